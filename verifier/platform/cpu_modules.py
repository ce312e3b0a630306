"""Reference layers with Transformer Engine's parameter layout, in plain PyTorch.

Class names are those of megatron-core's wrappers of Transformer Engine, because megatron-bridge derives a parameter's
sharding from the class name of its owner. `verifier.platform.cpu` compares each constructor of upstream's with
`REFERENCE_MODULES`; what a reference layer has no use for it ignores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    _initialize_affine_weight_gpu,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_data_parallel_rng_tracker_name
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import divide
from torch import Tensor
from torch.nn import Parameter, functional

from verifier.errors import UsageError
from verifier.platform.cpu_attention import TEDotProductAttention

Init = Callable[[Tensor], object]
BLOCK = 16
"""Number of rows of one expert that are multiplied at once."""
WATCHERS: list[Callable[[Tensor, Tensor | None, Tensor, Tensor, float], None]] = []
"""Called with weight, bias, input, output and epsilon of each norm, to look at them."""


def normalize(x: Tensor, weight: Tensor, bias: Tensor | None, config: TransformerConfig, eps: float) -> Tensor:
    """Apply RMSNorm or LayerNorm over the last dim, in float32, and cast to the input's dtype.

    `x` is [..., width], and `weight` [width] gamma, or gamma - 1 if the configuration centres it at zero; LayerNorm has
    a bias [width]. `eps` is added to the mean square or the variance.

    Raises:
        UsageError: another normalization.
    """
    gamma = weight.float() + 1.0 if config.layernorm_zero_centered_gamma else weight.float()
    if config.normalization == "RMSNorm":
        normed = functional.rms_norm(x.float(), weight.shape, gamma, eps).to(x.dtype)
    elif config.normalization == "LayerNorm":
        normed = functional.layer_norm(x.float(), weight.shape, gamma, bias.float(), eps).to(x.dtype)
    else:
        raise UsageError(f"normalization {config.normalization} has no reference module: RMSNorm and LayerNorm do")
    for watch in WATCHERS:
        watch(weight, bias, x, normed, eps)
    return normed


def norm_parameters(config: TransformerConfig, width: int) -> tuple[Parameter, Parameter | None]:
    """Make norm weight and bias (None for RMSNorm), [width] each, marked for reduction over sequence shards."""
    gamma = torch.zeros if config.layernorm_zero_centered_gamma else torch.ones
    weight = Parameter(gamma(width, dtype=config.params_dtype))
    bias = Parameter(torch.zeros(width, dtype=config.params_dtype)) if config.normalization == "LayerNorm" else None
    for parameter in (weight, bias):
        if parameter is not None:
            parameter.sequence_parallel = config.sequence_parallel
    return weight, bias


class TENorm(torch.nn.Module):
    """RMSNorm or LayerNorm, as configured."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, has_residual: bool = False
    ) -> None:
        super().__init__()
        if config.fused_residual_rmsnorm and has_residual:
            raise UsageError("fused_residual_rmsnorm needs Transformer Engine: use the gpu tier")
        self.config = config
        self.eps = eps
        self.weight, self.bias = norm_parameters(config, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] to [..., hidden]."""
        return normalize(x, self.weight, self.bias, self.config, self.eps)


class TEColumnParallelLinear(ColumnParallelLinear):
    """Linear with output rows split over tensor-parallel ranks."""

    def __init__(
        self, input_size: int, output_size: int, *, tp_comm_buffer_name: str | None = None, **options: object
    ) -> None:
        super().__init__(input_size, output_size, **options)
        self.in_features, self.out_features = self.input_size, self.output_size_per_partition  # read by adapters


class TELayerNormColumnParallelLinear(TEColumnParallelLinear):
    """Norm and column-parallel linear; the norm's input is this rank's sequence shard, before it is gathered."""

    return_layernorm_output = False
    """Switch: return the norm's output too; adapters set it."""
    ub_overlap_ag = True
    """Flag for adapters: the norm's output is a sequence shard, which they must gather."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: object) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.layer_norm_weight, self.layer_norm_bias = norm_parameters(config, input_size)

    def forward(self, x: Tensor) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor | None]:
        """Map [rows, batch, input] to [rows, batch, output / tp] and the bias, if it is not added here.

        With `return_layernorm_output` the output is a pair with [rows / tp, batch, input] after the norm.
        """
        eps = self.config.layernorm_epsilon
        normed = normalize(x, self.layer_norm_weight, self.layer_norm_bias, self.config, eps)
        output, bias = super().forward(normed)
        return ((output, normed) if self.return_layernorm_output else output), bias


class TERowParallelLinear(RowParallelLinear):
    """Linear with input columns split over tensor-parallel ranks; outputs are summed."""

    def __init__(
        self, input_size: int, output_size: int, *, tp_comm_buffer_name: str | None = None, **options: object
    ) -> None:
        super().__init__(input_size, output_size, **options)
        self.in_features, self.out_features = self.input_size_per_partition, self.output_size  # read by adapters


class TELinear(torch.nn.Module):
    """Linear with the whole weight on every tensor-parallel rank, such as MLA's down projections.

    Raises:
        UsageError: another parallel mode, or a bias.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        parallel_mode: str | None,
        config: TransformerConfig,
        init_method: Init,
        bias: bool,
        is_expert: bool = False,
        **ignored: object,
    ) -> None:
        super().__init__()
        if parallel_mode != "duplicated" or bias or is_expert:
            raise UsageError(f"the reference TELinear is duplicated and without bias, not {parallel_mode}, bias={bias}")
        self.parallel_mode = None
        self.weight = Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        with get_cuda_rng_tracker().fork(get_data_parallel_rng_tracker_name()):
            init_method(self.weight)
        self.weight.allreduce = True
        self.weight.sequence_parallel = config.sequence_parallel
        self.weight.tensor_model_parallel = False

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """[..., input] to [..., output]."""
        return functional.linear(x, self.weight), None


class _GroupedLinear(torch.nn.Module):
    """One weight per local expert (`weight0`, `weight1`, ...), each applied to its own run of rows; biases likewise."""

    partition_dim: int

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig,
        init_method: Init,
        bias: bool,
        skip_bias_add: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
        **ignored: object,
    ) -> None:
        super().__init__()
        groups = ProcessGroupCollection.use_mpu_process_groups() if pg_collection is None else pg_collection
        shape = [output_size, input_size]
        shape[self.partition_dim] = divide(shape[self.partition_dim], groups.expt_tp.size())
        own_groups = (
            config.expert_model_parallel_size > 1
            or config.expert_tensor_parallel_size != config.tensor_model_parallel_size
        )
        self.num_gemms = num_gemms
        self.use_bias = bias
        self._returns_bias = bias and skip_bias_add
        self._groups = groups
        for index in range(num_gemms):
            weight = Parameter(torch.empty(*shape, dtype=config.params_dtype))
            _initialize_affine_weight_gpu(weight, init_method, partition_dim=self.partition_dim, is_expert=True)
            weight.allreduce = not own_groups
            self.register_parameter(f"weight{index}", weight)
            if bias:
                own = Parameter(torch.zeros(shape[0], dtype=config.params_dtype))
                own.allreduce = weight.allreduce
                own.tensor_model_parallel = self.partition_dim == 0
                own.partition_dim, own.partition_stride = (0, 1) if self.partition_dim == 0 else (-1, 1)
                self.register_parameter(f"bias{index}", own)

    def forward(self, x: Tensor, m_splits: list[int]) -> tuple[Tensor, list[Tensor] | None]:
        """Apply expert i to its `m_splits[i]` rows of [rows, input], rows of expert 0 first.

        The second value is the experts' biases where the caller adds them.
        """
        runs = torch.split(x, m_splits)
        weights = [getattr(self, f"weight{index}") for index in range(self.num_gemms)]
        parts = [_linear_by_blocks(run, weight) for run, weight in zip(runs, weights, strict=True)]
        biases = [getattr(self, f"bias{index}") for index in range(self.num_gemms)] if self.use_bias else []
        if biases and not self._returns_bias:
            parts = [part + bias for part, bias in zip(parts, biases, strict=True)]
        return torch.cat(parts), biases if self._returns_bias else None

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, ShardedTensor]:
        """Place each local expert's weight, and its bias, among those of all ranks, each under one key.

        Of the ranks with copies of an expert, the first of its expert-data-parallel group writes it.

        Source:
            megatron-core 0.19.2, core/extensions/transformer_engine.py, `TEGroupedLinear._sharded_state_dict_grouped`;
            without its extra states, which these modules do not have.
        """
        ep, copy = self._groups.ep, self._groups.expt_dp.rank()
        found = {}
        leaves = ("weight", "bias") if self.use_bias else ("weight",)
        axes = {"weight": 0, "bias": 0} if self.partition_dim == 0 else {"weight": 1}
        for index in range(self.num_gemms):
            place = (len(sharded_offsets), ep.rank() * self.num_gemms + index, ep.size() * self.num_gemms)
            shards = make_sharded_tensors_for_checkpoint(
                {leaf: getattr(self, f"{leaf}{index}") for leaf in leaves}, prefix, axes, (*sharded_offsets, place),
                tp_group=self._groups.expt_tp, dp_cp_group=self._groups.expt_dp,
            )  # fmt: skip
            for leaf in leaves:
                shard = shards[f"{prefix}{leaf}"]
                shard.replica_id = (*shard.replica_id[:2], copy)
                found[f"{prefix}{leaf}{index}"] = shard
        return found


def _linear_by_blocks(x: Tensor, weight: Tensor) -> Tensor:
    """Map [rows, input] to [rows, output] in products of `BLOCK` rows.

    The number of rows of an expert depends on the whole batch, and BLAS rounds differently for different numbers. In
    blocks of one size a token's bits do not depend on its neighbours.
    """
    num_rows = x.shape[0]
    blocks = functional.pad(x, (0, 0, 0, -num_rows % BLOCK)).split(BLOCK)
    return torch.cat([functional.linear(block, weight) for block in blocks])[:num_rows]


class TEColumnParallelGroupedLinear(_GroupedLinear):
    """Experts whose output rows are split over expert-tensor-parallel ranks."""

    partition_dim = 0


class TERowParallelGroupedLinear(_GroupedLinear):
    """Experts whose input columns are split over expert-tensor-parallel ranks; the token dispatcher sums."""

    partition_dim = 1


_COLUMNS = (
    "input_size output_size config init_method gather_output bias skip_bias_add is_expert "
    "skip_weight_param_allocation tp_comm_buffer_name tp_group stride name"
)
_GROUPED = (
    "num_gemms input_size output_size config init_method bias skip_bias_add is_expert tp_comm_buffer_name "
    "pg_collection name"
)
REFERENCE_MODULES: dict[type[torch.nn.Module], str] = {
    TENorm: "config hidden_size eps has_residual",
    TEColumnParallelLinear: _COLUMNS,
    TELayerNormColumnParallelLinear: _COLUMNS,
    TERowParallelLinear: "input_size output_size config init_method bias input_is_parallel skip_bias_add is_expert "
    "tp_comm_buffer_name tp_group name",
    TELinear: "input_size output_size parallel_mode config init_method bias skip_bias_add skip_weight_param_allocation "
    "tp_comm_buffer_name is_expert symmetric_ar_type tp_group name gtp_remat_group",
    TEColumnParallelGroupedLinear: _GROUPED,
    TERowParallelGroupedLinear: _GROUPED,
    TEDotProductAttention: "config layer_number attn_mask_type attention_type attention_dropout softmax_scale "
    "k_channels v_channels num_splits cp_comm_type pg_collection",
}
"""Modules that replace Transformer Engine's, with the parameters of the constructors that they were written for."""

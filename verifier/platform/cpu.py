"""The CPU tier: real megatron-core and megatron-bridge on a machine without a GPU.

Installed once per process, before Megatron is imported. Reference modules with the same parameters replace Transformer
Engine's (`cpu_modules`, `cpu_attention`), and CUDA's bookkeeping calls are answered on the host (`cpu_cuda_shims`).
All other code, parallelism included, is upstream's over gloo, with what gloo lacks.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer.transformer_config import TransformerConfig
from packaging.version import Version
from torch import Tensor

from verifier.errors import UsageError
from verifier.platform.cpu_attention import TEDotProductAttention
from verifier.platform.cpu_cuda_shims import HostTorch
from verifier.platform.patch import Patch, apply, current, parameters, require_parameters, source_parameters
from verifier.platform.provenance import PINS, TRAINER, require_installed

_DONE = "verifier.platform.cpu.installed"


def install() -> None:
    """Make this process a CPU-tier process; a second call does nothing.

    Raises:
        UsageError: Megatron was imported first, a package is absent, or a replaced upstream name has changed.
    """
    if _DONE in sys.modules:
        return
    if "megatron.core" in sys.modules:
        raise UsageError("megatron.core was imported before the CPU platform: call `install_for('cpu')` first")
    if getattr(sys.modules.get("transformer_engine"), "__version__", None):
        raise UsageError("transformer_engine was imported before the CPU platform: call `install_for('cpu')` first")
    require_installed(*TRAINER)
    from verifier.platform.cpu_cuda_shims import core_patches, torch_patches
    from verifier.platform.cpu_mamba import mixer_patches

    apply(torch_patches())
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # megatron-core warns on every rank without it
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    # Compiling the fusions at import would take ten seconds and gain nothing on a CPU.
    compile_function, torch.compile = torch.compile, _uncompiled
    sys.modules["transformer_engine"] = None
    silenced = logging.root.manager.disable
    logging.disable(logging.INFO)  # megatron-bridge logs every missing optional package
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for module in ("models.gpt.gpt_layer_specs", "models.mimo", "optimizer", "pipeline_parallel"):
                importlib.import_module(f"megatron.core.{module}")
            apply([*core_patches(), *mapping_patches(), *_module_patches(), *mixer_patches()])
            _offer_placeholder()
            importlib.import_module("megatron.bridge")
            apply(bridge_patches())
    finally:
        torch.compile = compile_function
        logging.disable(silenced)
    # Host and device have one random state here, so upstream's warning that both changed is expected.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    sys.modules[_DONE] = ModuleType(_DONE)


def _module_patches() -> list[Patch]:
    """Return the patches that put reference modules where megatron-core looks up Transformer Engine's."""
    from megatron.core.extensions import transformer_engine as upstream
    from megatron.core.extensions import transformer_engine_spec_provider as specs

    from verifier.platform.cpu_modules import REFERENCE_MODULES, TEDotProductAttention, TENorm

    classes = {module.__name__: module for module in REFERENCE_MODULES}
    for name, module in classes.items():
        maker = f"{name}.{'__new__' if module is TENorm else '__init__'}"
        require_parameters(f"{upstream.__name__}:{name}", source_parameters(upstream, maker), REFERENCE_MODULES[module])
    attention_call = source_parameters(upstream, "TEDotProductAttention.forward")
    require_parameters("TEDotProductAttention.forward", attention_call, parameters(TEDotProductAttention.forward)[5:])

    core = "megatron.core"
    places = [
        *((f"{owner.__name__}:{name}", module) for owner in (upstream, specs) for name, module in classes.items()),
        *(
            (f"{core}.transformer.multi_latent_attention:{name}", classes[name])
            for name in ("TELinear", "TEColumnParallelLinear", "TELayerNormColumnParallelLinear")
        ),
        (f"{core}.models.gpt.gpt_layer_specs:TESpecProvider", specs.TESpecProvider),
        (f"{core}.models.gpt.gpt_layer_specs:TENorm", TENorm),
        (f"{core}.transformer.transformer_block:LayerNormImpl", TENorm),
        (f"{core}.transformer.attention:TENorm", TENorm),
    ]
    return [
        *(Patch(target, module) for target, module in places),
        *(
            Patch(f"{core}.models.common.embeddings.rope_utils:{kernel.__name__}", kernel)
            for kernel in (fused_apply_rotary_pos_emb, fused_apply_rotary_pos_emb_thd)
        ),
        Patch(f"{specs.__name__}:is_te_min_version", lambda version: True),
        Patch(f"{core}.transformer.transformer_config:is_te_min_version", _is_pinned, takes="version check_equality"),
        Patch(
            f"{core}.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu",
            _counts_on_host,
            takes="tensor as_numpy record_stream",
        ),
        Patch(
            f"{core}.optimizer.clip_grads:l2_norm_impl",
            _norm_of_all,
            takes="chunk_size noop_flag tensor_lists per_tensor args",
        ),
    ]


def _is_pinned(version: str, check_equality: bool = True) -> bool:
    """Return whether the Transformer Engine of the GPU tier, whose options this tier takes, has at least `version`."""
    pinned = Version(PINS["transformer-engine"])
    return pinned >= Version(version) if check_equality else pinned > Version(version)


def _counts_on_host(tensor: torch.Tensor, as_numpy: bool = False, record_stream: bool = False) -> object:
    """Return token counts for the all-to-all as numpy, also those of a host tensor.

    Source:
        megatron-core 0.19.2, megatron/core/transformer/moe/moe_utils.py, `maybe_move_tensor_to_cpu`: it returns a host
        tensor unchanged, and `all_to_all_single` would get tensors as split sizes.
    """
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _offer_placeholder() -> None:
    """Make megatron-bridge's unguarded `import transformer_engine.pytorch` succeed; any use raises AttributeError."""
    package, pytorch = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    package.__path__, package.pytorch = [], pytorch
    # Adapters refer to these at import, in annotations and in isinstance checks; megatron-bridge 0.5 to the signature
    # of the grouped one.
    pytorch.ops = ModuleType("transformer_engine.pytorch.ops")
    pytorch.ops.Sequential = type("Sequential", (), {})
    pytorch.Linear, pytorch.LayerNormLinear = type("Linear", (), {}), type("LayerNormLinear", (), {})
    pytorch.GroupedLinear = type("GroupedLinear", (), {})
    sys.modules["transformer_engine"], sys.modules["transformer_engine.pytorch"] = package, pytorch


def _uncompiled(model: object = None, **options: object) -> object:
    return model if model is not None else lambda function: function


def _norm_of_all(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: list[list[torch.Tensor]], per_tensor: bool, *args: object
) -> tuple[torch.Tensor, None]:
    """Return the L2 norm of all gradients together, [1] float32, as Transformer Engine's kernel does on a GPU.

    Source:
        megatron-core 0.19.2, megatron/core/utils.py, `local_multi_tensor_l2_norm`: without Transformer Engine it uses
        `torch.norm`, which on a CPU is too small by 8e-5 for four million normal float32 elements.
    """
    squares = [tensor.square().sum(dtype=torch.float64) for tensors in tensor_lists for tensor in tensors]
    return torch.stack(squares).sum().sqrt().float().reshape(1), None


LITERAL_CUDA_MODULES = ("megatron.bridge.models.minimax_m2.minimax_m2_bridge",)
"""Modules of megatron-bridge 0.6.2 that put tensors onto `torch.device("cuda", ...)`."""


class Gemma2FlexDotProductAttention(TEDotProductAttention):
    """Gemma 2's attention: scores bent to a bound, a scale of its own, and a window in every other layer.

    Upstream's takes no packed sequences, on a GPU either.

    Source:
        megatron-bridge 0.6.2, models/gemma/gemma2_provider.py, `Gemma2DotProductAttention`.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, attn_mask_type: Any, attention_type: str, **options: Any
    ) -> None:
        options["softmax_scale"] = config.query_pre_attn_scalar**-0.5
        super().__init__(config, layer_number, attn_mask_type, attention_type, **options)
        self.softcap = config.attn_logit_softcapping
        if layer_number % 2 == 0:
            self.rows_before = None


def bridge_patches() -> list[Patch]:
    """Return the patches of megatron-bridge, for use after it is imported."""
    view = HostTorch()
    return [
        *(Patch(f"{module}:torch", view) for module in LITERAL_CUDA_MODULES),
        Patch(
            "megatron.bridge.models.gemma.gemma2_provider:Gemma2FlexDotProductAttention",
            Gemma2FlexDotProductAttention,
            takes="config layer_number attn_mask_type attention_type attention_dropout kwargs",
        ),
    ]


MAPPINGS = "megatron.core.tensor_parallel.mappings"
GATHER, SCATTER = "_gather_along_first_dim", "_reduce_scatter_along_first_dim"
Rows = Callable[..., torch.Tensor]
"""Function of megatron-core on rows, a group, the number of rows of each of its ranks, and use of a shared buffer."""


def mapping_patches() -> list[Patch]:
    """Return the patches of megatron-core, for use after it is imported.

    Source:
        megatron-core 0.19.2, megatron/core/tensor_parallel/mappings.py: with split sizes, `all_gather` and
        `reduce_scatter` on lists of tensors. Experts that are cut over tensor-parallel ranks gather each rank's tokens.
    """
    replaced = {GATHER: (_gathering, "output_split_sizes"), SCATTER: (_scattering, "input_split_sizes")}
    return [
        Patch(target, made(current(target)), takes=f"input_ group {sizes} use_global_buffer")
        for target, (made, sizes) in ((f"{MAPPINGS}:{name}", item) for name, item in replaced.items())
    ]


def _gathering(original: Rows) -> Rows:
    def gathered(
        input_: torch.Tensor, group: dist.ProcessGroup, output_split_sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """Rows of all ranks, in their order."""
        if output_split_sizes is None or len(set(output_split_sizes)) < 2:
            return original(input_, group, output_split_sizes, use_global_buffer)
        whole = input_.new_empty((sum(output_split_sizes), *input_.shape[1:]))
        for rank, part in enumerate(whole.split(list(output_split_sizes))):
            if rank == group.rank():
                part.copy_(input_)
            dist.broadcast(part, group=group, group_src=rank)
        return whole

    return gathered


def _scattering(original: Rows) -> Rows:
    def scattered(
        input_: torch.Tensor, group: dist.ProcessGroup, input_split_sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """This rank's rows of the sum over all ranks."""
        if input_split_sizes is None or len(set(input_split_sizes)) < 2:
            return original(input_, group, input_split_sizes, use_global_buffer)
        whole = input_.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, group=group)
        return whole.split(list(input_split_sizes))[group.rank()].clone()

    return scattered


def fused_apply_rotary_pos_emb(
    t: Tensor, freqs: Tensor, transpose_output_memory: bool = False, interleaved: bool = False
) -> Tensor:
    """Embed t [length, batch, heads, width] by freqs [length, 1, 1, width]."""
    del transpose_output_memory
    return rope_utils._apply_rotary_pos_emb_bshd(t, freqs, rotary_interleaved=interleaved)


def fused_apply_rotary_pos_emb_thd(
    t: Tensor, cu_seqlens: Tensor, freqs: Tensor, cp_size: int = 1, cp_rank: int = 0, interleaved: bool = False
) -> Tensor:
    """Embed t [rows, heads, width], packed sequences or one context-parallel rank's two chunks of each.

    Args:
        t: rows of this rank.
        cu_seqlens: [sequences + 1], cumulative padded lengths of the whole sequences.
        freqs: [at least the longest length, 1, 1, width], angles by position.
        cp_size: number of context-parallel ranks.
        cp_rank: this one.
        interleaved: pairs of a rotation are neighbours, and not halves.

    Source:
        megatron-core 0.19.2, core/models/common/embeddings/rope_utils.py, `_apply_rotary_pos_emb_thd`.
    """
    begins = cu_seqlens.long() // cp_size
    lengths = begins.diff()
    position = torch.arange(len(t), device=t.device) - torch.repeat_interleave(begins[:-1], lengths)
    if cp_size > 1:
        chunk = torch.repeat_interleave(lengths // 2, lengths)
        first, last = cp_rank * chunk, (2 * cp_size - 2 - cp_rank) * chunk  # of a row in the second chunk, less its own
        position += torch.where(position < chunk, first, last)
    return rope_utils._apply_rotary_pos_emb_bshd(
        t.unsqueeze(1), freqs[position], rotary_interleaved=interleaved
    ).squeeze(1)

"""Stored tensors of a vLLM rank: listing and poisoning, also of those that vLLM's CPU kernels keep in a packed form.

vLLM 0.21 packs linear weights for oneDNN: it empties the parameter and keeps the contents behind a handle in
``layer.cpu_linear``. It permutes expert weights for its grouped kernel. Two exact methods read them back:

- a linear is applied to the identity matrix: each output is one weight times 1 plus zeros, exact in every float dtype
  but for the sign of a zero weight;
- an expert's permutation is found by packing a tensor of indices, digit by digit, and inverted.

Source:
    vllm/model_executor/layers/utils.py `dispatch_cpu_unquantized_gemm`;
    vllm/model_executor/layers/fused_moe/cpu_fused_moe.py `CPUFusedMOE`, `SGLFusedMOE`; experts/cpu_moe.py in vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from vllm import _custom_ops as ops
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

from verifier.engine.api import Poisoned
from verifier.engine.stored_tensors import StoredTensor, poison_stored, prefixed_modules, stored_in_model
from verifier.engine.vllm.experts_vllm import packer
from verifier.errors import ContractError

_ROWS = 1024
"""Number of rows of the identity matrix that a linear is applied to at once."""
_DIGIT_BITS = 8
"""Number of bits of an integer that every float dtype represents exactly."""
_OF_ROUTES = "_routing_replay_out"
"""Attribute of a layer into which vLLM 0.21 writes the experts of each pass, where routes are reported."""


def model_tensors(model: nn.Module) -> Iterator[StoredTensor]:
    """Yield every stored tensor of the model that a pass reads, and every packed linear as the weight it multiplies by.

    Parameters that vLLM emptied after packing are yielded with zero elements. A parameter that did not exist before the
    weights were loaded, such as a quantised weight's scale, is derived: no checkpoint has it.
    """
    loadable = {
        prefix + name
        for prefix, module in prefixed_modules(model)
        for name in get_layerwise_info(module).restore_metadata[0].keys() | SKIP_TENSORS
    }
    for item in stored_in_model(model):
        if item.name.rpartition(".")[2] == _OF_ROUTES:
            continue
        made_later = item.kind == "parameter" and item.name not in loadable
        yield replace(item, kind="derived") if made_later else item
    for prefix, module in prefixed_modules(model):
        for packed in packed_linears(module):
            yield StoredTensor(name=prefix + packed.holder, kind="derived", tensor=packed.read())


def poison_model(model: nn.Module, carried: Collection[str], saved: dict[str, torch.Tensor]) -> Iterator[Poisoned]:
    """Fill with NaN everything that a forward pass reads; see `poison_stored`."""
    for item in stored_in_model(model):
        yield poison_stored(item, carried, saved)
    for prefix, module in prefixed_modules(model):
        done = [packed.poison(module) for packed in packed_linears(module)]
        for packed, how in zip(packed_linears(module), done, strict=True):
            failed = how == "nan" and not bool(packed.read().isnan().all())
            yield Poisoned(name=prefix + packed.holder, how="left" if failed else how)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLinear:
    """Closure that multiplies by a weight that no parameter holds."""

    holder: str
    """Attribute of the module, such as ``cpu_linear`` or ``down_linear[3]``."""
    apply: Callable[[torch.Tensor], torch.Tensor]
    weights: list[torch.Tensor | ops.CPUDNNLGEMMHandler]
    in_features: int
    dtype: torch.dtype

    def read(self) -> torch.Tensor:
        """Return the weight that the closure multiplies by, [out_features, in_features]."""
        parts = []
        for begin in range(0, self.in_features, _ROWS):
            rows = torch.zeros(min(_ROWS, self.in_features - begin), self.in_features, dtype=self.dtype)
            rows.diagonal(begin).fill_(1)
            parts.append(self.apply(rows))
        return torch.cat(parts).t().contiguous()

    def poison(self, module: nn.Module) -> str:
        """Make the closure, or the one that takes its place in the module, multiply by NaN; `Poisoned.how`."""
        for weight in self.weights:
            if isinstance(weight, torch.Tensor):
                weight.fill_(float("nan"))
            elif self.holder == "cpu_linear":
                nan = torch.full((weight.n, weight.k), float("nan"), dtype=self.dtype)
                held, module.weight = module.weight, nn.Parameter(nan, requires_grad=False)
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)
                module.weight = held
            else:
                return "left: an expert's handle cannot be rebuilt in place"
        return "nan"


def packed_linears(module: nn.Module) -> Iterator[PackedLinear]:
    """Yield the closures of this module, without its children, that hold a weight of their own."""
    closures = [("cpu_linear", module.__dict__.get("cpu_linear"), "weight")]
    for name, parameter in (("gate_up_linear", "w13_weight"), ("down_linear", "w2_weight")):
        experts = module.__dict__.get(name, ())
        closures += [(f"{name}[{index}]", expert, parameter) for index, expert in enumerate(experts)]
    for holder, closure, parameter in closures:
        # oneDNN's handle or a tensor of two dims; biases are parameters elsewhere.
        cells = [cell.cell_contents for cell in getattr(closure, "__closure__", None) or ()]
        values = [*cells, *(getattr(closure, "__defaults__", None) or ())]
        handles = [value for value in values if isinstance(value, ops.CPUDNNLGEMMHandler)]
        weights = handles + [value for value in values if isinstance(value, torch.Tensor) and value.ndim == 2]
        if not weights and holder != "cpu_linear":
            raise ContractError(f"{type(module).__name__}.{holder}: this version of vLLM keeps its weight elsewhere")
        if weights:
            width = weights[0].k if handles else getattr(module, "input_size_per_partition", weights[0].shape[1])
            yield PackedLinear(
                holder=holder,
                apply=partial(closure, weight=None, bias=None) if holder == "cpu_linear" else closure,
                weights=weights,
                in_features=width,
                dtype=getattr(module, "params_dtype", getattr(module, parameter).dtype),
            )


def unpack_experts(module: nn.Module, packed: torch.Tensor) -> torch.Tensor:
    """Return fused experts' ``w13_weight`` or ``w2_weight``, [experts, out, in], in the order of the checkpoint.

    Raises:
        ContractError: the kernel does more than permute within an expert.
    """
    pack = packer(module)
    if pack is None:
        return packed
    count = packed[0].numel()
    index = torch.arange(count).view(1, *packed.shape[1:])
    order = torch.zeros(count, dtype=torch.int64)
    for shift in range(0, max(count - 1, 1).bit_length(), _DIGIT_BITS):
        digit = ((index >> shift) & (2**_DIGIT_BITS - 1)).to(packed.dtype)
        order += pack(digit).reshape(-1).to(torch.int64) << shift
    if not torch.equal(order.sort().values, torch.arange(count)):
        raise ContractError(f"{type(module).__name__}: this kernel's expert layout is no permutation of the weight")
    plain = torch.empty_like(packed).view(packed.shape[0], count)
    plain[:, order] = packed.reshape(packed.shape[0], count)
    return plain.view(packed.shape)

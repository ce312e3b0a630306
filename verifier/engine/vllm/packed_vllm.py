"""Reading and poisoning of weights that vLLM's CPU kernels keep in a packed form.

vLLM 0.21 packs linear weights for oneDNN: it empties the parameter and keeps the contents behind a handle in
``layer.cpu_linear``. It permutes expert weights for its grouped kernel. Two exact methods read them back:

- a linear is applied to the identity matrix: each output is one weight times 1 plus zeros, exact in every float dtype
  but for the sign of a zero weight;
- an expert's permutation is found by packing a tensor of indices, digit by digit, and inverted.

Source:
    vllm/model_executor/layers/utils.py `dispatch_cpu_unquantized_gemm`;
    vllm/model_executor/layers/fused_moe/cpu_fused_moe.py `CPUFusedMOE`, `SGLFusedMOE`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from vllm import _custom_ops as ops
from vllm.model_executor.layers.fused_moe.cpu_fused_moe import CPUFusedMOE, SGLFusedMOE
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from verifier.errors import ContractError

_ROWS = 1024
"""Number of rows of the identity matrix that a linear is applied to at once."""
_DIGIT_BITS = 8
"""Number of bits of an integer that every float dtype represents exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLinear:
    """Closure that multiplies by a weight that no parameter holds."""

    holder: str
    """Attribute of the module, such as ``cpu_linear`` or ``down_linear[3]``."""
    apply: Callable[[torch.Tensor], torch.Tensor]
    in_features: int
    dtype: torch.dtype

    def read(self) -> torch.Tensor:
        """Return the weight that the closure multiplies by, [out_features, in_features]."""
        parts = []
        for begin in range(0, self.in_features, _ROWS):
            end = min(begin + _ROWS, self.in_features)
            rows = torch.zeros(end - begin, self.in_features, dtype=self.dtype)
            rows[torch.arange(end - begin), torch.arange(begin, end)] = 1
            parts.append(self.apply(rows))
        return torch.cat(parts).t().contiguous()


def packed_linears(module: nn.Module) -> Iterator[PackedLinear]:
    """Yield the closures of this module, without its children, that hold a weight of their own."""
    linear = module.__dict__.get("cpu_linear")
    if linear is not None and (holds := _weights_of(linear)):
        yield PackedLinear(
            holder="cpu_linear",
            apply=lambda x: linear(x, None, None),
            in_features=_in_features(holds[0], module),
            dtype=getattr(module, "params_dtype", None) or module.weight.dtype,
        )
    for name, parameter in (("gate_up_linear", "w13_weight"), ("down_linear", "w2_weight")):
        for index, expert in enumerate(module.__dict__.get(name, ())):
            weight, holds = getattr(module, parameter), _weights_of(expert)
            yield PackedLinear(
                holder=f"{name}[{index}]",
                apply=expert,
                in_features=_in_features(holds[0], module),
                dtype=weight.dtype if weight.numel() else module.params_dtype,
            )


def unpack_experts(module: nn.Module, packed: torch.Tensor) -> torch.Tensor:
    """Undo the expert kernel's permutation.

    Args:
        module: vLLM's fused experts.
        packed: ``w13_weight`` or ``w2_weight``, [experts, out, in].

    Returns:
        Weight in checkpoint order, [experts, out, in]; `packed` itself if the kernel keeps that order.

    Raises:
        ContractError: the kernel does more than permute within an expert.
    """
    pack = _expert_packing(module)
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


def poison_packed(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Make this module's packed linears multiply by NaN, and verify it.

    Yields:
        (holder, result), as in `Poisoned`.
    """
    for (holder, how), packed in zip(list(_poison_packed(module)), packed_linears(module), strict=True):
        yield holder, "left" if how == "nan" and not bool(packed.read().isnan().all()) else how


def _poison_packed(module: nn.Module) -> Iterator[tuple[str, str]]:
    linear = module.__dict__.get("cpu_linear")
    for closure, packed in zip(_closures(module), packed_linears(module), strict=True):
        for weight in _weights_of(closure):
            if isinstance(weight, torch.Tensor):
                weight.fill_(float("nan"))
            elif closure is linear:
                _repack_with_nan(module, weight.n, weight.k, packed.dtype)
            else:
                yield packed.holder, "left: an expert's handle cannot be rebuilt in place"
                break
        else:
            yield packed.holder, "nan"


def _repack_with_nan(module: nn.Module, out_features: int, in_features: int, dtype: torch.dtype) -> None:
    weight = module.weight
    module.weight = nn.Parameter(torch.full((out_features, in_features), float("nan"), dtype=dtype), False)
    dispatch_cpu_unquantized_gemm(module, remove_weight=False)
    module.weight = weight


def _closures(module: nn.Module) -> Iterator[Callable[..., torch.Tensor]]:
    linear = module.__dict__.get("cpu_linear")
    if linear is not None and _weights_of(linear):
        yield linear
    yield from module.__dict__.get("gate_up_linear", ())
    yield from module.__dict__.get("down_linear", ())


def _weights_of(closure: Callable[..., torch.Tensor]) -> list[torch.Tensor | ops.CPUDNNLGEMMHandler]:
    """Return the weights of a closure: oneDNN's handle or a tensor of two dims; biases are parameters elsewhere."""
    cells = [cell.cell_contents for cell in closure.__closure__ or ()]
    values = [*cells, *(closure.__defaults__ or ())]
    return [
        value
        for value in values
        if isinstance(value, ops.CPUDNNLGEMMHandler) or (isinstance(value, torch.Tensor) and value.ndim == 2)
    ]


def _in_features(weight: torch.Tensor | ops.CPUDNNLGEMMHandler, module: nn.Module) -> int:
    if isinstance(weight, ops.CPUDNNLGEMMHandler):
        return weight.k
    return getattr(module, "input_size_per_partition", weight.shape[1])


def _expert_packing(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor] | None:
    kernel = getattr(getattr(module, "quant_method", None), "cpu_fused_moe", None)
    if isinstance(kernel, SGLFusedMOE):
        return torch.ops._C.convert_weight_packed
    if isinstance(kernel, CPUFusedMOE) and kernel.forward_method.__name__ == "forward_grouped_gemm":
        return lambda weight: ops.cpu_prepack_moe_weight(weight, kernel.isa)
    return None

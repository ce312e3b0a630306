"""Host replacements of the CUDA functions that megatron-core calls: devices, streams, random states, type names.

Functions of `torch.cuda` and three Tensor methods are replaced for the whole process, as all of upstream calls them.
Factories with a literal `device="cuda"` appear only in `LITERAL_CUDA_MODULES`. These modules get a view of `torch`
whose factories ignore the device; `torch` itself is unchanged.
"""

from __future__ import annotations

import contextlib
import functools
from types import ModuleType

import torch

from verifier.platform.patch import Patch

HOST = torch.device("cpu")

LITERAL_CUDA_MODULES = (
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.optimizer.optimizer",
    "megatron.core.distributed.param_and_grad_buffer",
    "megatron.core.models.common.embeddings.rope_utils",
    "megatron.core.utils",
)
"""Modules of megatron-core 0.19.2 that create tensors with a literal `device="cuda"` or pinned."""

_FACTORIES = ("zeros", "ones", "empty", "full", "tensor", "arange")
_TYPE_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
}


class HostEvent:
    """CUDA event of a device that is always synchronous."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def ignore(self, other: object = None) -> None:
        """Do nothing."""

    record = wait = synchronize = ignore


class HostStream(HostEvent):
    """CUDA stream of such a device."""

    wait_stream = wait_event = HostEvent.ignore

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        """Return an event for callers to wait for."""
        return event or HostEvent()


class HostTorch(ModuleType):
    """View of `torch` whose factories put every tensor into pageable host memory, and whose devices are the host."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.device = _always(HOST)
        for name in _FACTORIES:
            setattr(self, name, _on_host(getattr(torch, name)))

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


def _on_host(factory: object) -> object:
    @functools.wraps(factory)
    def create(*args: object, **kwargs: object) -> torch.Tensor:
        kwargs.pop("pin_memory", None)
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = HOST
        return factory(*args, **kwargs)

    return create


def _always(answer: object) -> object:
    """Return a new function that returns `answer` for any arguments; dynamo distinguishes functions by identity."""
    return lambda *args, **kwargs: answer


def _type_name(tensor: torch.Tensor, dtype: object = None, *args: object, **kwargs: object) -> object:
    if dtype is None and tensor.dtype in _TYPE_NAMES:
        return _TYPE_NAMES[tensor.dtype]
    return torch._C.TensorBase.type(tensor, dtype, *args, **kwargs)


def torch_patches() -> list[Patch]:
    """Return the patches of torch, for use before megatron-core is imported."""
    stream = HostStream()
    cuda = {
        "current_device": _always(HOST),
        "current_stream": _always(stream),
        "default_stream": _always(stream),
        "Stream": HostStream,
        "Event": HostEvent,
        "stream": lambda stream: contextlib.nullcontext(),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda new_state, device=None: torch.set_rng_state(new_state),
        "manual_seed": lambda seed: torch.manual_seed(seed),
        **{
            name: _always(None)
            for name in ("set_device", "synchronize", "empty_cache", "nvtx.range_push", "nvtx.range_pop")
        },
        **{f"{most}memory_{kind}": _always(0) for most in ("", "max_") for kind in ("allocated", "reserved")},
    }
    moves = ("Tensor.cuda", "Tensor.pin_memory", "nn.Module.cuda")
    return [
        *(Patch(f"torch.cuda:{name}", value) for name, value in cuda.items()),
        *(Patch(f"torch:{name}", lambda self, *args, **kwargs: self) for name in moves),
        Patch("torch:Tensor.type", _type_name),
    ]


def core_patches() -> list[Patch]:
    """Return the patches of megatron-core, for use after it is imported."""
    view = HostTorch()
    random = "megatron.core.tensor_parallel.random"
    return [
        *(Patch(f"{module}:torch", view) for module in LITERAL_CUDA_MODULES),
        Patch(
            f"{random}:_get_cuda_rng_state",
            lambda device=None, clone=False, graph_safe=False: torch.get_rng_state(),
            takes="device clone graph_safe",
        ),
        Patch(
            f"{random}:_set_cuda_rng_state",
            lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state),
            takes="new_state device graph_safe",
        ),
    ]

"""Host replacements of what megatron-core calls of CUDA and NCCL: devices, streams, random states, uneven gathers.

Functions of `torch.cuda` and three Tensor methods are replaced for the whole process, as all of upstream calls them.
Factories with a literal `device="cuda"` appear only in `LITERAL_CUDA_MODULES`. These modules get a view of `torch`
whose factories ignore the device; `torch` itself is unchanged. Gathers and scatters of rows that ranks have unequally
many of, which NCCL does, gloo does not.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from types import ModuleType

import torch
import torch.distributed as dist

from verifier.platform.patch import Patch, current

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
MAPPINGS = "megatron.core.tensor_parallel.mappings"
GATHER, SCATTER = "_gather_along_first_dim", "_reduce_scatter_along_first_dim"
Rows = Callable[..., torch.Tensor]
"""Function of megatron-core on rows, a group, the number of rows of each of its ranks, and use of a shared buffer."""


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

"""The whole state of a trainer in megatron-core's distributed checkpoints: saved by one mesh, loaded by any."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import random
import secrets
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from verifier.errors import ContractError, InternalError, UsageError
from verifier.launch.child import described, die_with_parent
from verifier.megatron import fsdp_megatron
from verifier.megatron.optimizer_megatron import fill_states, parameters_of
from verifier.megatron.step_megatron import params_synced
from verifier.megatron.written_megatron import Facts, Stepped, Written
from verifier.model.provider_megatron import TrainerModel
from verifier.platform.provenance import installed

FORMAT = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
"""Format of megatron-core in which every state of the optimizer has the shape and the place of its parameter."""
MISPLACING = ("0.19.2",)
"""Versions of megatron-core whose saves in that format take states from wrong places, where buckets end in padding."""
RNG = "rng"
SHARDS = "shards"


class Writer:
    """Saves of one rank, each written at once, or by a process of its own. Every method is a collective.

    An asynchronous one forks a process for each save, which writes it while training goes on. If it reads back, some of
    what was written is read again, for a check.

    Source:
        megatron-core 0.19.2, core/dist_checkpointing/serialization.py, `save`; strategies/async_utils.py.
    """

    def __init__(
        self, trainer: TrainerModel, optimizer: Any, scheduler: Any, *, asynchronous: bool, read_back: bool = False
    ) -> None:
        self._trainer, self._optimizer, self._scheduler = trainer, optimizer, scheduler
        self._reads_back, self._written = read_back, None
        self._queue: Any = None
        if asynchronous:
            from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

            self._queue = AsyncCallsQueue()

    def begin(self, folder: Path, stepped: Sequence[Stepped] = ()) -> None:
        """Write the state into an empty folder, the same for all ranks, or begin to.

        `stepped` is what the last update left of some parameters.

        Raises:
            UsageError: it cannot be written.
        """
        from megatron.core import dist_checkpointing

        if fsdp_megatron.is_fsdp(self._trainer):
            state = _ranks_state(self._trainer, self._optimizer, self._scheduler)
        else:
            fill_states(self._optimizer)  # a run may be saved before its first optimizer step
            state = _sharded_state(self._trainer, self._optimizer, self._scheduler)
        with params_synced(self._trainer), _failed_write_refused(folder):
            self._written = Written(state, folder.parent.name, stepped) if self._reads_back else None
            if self._queue is None:
                with _writing_here():
                    dist_checkpointing.save(state, str(folder))
                return
            _share_results()
            request = dist_checkpointing.save(state, str(folder), async_sharded_save=True, async_strategy="mcore")
            if request.async_fn is not None:
                request = request._replace(async_fn=partial(_mortal, os.getpid(), request.async_fn))
            self._queue.schedule_async_request(request)

    def done(self, folder: Path, *, wait: bool) -> Facts | None:
        """Read back what was begun, if that is asked for, once it is written; None before. Waits if asked to.

        Raises:
            UsageError: it cannot be written.
        """
        if self._queue is not None:
            with _failed_write_refused(folder):
                self._queue.maybe_finalize_async_calls(blocking=wait)
            if self._queue.get_num_unfinalized_calls():
                return None
        return self._written.read(folder) if self._written is not None else []


def load(trainer: TrainerModel, optimizer: Any, scheduler: Any, folder: Path, *, same_mesh: bool) -> None:
    """Load what `Writer` saved into a new trainer, optimizer and scheduler. A collective.

    Rates and decays are those of the config: of the scheduler only its count is loaded. Random states belong to ranks,
    so another mesh keeps those of its seed. The optimizer has taken no step yet. `same_mesh` says that the mesh that
    loads it has saved it.

    Raises:
        ContractError: it holds another number of model chunks than this rank builds.

    Source:
        megatron-core 0.19.2, core/optimizer/distrib_optimizer.py, `sharded_state_dict` with `is_loading`: torch's
        Adam must have a state to load into.
    """
    from megatron.core import dist_checkpointing

    if fsdp_megatron.is_fsdp(trainer):
        if not same_mesh:
            raise UsageError(
                f"the checkpoint `{folder}` has shards of Megatron-FSDP, which another mesh does not load: continue on "
                "the mesh that saved it, or begin from an export"
            )
        found = dist_checkpointing.load(_ranks_state(trainer, optimizer, scheduler), str(folder))
        fsdp_megatron.restore(trainer, optimizer, found[SHARDS])
        restore_scheduler(scheduler, found["scheduler"])
        restore_rng(found[RNG])
        return
    fill_states(optimizer)
    state = _sharded_state(trainer, optimizer, scheduler, loading=True)
    if not same_mesh:
        del state[RNG]
    found = dist_checkpointing.load(state, str(folder))
    restore_weights(trainer, found)
    restore_optimizer(optimizer, found["optimizer"])
    restore_scheduler(scheduler, found["scheduler"])
    if same_mesh:
        restore_rng(found[RNG])


def restore_weights(trainer: TrainerModel, found: dict[str, Any]) -> None:
    """Put loaded weights into the model's parameters and buffers."""
    from megatron.core.utils import unwrap_model

    for index, chunk in enumerate(unwrap_model(trainer.chunks)):
        if f"model{index}" not in found:
            raise ContractError(f"the checkpoint has no model chunk {index}")
        chunk.load_state_dict(_within_wrappers(chunk, found[f"model{index}"]))


def _within_wrappers(chunk: Any, found: dict[str, Any]) -> dict[str, Any]:
    """Entries of a loaded model under the names that `load_state_dict` expects: linears with an adapter are one deeper.

    Source:
        megatron-bridge 0.6.2, peft/adapter_wrapper.py: `sharded_state_dict` leaves out "to_wrap", and nothing puts it
        back.
    """
    wrapped = {name for name, module in chunk.named_modules() if hasattr(module, "to_wrap")}
    named = {}
    for name, value in found.items():
        linear = next((name[:at] for at, sign in enumerate(name) if sign == "." and name[:at] in wrapped), None)
        own = linear is not None and not name.startswith(f"{linear}.adapter.")
        named[f"{linear}.to_wrap{name[len(linear) :]}" if own and linear is not None else name] = value
    return named


def restore_optimizer(optimizer: Any, found: Any) -> None:
    """Put loaded masters, moments and steps into the optimizer.

    megatron-core looks for the step of torch's Adam, which replaces Transformer Engine's on the CPU tier, among the
    loaded tensors, and it is in the loaded group.
    """
    parts = optimizer.chained_optimizers
    states = [found] if len(parts) == 1 else [found[index] for index in range(len(parts))]
    with torch.no_grad():
        for part, state in zip(parts, states, strict=True):
            if part.is_stub_optimizer:  # of a rank without parameters
                continue
            if not isinstance(part.optimizer, torch.optim.Adam):
                part.load_state_dict(state)
                continue
            tensors = state.pop("param_state")
            part.load_state_dict(state)
            for held in part.optimizer.state.values():
                held.pop("step")
            part.load_parameter_state_from_fully_reshardable(tensors)
            for adam, group, parameter in parameters_of([part.optimizer]):
                adam.state[parameter]["step"] = torch.tensor(float(group["step"]))


def restore_scheduler(scheduler: Any, found: dict[str, Any]) -> None:
    """Advance a new scheduler to the loaded count.

    Megatron's adds what it loads to what it has counted, and asserts that the loaded rates are its own.
    """
    scheduler.override_opt_param_scheduler = True
    scheduler.num_steps = 0
    scheduler.load_state_dict(found)


def seed_all(seed: int) -> None:
    """Seed the random states that Megatron leaves to chance or to others: numpy's, Python's, torch's."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_states() -> dict[str, Any]:
    """Copy the random states of torch, its device, numpy, Python, and Megatron's tracker: plain values and tensors."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    name, keys, position, has_gauss, gauss = cast("tuple[Any, ...]", np.random.get_state())
    version, words, gauss_next = random.getstate()
    return {
        "torch": torch.get_rng_state(), "device": torch.cuda.get_rng_state(),
        "numpy": [str(name), keys.tolist(), int(position), int(has_gauss), float(gauss)],
        "python": [version, list(words), gauss_next],
        "tracker": {key: state.clone() for key, state in get_cuda_rng_tracker().get_states().items()},
    }  # fmt: skip


def restore_rng(states: dict[str, Any]) -> None:
    """Set the random states that `rng_states` copied."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    name, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), position, has_gauss, gauss))
    version, words, gauss_next = states["python"]
    random.setstate((version, tuple(words), gauss_next))
    get_cuda_rng_tracker().set_states(states["tracker"])
    torch.cuda.set_rng_state(states["device"])
    torch.set_rng_state(states["torch"])


@contextlib.contextmanager
def _failed_write_refused(folder: Path) -> Iterator[None]:
    """Make a UsageError, on every rank, of a write that failed on one; the reason is in that rank's log.

    The error of a write whose process for results has ended names that process.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except (CheckpointException, EOFError, OSError) as problem:
        manager = getattr(filesystem_async, "_results_manager", None)
        if manager is not None and manager._process.exitcode is not None:
            death = described(manager._process.exitcode)
            raise InternalError(f"the process that a checkpoint's writers report to has ended: {death}") from problem
        if not isinstance(problem, CheckpointException):
            raise
        raise UsageError(
            f"the checkpoint `{folder}` cannot be written, and the ranks' logs say why: free some space and run the "
            "same command again, which continues from the checkpoint before"
        ) from problem


def _sharded_state(trainer: TrainerModel, optimizer: Any, scheduler: Any, *, loading: bool = False) -> dict[str, Any]:
    from megatron.core.dist_checkpointing import ShardedObject
    from megatron.core.utils import unwrap_model

    chunks = unwrap_model(trainer.chunks)
    model = {f"model{index}": chunk.sharded_state_dict(metadata=FORMAT) for index, chunk in enumerate(chunks)}
    with _offsets_without_padding(optimizer), _states_in_place(optimizer):
        states = optimizer.sharded_state_dict(model, is_loading=loading, metadata=FORMAT)
    return {
        **model,
        "optimizer": states,
        "scheduler": scheduler.state_dict(),
        RNG: ShardedObject(RNG, rng_states(), (dist.get_world_size(),), (dist.get_rank(),)),
    }  # fmt: skip


@contextlib.contextmanager
def _offsets_without_padding(optimizer: Any) -> Iterator[None]:
    """Let parameters lie in their buffers of gradients as if these had no padding between buckets.

    Source:
        megatron-core 0.19.2, core/optimizer/distrib_optimizer.py: `get_parameter_state_dp_zero` leaves the padding at
        the end of each bucket out, and `sharded_param_state_fully_reshardable` cuts states out of what is left by
        offsets that have it (Megatron-LM #5077, ADR 0053).
    """
    buffers = [buffer for part in optimizer.chained_optimizers for buffer in getattr(part, "buffers", ())]
    padded = [buffer.param_index_map for buffer in buffers]
    try:
        if installed("megatron-core") in MISPLACING:
            for buffer in buffers:
                left_out = [
                    0,
                    *accumulate(bucket.grad_data.numel() - bucket.numel_unpadded for bucket in buffer.buckets),
                ]
                buffer.param_index_map = {
                    parameter: (begin - left_out[bucket], end - left_out[bucket], bucket)
                    for parameter, (begin, end, bucket) in buffer.param_index_map.items()
                }
        yield
    finally:
        for buffer, offsets in zip(buffers, padded, strict=True):
            buffer.param_index_map = offsets


@contextlib.contextmanager
def _states_in_place(optimizer: Any) -> Iterator[None]:
    """Let each part of the optimizer that shares no parameter with another rank give its states as they are.

    Source:
        megatron-core 0.19.2, core/optimizer/distrib_optimizer.py: its `get_parameter_state_dp_zero` has three copies of
        all states for what it gathers, and `sharded_param_state_fully_reshardable` cuts the last one by parameter.
    """
    with contextlib.ExitStack() as stack:
        for part in optimizer.chained_optimizers:
            if hasattr(part, "gbuf_ranges") and part.data_parallel_group.size() == 1:
                part.get_parameter_state_dp_zero = partial(get_parameter_state_dp_zero, part)
                stack.callback(delattr, part, "get_parameter_state_dp_zero")
        yield


def get_parameter_state_dp_zero(part: Any, **_: Any) -> dict[int, dict[Any, dict[str, _Cut]]]:
    """States by buffer, type and kind: views on a CPU. Named as megatron-core's, by which a failure is known."""
    found: dict[int, dict[Any, dict[str, _Cut]]] = {}
    for at, (buffer, ranges) in enumerate(zip(part.buffers, part.gbuf_ranges, strict=True)):
        cuts = {key: _Cut() for key in ("param", *part.optimizer_state_keys)}
        for parameter, (begin, *_) in buffer.param_index_map.items():
            states = part._get_main_param_and_optimizer_states(parameter)
            for key, cut in cuts.items():
                cut.by_begin[begin] = states[key].detach().to("cpu", torch.float32).view(parameter.shape).view(-1)
        found[at] = dict.fromkeys(ranges, cuts)
    return found


class _Cut:
    """Flat states of one kind, each found by its parameter's place in the buffer."""

    def __init__(self) -> None:
        self.by_begin: dict[int, torch.Tensor] = {}

    def __getitem__(self, place: slice) -> torch.Tensor:
        return self.by_begin[place.start]


def _ranks_state(trainer: TrainerModel, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """State under Megatron-FSDP: each rank's shards as they are, for the same rank of the same mesh."""
    from megatron.core.dist_checkpointing import ShardedObject

    place = (dist.get_world_size(),), (dist.get_rank(),)
    return {
        SHARDS: ShardedObject(SHARDS, fsdp_megatron.state_of(trainer, optimizer), *place),
        "scheduler": scheduler.state_dict(), RNG: ShardedObject(RNG, rng_states(), *place),
    }  # fmt: skip


@contextlib.contextmanager
def _writing_here() -> Iterator[None]:
    """Replace the writers' result queue by a local one: they run in this process, and the shared queue takes seconds.

    Source:
        megatron-core 0.19.2, core/dist_checkpointing/strategies/filesystem_async.py, `get_write_results_queue`.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    before, filesystem_async._results_queue = filesystem_async._results_queue, queue.Queue()
    try:
        yield
    finally:
        filesystem_async._results_queue = before


def _share_results() -> None:
    """Let writers that are forked report to this rank: megatron-core's queue of results, from a process that is forked.

    Its own is served by a process that imports everything anew, which takes seconds, and outlives a rank that is
    killed.

    Source:
        megatron-core 0.19.2, core/dist_checkpointing/strategies/filesystem_async.py, `get_write_results_queue`.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if filesystem_async._results_queue is None:
        address = f"\0verifier-{os.getpid()}-{secrets.token_hex(4)}"  # no file, which a kill would leave
        manager = SyncManager(address, ctx=multiprocessing.get_context("fork"))
        manager.start(die_with_parent, (os.getpid(),))
        filesystem_async._results_queue = manager.Queue()
        filesystem_async._results_manager = manager  # it ends when nobody holds it


def _mortal(parent: int, write: Any, *arguments: Any, **named: Any) -> None:
    """Write, and end with the rank, so that nothing is written into a folder that another run has opened."""
    die_with_parent(parent)
    write(*arguments, **named)

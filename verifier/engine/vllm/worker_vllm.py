"""Part of the engine inside vLLM's worker processes: weight-transfer engine and further requests.

vLLM imports this module in each worker, because it contains the worker extension class, before it builds the
weight-transfer engine. The import registers `ChunkTransferEngine`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.model_loader.reload.layerwise import (
    LAYERWISE_INFO,
    _place_kernel_tensors,
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.model_executor.utils import replace_parameter

from verifier.engine import worker_failures
from verifier.engine.api import EngineSlice, EngineTensor, Poisoned, reply_of
from verifier.engine.stored_tensors import adapter_places, restore
from verifier.engine.vllm.experts_vllm import CPU_KERNELS, KERNEL_TAKES, of_rank
from verifier.engine.vllm.stored_tensors_vllm import model_tensors, poison_model
from verifier.engine.vllm.view_vllm import checkpoint_slices
from verifier.errors import ContractError
from verifier.launch.child import die_with_parent, give_memory_back, resolve
from verifier.plan.chunk_plan import ChunkPlan
from verifier.platform import upstream_fixes_vllm
from verifier.platform.patch import Patch, apply, current
from verifier.transport.receiver import ChunkReceiver
from verifier.transport.wire import Address, Agreement, Receipt

Load = Callable[[list[tuple[str, torch.Tensor]]], set[str] | None]
BACKEND = "ipc"
"""Backend name that `ChunkTransferEngine` replaces; `WeightTransferConfig.backend` accepts only "nccl" and "ipc"."""
_LEAVE_MEMORY = frozenset({"verifier_view", "verifier_begin", "verifier_finish"})
"""Requests that end a row of those that copy weights. Trainer ranks beside this process need the memory."""
_ADAPTED = "vllm.lora.layers.column_parallel_linear:_mcp_apply"
_ROUTES = "vllm.v1.worker.cpu_model_runner:CPUModelRunner.init_routed_experts_capturer"


class ChunkTransferEngine(WeightTransferEngine[Address, dict[str, int]]):
    """vLLM's weight-transfer API over a transfer group of gloo, NCCL or CUDA IPC.

    An update carries the index of the next chunk; names, dtypes and shapes are in the plan.
    """

    init_info_cls = Address
    update_info_cls = dict

    def __init__(self, config: WeightTransferConfig, *given: Any) -> None:
        super().__init__(config, *given)  # the parallel config; from vLLM 0.22 on the model too, in 0.32 all configs
        worker_failures.listen_in_worker()
        upstream_fixes_vllm.install_asked()
        if threading.current_thread() is threading.main_thread():
            die_with_parent(os.getppid())
        parallel = self.parallel_config
        self.receiver = ChunkReceiver(
            parallel.data_parallel_index * parallel.world_size + parallel.rank, copy_kept_views
        )
        self.receipt: Receipt | None = None

    def init_transfer_engine(self, init_info: Address) -> None:
        """Join the sender's group."""
        self.receiver.connect(init_info)

    def start_weight_update(self) -> None:
        """Begin a layerwise reload; called by vLLM 0.32, whose worker leaves it to the engine."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: dict[str, int], load_weights: Load | None = None) -> None:
        """Receive and load one chunk and keep its `receipt`."""
        load = load_weights or self.model.load_weights
        self.receipt = self.receiver.receive(update_info["chunk"], lambda tensors: load(tensors) or ())

    def finish_weight_update(self) -> None:
        """Finish a layerwise reload; called by vLLM 0.32."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leave the group."""
        self.receiver.close()

    @staticmethod
    def trainer_send_weights(iterator: Iterator[tuple[str, torch.Tensor]], trainer_args: Any) -> None:
        """Refuse: `verifier.engine.sender` sends."""
        raise ContractError("send through verifier.engine.sender, which agrees on a plan first")


class VerifierWorker:
    """Methods mixed into vLLM's worker, the only one of its process; called by `verifier_request`."""

    _verifier_saved: ClassVar[dict[str, torch.Tensor]] = {}
    _verifier_open = False
    """An update has begun and was not finished; vLLM 0.32 counts one that failed as finished."""

    def verifier_request(self, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Call a method of this worker, vLLM's or one below, and never raise; see `reply_of`.

        vLLM's driver stops reading at the first rank that fails. Other answers would stay in the ranks' queues and be
        taken for those of later requests.
        """
        reply = reply_of(lambda: getattr(self, method)(**arguments))
        if method in _LEAVE_MEMORY:
            give_memory_back()
        return reply

    def verifier_state(self) -> list[EngineTensor]:
        """See `Engine.state`."""
        return [item.describe() for item in model_tensors(self.model_runner.get_model())]

    def verifier_view(self, carried: Sequence[str]) -> list[EngineSlice]:
        """See `Engine.checkpoint_view`."""
        return list(checkpoint_slices(self.model_runner.get_model(), frozenset(carried)))

    def verifier_poison(self, carried: Sequence[str]) -> list[Poisoned]:
        """See `Engine.poison`; an update that was left open is abandoned."""
        self._verifier_abandon()
        return list(poison_model(self.model_runner.get_model(), frozenset(carried), self._verifier_saved))

    def verifier_poison_adapter(self) -> None:
        """Fill the memory of adapters with NaN; loading one must overwrite all of it."""
        for module in self.model_runner.get_model().modules():
            for tensor in adapter_places(module).values():
                tensor.fill_(float("nan"))

    def verifier_begin(self, plan: list[Any]) -> Agreement:
        """See `Engine.begin_update`; if all members agree, abandons an open update and restores the saved tensors."""
        agreement = self.weight_transfer_engine.receiver.agree(ChunkPlan.from_json(plan))
        if agreement.reached:
            if self.device is None:  # vLLM 0.21 sets it for accelerators only, and start_weight_update reads it
                self.device = torch.device("cpu")
            self._verifier_abandon()
            restore(self.model_runner.get_model(), self._verifier_saved)
            self._verifier_aliases = aliases(self.model_runner.get_model())
            self.start_weight_update()
            self._verifier_open = True
        return agreement

    def verifier_receive(self, chunk: int) -> Receipt:
        """See `Engine.receive`; a parameter of two modules counts as loaded under both names."""
        self.update_weights({"chunk": chunk})
        receipt = self.weight_transfer_engine.receipt
        names = {alias for name in receipt.loaded for alias in self._verifier_aliases.get(name, (name,))}
        return replace(receipt, loaded=tuple(sorted(names)))

    def verifier_finish(self) -> None:
        """See `Engine.finish_update`."""
        self.finish_weight_update()
        self._verifier_open = False

    def verifier_clear_cache(self) -> None:
        """Zero every block of the KV cache, used or free.

        Freed blocks are not cleared, and the CPU kernel multiplies values behind a sequence's end by zero. So a NaN
        of a broken forward would reach later requests.
        """
        for cache in self.model_runner.kv_caches:
            for part in cache if isinstance(cache, list) else (cache,):  # a state-space layer has two
                part.zero_()

    def verifier_seed(self, seed: int) -> int:
        """Seed the generator that serves requests without one of their own; return what it says of its seed."""
        torch.manual_seed(seed)
        return torch.cuda.initial_seed() if torch.cuda.is_available() else torch.initial_seed()

    def verifier_unlink_shared(self) -> None:
        """Remove the names of the shared memory that CPU ranks all-reduce over; the mappings stay.

        vLLM 0.21 never removes them, so every tensor-parallel engine would leave 4 MiB per rank behind. All ranks have
        mapped them once the model is loaded.
        """
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = line.split(maxsplit=5)[-1]
            if path.startswith("/dev/shm/") and path.rpartition("-")[2].startswith("cpushm"):  # noqa: S108 - Linux's own
                Path(path).unlink(missing_ok=True)

    def _verifier_abandon(self) -> None:
        if self._verifier_open:
            abandon_reload(self.model_runner.get_model())
            self._weight_update_active = self._verifier_open = False

    def verifier_call(self, function: str, arguments: Sequence[Any]) -> Any:
        """See `Engine.call`."""
        return resolve(function)(self, *arguments)


def aliases(model: nn.Module) -> dict[str, list[str]]:
    """Return all names of each parameter: a router's score bias is one tensor of two modules."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: same for same in names.values() for name in same}


def abandon_reload(model: nn.Module) -> None:
    """Undo `initialize_layerwise_reload` for layers whose weights did not all come or did not fit.

    Finishing the reload instead would process half-loaded layers and fail again where loading failed.
    """
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            _place_kernel_tensors(layer, info)
        info.reset()


def copy_kept_views(buffer: torch.Tensor) -> None:
    """Replace views that incomplete layers keep of a buffer by copies, as the sender will overwrite the buffer.

    A layerwise reload keeps the tensors of a layer until the last one has come, and those of attention modules until
    the update is finished.
    """
    memory = buffer.untyped_storage().data_ptr()
    for info in LAYERWISE_INFO.values():
        for _, call in info.loaded_weights:
            for name, value in call.arguments.items():
                is_real = isinstance(value, torch.Tensor) and not value.is_meta
                if is_real and value.untyped_storage().data_ptr() == memory:
                    call.arguments[name] = value.clone()


def _install() -> None:
    WeightTransferEngineFactory._registry[BACKEND] = lambda: ChunkTransferEngine
    if not torch.cuda.is_available() and find_spec("vllm.model_executor.layers.fused_moe.cpu_fused_moe") is not None:
        # Where its grouped kernel does not compute the experts (no AVX-512, or AMX), vLLM 0.21 makes a module of the
        # activation in each forward pass, where there is no config to make it with (vllm #45447). vLLM 0.32 has neither
        # this module nor this way to record routes.
        from vllm.model_executor.layers.fused_moe import cpu_fused_moe

        cpu_fused_moe._CPU_MOE_ACT_FN[MoEActivation.SILU] = SiluAndMul.forward_native
        # Packed experts lose their loader, which tells another rank's experts, and a reload offers those to a rank
        # that has all of its own. On a GPU vLLM packs by the function that keeps it.
        cpu_fused_moe.replace_parameter = replace_parameter
        # Each rank has all of an adapter's A. vLLM 0.21 gathers the ranks' products with it for fused linears, of which
        # Triton reads the first, and which a CPU does not multiply by B (vllm #45691).
        apply([
            Patch(_ROUTES, _record_routes(current(_ROUTES)), "self"),
            *(Patch(kernel, of_rank(current(kernel)), KERNEL_TAKES) for kernel in CPU_KERNELS),
            Patch(_ADAPTED, lambda x, bias, layer: layer._apply_sync(x, bias), "x bias layer"),
        ])  # fmt: skip


def _record_routes(begin: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return what begins a record of routes: only mixtures import the module that changes most between versions."""

    def record(runner: Any) -> None:
        from verifier.engine.vllm.routes_vllm import record_routes

        record_routes(runner, begin)

    return record


_install()

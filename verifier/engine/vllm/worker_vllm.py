"""Inside vLLM's worker processes: our weight-transfer engine, and the requests that vLLM has no name for.

vLLM imports this module in each worker (it names the worker extension class) before it builds the weight-transfer
engine; importing it registers `ChunkTransferEngine`, whose making ties the worker's life to its parent's.
"""

from __future__ import annotations

import importlib
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config.parallel import ParallelConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload.layerwise import (
    LAYERWISE_INFO,
    _place_kernel_tensors,
    get_layerwise_info,
)

from verifier.engine.errors import CARRIED, to_record
from verifier.engine.process import die_with_parent
from verifier.engine.vllm.view_vllm import checkpoint_slices
from verifier.engine.vllm.weights_vllm import held_tensors, poison_model
from verifier.engine.weights import adapter_places, restore
from verifier.errors import ContractError
from verifier.plan.chunk_plan import ChunkPlan
from verifier.plan.digest import digest_tensor
from verifier.platform import upstream_fixes_vllm
from verifier.transport.buffer import dtype_name
from verifier.transport.receiver import ChunkReceiver
from verifier.transport.wire import Address, Receipt

BACKEND = "ipc"
"""`WeightTransferConfig.backend` admits only "nccl" and "ipc"; ours takes the place of the latter."""


@dataclass
class AddressInfo(WeightTransferInitInfo):
    """An `Address`, field by field."""

    host: str
    port: int
    world_size: int
    deadline_s: float
    kind: str = "gloo"


@dataclass
class ChunkInfo(WeightTransferUpdateInfo):
    """Which chunk of the agreed plan comes now; names, dtypes and shapes stand in the plan and nowhere else."""

    chunk: int


class ChunkTransferEngine(WeightTransferEngine[AddressInfo, ChunkInfo]):
    """vLLM's weight-transfer API over a transfer group: gloo, NCCL or CUDA IPC, as the sender's address says."""

    init_info_cls = AddressInfo
    update_info_cls = ChunkInfo

    def __init__(self, config: WeightTransferConfig, parallel_config: ParallelConfig) -> None:
        super().__init__(config, parallel_config)
        upstream_fixes_vllm.install_asked()
        if threading.current_thread() is threading.main_thread():
            die_with_parent()
        self.receiver = ChunkReceiver(
            parallel_config.data_parallel_index * parallel_config.world_size + parallel_config.rank, let_go
        )
        self.receipt: Receipt | None = None

    def init_transfer_engine(self, init_info: AddressInfo) -> None:
        """Join the sender's group."""
        self.receiver.connect(
            Address(
                host=init_info.host,
                port=init_info.port,
                world_size=init_info.world_size,
                deadline_s=init_info.deadline_s,
                kind=init_info.kind,
            )
        )

    def receive_weights(
        self, update_info: ChunkInfo, load_weights: Callable[[list[tuple[str, torch.Tensor]]], set[str] | None]
    ) -> None:
        """Take and load one chunk; `receipt` says what came."""
        self.receipt = self.receiver.receive(update_info.chunk, lambda tensors: load_weights(tensors) or ())

    def shutdown(self) -> None:
        """Leave the group."""
        self.receiver.close()

    @staticmethod
    def trainer_send_weights(iterator: Iterator[tuple[str, torch.Tensor]], trainer_args: Any) -> None:
        """The sender is `verifier.engine.sender`, which needs a plan and hands back receipts."""
        raise ContractError("send through verifier.engine.sender, which agrees on a plan first")


class VerifierWorker:
    """Methods mixed into vLLM's worker, called by ``collective_rpc``. All results are JSON values."""

    def verifier_request(self, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Call a method of this worker, vLLM's or ours, and never raise.

        vLLM's driver stops reading at the first rank that failed; the answers of the others stay in their queues and
        every later request gets the answer to an earlier one.
        """
        try:
            return {"value": getattr(self, method)(**arguments)}
        except CARRIED as error:
            traceback.print_exc()
            return to_record(error)

    def verifier_state(self) -> list[dict[str, Any]]:
        """This rank's `HeldTensor` records."""
        return [
            {
                "name": held.name,
                "kind": held.kind,
                "dtype": dtype_name(held.tensor.dtype),
                "shape": list(held.tensor.shape),
                "digest": digest_tensor(held.tensor.detach()),
            }
            for held in held_tensors(self.model_runner.get_model())
        ]

    def verifier_view(self, carried: Sequence[str]) -> list[dict[str, Any]]:
        """This rank's `HeldSlice` records."""
        return [
            {
                "name": part.name,
                "holder": part.holder,
                "dtype": dtype_name(part.tensor.dtype),
                "shape": list(part.tensor.shape),
                "digest": digest_tensor(part.tensor.detach().contiguous()),
                "box": [list(span) for span in part.box],
                "quantized": part.quantized,
            }
            for part in checkpoint_slices(self.model_runner.get_model(), frozenset(carried))
        ]

    def verifier_poison(self, carried: Sequence[str]) -> list[dict[str, Any]]:
        """This rank's `Poisoned` records; an update that was left open is abandoned."""
        self._verifier_abandon()
        done = poison_model(self.model_runner.get_model(), frozenset(carried), self._verifier_aside())
        return [{"name": name, "how": how} for name, how in done]

    def verifier_poison_adapter(self) -> None:
        """Fill the places of adapters with NaN; loading one must overwrite all of its place."""
        for module in self.model_runner.get_model().modules():
            for tensor in adapter_places(module).values():
                tensor.fill_(float("nan"))

    def verifier_begin(self, plan: list[Any]) -> list[str]:
        """Agree on the plan; if reached, abandon an update that was left open and restore what was put aside.

        Returns:
            What each member of the transfer group said.
        """
        agreement = self.weight_transfer_engine.receiver.agree(ChunkPlan.from_json(plan))
        if agreement.reached:
            if self.device is None:  # vLLM 0.21 sets it for accelerators only, and start_weight_update reads it
                self.device = torch.device("cpu")
            self._verifier_abandon()
            restore(self.model_runner.get_model(), self._verifier_aside())
            self._verifier_aliases = aliases(self.model_runner.get_model())
        return list(agreement.said)

    def verifier_receipt(self) -> dict[str, Any]:
        """The receipt of the last chunk; a parameter of two modules counts as loaded under both names."""
        record = self.weight_transfer_engine.receipt.to_json()
        names = {alias for name in record["loaded"] for alias in self._verifier_aliases.get(name, (name,))}
        return {**record, "loaded": sorted(names)}

    def verifier_clear_cache(self) -> None:
        """Zero every block of the KV cache, used or free.

        A block is not cleared when it is freed, and the CPU kernel multiplies what lies behind a sequence's end by
        zero, so a NaN that a broken forward left there reaches later requests.
        """
        for cache in self.model_runner.kv_caches:
            for part in cache if isinstance(cache, list) else (cache,):  # a state-space layer has two
                part.zero_()

    def verifier_seed(self, seed: int) -> None:
        """Seed the generator that serves requests without one of their own."""
        torch.manual_seed(seed)

    def verifier_unlink_shared(self) -> None:
        """Remove the names of the shared memory over which CPU ranks all-reduce; the mappings stay.

        vLLM 0.21 never removes them, so every tensor-parallel engine would leave 4 MiB per rank behind. Safe once all
        ranks have mapped them, which they have when the model is loaded.
        """
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = line.split(maxsplit=5)[-1]
            if path.startswith("/dev/shm/") and path.rpartition("-")[2].startswith("cpushm"):  # noqa: S108 - Linux's own
                Path(path).unlink(missing_ok=True)

    def _verifier_abandon(self) -> None:
        if self._weight_update_active:
            abandon_reload(self.model_runner.get_model())
            self._weight_update_active = False

    def _verifier_aside(self) -> dict[str, torch.Tensor]:
        return self.__dict__.setdefault("_verifier_kept", {})

    def verifier_call(self, module: str, function: str, arguments: Sequence[Any]) -> Any:
        """Run ``function(worker, *arguments)`` of a named module here."""
        return getattr(importlib.import_module(module), function)(self, *arguments)


def aliases(model: nn.Module) -> dict[str, list[str]]:
    """Every parameter's names: a router's score bias is one tensor of two modules."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: same for same in names.values() for name in same}


def abandon_reload(model: nn.Module) -> None:
    """Undo `initialize_layerwise_reload` for the layers whose weights did not all come, or did not fit.

    Finishing instead would process half-loaded layers, and fail again where loading failed.
    """
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            _place_kernel_tensors(layer, info)
        info.reset()


def let_go(buffer: torch.Tensor) -> None:
    """Give layers that are not complete yet copies of what they hold of a buffer that will be filled again.

    A layerwise reload keeps the tensors of a layer until its last one has come; those of attention modules, until the
    update is finished.
    """
    memory = buffer.untyped_storage().data_ptr()
    for info in LAYERWISE_INFO.values():
        for _, call in info.loaded_weights:
            for name, value in call.arguments.items():
                if isinstance(value, torch.Tensor) and not value.is_meta and _memory(value) == memory:
                    call.arguments[name] = value.clone()


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _install() -> None:
    WeightTransferEngineFactory._registry[BACKEND] = lambda: ChunkTransferEngine


_install()

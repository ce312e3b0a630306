"""Worker extension of vLLM that records what an engine rank receives, whatever transfers it.

A loop names it in its engine's options, as
``worker_extension_cls="verifier.probe.recording_worker_vllm.RecordingWorker"``, and calls `verifier_receives` before a
sync and `verifier_received` after it. All that vLLM loads goes through the model's `load_weights`: chunks of its "nccl"
and "ipc" transfer, `reload_weights`, a trainer's own extension.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import Any

import torch

from verifier.engine.settings import settings_of
from verifier.engine.vllm.view_vllm import checkpoint_slices
from verifier.probe.recorder import LoopRecorder, attach
from verifier.stages.engine.probe_engine_state import views_of


class RecordingWorker:
    """Methods mixed into vLLM's worker, called by `collective_rpc`."""

    _verifier_recorder: LoopRecorder | None = None
    _verifier_synced: tuple[int, dict[str, str]] | None = None

    def verifier_receives(self, trace: str, version: int) -> None:
        """Record, from now on, every tensor that the model's loader is given, as received for a version."""
        self.verifier_received()
        parallel = self.vllm_config.parallel_config
        rank = int(parallel.data_parallel_index * parallel.world_size + self.rank)
        recorder = self._verifier_recorder = attach(trace, rank=rank)
        model = self.model_runner.get_model()
        load = type(model).load_weights
        if self._verifier_synced is not None:
            recorder.synced = self._verifier_synced
            recorder.engine_served(_held_by(model))
        chunks = count()

        def recording(weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
            loaded = load(model, recorder.receiving(weights, version))
            recorder.engine_loaded(version, loaded or (), chunk=next(chunks))
            return loaded

        model.load_weights = recording

    def verifier_received(self, held: int | None = None, carried: list[str] | None = None) -> None:
        """End the record of a transfer; with `held`, a version, and the checkpoint's names record what is held too.

        A rank that holds parts of tensors, or those of a pipeline stage, records them, and they are not judged.
        """
        recorder, self._verifier_recorder = self._verifier_recorder, None
        model = self.model_runner.get_model()
        model.__dict__.pop("load_weights", None)
        if recorder is None:
            return
        if held is not None:
            for record in views_of([*checkpoint_slices(model, frozenset(carried or ()))], held):
                recorder.emit(record)
            state = dict(model.named_parameters())
            buffers = {name: tensor for name, tensor in _held_by(model).items() if name not in state}
            recorder.engine_held(held, state, buffers=buffers, settings=dict(settings_of(model)))
            self._verifier_synced = recorder.synced
        recorder.close()


def _held_by(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_buffers()), **dict(model.named_parameters())}

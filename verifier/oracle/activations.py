"""The oracle's evidence of a run of `bisect`: what transformers holds at each point, and its gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from verifier.core import store
from verifier.core.record import real
from verifier.export.derived import DerivedLayout
from verifier.export.names import ModelLayout
from verifier.export.sharding import Owners
from verifier.mesh import Mesh
from verifier.model.checkpoint import Checkpoint
from verifier.model.families import size_if_any
from verifier.model.module_points import OF_THE_LOSS, order_of
from verifier.oracle.oracle import Oracle
from verifier.oracle.recording import gradient_record
from verifier.stages.logprob.records import Activation
from verifier.stages.loss.records import ActivationGradient


def record_activations(
    oracle: Oracle, trace: Path, work: Path, source: Checkpoint, batch: Sequence[Any], rule: Mapping[str, float],
    layout: ModelLayout | DerivedLayout | None, mesh: Mesh,
) -> None:  # fmt: skip
    """Have transformers compute the step, and record it.

    Args:
        oracle: running.
        trace: trace directory that the ranks have written.
        work: folder in which the ranks left their gradients.
        source: the weights.
        batch: see `verifier.oracle.activations_hf.record`; `rule` likewise.
        rule: coefficients of the loss.
        layout: where the source's tensors live in the trainer; None where nobody knows.
        mesh: the trainer's.
    """
    found = oracle.ask("activations_hf:record", [source.path, work], batch, rule)
    lengths = found["lengths"]
    layers = size_if_any(source.config, "num_hidden_layers") or 0
    with contextlib.closing(store.Recorder(trace, "oracle", 0)) as recorder:
        for name, values in load_file(work / "activations.safetensors").items():
            side, _, point = name.partition(" ")
            rows = [length - (point in OF_THE_LOSS) for length in lengths]
            kind = Activation if side == "forward" else ActivationGradient
            recorder.emit(
                kind(name=point, version=1, step="train", order=order_of(point, layers)),
                {
                    "values": values, "columns": np.arange(values.shape[1], dtype=np.int32),
                    "sequence": np.repeat(np.arange(len(rows), dtype=np.int32), rows),
                    "position": np.concatenate([np.arange(count, dtype=np.int32) for count in rows]),
                },
            )  # fmt: skip
        owners = Owners(layout.placements, mesh) if layout else None
        whole = {key: real(found[key]) for key in ("loss", "loss_scale")}
        for row in found["gradients"]:
            more = {**whole, "gradient_norm": 0.0, "num_tokens": found["num_tokens"], "version": 1}
            recorder.emit(gradient_record({**row, **more}, owners, mesh))

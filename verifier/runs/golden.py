"""Recorded manifests of exports: written by `verifier golden --record`, compared with by `--against`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from verifier.config import GoldenConfig
from verifier.core import store
from verifier.core.outputs import write_whole
from verifier.errors import UsageError
from verifier.runs.model_under_test import ModelUnderTest, open_model
from verifier.stages.export.records import ExportedTensor
from verifier.stages.load.records import SourceTensor

MANIFESTS = Path("golden")


def write_manifest(config: GoldenConfig) -> Path:
    """Record the export of a finished trace, in which every check holds, under ``golden/``, with the reason."""
    trace = store.read(config.trace)
    tensors = {
        item.name: {"dtype": item.dtype, "shape": list(item.shape), "digest": item.digest}
        for item in trace.of(ExportedTensor, version=0, rank=0)
    }
    path = manifest_path(config)
    record = {
        "model": config.model,
        "dtype": config.dtype,
        "architecture": open_model(config.model, config.dtype, config.mesh).checkpoint.architecture,
        "mesh": config.mesh.to_dict(),
        "versions": trace.manifest.versions,
        "why": config.why,
        "tensors": tensors,
    }
    write_whole(path, json.dumps(record, indent=1, sort_keys=True) + "\n")
    return path


def manifest_path(config: GoldenConfig) -> Path:
    """File of a model's manifest."""
    name = config.model.replace(":", "-").rstrip("/").rpartition("/")[2]
    return MANIFESTS / f"{name}-{config.dtype}.json"


def require_same_model(record: dict[str, Any], model: ModelUnderTest, path: Path | None) -> None:
    """Refuse to compare with the manifest of another architecture or dtype."""
    ours = {"architecture": model.checkpoint.architecture, "dtype": model.dtype}
    for what, value in ours.items():
        if record.get(what) != value:
            raise UsageError(f"`{path}` was recorded for {what} {record.get(what)}, and the model has {value}")


def read_manifest(path: Path) -> dict[str, Any]:
    """Read a recorded manifest.

    Raises:
        UsageError: it is not JSON, or no manifest of golden.
    """
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as problem:
        raise UsageError(f"`{path}` is no manifest that `verifier golden --record` wrote: {problem}") from problem
    if not isinstance(record, dict) or not isinstance(record.get("tensors"), dict) or not record["tensors"]:
        raise UsageError(f"`{path}` is no manifest that `verifier golden --record` wrote: it lists no tensors")
    for name, item in record["tensors"].items():
        fields = item if isinstance(item, dict) else {}
        if not (
            isinstance(fields.get("digest"), str) and isinstance(fields.get("shape"), list) and fields.get("dtype")
        ):
            raise UsageError(f"`{path}` is damaged: tensor `{name}` lacks its digest, dtype or shape")
    return record


def record_manifest(trace: Path, record: dict[str, Any]) -> None:
    """Record a manifest's tensors as the source."""
    recorder = store.Recorder(trace, "source", 0)
    for name, item in record["tensors"].items():
        shape = tuple(item["shape"])
        recorder.emit(SourceTensor(name=name, digest=item["digest"], dtype=item["dtype"], shape=shape))
    recorder.close()

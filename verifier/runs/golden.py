"""`verifier golden`: load through Megatron-Bridge on a mesh, export, compare with the source bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from verifier.config import GoldenConfig
from verifier.core import store
from verifier.core.manifest import Manifest, replace
from verifier.core.outputs import require_writable
from verifier.core.records_weights import ExportedTensor, SourceTensor
from verifier.errors import UsageError
from verifier.launch.fork_launcher import ForkLauncher
from verifier.platform.upstream_fixes import selected
from verifier.runs.placement import place_trainer
from verifier.runs.setup import (
    PRELOADS,
    Deadline,
    Progress,
    Subject,
    identity,
    open_subject,
    run_ranks,
    trace_folder,
    work_folder,
)
from verifier.runs.spec import RunSpec

MANIFESTS = Path("golden")


def run(config: GoldenConfig, progress: Progress) -> None:
    """Run golden and leave its trace; judge it afterwards.

    Raises:
        UsageError: what the user can mend; no trace is left then.
        VerifierError: a rank died or hung; the trace says so.
    """
    until = Deadline(config.timeout_s)
    subject = open_subject(config.model, config.dtype, config.mesh)
    recorded = None if config.against is None else read_manifest(config.against)
    if recorded is not None:
        require_same_model(recorded, subject, config.against)
    if config.record:
        require_writable(manifest_path(config), make_folder=True)
    manifest = manifest_of(config, subject)
    with (
        ForkLauncher(preload=PRELOADS[subject.tier], load_deadline_s=until.left("importing Megatron")) as launcher,
        trace_folder(config.trace, manifest) as trace,
        work_folder() as work,
    ):
        spec = RunSpec(
            checkpoint=str(subject.checkpoint.path), mesh=config.mesh, dtype=config.dtype, tier=subject.tier,
            trace=str(trace), work=str(work), source_from_manifest=recorded is not None, saves=subject.is_saved,
            fixes=sorted(selected(config.fixes)),
        )  # fmt: skip
        progress("importing Megatron")
        run_ranks(launcher, "golden", spec, until.left("the ranks were started"), progress)
        if recorded is not None:
            emit_manifest(trace, recorded)
        store.complete(trace, manifest)


def manifest_of(config: GoldenConfig, subject: Subject) -> Manifest:
    """Run identity, and which checks have a subject in this run."""
    scopes = ["export", *subject.layout_scopes, *(["saved"] if subject.is_saved else [])]
    num_gpus = place_trainer(config.mesh, subject.tier)
    return replace(identity(subject, "golden", config.model, config.to_dict(), num_gpus), scopes=tuple(scopes))


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
        "architecture": open_subject(config.model, config.dtype, config.mesh).checkpoint.config["architectures"][0],
        "mesh": config.mesh.to_dict(),
        "versions": trace.manifest.versions,
        "why": config.why,
        "tensors": tensors,
    }
    try:
        aside = path.with_suffix(".partial")
        aside.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
        aside.rename(path)
    except OSError as problem:
        raise UsageError(f"the manifest cannot be written to `{path}`: {problem.strerror}") from problem
    return path


def manifest_path(config: GoldenConfig) -> Path:
    """Where the manifest of a model is recorded."""
    name = config.model.replace(":", "-").rstrip("/").rpartition("/")[2]
    return MANIFESTS / f"{name}-{config.dtype}.json"


def require_same_model(record: dict[str, Any], subject: Subject, path: Path | None) -> None:
    """Refuse to compare with the manifest of another architecture or dtype.

    Raises:
        UsageError: names both.
    """
    ours = {"architecture": subject.checkpoint.config["architectures"][0], "dtype": subject.dtype}
    for what, value in ours.items():
        if record.get(what) != value:
            raise UsageError(f"`{path}` was recorded for {what} {record.get(what)}, and the model has {value}")


def read_manifest(path: Path) -> dict[str, Any]:
    """A recorded manifest.

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


def emit_manifest(trace: Path, record: dict[str, Any]) -> None:
    """A manifest's tensors as evidence of the source."""
    recorder = store.Recorder(trace, "source", 0)
    for name, item in record["tensors"].items():
        shape = tuple(item["shape"])
        recorder.emit(SourceTensor(name=name, digest=item["digest"], dtype=item["dtype"], shape=shape))
    recorder.close()

"""Files beside the weights of a source and of an export."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from verifier.core.reader import digest_of
from verifier.core.record import Probe
from verifier.stages.export.records import SavedFiles
from verifier.stages.load.records import SourceFiles
from verifier.trainer.model_files import beside_weights, holds_weights


def record_files(probe: Probe, source: Path, folder: Path, version: int) -> None:
    """Record the files beside the weights and config.json of a source, and of a folder that was exported to."""
    kept = [file for file in beside_weights(source) if not holds_weights(file.name)]
    probe.emit(SourceFiles(name="files", version=version, digests=_digests(kept)))
    probe.emit(SavedFiles(name="files", version=version, digests=_digests(beside_weights(folder))))


def _digests(files: Iterable[Path]) -> dict[str, str]:
    return {file.name: digest_of(file.read_bytes()) for file in files}

"""Trace of a run's last export, and its judgement."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from msgspec.structs import replace

from verifier.config.training import TrainConfig
from verifier.core.manifest import Facts
from verifier.core.store import Recorder, complete, create
from verifier.probes.training.step_trace import step_manifest
from verifier.probes.training.verdicts import Judge, require_held
from verifier.runs.model_under_test import ModelUnderTest
from verifier.stages.checkpoint.probe_written import CheckpointEvidence
from verifier.stages.export.probe_saved_files import record_files
from verifier.stages.logprob.records import SampledNoise
from verifier.stages.rollout.probe_evaluations import Examine
from verifier.stages.train.records import PreviousStep
from verifier.trainer.run_folder import RunFolder


class ExportTrace:
    """A trace for the ranks to write their evidence to; one of an earlier export is removed.

    Args:
        config: of the run.
        model: of the run.
        folder: of the run.
        step: the last one.

    Attributes:
        path: of the trace.
    """

    def __init__(self, config: TrainConfig, model: ModelUnderTest, folder: RunFolder, step: int) -> None:
        self._manifest = replace(
            step_manifest(config, model, Facts(part="export", step=step)), engine="", engine_ranks=0, synced_versions=()
        )
        # Scores put an engine that sleeps to rest; the last step's noise of another dtype is in its own trace.
        self._step, self._examines = step, model.dtype == "float32" and not config.engine.sleep_level
        shutil.rmtree(folder.export_trace, ignore_errors=True)
        self.path = create(folder.export_trace, self._manifest)

    def record(
        self, last: PreviousStep, continuation: CheckpointEvidence, examine: Examine, noise: SampledNoise | None
    ) -> None:
        """Record the last step, the checkpoints of the run, and answers of its evaluation."""
        with contextlib.closing(Recorder(self.path, "controller", 0)) as probe:
            stored = continuation.record_stored(probe)
            examined = self._examines and examine(probe, self._step)
            if examined:
                probe.emit(last)
            if examined and noise is not None:
                probe.emit(replace(noise, version=self._step + 1))
            facts = replace(self._manifest.facts, stored=stored, examined=examined, noise=noise is not None)
            self._manifest = replace(self._manifest, facts=facts)

    def judge(self, judge: Judge, source: Path, exported: Path) -> None:
        """Have it judged, with the files beside the weights of the source and of what was exported.

        Raises:
            ViolationFound: a check does not hold.
        """
        with contextlib.closing(Recorder(self.path, "source", 0)) as probe:
            record_files(probe, source, exported, self._step)
        complete(self.path, self._manifest)
        require_held(judge, self.path, "the export")

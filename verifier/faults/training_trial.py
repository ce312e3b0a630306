"""Runs of a fault's trial that train: clean, faulted or healed, each a short run of `verifier train`."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.core import store
from verifier.core.comparison import Comparison
from verifier.core.finding import Verdict
from verifier.errors import VerifierError
from verifier.faults.fault import Fault, FireCounter, Side
from verifier.faults.injection import INJECTED, in_engines
from verifier.mesh import Mesh
from verifier.probes.training.run_evidence import RunEvidence
from verifier.probes.training.verdicts import Judged
from verifier.report.report import report_of
from verifier.runs.resources import Deadline, Resources
from verifier.stages.train.records import UpdatedShard
from verifier.trainer.checkpoint_folder import Checkpoints
from verifier.trainer.controller import Progress, Trainer
from verifier.trainer.run_folder import FINISHED, RunFolder

KNOBS = (
    "steps=3", "data.batch_size=8", "batch.micro_batch_size=3", "optimizer.schedule=linear", "optimizer.warmup_steps=2",
    "optimizer.weight_decay=0.1", "evaluation.num_problems=0", "verify.every=0",
)  # fmt: skip
"""Knobs of every trial, before the fault's own: each step has a rate of its own, and ranks add up micro-batches."""

GRPO_KNOBS = (f"data.rollouts={Path(__file__).parent / 'rollouts'}", "grpo.group_size=4")
"""Knobs of a trial of GRPO: answers that transformers sampled from `tiny:add`, and right ones among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOutcome:
    """Judgement of one run, over all of its steps."""

    verdict: Verdict
    caught: tuple[str, ...]
    """Codes of the checks that are violated."""
    bad: list[Comparison]
    weights: frozenset[tuple[int, str, str]]
    """(rank, name, digest) of every live shard after the last step."""
    fired: int
    crashed: str
    """Error that ended the run early, if one did."""


def training_overrides(fault: Fault) -> tuple[str, ...]:
    """Knobs of a fault's runs; those that share them share a clean run."""
    mesh = _axes(fault.mesh)
    knobs = [*KNOBS, *(GRPO_KNOBS if "algorithm=grpo" in fault.training else ())]
    own = {text.partition("=")[0] for text in fault.training}
    kept = [text for text in knobs if text.partition("=")[0] not in own]
    resumed = ["checkpoint.every=1"] if fault.resumes else []
    return (f"model={fault.model}", *mesh, *kept, *fault.training, *resumed)


def _axes(mesh: Mesh) -> list[str]:
    return [f"mesh.{axis}={size}" for axis, size in mesh.to_dict().items() if size is not None]


def run_training(
    fault: Fault, folder: Path, resources: Resources, progress: Progress, *, inject: bool = False
) -> TrainingOutcome:
    """Train in a folder, with the fault if asked to, and judge every step afterwards, the first bad one included.

    `resources` serve runs that sample from no engine, and keep the oracle from run to run. A fault of a resume has a
    whole run without it first, which loses its last checkpoint and is then continued.
    """
    run = folder / "run"
    words = [*training_overrides(fault), f"run={run}", "verify.steps=true"]
    fire, crashed = FireCounter(mark=folder / "fired-controller"), ""
    config, _ = load(TrainConfig, overrides=words)
    launcher = resources.launcher(Deadline(config.timeout_s))
    if fault.resumes:
        others = [text for text in words if not text.startswith("mesh.")]
        whole, _ = load(TrainConfig, overrides=[*others, *_axes(fault.saved_on or fault.mesh)])
        Trainer(whole, progress, RunEvidence(DeferredJudge()), launcher=launcher, resources=resources).run()
        Checkpoints(run / "checkpoints", config.checkpoint.keep).remove_after(config.steps - 1)
        (run / FINISHED).unlink()
    with contextlib.ExitStack() as stack:
        if inject and fault.side is Side.CONTROLLER:
            stack.enter_context(fault.inject(fire))
        if inject and fault.side is Side.DRIVER:
            stack.enter_context(in_engines(fault, fire))
        within = (INJECTED, fault.id, str(folder)) if inject and fault.side is Side.TRAINER else ()
        warm: dict[str, Any] = {"launcher": launcher, "resources": resources}
        try:
            Trainer(config, progress, RunEvidence(DeferredJudge()), within=within, **warm).run()
        except VerifierError as problem:
            if not inject:
                raise
            crashed = str(problem)
    fired = fire.count + sum(int(mark.read_text() or 1) for mark in folder.glob("fired-[0-9]*"))
    traces = [store.read(path) for path in sorted((run / "steps").iterdir())]
    exported = RunFolder(run).export_trace
    judged = [*traces, *([store.read(exported)] if exported.exists() else [])]
    outcomes = [outcome for trace in judged for outcome in report_of(trace, str(run)).outcomes]
    return TrainingOutcome(
        verdict=max((outcome.verdict for outcome in outcomes), default=Verdict.INCONCLUSIVE),
        caught=tuple(sorted({item.code for item in outcomes if item.verdict is Verdict.VIOLATED})),
        bad=[item for outcome in outcomes if outcome.finding for item in outcome.finding.bad],
        weights=frozenset((item.rank, item.name, item.digest) for item in traces[-1].of(UpdatedShard)),
        fired=fired, crashed=crashed,
    )  # fmt: skip


class DeferredJudge:
    """Judge that lets every step pass; whoever started the run judges the traces afterwards."""

    def submit(self, trace: Path) -> Future[Judged]:
        """Return a verdict that holds, whatever the trace has."""
        done: Future[Judged] = Future()
        done.set_result(Judged(0, ""))
        return done

    def pack(self, trace: Path, *, records: bool = True) -> None:
        """Leave a trace as it is."""

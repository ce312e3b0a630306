"""Clean runs: their families, meshes, dtypes and engines, and what each measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.config import EngineOptions, GoldenConfig, RoundtripConfig
from verifier.core import store
from verifier.core.finding import Verdict
from verifier.core.trace import Trace
from verifier.mesh import Mesh
from verifier.report.report import Report, report_of
from verifier.runs.runner import Runner
from verifier.stages.logprob.records import DtypeNoise, OracleLogprobs, OracleOfSampled, TrainerLogprobs
from verifier.stages.loss.records import GradientRecord
from verifier.stages.replay.records import LogprobRecord
from verifier.stages.rollout.records import EngineLogprobs, SampledTokens

CYCLES = 2
EXACT_NATS = 1e-5
DENSE = ("qwen3", "qwen3-tied", "llama")
MOE = ("qwen3-moe", "deepseek-v3", "nemotron-h")
HYBRID = "nemotron-h"
FIXES = {HYBRID: ("all",)}
"""Upstream fixes without which a clean run of a family does not hold; docs/upstream.md has it without them."""
DENSE_MESHES = (
    Mesh(dp=2),
    Mesh(tp=2),
    Mesh(pp=2),
    Mesh(pp=2, vpp=2),
    Mesh(cp=2),
    Mesh(pp=2, first_stage_layers=1, last_stage_layers=3),
)
MOE_MESHES = (
    *DENSE_MESHES,
    Mesh(ep=2, dp=2),
    Mesh(tp=2, ep=2),
    Mesh(tp=2, etp=2),
    Mesh(tp=2, etp=2, ep=2, dp=2),
    Mesh(cp=2, ep=2),
    Mesh(pp=2, ep=2, dp=2),
    Mesh(tp=2, pp=2, ep=2),
)
# A hybrid has eight layers, and megatron-bridge builds it without virtual stages.
HYBRID_MESHES = (
    *(mesh for mesh in MOE_MESHES if mesh.vpp == 1 and mesh.first_stage_layers is None),
    Mesh(pp=2, first_stage_layers=3, last_stage_layers=5),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One clean run."""

    family: str
    """Name of a tiny model without its "tiny:", or the absolute path of a checkpoint."""
    mesh: Mesh
    engine: str = "hf"
    dtype: str = "float32"
    update: str = "step"

    @property
    def id(self) -> str:
        """For the name of a test and of a folder."""
        return f"{self.engine} {self.family} {self.dtype} {self.update} {self.mesh.label()}".replace(" ", "-")


def cases() -> list[Case]:
    """All rows of the table; those that share an engine follow each other."""
    found = [Case(family=family, mesh=mesh) for family in DENSE for mesh in DENSE_MESHES]
    found += [Case(family="qwen2", mesh=mesh) for mesh in DENSE_MESHES]
    found += [Case(family="deepseek-v3-yarn", mesh=Mesh(tp=2)), Case(family="qwen3-moe-320", mesh=Mesh(ep=2, dp=2))]
    found += [Case(family=family, mesh=mesh) for family in MOE for mesh in MOE_MESHES if family != HYBRID]
    found += [Case(family=HYBRID, mesh=mesh) for mesh in HYBRID_MESHES]
    found += [Case(family=family, mesh=Mesh(tp=2), dtype="bfloat16") for family in ("qwen3", *MOE)]
    found += [Case(family=family, mesh=Mesh(ep=2, dp=2), dtype="bfloat16") for family in MOE]
    found += [Case(family="deepseek-v3", mesh=Mesh(pp=2, ep=2, dp=2), update="noise")]
    found += [Case(family=family, mesh=Mesh(tp=2, pp=2), engine="vllm") for family in (*DENSE, "qwen2")]
    found += [Case(family="qwen3-moe", mesh=mesh, engine="vllm") for mesh in (Mesh(ep=2, dp=2), MOE_MESHES[-1])]
    found += [Case(family="qwen3-moe", mesh=Mesh(ep=2, dp=2), engine="vllm", update="noise")]
    found += [Case(family="qwen3-moe", mesh=Mesh(tp=2, ep=2), engine="vllm", dtype="bfloat16")]
    return sorted(found, key=lambda case: (case.engine, case.family, case.dtype != "float32"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a clean run measured; gaps are the greatest over all tokens, tensors and versions."""

    case: Case
    num_bitwise: int
    """Tensors that the exports of version 0 and the source hold alike, in golden and in the round trip."""
    num_compared: int
    without_subject: tuple[str, ...]
    """Codes of the checks that the round trip had no subject for."""
    trainer_nats: float
    engine_nats: float
    sampled_nats: float
    noise_nats: float | None
    """Transformers in the run's dtype against itself in float32; None in float32."""
    gradient_gap: float | None
    """Of the tensor's greatest gradient."""
    step_gap: float | None
    """In learning rates."""
    golden_s: float
    roundtrip_s: float

    def row(self) -> dict[str, Any]:
        """Record in the ledger of clean runs: gaps with two digits, times in tenths of a second."""
        found = asdict(self)
        del found["case"], found["without_subject"]
        short = {key: round(value, 1) if key.endswith("_s") else float(f"{value:.1e}")
                 for key, value in found.items() if isinstance(value, float)}  # fmt: skip
        case = self.case
        ids = {"family": case.family, "mesh": case.mesh.label(), "dtype": case.dtype, "engine": case.engine}
        return {**ids, "update": case.update, **found, **short}


def run(runner: Runner, case: Case, folder: Path) -> Measured:
    """Golden, then a round trip; both must hold, with every check that they declare."""
    import time

    began = time.monotonic()
    model = case.family if Path(case.family).is_absolute() else f"tiny:{case.family}"
    fixes = FIXES.get(case.family, ())
    golden = runner.golden(
        GoldenConfig(model=model, trace=folder / "golden", mesh=case.mesh, dtype=case.dtype, fixes=fixes)
    )
    loaded = time.monotonic()
    trace = runner.roundtrip(
        RoundtripConfig(
            model=model, trace=folder / "roundtrip", mesh=case.mesh, dtype=case.dtype, fixes=fixes,
            engine=EngineOptions(kind=case.engine), cycles=CYCLES, update=case.update,
        )
    )  # fmt: skip
    ended = time.monotonic()
    reports = [judge(golden), judge(trace)]
    found = store.read(trace)
    noise = [float(item.greatest) for item in found.of(DtypeNoise, name="scored")]
    steps = list(found.of(GradientRecord))
    return Measured(
        case=case,
        num_bitwise=min(compared(report, "WGT004") for report in reports),
        num_compared=sum(outcome.num_compared for report in reports for outcome in report.outcomes),
        without_subject=reports[1].out_of_scope,
        trainer_nats=gap(found, TrainerLogprobs, OracleLogprobs),
        engine_nats=gap(found, EngineLogprobs, OracleLogprobs),
        sampled_nats=gap(found, SampledTokens, OracleOfSampled),
        noise_nats=max(noise, default=None),
        gradient_gap=max(
            (float(i.gradient.value) / float(i.gradient_scale) for i in steps if i.gradient and i.gradient_scale),
            default=None,
        ),
        step_gap=max((float(item.step.value) for item in steps if item.step), default=None),
        golden_s=loaded - began,
        roundtrip_s=ended - loaded,
    )


def judge(path: Path) -> Report:
    """The report on a trace, which must hold whole."""
    report = report_of(store.read(path), str(path))
    bad = {outcome.code: outcome.finding or outcome.error for outcome in report.outcomes if outcome.verdict}
    assert report.verdict is Verdict.HOLDS, f"{path}: {report.verdict.name} {bad}"
    return report


def compared(report: Report, code: str) -> int:
    """How many things a check compared."""
    return next(outcome.num_compared for outcome in report.outcomes if outcome.code == code)


def gap(trace: Trace, actual: type[LogprobRecord], expected: type[LogprobRecord]) -> float:
    """Greatest difference of two sides' log-probabilities over all versions, nats."""
    theirs = {(item.name, item.version): trace.array(item).astype(float) for item in trace.of(expected)}
    ours = {(item.name, item.version): trace.array(item).astype(float) for item in trace.of(actual)}
    assert len({version for _, version in ours}) == CYCLES + 1
    return max(float(abs(values - theirs[key]).max()) for key, values in ours.items())

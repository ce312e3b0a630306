"""`verifier bisect`: the run, what differs first in it, and the sentence and table that say so."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from verifier.cli.results import show
from verifier.config import BisectConfig
from verifier.core import store
from verifier.core.finding import ExitCode
from verifier.core.trace import Trace
from verifier.errors import UsageError
from verifier.mesh import Mesh
from verifier.report.render_text import mesh_of
from verifier.runs.first_difference import NATS, FirstDifference, PointCompared, first_difference
from verifier.stages.logprob.records import Activation

ROWS = 12
"""Rows of the table on either side of the first difference; `--verbose` prints all."""
_PARTS = {
    "score": "forward, in the pass that scores", "train": "forward, in the pass with gradients",
    "backward": "backward: gradients of outputs", "weight": "backward: gradients of weights",
}  # fmt: skip


def run(config: BisectConfig, *, verbose: bool) -> int:
    """Run one step on the mesh and by transformers, and say what differs first.

    Raises:
        UsageError: nothing was run; names what to mend.
        VerifierError: a process died or hung.
    """
    from verifier.report.progress import shown_progress
    from verifier.runs.resources import Resources
    from verifier.runs.runner import Runner

    with tempfile.TemporaryDirectory() as folder:
        within = () if config.fault is None else _injection(config.fault, folder)
        with shown_progress("bisect") as progress, Resources() as resources:
            Runner(resources, progress).bisect(config, within)
        fired = any(Path(folder).iterdir())
    code = judge([config.trace], verbose=verbose)
    if within and not fired:
        show(f"\nthe fault `{config.fault}` never ran on this model and mesh\n")
        return ExitCode.INCONCLUSIVE
    return code


def judge(traces: Sequence[Path], *, verbose: bool) -> int:
    """Say what differs first in a recorded run, or between two.

    Raises:
        UsageError: no trace of `verifier bisect` there, or more than two.
    """
    if len(traces) > 2:
        raise UsageError(f"{len(traces)} traces are given: bisect compares one with its oracle, or two with each other")
    read = [_read(path) for path in traces]
    if len(read) == 2 and read[0].manifest.config.get("seed") != read[1].manifest.config.get("seed"):
        raise UsageError("the two runs have tokens of different seeds: give both the same --seed")
    found = first_difference(*read)
    show(render(found, read, whole=verbose))
    if any(not trace.manifest.complete for trace in read) and found.first is None:
        return ExitCode.INCONCLUSIVE
    if not found.points:
        return ExitCode.INCONCLUSIVE
    return ExitCode.HOLDS if found.first is None else ExitCode.VIOLATED


def _read(path: Path) -> Trace:
    trace = store.read(path)
    if trace.manifest.command != "bisect" or not trace.has(Activation):
        raise UsageError(f"`{path}` is no trace of `verifier bisect`: it has no values of modules")
    return trace


def _injection(fault_id: str, folder: str) -> tuple[str, ...]:
    from verifier.faults.fault import Side
    from verifier.faults.injection import INJECTED
    from verifier.faults.matrix import chosen

    (fault,) = chosen([fault_id])
    if fault.side is not Side.TRAINER:
        raise UsageError(f"--fault {fault.id} is a bug of the {fault.side.value}: bisect runs the trainer alone")
    return INJECTED, fault.id, folder


def render(found: FirstDifference, traces: Sequence[Trace], *, whole: bool = False) -> str:
    """The sentence, and a table of points around the first difference, or of all."""
    manifest = traces[0].manifest
    theirs = "by transformers" if len(traces) == 1 else "in the other run"
    lines = [sentence(found, theirs), ""]
    mesh = mesh_of(manifest) or Mesh()
    lines.append(f"{manifest.model}, {manifest.dtype}, mesh {mesh.label()}")
    lines += _table(found, whole)
    for trace in traces:
        if not trace.manifest.complete:
            lines += ["", f"a run did not finish, and has not all points: {trace.manifest.failure or 'it was killed'}"]
    if found.left_out:
        kinds = sorted({name.split(".", 2)[-1] if name.startswith("layers.") else name for name in found.left_out})
        lines += ["", f"left out, as one side alone has them: {', '.join(kinds)}"]
    if len(traces) == 1 and not found.weights_compared:
        lines += ["", "gradients of weights were not compared: no layout says where they lie"]
    return "\n".join(lines) + "\n"


def sentence(found: FirstDifference, theirs: str) -> str:
    """The first difference in one sentence."""
    first = found.first
    if not found.points:
        return "nothing was compared: the two sides have no point in common"
    if first is None:
        return f"nothing differs: {len(found.points)} points agree within {found.agreed:.1e} of their greatest"
    bound = f"{first.allowed.absolute:g} {first.allowed.unit}"
    before = f"everything before it agrees within {found.agreed:.1e} (allowed {bound})"
    if not found.agreed:
        before = f"everything before it is equal (allowed {bound})"
    name = titled(first.name)
    if first.part == "backward" and first.name in NATS:
        name = f"loss, gradient of {first.name}"
    if first.part == "weight":
        wrong = [item for item in found.same_part if item.differs]
        where = "" if first.rank is None else f" on {placed(first.rank, first.coordinate)}"
        if len(wrong) == len(found.same_part):
            factor = "" if found.same_factor is None else f" by the factor {found.same_factor:.4g}"
            return (
                f"reduction of gradients: all {len(wrong)} weights' differ{factor} while those of outputs are right, "
                f"so what adds them up or divides them is wrong; the first, `{first.name}`, by {first.ratio:.2g} of "
                f"its greatest; {before}"
            )
        return (
            f"{name}: first weight whose gradient differs although the gradients of outputs are right: by "
            f"{first.greatest:.3g} at {list(first.index)}{where}, {first.ratio:.2g} of its greatest; {len(wrong)} of "
            f"{len(found.same_part)} weights differ; {before}"
        )
    what = "first gradient of an output that differs, back from the loss" if first.part == "backward" else (
        "first output that differs" + (", when scoring" if first.part == "score" else ", in the pass with gradients")
    )  # fmt: skip
    if first.part == "backward" and found.reader is not None and first.name not in NATS:
        what += f", so the fault lies behind it and before `{titled(found.reader.name)}` is put out"
    if first.place is None:
        return f"{name}: {what}: {first.missing} of {first.tokens} tokens are on no rank; {before}"
    at = first.place
    if found.experts:
        before = f"they are the tokens of expert {', '.join(map(str, found.experts))}; {before}"
    missing = f", and {first.missing} are on no rank" if first.missing else ""
    return (
        f"{name}: {what}: {placed(at.rank, at.coordinate)}, sequence {at.sequence}, position {at.position}, channel "
        f"{at.channel}: {at.value:.6g} here, {at.expected:.6g} {theirs}; {first.off} of {first.tokens} tokens "
        f"differ{missing}; {before}"
    )


def placed(rank: int, coordinate: str) -> str:
    """A rank and those of its coordinates that are not 0."""
    known = ", ".join(axis.replace("=", " ") for axis in coordinate.split() if not axis.endswith("=0"))
    return f"rank {rank} ({known})" if known else f"rank {rank}"


def titled(name: str) -> str:
    """Name of a point with its layer first."""
    if not name.startswith("layers."):
        return name
    _, layer, rest = name.split(".", 2)
    return f"layer {layer}, {rest}"


def _table(found: FirstDifference, whole: bool) -> Iterator[str]:
    """Rows of points around the first difference; where nothing differs, the worst of each part; or all."""
    first = found.first
    at = len(found.points) if first is None else found.points.index(first)
    shown = list(range(max(0, at - ROWS), min(len(found.points), at + ROWS + 1)))
    if whole:
        shown = list(range(len(found.points)))
    elif first is None:
        worst = {item.part: one for one, item in sorted(enumerate(found.points), key=lambda pair: pair[1].ratio)}
        shown = sorted(worst.values())
    width = max((len(titled(found.points[one].name)) for one in shown), default=0)
    part = ""
    for one in shown:
        item = found.points[one]
        if item.part != part:
            part = item.part
            yield ""
            yield f"{_PARTS[part]} (allowed: {item.allowed})"
            yield f"  {'':<{width}}   greatest      share"
        yield _row(item, width, one == at)


def _row(item: PointCompared, width: int, is_first: bool) -> str:
    mark = ">" if is_first else " "
    said = f"{mark} {titled(item.name):<{width}}  {item.greatest:9.2e}  {item.ratio:9.2e}"
    if item.differs:
        said += f"  differs, {item.off} of {item.tokens} tokens" if item.tokens else "  differs"
    return said

"""Records that each rank, engine, version and update owes: declared by their class, counted by the manifest.

A manifest says what a run was to do, so what it has to leave is known without its evidence. Absence is never agreement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verifier.core.manifest import Manifest
    from verifier.core.record import Record

Who = tuple[str, int] | None
"""Role and rank of a recorder; None for whoever it is."""
When = tuple[int | None, int | None]
"""Version and number of the optimizer step; None for whichever it is."""
Recorders = Callable[["Manifest"], Sequence[Who]]
Times = Callable[["Manifest"], Sequence[When]]
ANYTIME: When = (None, None)
NAMED = 4
"""Absent records that a report names one by one."""


def anyone(run: Manifest) -> Sequence[Who]:
    """Some process."""
    return [None]


def _trainers(test: Callable[[int, int, int, int, int], bool]) -> Recorders:
    """Trainer ranks by their coordinates: tensor, context and data parallel, pipeline stage, number of stages."""

    def ranks(run: Manifest) -> Sequence[Who]:
        mesh = run.mesh
        if mesh is None:
            return [("trainer", rank) for rank in range(run.world_size)] or [None]
        found: list[Who] = []
        for rank in range(run.world_size):  # tp is fastest, then cp, dp, pp: see `verifier.mesh.Mesh`
            rest, tp = divmod(rank, mesh.tp)
            rest, cp = divmod(rest, mesh.cp)
            pp, dp = divmod(rest, mesh.dp)
            if test(tp, cp, dp, pp, mesh.pp):
                found.append(("trainer", rank))
        return found or [None]

    return ranks


every_rank = _trainers(lambda tp, cp, dp, pp, stages: True)
first_stage = _trainers(lambda tp, cp, dp, pp, stages: tp == pp == 0)
"""Ranks that are given rows of tokens, one of each tensor-parallel group."""
last_stage = _trainers(lambda tp, cp, dp, pp, stages: tp == 0 and pp == stages - 1)
"""Ranks that make rows of log-probabilities, one of each tensor-parallel group."""


def expert_rank(run: Manifest) -> Sequence[Who]:
    """Ranks of pipeline stages that have layers with routers."""
    return _trainers(lambda tp, cp, dp, pp, stages: pp in run.facts.expert_stages)(run)


each_stage = _trainers(lambda tp, cp, dp, pp, stages: tp == cp == dp == 0)
"""One rank of each pipeline stage."""


def provider_rank(run: Manifest) -> Sequence[Who]:
    """One rank of each stage of a training run; in a round trip each rank."""
    return (every_rank if run.command == "roundtrip" else each_stage)(run)


def every_engine(run: Manifest) -> Sequence[Who]:
    """Each rank of the engine."""
    return [("engine", rank) for rank in range(run.engine_ranks)] or [None]


def once(run: Manifest) -> Sequence[When]:
    """In the run, whenever."""
    return [ANYTIME]


def never(run: Manifest) -> Sequence[When]:
    """In no run."""
    return []


def _choose(test: Callable[[Manifest], object], times: Times, otherwise: Times = never) -> Times:
    """Times of a run of which the test is true, and those of others."""
    return lambda run: (times if test(run) else otherwise)(run)


def _in_step(run: Manifest) -> int:
    """Number of the step of a training run; 0 for others."""
    return run.facts.step


def _cycles(run: Manifest) -> int:
    found = run.config.get("cycles", 0) if run.command == "roundtrip" else 0
    return found if isinstance(found, int) else 0


def per_step(run: Manifest) -> Sequence[When]:
    """In each step: of a training run, of a round trip, of a recorded loop."""
    if run.facts.step:
        return [(run.facts.step, None)]
    if run.command == "golden":
        return []
    return [(version, None) for version in (run.facts.updates or range(1, _cycles(run) + 1))] or [ANYTIME]


def per_sync(run: Manifest) -> Sequence[When]:
    """Each version that the engine gets."""
    return [(version, None) for version in run.synced_versions] or [ANYTIME]


def per_cycle(run: Manifest) -> Sequence[When]:
    """Each version of a round trip's weights."""
    return [(version, None) for version in range(_cycles(run) + 1)]


per_version = _choose(_cycles, per_cycle, per_step)
"""Each version of the weights that a round trip scores with; the step of a training run."""
per_update = _choose(_in_step, lambda run: [(run.facts.step, number) for number in run.facts.updates], per_step)
"""In each optimizer step."""
per_live = _choose(_in_step, per_sync, per_step)
"""Each version whose tensors are joined: all that are sent in a step of a training run."""
per_held = _choose(_cycles, per_cycle, per_sync)
"""Each version that an engine holds: in a round trip those that it begins with too."""
per_pass = _choose(_cycles, per_cycle, per_update)
"""In each pass that trains; of a round trip with the weights of each version, which score too."""
per_sample = _choose(_cycles, per_cycle, once)
"""Each version of a round trip's weights; elsewhere some time."""
per_sent = _choose(_in_step, per_sync, once)
"""Each version that a training run sends; elsewhere some time."""
if_scored = _choose(_cycles, per_cycle)
"""Each version of the weights that a round trip scores with."""
if_drawn = _choose(lambda run: run.command != "probe", per_version)
"""Each version of a round trip's weights; a recorded loop need not draw one token again and again."""
if_asked = _choose(lambda run: _cycles(run) and run.config.get("update") == "step", once)
"""Once in a round trip, whose steps have an objective and a rule of their own."""
if_idle = _choose(lambda run: not run.facts.frozen_base, if_asked)
"""Once in a round trip whose steps move more than adapters."""
if_measured = _choose(lambda run: run.facts.noise, once)
"""Once, where the noise of the run's dtype was measured."""
after_another = _choose(lambda run: run.facts.part == "export" or run.facts.step != 1, once)
"""Once, where a step went before."""
if_cut = _choose(lambda run: run.facts.part != "export" or (run.layout and not run.facts.frozen_base), once)
"""Once, but for exports that no layout cuts: of adapters, or of a family without one."""
at_load = _choose(lambda run: not run.facts.step or run.facts.loaded or run.facts.frozen_base, once)
"""Once, where the ranks loaded the model: in a step of a training run that is the first, or of adapters."""


def per_answers(run: Manifest) -> Sequence[When]:
    """In a step, and with the weights before it where an evaluation of theirs is in its trace."""
    before = run.facts.examined and run.facts.part == "step"
    return [*per_step(run), *([(run.facts.step - 1, None)] if before else [])]


def per_gradient(run: Manifest) -> Sequence[When]:
    """In each optimizer step, and in a round trip's idle one at version 0."""
    idle = _cycles(run) and run.config.get("update") == "step" and not run.facts.frozen_base
    return [*([(0, None)] if idle else []), *per_update(run)]


def at_last(run: Manifest) -> Sequence[When]:
    """Last weights that a round trip in fp32 samples by."""
    asked = _cycles(run) and run.synced_versions and run.dtype == "float32"
    return [(_cycles(run), None)] if asked else []


def per_score(run: Manifest) -> Sequence[When]:
    """Weights by which transformers scores too: the policy's before the step, and the reference's."""
    if not run.facts.step:
        return per_version(run) if _cycles(run) else once(run)
    return [(run.facts.step - 1, None), *([(0, None)] if run.facts.has_reference else [])]


def per_export(run: Manifest) -> Sequence[When]:
    """Each version that is exported."""
    if _cycles(run):
        return per_version(run)
    return [(version, None) for version in run.facts.exported or run.synced_versions] or [ANYTIME]


def if_adapted(run: Manifest) -> Sequence[When]:
    """Each export of adapters; of a round trip each version that it sends but version 0, which is the base alone."""
    if _cycles(run):
        return [(version, None) for version in run.synced_versions if version]
    return [] if _without_adapters(run) else per_export(run)


def _without_adapters(run: Manifest) -> bool:
    """Tell of an export, and of a recorded loop, whether no adapters are trained."""
    return (run.facts.part == "export" or run.command == "probe") and not run.facts.frozen_base


def if_stepped(run: Manifest) -> Sequence[When]:
    """Each export of adapters but that of a training run's first ones, which no step of its trace has made."""
    return per_step(run) if run.facts.step and not _without_adapters(run) else if_adapted(run)


def if_export_moves(run: Manifest) -> Sequence[When]:
    """Each export of weights that it may move; of a training run with adapters each but that of its first weights."""
    if run.facts.step:
        return per_step(run) if run.synced_versions and run.facts.frozen_base else []
    return per_export(run) if run.command == "golden" or (_cycles(run) and run.synced_versions) else []


def if_frozen(run: Manifest) -> Sequence[When]:
    """In each step of adapters, whose base a layout knows."""
    known = run.facts.part == "step" and (run.facts.step or (_cycles(run) and run.synced_versions and run.layout))
    return per_step(run) if run.facts.frozen_base and known else []


per_noise = _choose(lambda run: run.facts.step or _cycles(run), per_score)
"""Same as `per_score`, where a run says what transformers scores."""


@dataclass(frozen=True, slots=True)
class Owed:
    """Recorders and times of which each pair owes a record."""

    recorders: Recorders = anyone
    times: Times = once

    def missing(
        self, kind: str, records: Iterable[Record], run: Manifest, came_past: Callable[[int], bool]
    ) -> list[str]:
        """Sentences on what is owed and not there; nothing that a run that broke may not have come to.

        Args:
            kind: of the records, as reports spell it.
            records: of this kind.
            run: that was recorded.
            came_past: tells of a version whether the run reached all of it.
        """
        owed: list[tuple[Who, int | None, int | None]]
        if run.command == "probe":  # of whom and of what its processes recorded when the loop was sealed
            own = run.facts.recorded.get(kind, {})
            owed = [(_named(name), version, None) for name, versions in own.items() for version in versions]
        else:
            owed = [(by, *when) for by in self.recorders(run) for when in self.times(run)]
        if not owed:
            return []
        some, timed, numbered = (place is not None for place in owed[0])
        seen = {
            (
                item.party if some else None, item.version if timed else None,
                item.update_number if numbered else None,
            )
            for item in records
        }  # fmt: skip
        gone = [place for place in owed if place not in seen]
        lost = [place for place in gone if (run.complete if place[1] is None else came_past(place[1]))]
        said = [kind + "".join(_where(*place)) for place in lost[:NAMED]]
        return said + ([f"{len(lost) - NAMED:,} more of {kind}"] if len(lost) > NAMED else [])


def _named(name: str) -> Who:
    role, _, rank = name.rpartition(" ")
    return role, int(rank)


def _where(who: Who, version: int | None, number: int | None) -> Iterable[str]:
    if who is not None:
        yield f" of {who[0]} rank {who[1]}"
    if number is not None:
        yield f" in update {number}"
    elif version is not None:
        yield f" in version {version}"

"""Settings that a run asks for against those that its live objects hold."""

from __future__ import annotations

from collections.abc import Iterator

from verifier.checks.conditions import UPDATED
from verifier.core.check import Comparison, Trace, check, compare_value
from verifier.core.condition import on, recorded
from verifier.core.records_trainer import KnobsAsked, KnobsReached


@check("CFG001", needs=(KnobsAsked, KnobsReached), applies=on(step=UPDATED, loop=recorded(KnobsAsked, KnobsReached)))
def knob_not_applied(trace: Trace) -> Iterator[Comparison]:
    """Every knob of the config holds the value that was asked for in the live objects of every rank.

    What it checks: per rank and knob, the value that the config asks of a field of TransformerConfig, of the data
    parallel config, of OptimizerConfig, of Adam's groups of parameters or of the scheduler, against the value that
    these objects hold after the step: those of every layer and every group. Of a recorded loop what it asks of its
    optimizer, against each group of it.
    Why it matters: a knob that is read and never applied trains another run than its config says. A balancing loss that
    is on by default changes the gradient's norm threefold.
    Evidence: load/asked, load/reached.
    Tolerance and its source: bitwise; settings are copied.
    Where to look: where the knob is handed on, and what sets the field after it.
    What it does not catch: a field that holds the right value and that no code reads (the gradients' checks do).
    References: NeMo-RL#3523, Megatron-LM#5694, SkyRL#1335.
    """
    for asked in trace.of(KnobsAsked):
        for reached in trace.of(KnobsReached, version=asked.version):
            for knob, expected in asked.values.items():
                actual = reached.values.get(knob, "absent")
                says, subject = ("the rank's live objects", "the config"), f"{knob} in the run"
                yield compare_value(
                    reached, f"{knob} on rank {reached.rank}", actual, expected, subject=subject, says=says
                )

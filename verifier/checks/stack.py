"""The end of a run by a failure of the stack under test."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from verifier.core.check import At, Comparison, Stage, Trace, check, compare_value
from verifier.core.condition import condition
from verifier.core.manifest import Manifest
from verifier.core.records_run import StackFailure

_CUTS = ("tp", "pp", "ep", "etp", "cp", "vpp")
"""Sizes of a mesh that cut the model or its input."""


STACK_FAILED = condition("", lambda run: run.facts.stack_failed)


@check("STK001", needs=(StackFailure,), applies=STACK_FAILED)
def stack_failed(trace: Trace) -> Iterator[Comparison]:
    """No process of the run died inside the stack under test.

    What it checks: exceptions whose innermost frame, torch and the standard library apart, lies in Megatron,
    megatron-bridge, Transformer Engine, vLLM or transformers, in the stage that was under way. Only a run that ended
    by one has a subject for this check. Frames of the CPU tier's stand-ins count as their caller's where torch refused
    what they were given; the finding says so.
    Why it matters: a model that the stack refuses on a mesh is what a gate is asked about, and no error of the gate.
    Evidence: load/stack-failure of the controller.
    Tolerance and its source: exact.
    What it does not catch: signals, deadlines, memory that runs out, and errors of this package, which end a command
    with exit code 3; a process that dies without an exception.
    References: Megatron-Bridge OLMoE, whose norm of queries is not divided over tensor-parallel ranks.
    """
    for item in trace.of(StackFailure):
        stage, hint = Stage[item.at.upper()] if item.at else Stage.LOAD, "; ".join(_hints(item, trace.manifest))
        at, sentence, same = At(stage, item.during, item.owner), item.sentence, not item.message
        yield compare_value(at, item.where, item.message, "no failure", same=same, sentence=sentence, hint=hint)


def _hints(item: StackFailure, run: Manifest) -> Iterator[str]:
    """Clauses on what can be tried, and what it would tell."""
    if item.missing:
        yield f"no mesh changes it: install what provides `{item.missing}`"
        return
    if item.message.startswith("ImportError"):
        yield "no mesh changes it: install the package that it names"
        return
    if item.stand_in:
        yield f"it came out of a stand-in of the CPU tier ({item.stand_in}), so a GPU tells whether it needs one"
    if item.name.startswith("trainer rank"):
        sizes = {} if run.mesh is None else msgspec.structs.asdict(run.mesh)
        cut = [f"--{name} 1" for name in _CUTS if (sizes.get(name) or 1) > 1]
        if cut:
            yield f"try {', '.join(cut)}{' each' if len(cut) > 1 else ''}: that tells whether it belongs to the mesh"
        elif run.world_size == 1:
            yield "the trainer had one rank, so no cut of the model brought it about"
    elif "engine" in item.name and run.engine_ranks > 1:
        yield "try --engine-tp 1: that tells whether it belongs to the engine's tensor parallelism"
    elif "engine" in item.name and run.engine == "vllm":
        yield "no mesh of the trainer changes it; try --engine hf to have the rest judged"

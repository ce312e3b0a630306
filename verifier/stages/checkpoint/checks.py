"""Checkpoints of a run: what their files have, and what its ranks hold after a resume."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from verifier.core import ragged
from verifier.core.check import Comparison, Stage, Trace, check, compare_value
from verifier.core.condition import ALWAYS, NEEDS, condition, knob, on, recorded
from verifier.stages.checkpoint.records import LoadedElements, LoadedState, SavedState, WrittenTensors
from verifier.stages.checks_conditions import RESUMED, STORED, UPDATED
from verifier.stages.checks_content import compare_contents

ASLEEP = condition("the engine does not sleep", lambda run: knob(run, "engine.sleep_level"))


@check(
    "CKP001", needs=(SavedState | LoadedElements, LoadedState | LoadedElements),
    applies=on(step=RESUMED | (UPDATED & ASLEEP), load=ALWAYS, loop=recorded(SavedState, LoadedState)),
)  # fmt: skip
def loaded_state_differs_from_saved(trace: Trace) -> Iterator[Comparison]:
    """After a resume every rank holds what it held when the checkpoint was saved.

    What it checks: per rank, digests of weights, fp32 masters, Adam's moments and steps, the scheduler's count, and all
    random states, taken after the load, against those taken at the save; names both ways. Where trainer and engine take
    turns on a GPU, the same before and after each stay on the host. On another mesh, in place of digests, 32 elements
    of each tensor of the checkpoint: weights, masters, moments, a reference; and the counts of optimizer and scheduler.
    Why it matters: a resume that leaves moments out, builds masters from rounded weights, or begins a schedule anew
    trains on without an error.
    Evidence: checkpoint/saved, checkpoint/loaded; on another mesh checkpoint/elements.
    Tolerance and its source: bitwise; a load is a copy.
    Where to look: what the load restores, leaves out or cuts for another mesh, and what overwrites it before the first
    step.
    What it does not catch: state that was wrong before it was saved (TRN001, TRN003); on another mesh all other
    elements, random states, which are those of the seed, and the state of a model without a layout.
    References: NeMo-RL#3171, SkyRL#1403, slime#1152, AReaL#1468.
    """
    held = {(item.role, item.rank, item.version) for kind in (SavedState, LoadedState) for item in trace.of(kind)}
    for role, rank, version in sorted(held):
        loaded, saved = (
            [item for item in trace.of(kind, version=version, rank=rank) if item.role == role]
            for kind in (LoadedState, SavedState)
        )
        says = "what was loaded", "what was saved"
        yield from compare_contents(loaded, saved, says, Stage.CHECKPOINT, version)
    yield from _on_another_mesh(trace)


def _on_another_mesh(trace: Trace) -> Iterator[Comparison]:
    """Compare elements of what ranks of another mesh loaded with the same elements of what was saved."""
    found: dict[tuple[str, int], set[tuple[str, int]]] = defaultdict(set)
    for item in trace.of(LoadedElements):
        columns = [ragged.split(trace.array(item, name), item.counts) for name in ("index", "saved", "loaded")]
        for tensor, index, saved, loaded in zip(item.tensors, *columns, strict=True):
            found[item.name, item.version] |= {(tensor, place) for place in index[saved >= 0].tolist()}
            bad = np.flatnonzero(saved != loaded)
            at = int(bad[0]) if len(bad) else 0
            expected, actual = (_shown(item.name, int(values[at])) for values in (saved, loaded))
            what = f"{item.name}/{tensor} on rank {item.rank}"
            subject = f"element {int(index[at]):,} of {item.name} of `{tensor}`"
            says = f"after the load; {len(bad):,} of {len(index):,} elements differ", "when it was saved"
            badness, same = len(bad) / len(index), not len(bad)
            yield compare_value(item, what, actual, expected, same=same, subject=subject, says=says, badness=badness)
    for item in trace.of(LoadedElements):
        held = len(found[item.name, item.version])
        what = f"elements of {item.name}, rank {item.rank}"
        subject = f"the number of elements of {item.name} that ranks hold"
        yield compare_value(item, what, held, item.saved_elements, subject=subject, says=("", "what was saved"))


def _shown(part: str, bits: int) -> str:
    if bits < 0:
        return "nothing"
    return f"{bits:,}" if part == "count" else f"{np.uint32(bits).view(np.float32):.6g}"


@check("CKP004", needs=(WrittenTensors,), applies=on(step=STORED, export=STORED, loop=NEEDS))
def written_tensor_differs(trace: Trace) -> Iterator[Comparison]:
    """The files of a checkpoint hold what the ranks gave to be written, and what the last update left.

    What it checks: after each checkpoint, per rank, up to 64 elements of up to four of its tensors of each kind
    (weights, masters, either moment), others in each, read from the files, against copies of the same elements that
    were taken when the save began; and that each tensor is there. Of up to eight tensors that the rank's optimizer
    steps, up to 64 elements of weights, masters and moments against what the last update left of them.
    Why it matters: a writer that works beside the training may write what it was given first, again and again, or what
    the next step has made of it. Saves and loads report success, and whoever resumes from it weeks later loses the
    steps between.
    Evidence: checkpoint/written.
    Tolerance and its source: bitwise; a save is a copy.
    Where to look: what is put in the place of weights when a save begins, and when the writer reads the memory that it
    was given.
    What it does not catch: frozen tensors and buffers that were wrong before they were given; random states and counts
    (CKP001); tensors of more than 16,777,216 elements, those that are cut before they are written, such as merged
    gates, and those whose turn has not come; files that are damaged later; checkpoints of Megatron-FSDP.
    References: NeMo-RL#3312, NeMo-RL#4183, pytorch#144657, nvidia-resiliency-ext#376, NeMo-RL#949, Megatron-LM#5077.
    """
    for item in trace.of(WrittenTensors):
        given = ragged.split(trace.array(item, "given"), item.counts)
        written = ragged.split(trace.array(item, "written"), item.found)
        for name, right, found in zip(item.tensors, given, written, strict=True):
            there = len(found) == len(right)
            bad = int((found != right).sum()) if there else len(right)
            badness = bad / max(len(right), 1)
            sentence = f"the checkpoint of step {item.version} has another `{name}` than {item.name} held"
            if not there:
                sentence = f"the checkpoint of step {item.version} has no `{name}`, which {item.name} gave"
            left = f"{bad:,} of {len(right):,} elements differ" if there else "absent"
            what, sides = f"{name} of {item.name}", (left, f"what {item.name} held when the save began")
            yield compare_value(item, what, *sides, same=not bad, sentence=sentence, badness=badness)

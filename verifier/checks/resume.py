"""Checkpoints of a run: what their files have, and what its ranks hold after a resume and were trained on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from verifier.checks.conditions import RESUMED, STORED, UPDATED
from verifier.checks.content import compare_contents, owner_of
from verifier.core import ragged
from verifier.core.check import check
from verifier.core.comparison import Comparison
from verifier.core.condition import ALWAYS, condition, knob, on
from verifier.core.records_run import WrittenState
from verifier.core.records_trainer import (
    CheckpointNumber,
    LoadedElements,
    LoadedState,
    SavedState,
    TrainedUntil,
    WrittenTensors,
)
from verifier.core.stage import Stage
from verifier.core.trace import Trace

ASLEEP = condition("the engine does not sleep", lambda run: knob(run, "engine.sleep_level"))


@check("CKP001", needs=(SavedState, LoadedState), applies=on(step=RESUMED | (UPDATED & ASLEEP), load=ALWAYS))
def loaded_state_differs_from_saved(trace: Trace) -> Iterator[Comparison]:
    """After a resume every rank holds what it held when the checkpoint was saved, and the data go on where they were.

    What it checks: per rank, digests of weights, fp32 masters, Adam's moments and steps, the scheduler's count, and all
    random states, taken after the load, against those taken at the save; names both ways. The controller's position in
    the data, and the digest of all examples to train on, in order, too. Where trainer and engine take turns on a GPU,
    the same before and after each stay on the host. On another mesh, in place of digests, 32 elements of each tensor of
    the checkpoint: weights, masters, moments, a reference; and the counts of optimizer and scheduler.
    Why it matters: a resume that leaves moments out, builds masters from rounded weights, or begins a schedule anew
    trains on without an error, and no curve shows why it is worse.
    Evidence: checkpoint/saved, checkpoint/loaded; on another mesh checkpoint/elements.
    Tolerance and its source: bitwise; a load is a copy.
    What it does not catch: state that was wrong before it was saved (TRN001, TRN003); on another mesh all other
    elements, random states, which are those of the seed, and the state of a model without a layout; a number that is
    another step's (CKP002).
    References: NeMo-RL#3171, SkyRL#1403, open-r1#450, slime#1152, VeOmni#330, AReaL#1468.
    """
    held = {(item.role, item.rank, item.version) for kind in (SavedState, LoadedState) for item in trace.of(kind)}
    for role, rank, version in sorted(held):
        loaded, saved = (
            [item for item in trace.of(kind, version=version, rank=rank) if item.role == role]
            for kind in (LoadedState, SavedState)
        )
        yield from compare_contents(
            loaded, saved, stage=Stage.CHECKPOINT, version=version, actual_says="what was loaded",
            expected_says="what was saved", allowed="bitwise (a load is a copy)",
            hint="look at what the load restores, and at what overwrites it before the first step",
        )  # fmt: skip
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
            yield Comparison(
                what=f"{item.name}/{tensor} on rank {item.rank}", same=not len(bad), stage=Stage.CHECKPOINT,
                version=item.version, badness=len(bad) / len(index), owner=owner_of(item),
                sentence=f"{item.name} of `{tensor}` is {actual} at element {int(index[at]):,} after the load, "
                f"{expected} was saved",
                expected=f"{expected} (any rank of the mesh that saved it)",
                actual=f"{actual} ({len(bad):,} of {len(index):,} elements differ)",
                allowed="bitwise (a load is a copy)",
                hint="look at how the load cuts tensors for another mesh, and at what it leaves out",
            )  # fmt: skip
    for item in trace.of(LoadedElements):
        held = len(found[item.name, item.version])
        yield Comparison(
            what=f"elements of {item.name}, rank {item.rank}", same=held == item.saved_elements,
            stage=Stage.CHECKPOINT, version=item.version, badness=1.0, owner=owner_of(item),
            sentence=f"ranks hold {held:,} of the {item.saved_elements:,} elements of {item.name} that were saved",
            expected=f"{item.saved_elements:,} (all ranks of the mesh that saved them)", actual=f"{held:,}",
            allowed="exact (counts)", hint="look at what the load leaves out",
        )  # fmt: skip


def _shown(part: str, bits: int) -> str:
    if bits < 0:
        return "nothing"
    return f"{bits:,}" if part == "count" else f"{np.uint32(bits).view(np.float32):.6g}"


@check("CKP002", needs=(CheckpointNumber, TrainedUntil), applies=on(step=RESUMED, load=ALWAYS))
def checkpoint_of_another_step(trace: Trace) -> Iterator[Comparison]:
    """After a resume the data go on behind the last step that the saved state was trained on.

    What it checks: the last step in which each rank had taken an update when it saved, by its own count, against the
    number of the checkpoint, which it may not exceed; and the steps that its optimizer counted then, against the
    checkpoint's count of updates.
    Why it matters: a checkpoint that is saved before the loop counts its step carries the number of the step before. A
    resume trains a batch again on weights that it trained already, and all states are what was saved.
    Evidence: checkpoint/number, checkpoint/trained.
    Tolerance and its source: exact; these are counts. Steps whose rollouts were all dropped train nothing, so a number
    may be greater.
    What it does not catch: a number that is too great, so that a batch is left out.
    References: Megatron-Bridge#3267, pytorch-lightning#19815.
    """
    for number in trace.of(CheckpointNumber):
        for item in trace.of(TrainedUntil, version=number.version):
            counts = (
                ("step", item.step, number.step, item.step <= number.step, "at most "),
                ("optimizer steps", item.optimizer_steps, number.optimizer_steps,
                 item.optimizer_steps == number.optimizer_steps, ""),
            )  # fmt: skip
            for what, actual, expected, same, bound in counts:
                yield Comparison(
                    what=f"{what} on rank {item.rank}", same=same, stage=Stage.CHECKPOINT, version=number.version,
                    badness=1.0, owner=owner_of(item),
                    sentence=f"the checkpoint says {what} {expected:,}, rank {item.rank} had trained until {actual:,}",
                    expected=f"{bound}{expected:,} (the number of the checkpoint)",
                    actual=f"{actual:,} (the rank, when it saved)", allowed="exact (counts)",
                    hint="look at whether the loop saves before or after it counts the step",
                )  # fmt: skip


@check("CKP004", needs=(WrittenTensors, WrittenState), applies=on(step=STORED, export=STORED))
def written_tensor_differs(trace: Trace) -> Iterator[Comparison]:
    """The files of a checkpoint hold what the ranks gave to be written, and what the last update left.

    What it checks: after each checkpoint, per rank, up to 64 elements of up to four of its tensors of each kind
    (weights, masters, either moment), others in each, read from the files, against copies of the same elements that
    were taken when the save began; and that each tensor is there. Of up to eight tensors that the rank's optimizer
    steps, up to 64 elements of weights, masters and moments against what the last update left of them. And of the
    controller's part, that its step, its version and its position in the data are of the checkpoint's own step, and
    that the batch in it, which was sampled ahead, is the one that the next step takes.
    Why it matters: a writer that works beside the training may write what it was given first, again and again, or what
    the next step has made of it. Saves and loads report success, and the run goes on as it should. Whoever resumes
    from it weeks later loses the steps between. A position that stays where a resume began is of no run before the
    second resume.
    Evidence: checkpoint/written, checkpoint/state.
    Tolerance and its source: bitwise; a save is a copy.
    What it does not catch: frozen tensors and buffers that were wrong before they were given; random states and counts
    (CKP001); tensors of more than 16,777,216 elements, those that are cut before they are written, such as merged
    gates, and those whose turn has not come; files that are damaged later; checkpoints of Megatron-FSDP.
    References: NeMo-RL#3312, NeMo-RL#4183, pytorch#144657, nvidia-resiliency-ext#376, NeMo-RL#949, Megatron-LM#5077,
    prime-rl#3332.
    """
    yield from _states(trace)
    for item in trace.of(WrittenTensors):
        given = ragged.split(trace.array(item, "given"), item.counts)
        for name, right, found in zip(
            item.tensors, given, ragged.split(trace.array(item, "written"), item.found), strict=True
        ):
            there = len(found) == len(right)
            bad = int((found != right).sum()) if there else len(right)
            yield Comparison(
                what=f"{name} of {item.name}", same=not bad, stage=Stage.CHECKPOINT, version=item.version,
                badness=bad / max(len(right), 1),
                sentence=f"the checkpoint of step {item.version} has another `{name}` than {item.name} held"
                if there else f"the checkpoint of step {item.version} has no `{name}`, which {item.name} gave",
                expected=f"what {item.name} held when the save began",
                actual=f"{bad:,} of {len(right):,} elements differ" if there else "absent",
                mismatched=f"elements: {bad:,} of {len(right):,}", allowed="bitwise (a save is a copy)",
                hint="look at what is gathered or put in the place of weights when a save begins, and at when the "
                "writer reads the memory that it was given",
            )  # fmt: skip


def _states(trace: Trace) -> Iterator[Comparison]:
    """The controller's part of each checkpoint, against its step and against the batch that came after it."""
    for item in trace.of(WrittenState):
        pairs: list[tuple[str, int | str, int | str]] = [
            *((name, number, item.version) for name, number in item.numbers.items()),
            ("batch sampled ahead", item.rollouts, item.after),
        ]
        for name, actual, expected in pairs:
            yield Comparison(
                what=f"{name} of {item.name}", same=actual == expected, stage=Stage.CHECKPOINT, version=item.version,
                badness=1.0,
                sentence=f"the checkpoint of step {item.version} has {name} {actual} in {item.name}, it should be "
                f"{expected}",
                expected=f"{expected} (what came after the step)", actual=f"{actual} (the file)",
                allowed="exact (counts and digests)",
                hint="look at what the controller gives the checkpoint, and at what it keeps of an earlier one",
            )  # fmt: skip

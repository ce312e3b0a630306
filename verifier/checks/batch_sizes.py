"""Sizes of a training step: its examples, the answers to each prompt, and its updates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from verifier.core import ragged
from verifier.core.check import check
from verifier.core.comparison import Comparison
from verifier.core.records_policy import Advantages, PolicyColumns
from verifier.core.records_trainer import DataOrder, LossColumns, StepAccount, StepSizes, TrainerStep
from verifier.core.stage import Stage
from verifier.core.trace import Trace


@check("DAT007", needs=(StepSizes,), scope="sizes")
def step_of_another_size(trace: Trace) -> Iterator[Comparison]:
    """A step has as many examples, answers and updates as its config asks for.

    What it checks: the number of examples of the first round of sampling; the number of prompts of a live batch, and of
    the answers to each, where the turns of a trajectory are one answer; the rollouts that came into the step. And the
    updates: as many as mini-batches with a token in the loss, times the passes, with consecutive numbers, each of the
    rollouts of its mini-batch, and each taken by the optimizer.
    Why it matters: a data loader that drops the tail of a batch, an answer that an engine lost, or mini-batches that
    are read and not made change the size of a step and the number of updates. All other counts are then those of what
    was left, and agree.
    Evidence: data/sizes (as the config asks), data/order, data/account, advantage/advantages, advantage/policy,
    advantage/columns, train/done.
    Tolerance and its source: exact; these are counts and ids.
    What it does not catch: further rounds of sampling (DAT005), and how many groups a file of recorded rollouts has.
    References: trl#998, tt-blacksmith#731, labs-molt#109, SkyRL#1529.
    """
    for sizes in trace.of(StepSizes):
        for order in trace.of(DataOrder, version=sizes.version):
            if not order.round:
                yield _count(sizes, "examples", len(order.examples), sizes.batch_size)
        given = next(trace.of(Advantages, version=sizes.version), None)
        if given is not None:
            yield from _groups(sizes, given)
        for account in trace.of(StepAccount, version=sizes.version):
            expected = sizes.batch_size if given is None else len(given.ids)
            yield _count(sizes, "rollouts", account.rollouts, expected)
        yield from _updates(trace, sizes)


def _groups(sizes: StepSizes, given: Advantages) -> Iterator[Comparison]:
    answers: dict[str, set[str]] = defaultdict(set)
    for group, trajectory in zip(given.groups, given.trajectories, strict=True):
        answers[group].add(trajectory)
    if sizes.live:
        yield _count(sizes, "prompts with an answer", len(answers), sizes.batch_size)
    for group, own in answers.items():
        yield _count(sizes, f"answers to prompt `{group}`", len(own), sizes.group_size)


def _updates(trace: Trace, sizes: StepSizes) -> Iterator[Comparison]:
    made = {_number(item.name): item for item in trace.of(LossColumns, version=sizes.version)}
    policy = next(trace.of(PolicyColumns, version=sizes.version), None)
    if policy is None and sizes.group_size:
        return
    parts = [None] if policy is None else _mini_batches(trace, policy, sizes.mini_batches)
    expected = [*parts] * sizes.epochs
    yield _count(sizes, "updates", len(made), len(expected))
    for (number, columns), after, own in zip(
        sorted(made.items()), range(min(made, default=0), min(made, default=0) + len(made)), expected, strict=False
    ):
        wrong = "" if number == after else f"has this number where {after} should follow"
        if own is not None and columns.ids != own:
            wrong = f"has {len(columns.ids)} rollouts, and not the {len(own)} of its mini-batch"
        yield Comparison(
            what=columns.name, same=not wrong, stage=Stage.DATA, version=sizes.version, badness=1.0,
            sentence=f"{columns.name} {wrong}",
            expected=f"number {after}" + ("" if own is None else f", {len(own)} rollouts from `{own[0]}` on"),
            actual=f"number {number}, {len(columns.ids)} rollouts from `{columns.ids[0]}` on", allowed="exact (ids)",
            hint="look at what cuts the rollouts of a step into mini-batches",
        )  # fmt: skip
    taken = {_number(item.name) for item in trace.of(TrainerStep, version=sizes.version)}
    if taken:
        yield Comparison(
            what="updates taken", same=taken == {*made}, stage=Stage.TRAIN, version=sizes.version, badness=1.0,
            sentence=f"the optimizer took the updates {sorted(taken)}, the step has {sorted(made)}",
            expected=f"{sorted(made)} (updates that were made)", actual=f"{sorted(taken)} (reports of ranks)",
            allowed="exact (numbers)", hint="look at the loop over the updates of a step",
        )  # fmt: skip


def _mini_batches(trace: Trace, policy: PolicyColumns, count: int) -> list[tuple[str, ...]]:
    """Ids of each mini-batch that has a token in the loss: consecutive parts, the first ones longer by one."""
    masks = ragged.split(trace.array(policy, "mask").astype(bool), policy.lengths)
    least, longer = divmod(len(policy.ids), count)
    parts, begin = [], 0
    for number in range(count):
        end = begin + least + (number < longer)
        if any(mask.any() for mask in masks[begin:end]):
            parts.append(policy.ids[begin:end])
        begin = end
    return parts


def _number(name: str) -> int:
    return int(name.rpartition(" ")[2])


def _count(sizes: StepSizes, what: str, actual: int, expected: int) -> Comparison:
    return Comparison(
        what=what, same=actual == expected, stage=Stage.DATA, version=sizes.version, badness=1.0,
        sentence=f"the step has {actual:,} {what}, it should have {expected:,}",
        expected=f"{expected:,} ({_asked(sizes)})", actual=f"{actual:,}", allowed="exact (counts)",
        hint="look at what cuts the batch, and at what loses answers of the engine",
    )  # fmt: skip


def _asked(sizes: StepSizes) -> str:
    texts: Sequence[str] = [f"batch size {sizes.batch_size}"]
    if sizes.group_size:
        texts = [*texts, f"{sizes.group_size} answers", f"{sizes.mini_batches} x {sizes.epochs} updates"]
    return ", ".join(texts)

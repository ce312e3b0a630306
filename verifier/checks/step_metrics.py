"""Numbers that a training step shows, against what its evidence says."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping

import numpy as np

from verifier.checks.content import times
from verifier.checks.loss_rows import LIMIT, UpdateRows, kl_estimates, updates_of
from verifier.checks.metric_history import all_steps_once
from verifier.checks.policy_step import FLOOR
from verifier.checks.shown_rates import rates_and_times
from verifier.core import ragged
from verifier.core.check import check
from verifier.core.comparison import Comparison, Tolerance
from verifier.core.record import Real
from verifier.core.records_policy import (
    Advantages,
    Drops,
    EpisodeTurns,
    LossTerms,
    PolicyColumns,
    SamplingRound,
    StepMetrics,
    WrittenMetrics,
)
from verifier.core.records_trainer import LossColumns, TrainerStep
from verifier.core.stage import Stage
from verifier.core.trace import Trace

SUM = Tolerance(absolute=1e-9, unit="of the number", source="float64: the same numbers in another order")
ENTROPY = Tolerance(
    absolute=1e-5,
    unit="of the number",
    source="fp32: the tokens of a micro-batch are summed before batches are, in float64",
)
ESTIMATE = Tolerance(
    absolute=2e-5, unit="of the mean magnitude of a token's estimate, and 1e-6 nats",
    source="fp32: the exponential of a difference of numbers of up to 20, each 1e-6 off",
)  # fmt: skip
EDGE = 2e-5
"""Distance of a ratio from a clip's edge at which float32 may take either side."""
EXACT = "exact (a count)"
POSITIONS = 8
"""Equal parts of the longest allowed answer."""
OF_ANSWERS = (
    "reward", "answer_tokens", "mixed_groups", "truncated_share", "staleness", "dropped_stale", "turns",
    "sampling_rounds", "replaced_groups", "sampled_tokens", "scored_tokens", "mismatch_max", "mismatch_p99",
    "mismatch_k3", *(f"mismatch_by_position_{part + 1}" for part in range(POSITIONS)),
)  # fmt: skip
"""Numbers of answers, which are there before any update."""
OPTIONAL = ("staleness", "dropped_stale")
"""Numbers that a run without stale answers does not show."""
CLIPPING = ("clipped", "gspo", "cispo")
"""Losses that clip ratios."""
Number = tuple[float, float, str]
"""A number, what it may differ by, and that in words."""


@check("MET001", needs=(StepMetrics, LossTerms), scope="shown")
def metrics_misreported(trace: Trace) -> Iterator[Comparison]:
    """The numbers that a step shows are those of all its answers and tokens.

    What it checks: mean reward, mean length, share of groups with several rewards and share of answers that were cut
    off, over all answers of the step; mean age of sampled tokens and answers older than the bound; mean turns of an
    episode; rounds of sampling and groups that were replaced; tokens that were sampled and scored; tokens that were
    trained on and that are in the loss, summed over the updates of the step; mean entropy and KL estimate by token, and
    shares of tokens whose ratio is clipped or clamped, over all ranks, as a mean over the updates; the greatest
    distance of a ratio from 1; loss, gradient norm and rate as a mean of what the first rank reports of its updates.
    Mismatch of trainer and engine: greatest, 99th percentile and k3, over all sampled tokens of the trained version,
    and its mean in each eighth of the longest answer that the config allows.
    And that each of these numbers is shown.
    Why it matters: runs are steered, stopped and compared by these numbers. A reward of the answers that stay in the
    loss rises by filtering alone; a share of one rank, or of one side of the clip, hides a policy that runs away.
    Evidence: loss/metrics, advantage/advantages, data/drops, data/turns, reward/round, loss/rows, loss/terms,
    advantage/columns, advantage/policy, train/done.
    Tolerance and its source: counts are exact; 1e-9 of sums, 1e-5 of the entropy's, which are in fp32; KL estimates as
    the loss (LSS004); shares may count tokens within 2e-5 of a clip's edge or not; ratios 2e-5.
    What it does not catch: numbers of time and memory; what is written of them (MET002); numbers of an evaluation
    (MET003).
    References: trl#3032, stable-baselines3#149, ms-swift#5619, ms-swift#8247, NeMo-RL#1426, transformers#35942,
    AReaL#1736, labs-molt#64, sglang#22497, prime-rl#2478, miles#2476, verl#7821, SkyRL#1870.
    """
    for terms in trace.of(LossTerms):
        for item in trace.of(StepMetrics, version=terms.version):
            found = {
                **_of_answers(trace, item.version), **_of_sampling(trace, item.version), **_of_tokens(trace, terms),
                **_of_updates(trace, terms), **_of_reports(trace, item.version),
            }  # fmt: skip
            for name, (right, allowed, why) in found.items():
                if name not in item.values and name in OPTIONAL:
                    continue
                shown = float(item.values.get(name, "nan"))
                alike = shown == right or (math.isnan(shown) and math.isnan(right))
                gap = 0.0 if alike else abs(shown - right)
                of_answers = name in OF_ANSWERS
                yield Comparison(
                    what=name, same=gap <= allowed, stage=Stage.REWARD if of_answers else Stage.LOSS,
                    version=item.version, share=times(gap, allowed),
                    sentence=f"the step shows {name} {shown:.6g}, it is {right:.6g}",
                    expected=f"{right:.6g} (from rewards, flags, versions and rows of the loss)", actual=f"{shown:.6g}",
                    allowed=f"{allowed:.3g}, {why}",
                    hint="look at what the number is summed over and divided by: dropped answers, ranks, updates",
                )  # fmt: skip


@check("MET002", needs=(WrittenMetrics,), scope="written")
def metrics_written_otherwise(trace: Trace) -> Iterator[Comparison]:
    """The line of metrics that a step leaves in the file is under its own number, and has the numbers of its trace.

    What it checks: the last line of `metrics.jsonl`, read back from the file before the next step begins and at the end
    of the run: its step, and each number that the trace of that step has, against that trace. The last event of
    TensorBoard, read back too, against the line: step and all numbers. Each rate of the line, against the quotient of
    its numbers, and each time, against the sum of its parts. And that the line has the numbers of an evaluation just if
    one was due: after its step, or before the first one. And that no step comes after one whose accuracy is
    `evaluation.stop_above` or more. And of the whole file that it has the lines that were there up to the checkpoint,
    and one line of each step since; that TensorBoard has a point of each, and forgets those of steps taken again.
    Why it matters: curves of two runs are compared step by step. Numbers under another step, or those of a step before,
    move a curve and no number in it is wrong. An evaluation that is passed over leaves a gap where nobody looks. After
    a resume a file that is opened anew has lost the run's beginning, and a curve may show a step twice.
    Evidence: loss/written, and the manifest's config.
    Tolerance and its source: bitwise; the file has every digit of a float64, and an event those of a float32. Times are
    differences of a clock's readings: 1e-6 s.
    What it does not catch: numbers that are wrong in the trace too (MET001); wandb; the other numbers of a line (trend
    of the mismatch, memory, a stage's own seconds); of a run that goes on from a checkpoint the numbers of the step
    before it, evaluations included. A line of another step is the resume's there, and is named checkpoint. An
    evaluation at the end alone (MET004).
    References: prime-rl#1516, prime-rl#1513, prime-rl#835, NeMo-Speech#4541, open-instruct#1032, rf-detr#1321,
    PaddleFormers#4744, main_loop_tf#22.
    """
    for item in trace.of(WrittenMetrics):
        stage = Stage.LOSS if item.recorded else Stage.CHECKPOINT
        pairs: list[tuple[str, Real | str, Real]] = [("step", item.step, item.version)]
        pairs += [(name, item.values.get(name, "absent"), right) for name, right in item.recorded.items()]
        for name, shown, right in pairs:
            yield Comparison(
                what=name, same=shown == right, stage=stage, version=item.version, badness=1.0,
                sentence=f"the line of step {item.version} in metrics.jsonl has {name} {shown}, it should be {right}",
                expected=f"{right} (the trace of the step)", actual=f"{shown} (the file)",
                allowed="bitwise (numbers are copied)", hint="look at which step the writer takes its numbers from",
            )  # fmt: skip
        yield from _curves(item)
        yield from all_steps_once(item)
        yield from rates_and_times(item)
        yield from _evaluated(trace, item)
        yield from _stopped(trace, item)


def _curves(item: WrittenMetrics) -> Iterator[Comparison]:
    """The last event of TensorBoard against the line, of a step whose trace this process has written."""
    if item.event is None or not item.recorded:
        return
    pairs: list[tuple[str, Real | str, float]] = [("step", item.event_step, float(item.version))]
    with np.errstate(over="ignore"):
        pairs += [
            (name, item.event.get(name, "absent"), float(np.float32(right))) for name, right in item.values.items()
        ]
    for name, shown, right in pairs:
        if math.isnan(right) and shown in ("absent", "nan"):  # a part without tokens has no point
            continue
        same = shown != "absent" and float(shown) == right
        yield Comparison(
            what=f"{name} of TensorBoard", same=same, stage=Stage.LOSS, version=item.version, badness=1.0,
            sentence=f"TensorBoard shows {name} {shown} after step {item.version}, it should be {right:g}",
            expected=f"{right:.9g} (metrics.jsonl)", actual=f"{shown} (the file of events)",
            allowed="bitwise (numbers are copied, in float32)",
            hint="look at which step the writer of events counts, and which numbers it is given",
        )  # fmt: skip


def _evaluated(trace: Trace, item: WrittenMetrics) -> Iterator[Comparison]:
    """The evaluation that the line of a step is to have, of a step whose trace this process has written."""
    config = trace.manifest.config
    evaluation, data = config.get("evaluation"), config.get("data")
    if not item.recorded or not isinstance(evaluation, Mapping) or not isinstance(data, Mapping):
        return
    every = int(str(evaluation.get("every")))
    problems = 0 if data.get("rollouts") is not None else int(str(evaluation.get("num_problems")))
    at_begin = item.version == 1 and every > 1
    due = problems > 0 and every > 0 and (at_begin or item.version % every == 0)
    shown, right = item.values.get("accuracy", "absent"), "present" if due else "absent"
    yield Comparison(
        what="evaluation", same=(shown != "absent") == due, stage=Stage.LOSS, version=item.version, badness=1.0,
        sentence=f"the line of step {item.version} in metrics.jsonl has accuracy {shown}, which should be {right}",
        expected=f"{right} (evaluation.every={every}, {problems:,} problems)", actual=f"{shown} (the file)",
        allowed="exact", hint="look at which steps the loop evaluates after, the one before the first included",
    )  # fmt: skip


def _stopped(trace: Trace, item: WrittenMetrics) -> Iterator[Comparison]:
    """Right of a step to come after the line of the one before it."""
    evaluation, shown = trace.manifest.config.get("evaluation"), item.values.get("accuracy")
    if shown is None or not isinstance(evaluation, Mapping) or "ended" in trace.manifest.scopes:
        return
    enough = float(str(evaluation.get("stop_above")))
    yield Comparison(
        what="goes on", same=float(shown) < enough, stage=Stage.TRAIN, version=item.version, badness=1.0,
        sentence=f"step {item.version + 1} is taken, and accuracy was {float(shown):g} after step {item.version}",
        expected=f"an end of the run from an accuracy of {enough:g} on (evaluation.stop_above)",
        actual=f"accuracy {float(shown):g} (the file), and another step", allowed="exact",
        hint="look at which number the loop compares with evaluation.stop_above",
    )  # fmt: skip


def _of_answers(trace: Trace, version: int) -> Mapping[str, Number]:
    """Numbers of all answers of a step."""
    found: dict[str, Number] = {}
    for item in trace.of(Advantages, version=version):
        totals, groups = defaultdict[str, float](float), defaultdict[str, set[str]](set)
        for name, group, reward in zip(item.trajectories, item.groups, item.rewards, strict=True):
            totals[name] += reward
            groups[group].add(name)
        mixed = [len({totals[name] for name in names}) > 1 for names in groups.values()]
        found["reward"] = _sum(math.fsum(totals.values()) / len(totals), scale=max(map(abs, totals.values())))
        found["mixed_groups"] = _sum(sum(mixed) / len(mixed))
        for policy in trace.of(PolicyColumns, version=version):
            sampled = int((trace.array(policy, "version") >= 0).sum())
            found["answer_tokens"] = _sum(sampled / len(totals))
        for drops in trace.of(Drops, version=version):
            last = dict(zip(item.trajectories, drops.truncated, strict=True))  # of several turns the last one counts
            found["truncated_share"] = _sum(sum(last.values()) / len(last))
    return found


def _of_sampling(trace: Trace, version: int) -> Mapping[str, Number]:
    """Turns of a step's episodes, and rounds of its sampling; none where there is none."""
    found: dict[str, Number] = {}
    turns, rounds = list(trace.of(EpisodeTurns, version=version)), list(trace.of(SamplingRound, version=version))
    if turns:
        episodes = sum(len(set(item.episodes)) for item in turns)
        found["turns"] = _sum(sum(len(item.episodes) for item in turns) / episodes)
    if rounds:
        found["sampling_rounds"] = _count(len(rounds))
        found["replaced_groups"] = _count(sum(len(set(item.groups)) for item in rounds if item.round))
    return found


def _of_tokens(trace: Trace, terms: LossTerms) -> Mapping[str, Number]:
    """Age of a step's sampled tokens, and tokens that were sampled, scored and trained on."""
    found: dict[str, Number] = {}
    for item in trace.of(PolicyColumns, version=terms.version):
        arrays = trace.arrays(item)
        version = arrays["version"].astype(np.int64)
        ages = np.where(version >= 0, item.trained_version - version, 0)
        oldest = [int(part.max(initial=0)) for part in ragged.split(ages, item.lengths)]
        sampled, passes = int((version >= 0).sum()), 1 + any(name.endswith("reference") for name in arrays)
        found["staleness"] = _sum(int(ages.sum()) / sampled if sampled else math.nan)
        found["dropped_stale"] = _count(sum(age > item.max_staleness for age in oldest))
        found["sampled_tokens"] = _count(sampled)
        found["scored_tokens"] = _count(sum(item.lengths) * passes)
        found |= _of_mismatch(item, arrays, _longest(trace))
    updates = list(trace.of(LossColumns, version=terms.version))
    if updates:
        found["tokens"] = _count(sum(sum(item.lengths) for item in updates))
    return found


def _of_mismatch(item: PolicyColumns, arrays: Mapping[str, np.ndarray], longest: int) -> Mapping[str, Number]:
    """Mismatch of trainer and engine, over the sampled tokens that no weights but those to train had a part in."""
    fresh = arrays["version"] == item.trained_version
    if item.keep_kv_cache:
        parts = ragged.split(arrays["version"], item.lengths)
        first = [part[part >= 0][0] if (part >= 0).any() else -1 for part in parts]
        fresh &= np.repeat(first, item.lengths) == item.trained_version
    nats = (arrays["old"] - arrays["engine"])[fresh].astype(np.float64)
    if not len(nats):
        return {}
    sizes = np.abs(nats)
    scale = float(sizes.max())
    found = {
        "mismatch_max": _sum(scale, scale=scale), "mismatch_p99": _sum(float(np.quantile(sizes, 0.99)), scale=scale),
        "mismatch_k3": _sum(float(np.mean(np.expm1(nats) - nats)), scale=scale),
    }  # fmt: skip
    if longest:
        drawn = ragged.split(arrays["version"] >= 0, item.lengths)
        places = np.concatenate([np.cumsum(own) - 1 for own in drawn])[fresh]
        parts = [sizes[_part(places, longest) == part] for part in range(POSITIONS)]
        for part, own in enumerate(parts, 1):
            mean = math.fsum(own) / len(own) if len(own) else math.nan
            found[f"mismatch_by_position_{part}"] = (mean, SUM.absolute * scale, str(SUM))
    return found


def _part(places: np.ndarray, longest: int) -> np.ndarray:
    """Part of the longest answer in which each sampled token of a rollout lies; later ones are of the last."""
    edges = np.array([-(-longest * part // POSITIONS) for part in range(1, POSITIONS)])
    found: np.ndarray = np.searchsorted(edges, places, side="right")
    return found


def _longest(trace: Trace) -> int:
    """Sampled tokens of a rollout, at most, as the manifest's config has them; 0 where it has none."""
    grpo = trace.manifest.config.get("grpo")
    return int(str(grpo["max_answer_tokens"])) * int(str(grpo["max_turns"])) if isinstance(grpo, Mapping) else 0


def _of_updates(trace: Trace, terms: LossTerms) -> Mapping[str, Number]:
    """Numbers of all updates of a step."""
    updates = [update for update in updates_of(trace) if update.columns.version == terms.version]
    if not updates:
        return {}
    counts = [max(int(update.in_loss.sum()), 1) for update in updates]
    entropy = [
        float(update.rows["entropy"].astype(np.float64).sum()) / n for update, n in zip(updates, counts, strict=True)
    ]
    mean = sum(entropy) / len(updates)
    found = {
        "num_tokens": _count(sum(counts)),
        "entropy": (mean, ENTROPY.absolute * max(mean, 1e-3), str(ENTROPY)),
    }
    if terms.loss == "cross_entropy":
        return found
    estimates = [_estimates(update, terms) for update in updates]
    means = [float(values.sum()) / n for values, n in zip(estimates, counts, strict=True)]
    size = sum(float(np.abs(values).sum()) / n for values, n in zip(estimates, counts, strict=True)) / len(updates)
    found["kl"] = (sum(means) / len(updates), ESTIMATE.absolute * size + 1e-6, str(ESTIMATE))
    gap = max(
        float(np.abs(np.exp(np.clip(update.log_ratios(terms.loss), -LIMIT, LIMIT)) - 1).max(initial=0))
        for update in updates
    )
    found["ratio_gap"] = (gap, EDGE * max(gap, 1.0), "2e-5 of a ratio (fp32)")
    if terms.loss != "gspo":
        beyond = [_clamped(update, terms) for update in updates]
        shares = [int(clamped.sum()) / n for (clamped, _), n in zip(beyond, counts, strict=True)]
        unsure = [int(edge.sum()) / n for (_, edge), n in zip(beyond, counts, strict=True)]
        allowed = sum(unsure) / len(updates) + SUM.absolute
        found["clamped_share"] = (sum(shares) / len(updates), allowed, "tokens at the limit of log-ratios")
    if terms.loss in CLIPPING:
        sides = [_clipped(update, terms) for update in updates]
        shares = [int(clipped.sum()) / n for (clipped, _), n in zip(sides, counts, strict=True)]
        unsure = [int(edge.sum()) / n for (_, edge), n in zip(sides, counts, strict=True)]
        allowed = sum(unsure) / len(updates) + SUM.absolute
        found["clipped_share"] = (sum(shares) / len(updates), allowed, "tokens at a clip's edge")
    return found


def _of_reports(trace: Trace, version: int) -> Mapping[str, Number]:
    """Numbers that the first rank reports of its updates, which other checks judge."""
    reports = list(trace.of(TrainerStep, version=version, rank=0))
    if not reports:
        return {}
    found = {}
    for name in ("loss", "grad_norm", "learning_rate"):
        values = [float(getattr(item, name)) for item in reports]
        mean = sum(values) / len(values)
        found[name] = (mean, SUM.absolute * max(map(abs, values)), str(SUM))
    return found


def _count(value: int) -> Number:
    return float(value), 0.0, EXACT


def _sum(value: float, scale: float = 1.0) -> Number:
    return value, SUM.absolute * max(abs(value), scale), str(SUM)


def _estimates(update: UpdateRows, terms: LossTerms) -> np.ndarray:
    """[T] KL estimate of each token in the loss, float64; 0 without a reference."""
    current = update.rows["current"].astype(np.float64)
    if "reference" not in update.given:
        return np.zeros(len(current))
    return kl_estimates(terms.kl_kind, current - update.given["reference"])


def _clipped(update: UpdateRows, terms: LossTerms) -> tuple[np.ndarray, np.ndarray]:
    """[T] whether the ratio of each token in the loss is clipped, and whether it is too near an edge to tell."""
    difference, advantage = update.log_ratios(terms.loss), update.given["advantage"]
    ratio = np.exp(np.clip(difference, -LIMIT, LIMIT))
    low, high = 1 - terms.clip_low, 1 + terms.clip_high
    bounds = [low, high, *([] if terms.dual_clip is None else [terms.dual_clip])]
    edge = np.any([np.abs(ratio - bound) < EDGE for bound in bounds], axis=0)
    if terms.loss == "cispo":
        return (ratio < low) | (ratio > high), edge
    clipped = ((ratio > high) & (advantage > 0)) | ((ratio < low) & (advantage < 0))
    if terms.dual_clip is not None:
        clipped |= (ratio > terms.dual_clip) & (advantage < 0)
    return clipped, edge


def _clamped(update: UpdateRows, terms: LossTerms) -> tuple[np.ndarray, np.ndarray]:
    """[T] whether a log-probability or a log-ratio of each token is clamped, and whether it is too near to tell."""
    current = update.rows["current"].astype(np.float64)
    others = [update.given["divisor"], *([update.given["reference"]] if "reference" in update.given else [])]
    ratios = others if terms.kl_kind == "k3" else others[:1]
    distances = [np.abs(np.maximum(current, FLOOR) - np.maximum(other, FLOOR)) for other in ratios]
    clamped = np.any([side < FLOOR for side in (current, *others)] + [far > LIMIT for far in distances], axis=0)
    return clamped, np.any([np.abs(far - LIMIT) < EDGE for far in distances], axis=0)

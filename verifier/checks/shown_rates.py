"""Rates and times of a step in its line of metrics, against each other: no evidence has a clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from verifier.core.comparison import Comparison
from verifier.core.record import Real
from verifier.core.records_policy import WrittenMetrics
from verifier.core.stage import Stage

QUOTIENTS = {
    "rollout_tokens_per_s": ("sampled_tokens", "rollout_s"), "score_tokens_per_s": ("scored_tokens", "score_s"),
    "train_tokens_per_s": ("tokens", "train_s"), "transfer_gb_per_s": ("sent_gb", "transfer_s"),
}  # fmt: skip
"""Rate -> what it is of, and its seconds."""
WITHIN = {"time_s": ("prepare_s", "train_s", "sync_s"), "prepare_s": ("rollout_s", "score_s")}
"""Seconds -> parts of them, none of which overlap."""
CLOCK_S = 1e-6
"""Error of a sum of differences of a clock's readings, which are of up to 1e9 s in float64."""


def rates_and_times(item: WrittenMetrics) -> Iterator[Comparison]:
    """Each rate of a line is the quotient of two of its numbers, and no time is shorter than its parts together."""
    values = item.values if item.recorded else {}  # a line of another process may have no rates
    for rate, (amount, seconds) in QUOTIENTS.items():
        if (spent := _number(values, seconds)) and (of := _number(values, amount)) is not None:
            shown = _number(values, rate)
            yield _compared(
                item, rate, shown, of / spent, same=shown == of / spent, allowed="bitwise (one division)",
                expected=f"{of / spent:.6g} ({amount} / {seconds} of the line)",
                hint="look at which steps' tokens the rate adds up, and at whose seconds it divides by",
            )  # fmt: skip
    for whole, parts in WITHIN.items():
        if (spent := _number(values, whole)) is not None:
            total = sum(_number(values, part) or 0.0 for part in parts)
            yield _compared(
                item, whole, spent, total, same=spent >= total - CLOCK_S, allowed=f"{CLOCK_S:g} s less",
                expected=f"at least {total:.6g} s ({' + '.join(parts)} of the line)",
                hint="look at which clock is read, and at where a stage's time begins and ends",
            )  # fmt: skip


def _number(values: Mapping[str, Real], name: str) -> float | None:
    return None if name not in values else float(values[name])


def _compared(
    item: WrittenMetrics, name: str, shown: float | None, right: float, *, same: bool, allowed: str, expected: str,
    hint: str,
) -> Comparison:  # fmt: skip
    found = "absent" if shown is None else f"{shown:.6g}"
    return Comparison(
        what=name, same=same, stage=Stage.LOSS, version=item.version, badness=1.0,
        sentence=f"the line of step {item.version} in metrics.jsonl has {name} {found}, which does not go with "
        f"{right:.6g}",
        expected=expected, actual=f"{found} (the file)", allowed=allowed, hint=hint,
    )  # fmt: skip

"""From the seconds of training steps to ratios, tokens/s and MFU; the same on both tiers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import verifier.checks  # noqa: F401  (fills the registry)
from tests.bench.train_functions import config_of, lengths_of
from tests.dist.clean_case import compared, judge
from verifier.launch.fork_launcher import ForkLauncher
from verifier.model.families import FAMILIES, Content, sizes_of, tensors_of

LEAST_SPEED = 0.95
"""Of the bare loop's, as the median over turns."""
GREATEST_COST = 0.02
"""Of a step: recording it and judging what was recorded, as the median over turns."""
SAME_WORK = 2e-3
"""Greatest relative gap of loss and gradient norm: the same sums in another order, in bf16 rounded elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one run of `measure` says."""

    speed: float
    """Of our step, as a share of the bare loop's."""
    recording: float
    """Of a step's time: what steps with a recorder take longer."""
    own: float
    """Of a step's time: what recording itself takes, the sharper of the two where steps vary by more than that."""
    judging: float
    """Of a step's time."""
    step_s: float
    bare_s: float
    num_tokens: int
    flops: float
    """Of one step."""
    num_compared: int
    """By the checks, per step."""
    gap: float
    """Greatest relative gap of our step's loss and gradient norm to the bare loop's."""
    peak_gib: float

    @property
    def tokens_per_s(self) -> float:
        """Of our step."""
        return self.num_tokens / self.step_s

    def text(self) -> str:
        """One line for the log."""
        return (
            f"step {self.step_s:.3f} s, {self.tokens_per_s:,.0f} tokens/s; bare {self.bare_s:.3f} s, speed "
            f"{self.speed:.3f} of it (at least {LEAST_SPEED}); recording {self.recording:.2%} (itself "
            f"{self.own:.2%}) and judging {self.judging:.2%} of a step (together at most {GREATEST_COST:.0%}), "
            f"{self.num_compared:,} comparisons; loss and norm within {self.gap:.1e} of the bare loop's"
        )


def flops_of(config: Mapping[str, Any], lengths: Sequence[int]) -> float:
    """Floating-point operations of one step that any implementation needs, none for recomputation.

    6 N per token, N the weights of all matrices (a tied embedding once: as the output layer it multiplies, as the
    embedding it looks up), plus 6 * layers * heads * head_dim * length^2 per sequence: two products of length^2 / 2
    (causal) rows and head_dim columns, 2 operations each, three times for forward and backward.
    """
    sizes = sizes_of(config)
    specs = tensors_of(FAMILIES["qwen3"], config)
    num_weights = sum(_product(spec.shape) for spec in specs if spec.content is Content.MATRIX)
    attention = 6 * sizes["layers"] * sizes["q"] * sum(length**2 for length in lengths)
    return 6.0 * num_weights * sum(lengths) + attention


def _product(shape: Sequence[int]) -> int:
    found = 1
    for size in shape:
        found *= size
    return found


def measure(launcher: ForkLauncher, folder: Path, args: Mapping[str, Any]) -> Cost:
    """Run the turns on one rank, judge what was recorded, and put both in relation.

    Args:
        launcher: with Megatron imported.
        folder: for the model and the traces.
        args: of `tests.bench.train_functions:measure`, without its folder.
    """
    found = launcher.run(
        "tests.bench.train_functions:measure", world_size=1, run_dir=folder / "ranks",
        args={**args, "folder": str(folder)}, deadline_s=300.0, collective_deadline_s=120.0,
    )[0]  # fmt: skip
    seconds = found["seconds"]
    judged = []
    for turn in range(args["rounds"] + 1):
        traces = sorted(folder.glob(f"trace-{turn}-*"))
        began = time.perf_counter()
        reports = [judge(trace) for trace in traces]
        judged.append((time.perf_counter() - began) / len(traces))
    turns = list(zip(seconds["bare"], seconds["plain"], seconds["recorded"], judged[1:], strict=True))
    config, lengths = config_of(args["sizes"], args["dtype"]), lengths_of(args["rows"], args["micro_batches"])
    cost = Cost(
        speed=statistics.median(bare / plain for bare, plain, _, _ in turns),
        recording=statistics.median((recorded - plain) / plain for _, plain, recorded, _ in turns),
        own=statistics.median(own / plain for own, plain in zip(seconds["own"], seconds["plain"], strict=True)),
        judging=statistics.median(judging / plain for _, plain, _, judging in turns),
        step_s=statistics.median(seconds["plain"]),
        bare_s=statistics.median(seconds["bare"]),
        num_tokens=sum(lengths),
        flops=flops_of(config, lengths),
        num_compared=sum(compared(reports[-1], code) for code in ("PCK001", "PCK002", "PCK003", "WGT007")),
        gap=max(found["loss_gap"], found["norm_gap"]),
        peak_gib=found["peak_gib"],
    )
    print(cost.text(), flush=True)
    return cost

"""From the seconds of training steps to ratios, tokens/s and MFU; the same on both tiers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import batched
from pathlib import Path
from typing import Any

import verifier.checks  # noqa: F401  (fills the registry)
from tests.bench.train_functions import config_of, lengths_of, spread_of
from tests.dist.clean_case import compared, judge
from verifier.launch.fork_launcher import ForkLauncher
from verifier.model.families import FAMILIES, Content, sizes_of, tensors_of

LEAST_SPEED = 0.95
"""Of the bare loop's, as the median over turns."""
GREATEST_COST = 0.02
"""Of a step: what it takes longer for being recorded while the step before it is judged."""
SAME_WORK = 2e-3
"""Greatest relative gap of loss and gradient norm: the same sums in another order, in bf16 rounded elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one run of `measure` says."""

    speed: float
    """Of our step, as a share of the bare loop's."""
    recording: float
    """Share of a step: how much longer one takes that is recorded while another process judges the one before it.

    The shortest of all recorded steps against the shortest of the plain ones: what else a host does only adds.
    """
    own: float
    """Share of a step in which the rank waits for what records it; median."""
    judging: float
    """Share of a step that the judge takes, in a process of its own; median."""
    spread: float
    """Median gap of a turn's two plain steps, as a share of a step: what a step varies by."""
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
            f"{self.speed:.3f} of it (at least {LEAST_SPEED}); recorded, while the step before is judged, it takes "
            f"{self.recording:.2%} longer (at most {GREATEST_COST:.0%}; plain steps vary by {self.spread:.2%}); "
            f"records take the rank {self.own:.2%} of a step, the judge's process {self.judging:.2%}, "
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
        args={**args, "folder": str(folder), "steady": GREATEST_COST}, deadline_s=300.0, collective_deadline_s=120.0,
    )[0]  # fmt: skip
    seconds = found["seconds"]
    judged = []
    for trace in sorted(folder.glob("trace-*")):
        began = time.perf_counter()
        report = judge(trace)
        judged.append(time.perf_counter() - began)
    bare, plain = ([sum(pair) / 2 for pair in batched(seconds[name], 2)] for name in ("bare", "plain"))
    config, lengths = config_of(args["sizes"], args["dtype"]), lengths_of(args["rows"], args["micro_batches"])
    cost = Cost(
        speed=statistics.median(theirs / ours for theirs, ours in zip(bare, plain, strict=True)),
        recording=min(seconds["recorded"]) / min(seconds["plain"]) - 1,
        own=statistics.median(seconds["own"]) / statistics.median(plain),
        judging=statistics.median(judged) / statistics.median(plain),
        spread=spread_of(seconds["plain"]),
        step_s=statistics.median(plain),
        bare_s=statistics.median(bare),
        num_tokens=sum(lengths),
        flops=flops_of(config, lengths),
        num_compared=sum(compared(report, code) for code in ("PCK001", "PCK002", "PCK003", "WGT010")),
        gap=max(found["loss_gap"], found["norm_gap"]),
        peak_gib=found["peak_gib"],
    )
    print(cost.text(), flush=True)
    return cost

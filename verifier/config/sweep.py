"""Config of `verifier sweep`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from verifier.config.commands import DTYPES, ModelConfig, folder_name, seed_knob, stored_dtype, timeout_knob
from verifier.config.megatron import MegatronOptions
from verifier.knob import group, knob

RUNS = Path("runs")
_WIDE, _WIDE_DTYPE = "wide:", "bfloat16"
"""Prefix of the generated models that have the published dtype, and that dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepConfig(ModelConfig):
    """Config of `verifier sweep`."""

    timeout_s: float = timeout_knob("Deadline of the whole sweep.", 86_400.0)
    dtype: str = knob(
        "Type of the weights; by default the checkpoint's own, bf16 of wide:NAME, or fp32.", "", flag="--dtype",
        choices=DTYPES, derived=True,
    )  # fmt: skip
    ranks: int | None = knob("Ranks of every layout that is tried; by default 1.", None, flag="--ranks", least=1)
    meshes: tuple[str, ...] = knob(
        "Layout to try, such as tp=2,dp=2, in place of all those of --ranks; repeatable.", (), flag="--mesh",
        metavar="AXES",
    )  # fmt: skip
    recompute: str = knob(
        "Recomputation of activations to try: megatron.recompute of the trials.", "both", flag="--recompute",
        choices=("none", "full", "both"),
    )  # fmt: skip
    least_tokens: int = knob(
        "Budget of a micro-batch that the search begins with.", 1024, flag="--least-tokens", least=2, unit="tokens"
    )
    most_tokens: int | None = knob(
        "Greatest budget that is tried; by default 1,048,576, and 8,192 on a CPU without --memory-limit.", None,
        flag="--most-tokens", least=2, unit="tokens",
    )  # fmt: skip
    longest: int | None = knob(
        "Longest made-up rollout; by default 2,048 tokens or the model's limit. The shortest is 1/8.", None,
        flag="--longest", least=2, unit="tokens",
    )  # fmt: skip
    micro_batches: int = knob("Micro-batches of a data-parallel rank and step.", 2, flag="--micro-batches", least=1)
    steps: int = knob("Optimizer steps that are timed, after one that is not.", 3, flag="--steps", least=1)
    memory_limit: float | None = knob(
        "Memory that a rank may take: private on a CPU, the allocator's on a GPU; by default all, 80 in --dry-run.",
        None, flag="--memory-limit", metavar="GIB", unit="GiB", above=0,
    )  # fmt: skip
    seed: int = seed_knob("Seed of weights, lengths and tokens.")
    trial_timeout_s: float = knob(
        "Deadline of one trial, which then counts as failed.", 300.0, flag="--trial-timeout", metavar="SECONDS",
        unit="seconds", above=0, last=True,
    )  # fmt: skip
    run: Path = knob(
        "Folder of the sweep, which the same command continues; by default runs/sweep-MODEL.", Path(), flag="--run",
        metavar="DIR", derived=True, last=True,
    )  # fmt: skip
    megatron: MegatronOptions = group(MegatronOptions)

    def _fill(self) -> None:
        if not self.dtype:
            wide = self.model.startswith(_WIDE)
            object.__setattr__(self, "dtype", _WIDE_DTYPE if wide else stored_dtype(self.model))
        if self.run == Path():
            object.__setattr__(self, "run", RUNS / f"sweep-{folder_name(self.model)}")

    def _contradictions(self) -> dict[str, object]:
        return {
            "--mesh names each layout and --ranks is {=ranks}: leave one of the two out": (
                self.meshes and self.ranks is not None
            ),
            "--most-tokens is {=most_tokens}, below --least-tokens, {=least_tokens}": (
                self.most_tokens is not None and self.most_tokens < self.least_tokens
            ),
            "{megatron.use_fsdp}, and a sweep has no trials of Megatron-FSDP so far: leave it out": (
                self.megatron.use_fsdp
            ),
            "{megatron.recompute}, and a sweep tries what --recompute names: give --recompute in its place": (
                self.megatron.recompute != "none"
            ),
        }

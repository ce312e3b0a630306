"""Checks that can judge a recorded loop, in docs/probe.md: ``python -m tests.meta.probe_table`` draws them anew."""

from __future__ import annotations

from types import UnionType
from typing import get_args

import verifier.checks  # noqa: F401  (fills the registry)
from tests.meta.sources import ROOT
from verifier.core.check import REGISTRY, Check, is_owed
from verifier.core.condition import Parts
from verifier.core.manifest import Manifest
from verifier.core.record import Record, kind_of

PAGE = ROOT / "docs" / "probe.md"
BEGIN, END = "<!-- table: loop -->\n", "<!-- table: end -->"
CALLS = {
    "advantages": ("advantage/advantages", "advantage/policy", "data/drops"),
    "adapter_exported": ("export/adapter", "export/adapter-scaling", "train/adapter", "train/adapter-scaling"),
    "adapter_merged": ("export/merged",),
    "answers": ("data/seeds",),
    "checkpoint_loaded": ("checkpoint/loaded",),
    "checkpoint_saved": ("checkpoint/saved",),
    "checkpoint_written": ("checkpoint/written",),
    "engine_cache": ("engine/kept-keys",),
    "engine_held": ("engine/state", "engine/cold", "engine/settings", "engine/cold-settings"),
    "engine_loaded": ("engine/loaded",),
    "engine_poisoned": ("engine/poison",),
    "engine_restarted": ("engine/restart",),
    "engine_scores": ("rollout/engine",),
    "engine_served": ("engine/served",),
    "engine_views": ("engine/view", "engine/view-expected"),
    "evaluation": ("rollout/evaluated",),
    "examples": ("data/order", "data/texts", "data/tokens-read"),
    "export_saved": (
        "export/config",
        "export/files",
        "export/saved",
        "export/saved-files",
        "export/written",
        "load/config",
        "load/files",
    ),
    "held_out": ("data/evaluated",),
    "loss": ("loss/terms",),
    "micro_batch": ("pack/ledger", "pack/layout", "pack/batch", "logprob/arguments"),
    "model_config": ("load/stated-config",),
    "megatron_config": ("logprob/provider",),
    "optimizer": ("train/adam", "train/done", "train/optimizer", "train/sums", "load/asked", "load/reached"),
    "reference_weights": ("logprob/reference",),
    "rewards": ("reward/rewards",),
    "rollouts": ("pack/rollouts", "data/asked", "rollout/sampled"),
    "routed": ("replay/choice",),
    "routes": ("replay/routes",),
    "scored": ("logprob/rows",),
    "scored_alone": ("logprob/spot",),
    "sending": ("plan/plan", "plan/entry", "export/stream"),
    "step": ("train/step",),
    "token_losses": ("loss/rows", "loss/ratios", "advantage/columns"),
    "trained_text": ("data/trained",),
    "trainer_logprobs": ("logprob/trainer",),
    "turns": ("data/turns",),
    "weights_exported": ("export/tensor", "train/live", "train/update", "load/source"),
    "weights_held": (
        "load/shard",
        "load/expected",
        "train/shard",
        "train/scored",
        "train/idle",
        "train/frozen",
        "export/exported",
    ),
    "weights_received": ("transport/receipt",),
    "weights_sent": ("transport/handover",),
    "judge --oracle": (
        "loss/gradient",
        "logprob/oracle",
        "logprob/sampled-oracle",
        "logprob/places",
        "logprob/ends",
        "logprob/entropy",
        "logprob/noise",
        "logprob/sampled-noise",
    ),
}
"""Call of a recorder -> kinds of records that it makes."""
CALL_OF = {kind: call for call, kinds in CALLS.items() for kind in kinds}
LOOP = Manifest(command="probe")


def judges_loops(item: Check) -> bool:
    """Tell whether a check judges recorded loops."""
    return isinstance(item.applies, Parts) and "loop" in item.applies.conditions


def needs_of(item: Check) -> list[str]:
    """Kinds of records that a check needs of a loop; of a union each."""
    needs = [need for need in item.needs if is_owed(need, LOOP)]
    return [kind_of(kind) for need in needs for kind in _kinds(need)]


def _kinds(need: type[Record] | UnionType) -> tuple[type[Record], ...]:
    return get_args(need) if isinstance(need, UnionType) else (need,)


def table() -> str:
    """The table, and the checks that judge no loop."""
    rows = ["| check | calls |", "| --- | --- |"]
    judging = [item for _, item in sorted(REGISTRY.items()) if judges_loops(item)]
    for item in judging:
        calls = sorted({CALL_OF[kind] for kind in needs_of(item) if kind in CALL_OF})
        rows.append(f"| {item.code} {item.name} | {', '.join(f'`{call}`' for call in calls) or '`sending`'} |")
    others = ", ".join(code for code, item in sorted(REGISTRY.items()) if not judges_loops(item))
    return (
        f"{len(judging)} of {len(REGISTRY)} checks.\n\n"
        + "\n".join(rows)
        + f"\n\nNo subject in a recorded loop: {others}.\n"
    )


def drawn(text: str) -> str:
    """The page with the table of the registry."""
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}{table()}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text()))

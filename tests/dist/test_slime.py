"""slime's rollout manager and Megatron actor, recorded by `verifier.probe`: they hold, planted bugs are caught.

What this does not exercise: GPUs, Transformer Engine, SGLang, Ray, pipeline and expert parallelism, critics, mixtures.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from tests.dist.recorded_loops import Ran, caught, holds, report, run
from verifier.core.finding import Verdict
from verifier.core.stage import Stage
from verifier.model.tiny import write_tiny
from verifier.oracle.oracle import Oracle
from verifier.report import render_text

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("slime") is None, reason="needs slime: docs/probe.md"),
]
ONE = {"steps": 1}
MANY = {"steps": 1, "global-batch-size": 8, "micro-batch-size": 2}
"""Two optimizer steps on one batch."""
STALE = {"steps": 3, "sync_every": 3}
"""Three batches of one version, so that the trainer is away from the engine."""
HOT = {"steps": 1, "rollout-temperature": 1.3}
KL = {**MANY, "use-kl-loss": True, "kl-loss-coef": 0.05}
TOKENS = {"calculate-per-token-loss": True}
TIS = {**STALE, "use-tis": True, "tis-clip": 1.25}
FLOOR = {**TIS, "tis-clip-low": 0.8}
ICEPOP = {
    **STALE, "use-tis": True, "tis-clip-low": 0.8, "tis-clip": 1.25,
    "custom-tis-function-path": "slime.backends.megatron_utils.loss.icepop_function",
}  # fmt: skip
TP2, CP2 = {"tensor-model-parallel-size": 2, "sequence-parallel": True}, {"context-parallel-size": 2}
BASELINE = {"advantage-estimator": "reinforce_plus_plus_baseline", "normalize-advantages": True}
SPLIT = {**MANY, "split": True, "global-batch-size": 4}
DYNAMIC = {"use-dynamic-batch-size": True, "max-tokens-per-gpu": 40, "balance-data": True}
RIGHT: dict[str, tuple[int, dict[str, Any]]] = {name: (1, case) for name, case in {
    "defaults": {}, "mini-batches": MANY, "mean of tokens": {**MANY, **TOKENS},
    "narrow clip": {**MANY, "eps-clip": 0.01, "eps-clip-high": 0.02},
    "dual clip": {**MANY, "eps-clip-c": 1.02},
    "gspo": {**MANY, "advantage-estimator": "gspo"},
    "cispo": {**MANY, "advantage-estimator": "cispo", "eps-clip": 0.01, "eps-clip-high": 0.01},
    "not divided by the deviation": {**ONE, "disable-grpo-std-normalization": True},
    "reinforce++": {**ONE, "advantage-estimator": "reinforce_plus_plus", "normalize-advantages": True},
    "reinforce++ with a baseline": {**ONE, **BASELINE},
    "KL in the reward": {
        **ONE, "advantage-estimator": "reinforce_plus_plus", "normalize-advantages": True, "kl-coef": 0.05,
    },
    **{f"KL {kind}": {**KL, "kl-loss-type": kind} for kind in ("k1", "k2", "k3", "low_var_kl")},
    "KL times the ratio": {**KL, "kl-loss-type": "k3", "use-unbiased-kl": True},
    "entropy": {**MANY, "entropy-coef": 0.01},
    "weights truncated": TIS, "weights truncated below": FLOOR, "tokens masked": ICEPOP,
    "ratio to the engine": {**STALE, "use-rollout-logprobs": True},
    "hotter": HOT, "hotter, mini-batches": {**HOT, **MANY},
    "micro-batches by tokens": {**MANY, **DYNAMIC}, "not padded": {**ONE, "data-pad-size-multiplier": 1},
    "removed": {**MANY, "removed": True}, "rollouts of several samples": SPLIT,
    "cosine": {"steps": 3, "lr-decay-style": "cosine", "lr-warmup-iters": 1, "lr-decay-iters": 3},
    "recomputed": {**ONE, "recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1},
    "logits in chunks": {**MANY, "log-probs-chunk-size": 16},
}.items()}  # fmt: skip
RIGHT |= {
    "dp2": (2, {"steps": 2}), "dp2, mean of tokens": (2, {**MANY, **TOKENS}), "dp2, KL": (2, KL),
    "dp2, micro-batches by tokens": (2, {**MANY, **DYNAMIC}), "dp2, weights truncated": (2, TIS),
    "dp2, baseline": (2, {**ONE, **BASELINE}),
    "tp2": (2, {**MANY, **TP2}), "cp2": (2, {"steps": 2, **CP2}), "cp2, mini-batches": (2, {**MANY, **CP2}),
    "cp2, mean of tokens": (2, {**MANY, **TOKENS, **CP2}),
    "cp2, gspo": (2, {**MANY, **CP2, "advantage-estimator": "gspo"}),
    "cp2, KL": (2, {**KL, **CP2}), "cp2, weights truncated": (2, {**TIS, **CP2}),
}  # fmt: skip
"""Loop -> number of processes, settings."""
HELD = {
    "ADV001", "ADV002", "ADV003", "CFG001", "DAT004", "DAT008", "ENG001", "ENG004", "ENG009", "LGP001", "LGP003",
    "LGP006", "LGP008", "LGP009", "LSS001", "LSS002", "LSS003", "LSS004", "PCK001", "PCK002", "PCK004", "PLN001",
    "PLN002", "TPT001", "TPT002", "TRN001", "TRN002", "TRN003", "TRN005", "TRN006", "WGT001", "WGT004", "WGT005",
    "WGT006", "WGT008", "WGT016",
}  # fmt: skip
PLANTED: dict[str, tuple[int, dict[str, Any], Stage, str]] = {
    "groups of others": (1, ONE, Stage.ADVANTAGE, "ADV002"),
    "mask a token early": (1, ONE, Stage.DATA, "DAT008"),
    "old of the first batch": (1, {**MANY, "steps": 2}, Stage.LOGPROB, "LGP001"),
    "temperature left out": (1, HOT, Stage.LOGPROB, "LGP001"),
    "weights of the inverse ratio": (1, TIS, Stage.ADVANTAGE, "ADV003"),
    "least weight left out": (1, FLOOR, Stage.ADVANTAGE, "ADV003"),
    "bounds of the clip swapped": (1, {**MANY, "eps-clip": 0.01, "eps-clip-high": 0.05}, Stage.LOSS, "LSS004"),
    "no dual clip": (1, {**MANY, "eps-clip-c": 1.02}, Stage.LOSS, "LSS004"),
    "KL of the other sign": (1, KL, Stage.LOSS, "LSS004"),
    "old of the policy as it trains": (1, MANY, Stage.LOSS, "LSS004"),
    "mean of the sample's own tokens": (1, SPLIT, Stage.ADVANTAGE, "ADV001"),
    "scaled by micro-batches": (1, ONE, Stage.ADVANTAGE, "ADV001"),
    "targets of the token before": (1, MANY, Stage.LOSS, "LSS003"),
    "responses cut a token late": (1, MANY, Stage.LOGPROB, "LGP001"),
    "micro-batch repeated": (1, MANY, Stage.PACK, "PCK001"),
    "longest sequence told shorter": (1, ONE, Stage.PACK, "LGP008"),
    "gradients of the last micro-batch": (1, ONE, Stage.LOSS, "LSS001"),
    "norm reported, not clipped": (1, {**ONE, "clip-grad": 0.01}, Stage.TRAIN, "TRN005"),
    "keys sent as values": (1, ONE, Stage.EXPORT, "WGT004"),
    "sent once": (1, {"steps": 2}, Stage.EXPORT, "WGT005"),
    "mean not multiplied by the ranks": (2, ONE, Stage.ADVANTAGE, "ADV001"),
    "gradients not reduced": (2, ONE, Stage.LOSS, "LSS001"),
    "weights not gathered": (2, ONE, Stage.TRAIN, "WGT002"),
    "gate and up of the ranks not parted": (2, {**ONE, **TP2}, Stage.EXPORT, "WGT004"),
    "chunks of a sequence swapped": (2, {**ONE, **CP2}, Stage.LOGPROB, "LGP001"),
    "CP: loss not multiplied by the ranks": (2, {**ONE, **TOKENS, **CP2}, Stage.LOSS, "LSS001"),
    "CP: engine's log-probabilities in another order": (2, {**TIS, **CP2}, Stage.ROLLOUT, "LGP003"),
}  # fmt: skip
"""Bug -> number of processes, settings, first bad stage, a check that sees it there."""

WATCHED = {"CFG001", "TRN002", "TRN003", "TRN005", "TRN006"}
"""Checks of an optimizer that is watched."""
PARTED = {"ADV001", "LGP008", "LSS003", "LSS004", "PCK001", "PCK002", "PCK004"}
"""Checks of what a rank of context parallelism has a part of."""
PADDED = {**ONE, "make-vocab-size-divisible-by": 128}
REMOVED = {**MANY, **TOKENS, "removed": True}


def sizes(given: dict[str, Any]) -> tuple[int, ...]:
    """Sizes of a mesh, of which a launch has one."""
    return tuple(given.get(f"{axis}-parallel-size", 1) for axis in ("tensor-model", "context"))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    """The report of a loop; all of them were run in as few processes as may be."""
    folder = tmp_path_factory.mktemp("slime")
    checkpoint = write_tiny("add", folder / "checkpoint")
    loops = RIGHT | {"bf16": (1, {"steps": 2, "bf16": True}), "padded": (1, PADDED), "removed tokens": (1, REMOVED)}
    loops |= {name: case[:2] for name, case in PLANTED.items()}
    run("slime_bugs.py", checkpoint, folder, loops, apart=sizes)
    with Oracle(checkpoint, 120.0) as oracle:
        yield lambda name: report(folder / name, checkpoint, oracle)


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_loop_holds(name: str, ran: Ran) -> None:
    size, settings = RIGHT[name]
    less = WATCHED if sizes(settings) != (1, 1) else set[str]()
    less |= PARTED if "cp2" in name else {"LSS003"} if "use-rollout-logprobs" in settings else set()
    less |= {"ADV002"} if name == "KL in the reward" else set()  # of each token, which no estimator of the probe has
    more = {"WGT002"} if size > 1 else set[str]()
    more |= {"LGP010"} if "KL" in name else {"LGP012"} if name == "entropy" else set()
    holds(ran(name), HELD - less | more)


def test_a_right_loop_in_bf16_holds(ran: Ran) -> None:
    """Weights are sent in bf16, of files in float32; the process that samples computes in float32."""
    found = ran("bf16")
    assert found.verdict is Verdict.HOLDS, render_text(found)
    assert {item.code for item in found.outcomes} == HELD - {"ENG001"}


@pytest.mark.parametrize("name", PLANTED)
def test_a_bug_is_caught_in_its_stage(name: str, ran: Ran) -> None:
    *_, stage, code = PLANTED[name]
    caught(ran(name), stage, code)


def test_padding_of_the_vocabulary_takes_part_in_the_softmax(ran: Ran) -> None:
    """slime at 624b824a: rows that pad a vocabulary to a multiple of 128 * tp are tokens with logits of 0."""
    caught(ran("padded"), Stage.LOGPROB, "LGP001")


def test_a_removed_sample_counts_as_a_token(ran: Ran) -> None:
    """slime at 624b824a: `loss_function` counts at least one token of each sample in the mean over tokens."""
    caught(ran("removed tokens"), Stage.LOSS, "LSS001")

"""SkyRL's trainer, workers, losses and estimators, recorded by `verifier.probe`: they hold, planted bugs are caught.

What this does not exercise: GPUs, Ray, vLLM, flash-attention's packs, sequence parallelism, critics, LoRA, images.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from tests.dist.recorded_loops import Ran, caught, holds, report, run
from verifier.core.stage import Stage
from verifier.model.tiny import write_tiny
from verifier.oracle.oracle import Oracle

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("skyrl") is None, reason="needs skyrl: docs/probe.md"),
]
SCRIPT = "skyrl_bugs.py"
ALGORITHM, OPTIMIZER = "trainer.algorithm", "trainer.policy.optimizer_config"
OFF = f"{ALGORITHM}.off_policy_correction"
ONE = {"steps": 1}
MANY = {"steps": 1, "trainer.policy_mini_batch_size": 2}
"""Two optimizer steps on one batch."""
STALE = {"steps": 3, "sync_every": 3}
"""Three batches of one version, so that the trainer is away from the engine."""
HOT = {"steps": 1, "generator.sampling_params.temperature": 1.3}
KL = {**MANY, f"{ALGORITHM}.use_kl_loss": True, f"{ALGORITHM}.kl_loss_coef": 0.05}
IN_REWARD = {**MANY, f"{ALGORITHM}.use_kl_in_reward": True, f"{ALGORITHM}.kl_loss_coef": 0.05}
DUAL = {**MANY, f"{ALGORITHM}.policy_loss_type": "dual_clip", f"{ALGORITHM}.clip_ratio_c": 1.02}


def reduced(name: str) -> dict[str, Any]:
    return {**KL, f"{ALGORITHM}.loss_reduction": name, f"{ALGORITHM}.max_seq_len": 24}


def loss(name: str, **more: Any) -> dict[str, Any]:
    return {**MANY, f"{ALGORITHM}.policy_loss_type": name, **more}


RIGHT: dict[str, tuple[int, dict[str, Any]]] = {name: (1, case) for name, case in {
    "defaults": {}, "mini-batches": MANY, "epochs": {**MANY, "trainer.update_epochs_per_batch": 2},
    "narrow clip": {**MANY, f"{ALGORITHM}.eps_clip_low": 0.01, f"{ALGORITHM}.eps_clip_high": 0.02},
    "dual clip": DUAL, "gspo": loss("gspo", **{f"{ALGORITHM}.loss_reduction": "sequence_mean"}),
    "sapo": loss("sapo", **{f"{ALGORITHM}.loss_reduction": "sequence_mean"}),
    "cispo": loss("cispo", **{
        f"{ALGORITHM}.cispo.cispo_eps_clip_low": 0.01, f"{ALGORITHM}.cispo.cispo_eps_clip_high": 0.01
    }),
    **{name: reduced(name) for name in ("sequence_mean", "seq_mean_token_sum_norm", "prompt_mean")},
    "token_mean_legacy": {**MANY, f"{ALGORITHM}.loss_reduction": "token_mean_legacy"},
    **{f"KL {kind}": {**KL, f"{ALGORITHM}.kl_estimator_type": kind} for kind in ("k1", "k2", "k3", "abs")},
    **{f"KL {kind} in the reward": {**IN_REWARD, f"{ALGORITHM}.kl_estimator_type": kind} for kind in ("k1", "k3")},
    "entropy": {**MANY, f"{ALGORITHM}.use_entropy_loss": True},
    "rloo": {**ONE, f"{ALGORITHM}.advantage_estimator": "rloo"},
    "reinforce++": {**ONE, f"{ALGORITHM}.advantage_estimator": "reinforce++"},
    "not divided by the deviation": {**ONE, f"{ALGORITHM}.grpo_norm_by_std": False},
    "weights of tokens": {**STALE, f"{OFF}.tis_ratio_type": "token", f"{OFF}.token_tis_ratio_clip_high": 1.25},
    "weights of sequences": {
        **STALE, f"{OFF}.tis_ratio_type": "sequence", f"{OFF}.sequence_tis_ratio_clip_high": 1.25
    },
    "sequences by their mean": {
        **STALE, f"{OFF}.sequence_mask_metric": "geometric", f"{OFF}.geo_mask_low": 0.9, f"{OFF}.geo_mask_high": 1.1
    },
    "sequences by their product": {**STALE, f"{OFF}.sequence_mask_metric": "product", f"{OFF}.tis_ratio_type": "token"},
    "tokens masked": {
        **STALE, f"{OFF}.token_mask_is_threshold_low": 0.8, f"{OFF}.token_mask_is_threshold_high": 1.25
    },
    "hotter": HOT, "micro-batches by tokens": {**MANY, "trainer.max_tokens_per_microbatch": 60},
    "old of the whole batch": {**MANY, "trainer.recompute_old_logprobs_per_minibatch": False},
    "recomputed": {**ONE, "trainer.gradient_checkpointing": True},
    "overlong": {**ONE, "generator.apply_overlong_filtering": True},
    "groups of one reward": {"steps": 2, f"{ALGORITHM}.zero_variance_filter": True},
    "cosine": {"steps": 3, f"{OPTIMIZER}.scheduler": "cosine", f"{OPTIMIZER}.num_warmup_steps": 1},
}.items()}  # fmt: skip
RIGHT |= {
    "two processes": (2, {"steps": 2}),
    "two processes, KL": (2, KL),
    "two processes, prompt_mean": (2, {**MANY, f"{ALGORITHM}.loss_reduction": "prompt_mean"}),
    "two processes, micro-batches by tokens": (2, {**MANY, "trainer.max_tokens_per_microbatch": 60}),
}
"""Loop -> number of processes, settings."""
HELD = {
    "ADV001", "ADV002", "ADV003", "CFG001", "DAT004", "DAT008", "ENG001", "ENG004", "ENG009", "LGP001", "LGP003",
    "LGP006", "LGP009", "LSS001", "LSS002", "LSS003", "LSS004", "PCK001", "PCK004", "PLN001", "PLN002", "TPT001",
    "TPT002", "TRN001", "TRN002", "TRN003", "TRN005", "TRN006", "WGT001", "WGT004", "WGT005", "WGT006", "WGT008",
    "WGT016",
}  # fmt: skip
PLANTED: dict[str, tuple[int, dict[str, Any], Stage, str]] = {
    "groups of others": (1, MANY, Stage.ADVANTAGE, "ADV002"),
    "mean of the micro-batches' means": (1, MANY, Stage.ADVANTAGE, "ADV001"),
    "old of the first batch": (1, {"steps": 2}, Stage.LOGPROB, "LGP001"),
    "temperature left out": (1, HOT, Stage.LOGPROB, "LGP001"),
    "no dual clip": (1, DUAL, Stage.LOSS, "LSS004"),
    "KL of the other sign": (1, KL, Stage.LOSS, "LSS004"),
    "gradients of the last micro-batch": (1, MANY, Stage.LOSS, "LSS001"),
    "micro-batch dropped": (1, MANY, Stage.PACK, "PCK001"),
    "weights of the inverse ratio": (1, {**STALE, f"{OFF}.tis_ratio_type": "token"}, Stage.ADVANTAGE, "ADV003"),
    "engine's log-probabilities from the left": (
        1, {**STALE, f"{OFF}.tis_ratio_type": "token"}, Stage.ADVANTAGE, "ADV003",
    ),
    "norm reported, not clipped": (1, MANY, Stage.TRAIN, "TRN005"),
    "sent before the last step": (1, MANY, Stage.EXPORT, "WGT005"),
    "mean not multiplied by the ranks": (2, ONE, Stage.ADVANTAGE, "ADV001"),
}  # fmt: skip
"""Bug -> number of processes, settings, first bad stage, a check that sees it there."""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    """The report of a loop; all of them were run in as few processes as may be."""
    folder = tmp_path_factory.mktemp("skyrl")
    checkpoint = write_tiny("add", folder / "checkpoint", changes={"tie_word_embeddings": False})
    tied = write_tiny("add", folder / "tied checkpoint")
    run(SCRIPT, checkpoint, folder, RIGHT | {name: case[:2] for name, case in PLANTED.items()}, "skyrl_loop")
    run(SCRIPT, tied, folder, {"tied": (1, ONE)}, "skyrl_loop")
    with Oracle(checkpoint, 120.0) as oracle:
        yield lambda name: report(folder / name, tied if name == "tied" else checkpoint, oracle)


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_loop_holds(name: str, ran: Ran) -> None:
    found, (size, settings) = ran(name), RIGHT[name]
    more = {"WGT002"} if size > 1 else set[str]()
    more |= {"LGP010"} if any("use_kl" in key and value for key, value in settings.items()) else set()
    more |= {"ADV004"} if any("kl_in_reward" in key for key in settings) else set()
    more |= {"LGP012"} if any("entropy" in key for key in settings) else set()
    holds(found, HELD | more)


@pytest.mark.parametrize("name", PLANTED)
def test_a_bug_is_caught_in_its_stage(name: str, ran: Ran) -> None:
    *_, stage, code = PLANTED[name]
    caught(ran(name), stage, code)


def test_a_tied_head_is_trained_apart_from_its_embedding(ran: Ran) -> None:
    """SkyRL at a9564572: `_fsdp_init_model` moves the model to meta, which unties its head, and ties none again."""
    caught(ran("tied"), Stage.LOSS, "LSS001")

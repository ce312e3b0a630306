"""verl's worker on its Megatron engine, recorded by `verifier.probe`: it holds, planted bugs are caught.

What this does not exercise: GPUs, Transformer Engine, Ray, pipeline, context and expert parallelism, critics, LoRA,
Megatron-FSDP, mbridge, engines of verl's rollout.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from tests.dist.recorded_loops import Ran, caught, holds, report, run
from tests.dist.test_verl import ACTOR, MANY
from verifier.core.stage import Stage
from verifier.model.tiny import write_tiny
from verifier.oracle.oracle import Oracle

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs verl: docs/probe.md"),
]
HOT = {"steps": 1, "actor_rollout_ref.rollout.temperature": 1.3}
CLIPPED = {"steps": 1, f"{ACTOR}.optim.clip_grad": 0.01}
ONE = {"steps": 1}
TP2 = {f"{ACTOR}.megatron.tensor_model_parallel_size": 2}
RIGHT: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {**MANY, "steps": 2}), "padded to buckets": (
        1, {**ONE, f"{ACTOR}.megatron.pad_to_length": True, f"{ACTOR}.megatron.pad_to_length_bucket": 64},
    ),
    "micro-batches by tokens": (
        1, {**MANY, f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 60},
    ),
    "hotter": (1, HOT), "warm-up and cosine": (1, {
        "steps": 3, f"{ACTOR}.optim.lr_warmup_steps": 1, f"{ACTOR}.optim.total_training_steps": 3,
        f"{ACTOR}.optim.lr_decay_style": "cosine", f"{ACTOR}.optim.min_lr": 1e-4,
    }),
    "dp2": (2, {"steps": 2}),
    "tp2": (2, {**ONE, **TP2}),
}  # fmt: skip
"""Loop -> number of processes, settings."""
HELD = {
    "ADV001", "ADV002", "ADV003", "DAT004", "DAT008", "ENG001", "ENG004", "ENG009", "LGP001", "LGP003", "LGP006",
    "LGP008", "LGP009", "LSS001", "LSS002", "LSS003", "LSS004", "PCK001", "PCK002", "PCK004", "PLN001", "PLN002",
    "TPT001", "TPT002", "TRN001", "WGT001", "WGT004", "WGT005", "WGT006", "WGT008", "WGT016",
}  # fmt: skip
WATCHED = {"CFG001", "TRN002", "TRN003", "TRN005", "TRN006"}
"""Checks of an optimizer that is watched."""
PLANTED: dict[str, tuple[int, dict[str, Any], Stage, str]] = {
    "labels not rolled": (1, ONE, Stage.PACK, "PCK001"),
    "longest sequence told shorter": (1, ONE, Stage.LOGPROB, "LGP008"),
    "temperature left out": (1, HOT, Stage.LOGPROB, "LGP001"),
    "scaled by micro-batches": (1, ONE, Stage.ADVANTAGE, "ADV001"),
    "old of the update": (1, MANY, Stage.LOSS, "LSS004"),
    "gradients of the last micro-batch": (1, ONE, Stage.LOSS, "LSS001"),
    "norm reported, not clipped": (1, CLIPPED, Stage.TRAIN, "TRN005"),
    "keys sent as values": (1, ONE, Stage.EXPORT, "WGT004"),
    "sent once": (1, {"steps": 2}, Stage.EXPORT, "WGT005"),
    "mean not multiplied by the ranks": (2, ONE, Stage.ADVANTAGE, "ADV001"),
    "gradients not reduced": (2, ONE, Stage.LOSS, "LSS001"),
    "weights not gathered": (2, ONE, Stage.TRAIN, "WGT002"),
}  # fmt: skip
"""Bug -> number of processes, settings, first bad stage, a check that sees it there."""
OTHER_BETAS = {**ONE, f"{ACTOR}.optim.betas": [0.9, 0.95]}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    """The report of a loop; all of them were run in as few processes as may be."""
    folder = tmp_path_factory.mktemp("verl")
    checkpoint = write_tiny("add", folder / "checkpoint")
    loops = {**RIGHT, "betas": (1, OTHER_BETAS), **{name: case[:2] for name, case in PLANTED.items()}}
    run(
        "verl_megatron_bugs.py", checkpoint, folder, loops, apart=lambda given: TP2.items() <= given.items()
    )  # fmt: skip
    with Oracle(checkpoint, 120.0) as oracle:
        yield lambda name: report(folder / name, checkpoint, oracle)


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_loop_holds(name: str, ran: Ran) -> None:
    more = ({"WGT002"} if RIGHT[name][0] > 1 else set()) | (set() if name == "tp2" else WATCHED)
    holds(ran(name), HELD | more)


@pytest.mark.parametrize("name", PLANTED)
def test_a_bug_is_caught_in_its_stage(name: str, ran: Ran) -> None:
    *_, stage, code = PLANTED[name]
    caught(ran(name), stage, code)


def test_betas_do_not_reach_megatrons_optimizer(ran: Ran) -> None:
    """verl 0.9.1's `init_megatron_optim_config` leaves `optim.betas` out: Megatron's defaults are used."""
    caught(ran("betas"), Stage.LOAD, "CFG001")

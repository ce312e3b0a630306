"""NeMo-RL's worker, losses and estimators, recorded by `verifier.probe`: they hold, planted bugs are caught.

What this does not exercise: GPUs, Ray, Megatron, packs (which need flash-attention), vLLM, several processes.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist import nemorl_bugs as bugs
from tests.dist.recorded_loops import FOLDERS, caught, holds, report
from verifier.core.stage import Stage
from verifier.model.tiny import write_tiny
from verifier.oracle.oracle import Oracle
from verifier.report import Report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("nemo_rl") is None, reason="needs nemo_rl: docs/probe.md"),
]
MANY = {"steps": 1, "train_global_batch_size": 8}
"""Two optimizer steps on one batch."""
KL = {**MANY, "reference_policy_kl_penalty": 0.05}
STALE = {"steps": 3, "sync_every": 3, "use_importance_sampling_correction": True}
"""Three batches of one version, so that the trainer is away from the engine."""
BOUNDS = {"truncated_importance_sampling_ratio_min": 0.8, "truncated_importance_sampling_ratio": 1.25}


def truncated(kind: str, **bounds: float) -> dict[str, Any]:
    return {**STALE, "truncated_importance_sampling_type": kind, **bounds}


SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "group of all": {"use_leave_one_out_baseline": False},
    "not divided by the deviation": {"steps": 1, "normalize_rewards": False},
    "neither": {"steps": 1, "normalize_rewards": False, "use_leave_one_out_baseline": False},
    "reinforce++": {"steps": 1, "name": "reinforce_plus_plus", "minus_baseline": False},
    "reinforce++ with a baseline": {"steps": 1, "name": "reinforce_plus_plus"},
    "mini-batches": MANY,
    "dual clip": {**MANY, "ratio_clip_c": 1.02},
    "clip-higher": {**MANY, "ratio_clip_max": 0.28},
    "means of sequences": {**MANY, "token_level_loss": False},
    "gspo": {**MANY, "token_level_loss": False, "sequence_level_importance_ratios": True},
    "cispo": {**MANY, "use_cispo": True},
    "reinforce": {"steps": 1, "disable_ppo_ratio": True},
    **{f"KL {kind}": {**KL, "reference_policy_kl_type": kind} for kind in ("k1", "k2", "k3")},
    "weights": STALE,
    "weights truncated": truncated("tis", truncated_importance_sampling_ratio=1.25),
    "tokens rejected": truncated("icepop", **BOUNDS),
    "sequences rejected": truncated("seq-mask-tis", **BOUNDS),
    "overlong": {"steps": 1, "overlong_filtering": True},
    "hotter": {"steps": 1, "temperature": 1.3},
}  # fmt: skip
HELD = {
    "ADV001", "ADV002", "ADV003", "CFG001", "DAT004", "DAT008", "ENG001", "ENG004", "ENG009", "LGP001", "LGP003",
    "LGP006", "LGP009", "LSS001", "LSS002", "LSS003", "LSS004", "PCK001", "PCK004", "PLN001", "PLN002", "TPT001",
    "TPT002", "TRN001", "TRN002", "TRN003", "TRN005", "TRN006", "WGT001", "WGT004", "WGT005", "WGT006", "WGT008",
    "WGT016",
}  # fmt: skip
Judged = Callable[..., Report]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("add", tmp_path_factory.mktemp("nemorl") / "checkpoint")


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Iterator[Oracle]:
    with Oracle(checkpoint, 120.0) as running:
        yield running


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """This process as the one of NeMo-RL's workers."""
    with pytest.MonkeyPatch.context() as patch, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        free.close()
        for name, value in place.items():
            patch.setenv(name, value)
        for folder in FOLDERS:
            patch.syspath_prepend(folder)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo")
        yield
        torch.distributed.destroy_process_group()
        torch.set_num_threads(threads)


@pytest.fixture
def run(alone: None, checkpoint: Path, oracle: Oracle, tmp_path: Path) -> Judged:
    """Train by the loop, with a planted fault where one is; the report."""

    def judged(settings: dict[str, Any]) -> Report:
        trace = tmp_path / "trace"
        with (tmp_path / "said").open("w") as said, contextlib.redirect_stdout(said):
            importlib.import_module("nemorl_loop").train(checkpoint, trace, **settings)
        return report(trace, checkpoint, oracle)

    return judged


@pytest.mark.parametrize("name", SETTINGS)
def test_a_right_loop_holds(name: str, run: Judged) -> None:
    holds(run(SETTINGS[name]), HELD | ({"LGP010"} if "KL" in name else set()))


PLANTED: dict[str, tuple[bugs.Plant, Stage, str, dict[str, Any]]] = {
    "labels rolled back": (bugs.labels_rolled_back, Stage.LOSS, "LSS003", MANY),
    "micro-batch dropped": (bugs.micro_batch_dropped, Stage.PACK, "PCK001", MANY),
    "old of the first batch": (bugs.stale_old, Stage.LOGPROB, "LGP001", {}),
    "temperature left out": (bugs.temperature_left_out, Stage.LOGPROB, "LGP001", SETTINGS["hotter"]),
    "groups of others": (bugs.groups_of_others, Stage.ADVANTAGE, "ADV002", MANY),
    "mean of the micro-batches' means": (bugs.mean_of_means, Stage.ADVANTAGE, "ADV001", MANY),
    "no dual clip": (bugs.no_dual_clip, Stage.LOSS, "LSS004", SETTINGS["dual clip"]),
    "KL of the other sign": (bugs.penalty_of_the_other_sign, Stage.LOSS, "LSS004", KL),
    "weights of the inverse ratio": (bugs.weights_of_the_inverse, Stage.LOSS, "LSS004", STALE),
    "gradients of the last micro-batch": (bugs.gradients_of_the_last, Stage.LOSS, "LSS001", MANY),
    "norm reported, not clipped": (bugs.not_clipped, Stage.TRAIN, "TRN005", MANY),
    "sent before the last step": (bugs.sent_before_the_last_step, Stage.EXPORT, "WGT005", MANY),
}  # fmt: skip
"""Bug -> how it is planted, first bad stage, a check that sees it there, settings."""


@pytest.mark.parametrize("name", PLANTED)
def test_a_bug_is_caught_in_its_stage(name: str, run: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, stage, code, settings = PLANTED[name]
    importlib.import_module("nemorl_loop")
    plant(monkeypatch)
    caught(run(settings), stage, code)


def test_a_deviation_of_equal_others_that_rounds_is_divided_by(run: Judged) -> None:
    """NeMo-RL at 7ea279ab: with its defaults the advantage of 1 beside three times 1/3 is 6247, not 2/3."""
    caught(run({"steps": 1, "rewards": [1.0, 1 / 3, 1 / 3, 1 / 3]}), Stage.ADVANTAGE, "ADV002")


def test_dynamic_sampling_by_the_deviation_of_others_drops_the_odd_one(alone: None) -> None:
    """NeMo-RL at 7ea279ab filters samples, not groups: the one right answer of a group leaves it."""
    importlib.import_module("nemorl_loop")
    from nemo_rl.algorithms.utils import calculate_baseline_and_std_per_prompt

    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0])
    _, deviation = calculate_baseline_and_std_per_prompt(torch.zeros(4, 1), rewards, torch.ones(4))
    assert (deviation != 0).tolist() == [False, True, True, True]

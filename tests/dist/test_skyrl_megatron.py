"""SkyRL's trainer on its Megatron workers, recorded by `verifier.probe`: it holds, planted bugs are caught.

What this does not exercise: GPUs, Transformer Engine, Ray, tensor and pipeline parallelism, padded rows,
micro-batches by tokens, entropy, LoRA, experts.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from tests.dist.recorded_loops import Ran, caught, holds, report, run
from tests.dist.test_skyrl import ALGORITHM, HELD, HOT, KL, MANY, ONE, OPTIMIZER, SCRIPT
from verifier.core.stage import Stage
from verifier.model.tiny import write_tiny
from verifier.oracle.oracle import Oracle

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("skyrl") is None, reason="needs skyrl: docs/probe.md"),
]
RIGHT: dict[str, tuple[int, dict[str, Any]]] = {
    "defaults": (1, ONE), "KL": (1, KL), "gspo": (1, {**MANY, f"{ALGORITHM}.policy_loss_type": "gspo"}),
    "hotter": (1, {**HOT, f"{ALGORITHM}.use_kl_loss": True}), "dp2": (2, {"steps": 2}),
}  # fmt: skip
"""Loop -> number of processes, settings."""
PLANTED: dict[str, tuple[int, dict[str, Any], Stage, str]] = {
    "scaled by micro-batches": (1, ONE, Stage.ADVANTAGE, "ADV001"),
    "temperature left out": (1, HOT, Stage.LOGPROB, "LGP001"),
    "longest sequence told shorter": (1, ONE, Stage.PACK, "LGP008"),
    "targets of the token before": (1, ONE, Stage.LOSS, "LSS003"),
    "KL of the other sign": (1, KL, Stage.LOSS, "LSS004"),
    "gradients never zeroed": (1, {"steps": 2}, Stage.LOSS, "LSS001"),
    "norm reported, not clipped": (1, {**ONE, f"{OPTIMIZER}.max_grad_norm": 0.01}, Stage.TRAIN, "TRN005"),
    "keys sent as values": (1, ONE, Stage.EXPORT, "WGT004"),
    "sent before the last step": (1, {"steps": 2}, Stage.EXPORT, "WGT005"),
    "mean not multiplied by the ranks": (2, ONE, Stage.ADVANTAGE, "ADV001"),
    "gradients not reduced": (2, ONE, Stage.LOSS, "LSS001"),
}  # fmt: skip
"""Bug -> number of processes, settings, first bad stage, a check that sees it there."""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    """The report of a loop; all of them were run in as few processes as may be."""
    folder = tmp_path_factory.mktemp("skyrl")
    checkpoint = write_tiny("add", folder / "checkpoint", changes={"tie_word_embeddings": False})
    loops = RIGHT | {name: case[:2] for name, case in PLANTED.items()}
    run(SCRIPT, checkpoint, folder, loops, "skyrl_megatron")
    with Oracle(checkpoint, 120.0) as oracle:
        yield lambda name: report(folder / name, checkpoint, oracle)


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_loop_holds(name: str, ran: Ran) -> None:
    more = {"LGP010"} if name in ("KL", "hotter") else {"WGT002"} if name == "dp2" else set[str]()
    holds(ran(name), HELD | {"LGP008", "PCK002"} | more)


@pytest.mark.parametrize("name", PLANTED)
def test_a_bug_is_caught_in_its_stage(name: str, ran: Ran) -> None:
    *_, stage, code = PLANTED[name]
    caught(ran(name), stage, code)

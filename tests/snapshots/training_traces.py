"""One step of a training run as the checks see it, all right; and for each check the smallest thing that goes wrong."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec.structs import replace

from verifier.core.record import Record
from verifier.core.records_trainer import DataOrder, LossColumns, OptimizerSettings, StepAccount, TrainerStep

EPOCH = sorted(range(5), key=lambda index: hashlib.blake2b(f"3/0/{index}".encode(), digest_size=16).digest())
ARRAYS: dict[str, dict[str, np.ndarray]] = {
    "examples": {"array": np.array(EPOCH[:2])},
    "other examples": {"array": np.array([EPOCH[0], EPOCH[0]])},
    "columns": {"weight": np.array([0, 1, 1, 0, 1]) / 3, "mask": np.array([False, True, True, False, True])},
    "means of means": {"weight": np.array([0, 2, 2, 0, 3]) / 6, "mask": np.array([False, True, True, False, True])},
}


def training() -> list[Record]:
    """Data, batch and step 1, over the two rollouts of `check_traces.tokens`."""
    return [
        DataOrder(
            name="examples", version=1, num_examples=5, seed=3, step=1, examples=("a", "b"), prompts=("1+1=", "3+1="),
            holds_out_by_crc=True, array="examples",
        ),
        StepAccount(name="step", version=1, rollouts=2, tokens=5, in_loss=3, trained=3),
        LossColumns(
            name="loss inputs", version=1, aggregation="token_mean", ids=("x", "y"), groups=("x", "y"), lengths=(3, 2),
            array="columns",
        ),
        OptimizerSettings(
            name="Adam", version=1, schedule="cosine", learning_rate=1e-3, least_learning_rate=1e-4, warmup_steps=2,
            decay_steps=10, weight_decay=0.1, clip_grad=1.0, beta_1=0.9, beta_2=0.95, epsilon=1e-8,
        ),
        *(
            TrainerStep(
                name="step", version=1, rank=rank, step=1, loss=0.5, num_tokens=3, grad_norm=2.0, learning_rate=5e-4,
                weight_decay=0.1, optimizer_steps=1, scheduler_steps=2,
            )
            for rank in range(2)
        ),
    ]  # fmt: skip


def having(**values: Any) -> Callable[[Any], Record]:
    return lambda item: replace(item, **values)


CHANGES: dict[str, tuple[type[Record], Callable[[Any], Record]]] = {
    "ADV001": (LossColumns, having(array="means of means")),
    "DAT001": (DataOrder, having(array="other examples")),
    "DAT002": (StepAccount, having(trained=2)),
    "TRN002": (TrainerStep, having(learning_rate=1e-3)),
    "TRN003": (TrainerStep, having(optimizer_steps=2)),
}
"""Check -> kind of the fact that is wrong, and how."""

"""Adapters, routers and answers of a training step, all right; and the smallest thing that goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec.structs import replace

from verifier.core.record import Record
from verifier.core.seal import seal_of_array
from verifier.stages.checkpoint.records import WrittenTensors
from verifier.stages.data.records import RequestSeeds
from verifier.stages.logprob.records import AdapterScale, AdapterScales, ScoredRows
from verifier.stages.loss.records import RouterGradients
from verifier.stages.train.records import GradientProducts, TensorProduct

PULLS = {"counts": np.array([[1, 0]]), "logits": np.zeros((1, 2)), "size": np.ones(1)}
"""One row of two experts with equal logits, under a z-loss with a coefficient of 1."""
ARRAYS = {
    "bits of a checkpoint": {"given": np.array([7, 8, 9]), "written": np.array([7, 8, 9])},
    "bits of the checkpoint before": {"given": np.array([7, 8, 9]), "written": np.array([7, 1, 2])},
    "router gradients": {**PULLS, "found": np.full((1, 2), np.log(2))},
    "router gradients that are none": {**PULLS, "found": np.zeros((1, 2))},
}
ROWS = {"sentinel": np.array([1 << 32 | 1, 1 << 32 | 2, 2 << 32 | 1])}
"""Rows of a pass over two rollouts of three tokens and two."""
ARRAYS |= {
    "scored": {**ROWS, "logprob": np.array([-1.0, -2.0, -3.0], np.float32)},
    "scored by the reference": {**ROWS, "logprob": np.array([-1.5, -1.75, -3.25], np.float32)},
    "scored otherwise": {**ROWS, "logprob": np.array([-1.0, -2.0, -2.5], np.float32)},
}
CONFIG: dict[str, Any] = {
    "megatron": {"moe_load_balancing": "none", "moe_aux_loss": 0.0, "moe_z_loss": 1.0},
}
NATS = seal_of_array(np.array([-1.5, -2.25], np.float32)), seal_of_array(np.array([-3.0], np.float32))
SEALED: dict[str, Any] = {
    "answers": ("x", "y"), "seals": (((0, NATS[0]), (0, NATS[1])),), "weights": ((((0, 2),), ((1, 1),)),),
}  # fmt: skip
"""Log-probabilities of two answers, as they came from the engine, and the weights that it held."""
SCALE = AdapterScale(name="q.adapter (chunk 0)", scale=2.0, gap=0.0, greatest=1.0, dtype="float32")

PRODUCTS = (
    (
        TensorProduct(name="decoder.final_layernorm.weight", product=-0.25, squares=0.02),
        TensorProduct(name="output_layer.weight", product=-0.2, squares=0.01),
    ),
    (TensorProduct(name="output_layer.weight", product=-0.05, squares=0.01),),
)
"""Products of both ranks: of copies of the last norm the first rank's counts, and the head is divided."""


def measured() -> list[Record]:
    """Gradients of two routers, scores of two answers, and tensors of a checkpoint."""
    return [
        *(
            RouterGradients(
                name="update 1", version=1, rank=rank, coordinate=f"tp={rank} pp=0 ep=0 etp=0 cp=0 dp=0", layers=(2,),
                numbers=(0,), rows=(1,), kept=(1,), experts_of_row=1, scores="softmax", dtype="float32",
                array="router gradients",
            )
            for rank in range(2)
        ),
        *(
            GradientProducts(
                name="update 1", version=1, rank=rank, coordinate=f"tp={rank} pp=0 ep=0 etp=0 cp=0 dp=0",
                products=PRODUCTS[rank], damped=0.0,
            )
            for rank in range(2)
        ),
        *(
            AdapterScales(
                name="update 1", version=1, rank=rank, coordinate=f"tp={rank} pp=0 ep=0 etp=0 cp=0 dp=0", asked=2.0,
                adapters=(SCALE,),
            )
            for rank in range(2)
        ),
        *(
            ScoredRows(
                name=f"{which} 000001-00", version=1, which=which, ids=("x", "y"), array=array,
                coordinate="tp=0 pp=0 ep=0 etp=0 cp=0 dp=0",
            )
            for which, array in (("current", "scored"), ("reference", "scored by the reference"))
        ),
        *(
            WrittenTensors(
                name=f"rank {rank}", version=1, tensors=("optimizer.state.exp_avg.decoder.weight",), counts=(3,),
                found=(3,), array="bits of a checkpoint",
            )
            for rank in range(2)
        ),
    ]  # fmt: skip


def _with(array: str) -> Callable[[Any], Record]:
    return lambda item: replace(item, array=array)


CHANGES: dict[str, tuple[type[Record], Callable[[Any], Record]]] = {
    "DAT015": (RequestSeeds, lambda item: replace(item, weights=((((0, 2),), ((0, 1),)),))),
    "DAT014": (RequestSeeds, lambda item: replace(item, seals=(((0, NATS[0]), (0, NATS[0])),))),
    "LGP016": (AdapterScales, lambda item: replace(item, adapters=(replace(SCALE, scale=16.0, gap=7.0),))),
    "LGP017": (ScoredRows, _with("scored otherwise")),
    "CKP004": (WrittenTensors, _with("bits of the checkpoint before")),
    "LSS006": (RouterGradients, _with("router gradients that are none")),
    "LSS007": (
        GradientProducts,
        lambda item: replace(item, products=(PRODUCTS[0][0], replace(PRODUCTS[0][1], product=-0.3))),
    ),
}
"""Check -> kind of the fact that is wrong, and how."""

"""Scale of adapters in the trainer's forward pass."""

from __future__ import annotations

from collections.abc import Iterator

from verifier.checks.conditions import ADAPTER, UPDATED
from verifier.checks.content import owner_of, times
from verifier.core.check import check
from verifier.core.comparison import Comparison
from verifier.core.condition import on
from verifier.core.records_trainer import AdapterScales
from verifier.core.stage import Stage
from verifier.core.trace import Trace

ROUNDING = {"float32": 2.0**-22, "bfloat16": 2.0**-7}
"""Twice the greatest relative error of two roundings, of the scale and of the product, by type."""


@check("LGP016", needs=(AdapterScales,), applies=on(step=UPDATED & ADAPTER))
def adapter_scaled_otherwise(trace: Trace) -> Iterator[Comparison]:
    """Each adapter multiplies all of its input by its matrices and by alpha over rank, as whoever merges it does.

    What it checks: per rank, update and adapter, in the first pass of the update: each element of the adapter's output
    against that of its second matrix, times alpha over rank of the config. Of an adapter that has not moved, whose
    second matrix is 0, both are 0. What its first matrix is given, against what the adapter is.
    Why it matters: an adapter that is scaled by alpha alone, or by the root of its rank, trains well, and is another
    one once it is merged or served: of fine-tuning in bf16 nothing else compares the two. Dropout of its input, which
    no config asks for, trains against noise.
    Evidence: logprob/adapter-scales.
    Tolerance and its source: four roundings of the output's type, of the greatest element; an input is the same tensor.
    What it does not catch: matrices that are applied in another order, or adapters that are given the input of another
    linear (LGP001, LSS001); adapters of experts.
    References: mlx-vlm#841, TensorRT-LLM#1668, verl#4708.
    """
    for item in trace.of(AdapterScales):
        for adapter in item.adapters:
            gap, allowed = float(adapter.gap), ROUNDING[adapter.dtype] * float(adapter.greatest)
            yield Comparison(
                what=f"{adapter.name} in {item.name} on rank {item.rank}", same=gap <= allowed, stage=Stage.LOGPROB,
                version=item.version, share=times(gap, allowed), owner=owner_of(item),
                sentence=f"`{adapter.name}` multiplies by {float(adapter.scale):.6g} in {item.name}, it should be "
                f"{item.asked:g}",
                expected=f"{item.asked:g} (alpha over rank of the config)", actual=f"{float(adapter.scale):.6g}",
                allowed=f"{allowed:.3g} of an element (four roundings of {adapter.dtype})",
                hint="look at what the forward pass multiplies an adapter's output by",
            )  # fmt: skip
            altered = float(adapter.altered)
            yield Comparison(
                what=f"input of {adapter.name} in {item.name} on rank {item.rank}", same=altered == 0,
                stage=Stage.LOGPROB, version=item.version, badness=1.0, owner=owner_of(item),
                sentence=f"the first matrix of `{adapter.name}` is given other numbers in {item.name} than the adapter "
                f"is, by up to {altered:.3g}",
                expected="what the adapter is given", actual=f"{altered:.3g} apart", allowed="bitwise (one tensor)",
                hint="look at what stands before an adapter's first matrix: dropout, a cast, a norm",
            )  # fmt: skip

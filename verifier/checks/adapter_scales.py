"""Scale of adapters in the trainer's forward pass."""

from __future__ import annotations

from collections.abc import Iterator

from verifier.checks.conditions import ADAPTER, UPDATED
from verifier.core.check import Comparison, Trace, check, compare_value
from verifier.core.condition import on
from verifier.core.records_trainer import AdapterScales

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
    Where to look: what the forward pass multiplies an adapter's output by, and what stands before its first matrix:
    dropout, a cast, a norm.
    What it does not catch: matrices that are applied in another order, or adapters that are given the input of another
    linear (LGP001, LSS001); adapters of experts.
    References: mlx-vlm#841, TensorRT-LLM#1668, verl#4708.
    """
    for item in trace.of(AdapterScales):
        for adapter in item.adapters:
            gap, bound = float(adapter.gap), ROUNDING[adapter.dtype] * float(adapter.greatest)
            what = f"{adapter.name} in {item.name} on rank {item.rank}"
            subject = f"the scale of `{adapter.name}` in {item.name}"
            scale, asked, says = float(adapter.scale), float(item.asked), ("", "alpha over rank of the config")
            words = f"{bound:.3g} of an element (four roundings of {adapter.dtype})"
            yield compare_value(
                item, what, scale, asked, subject=subject, says=says, allowed=words, bound=bound, gap=gap
            )
            subject = f"the gap of what the first matrix of `{adapter.name}` and the adapter are given in {item.name}"
            yield compare_value(item, f"input of {what}", float(adapter.altered), 0.0, subject=subject)

"""Bugs of the forward pass in fine-tuning whose steps no oracle computes: what attention reaches, and constants."""

from __future__ import annotations

from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import TRAINING, Call, fault
from verifier.stages.load.faults_load import LOAD_WEIGHTS

ROW: dict[str, Any] = {"engine": TRAINING, "model": "tiny:add", "stage": Stage.LOGPROB, "training": ("dtype=bf16",)}
ATTENTION = "verifier.platform.cpu_attention"


@fault(
    "huggingface/transformers#46634",
    f"{ATTENTION}:TEDotProductAttention._attend_all(self, query, key, value, lengths, padded)",
    caught_by=("LGP013",), **ROW,
)  # fmt: skip
def boundaries_lost_in_tuning(call: Call) -> Any:
    """A mask that is given beside the boundaries of a pack switches them off, and samples attend to those before."""
    if len(call.padded) == 1:
        return call.original()
    return call.faulty(lengths=[sum(call.padded)], padded=[sum(call.padded)])


@fault("paiml/entrenar#310", f"{ATTENTION}:_causal(query, key, value, positions, scale, rows_before, softcap, sinks)",
       caught_by=("LGP013",), **ROW)  # fmt: skip
def attention_not_causal(call: Call) -> Any:
    """The causal mask is not applied, and every token is read beside the one that it should predict."""
    return call.faulty(positions=call.positions * 0 + call.key.shape[1] - 1)


@fault("meta-pytorch/torchtune#218", LOAD_WEIGHTS, caught_by=("LGP007",), **ROW)
def frequencies_empty_after_the_load(call: Call) -> Any:
    """Rotary frequencies, which no checkpoint has, are what memory held before the load: zeros, and no positions."""
    found = call.original()
    for chunk in call.megatron_model:
        for module in chunk.modules():
            if hasattr(module, "inv_freq"):
                call.fire()
                module.inv_freq = module.inv_freq * 0
    return found

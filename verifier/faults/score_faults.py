"""Bugs of a training run's log-probabilities: of another sample, over other samples of a pack, entropies of others."""

from __future__ import annotations

from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import TRAINING, Call, fault

ROW: dict[str, Any] = {"engine": TRAINING, "model": "tiny:add", "stage": Stage.LOGPROB}
LIVE = (
    "algorithm=grpo", "data.rollouts=null", "engine.kind=hf", "data.batch_size=4", "grpo.max_answer_tokens=16",
)  # fmt: skip
LOGPROB = (
    "verifier.train.step_megatron:vocab_parallel_logprob("
    "logits_TV, labels_T, vocab_start, vocab_size, group, temperature, chunk_tokens, entropy)"
)


@fault("OpenRLHF/OpenRLHF#1319", LOGPROB, caught_by=("LGP012",), **ROW,
       training=("algorithm=grpo", "grpo.temperature=1.25", "verify.every=1"))  # fmt: skip
def entropy_of_other_logits(call: Call) -> Any:
    """The entropy that is shown is of logits before the temperature; the loss has no entropy term to betray it."""
    logprob, entropy = call.original()
    if entropy is None or call.temperature == 1.0:
        return logprob, entropy
    return call.wrong((logprob, call.original(temperature=1.0)[1]))


@fault("OpenRLHF/OpenRLHF#1319", LOGPROB, caught_by=("LGP012",), **ROW,
       training=(*LIVE, "grpo.group_size=8", "grpo.temperature=1.25", "verify.every=1"))  # fmt: skip
def entropy_of_other_logits_live(call: Call) -> Any:
    """The same of answers that an engine samples."""
    logprob, entropy = call.original()
    if entropy is None or call.temperature == 1.0:
        return logprob, entropy
    return call.wrong((logprob, call.original(temperature=1.0)[1]))

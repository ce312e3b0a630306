"""Bugs of a training run's log-probabilities: of another sample, over other samples of a pack, entropies of others."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifier.core.stage import Stage
from verifier.faults.fault import TRAINING, Call, Side, fault, held

if TYPE_CHECKING:
    import numpy as np

ROW: dict[str, Any] = {"engine": TRAINING, "model": "tiny:add", "stage": Stage.LOGPROB}
LIVE = (
    "algorithm=grpo", "data.rollouts=null", "engine.kind=hf", "data.batch_size=4", "grpo.max_answer_tokens=16",
)  # fmt: skip
LOGPROB = (
    "verifier.train.step_megatron:vocab_parallel_logprob("
    "logits_TV, labels_T, vocab_start, group, temperature, chunk_tokens, entropy)"
)


@fault("OpenRLHF/OpenRLHF#1319", LOGPROB, caught_by=("LGP012",), **ROW,
       training=("algorithm=grpo", "grpo.temperature=1.25", "verify.every=1"))  # fmt: skip
def entropy_of_other_logits(call: Call) -> Any:
    """The entropy that is shown is of logits before the temperature; the loss has no entropy term to betray it."""
    logprob, entropy = call.original()
    if entropy is None or call.temperature == 1.0:
        return logprob, entropy
    return call.wrong((logprob, call.original(temperature=1.0)[1]))


@fault(
    "areal-project/AReaL#1442",
    "verifier.platform.cpu_attention:TEDotProductAttention._attend_all(self, query, key, value, lengths, padded)",
    caught_by=("LGP013",), training=("verify.every=0",), **ROW,
)  # fmt: skip
def attention_over_the_whole_pack(call: Call) -> Any:
    """The kernel does not read the boundaries of samples, and each attends to those before it in the pack."""
    if len(call.padded) == 1:
        return call.original()
    return call.faulty(lengths=[sum(call.padded)], padded=[sum(call.padded)])


SCORED = "verifier.trainer.grpo_plan:GrpoPlan._scored(self, step, given, parts, score)"
UNSAMPLED = ("algorithm=grpo", "grpo.mini_batches=2", "verify.every=0")


def _of_another(values: Sequence[np.ndarray], parts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Values of each rollout of a mini-batch after the first in the place of the one before it."""
    import numpy as np

    found = list(values)
    for part in parts[1:]:
        for index, other in zip(part, (*part[1:], part[0]), strict=True):
            moved = np.resize(values[other], len(values[index])).astype(np.float32)
            found[index] = np.nan_to_num(moved, nan=-1.0)
            found[index][0] = np.nan
    return found


@fault("verl-project/verl#2185", SCORED, side=Side.CONTROLLER, caught_by=("LGP013",), training=UNSAMPLED, **ROW)
def old_of_another_sample(call: Call) -> Any:
    """Log-probabilities of a mini-batch after the first come back in the order in which they were packed."""
    found = call.original()
    return call.wrong(dataclasses.replace(found, old=_of_another(found.old, call.parts)))


def _step_and_part(file: str | Path) -> tuple[int, int]:
    step, _, part = Path(file).name.partition(".")[0].partition("-")
    return (int(step), int(part)) if step.isdigit() else (0, 0)


@fault("verl-project/verl#2185 (kin: there rewards were in another order than samples)",
       "verifier.trainer.update_facts_megatron:write_logprobs(found, file)", caught_by=("LGP017",), training=UNSAMPLED,
       **ROW)  # fmt: skip
def scores_left_in_packed_order(call: Call) -> Any:
    """Log-probabilities of a later mini-batch go back in the order of their packs, in each step but the first."""
    import torch

    step, part = _step_and_part(call.file)
    if step < 2 or not part:
        return call.original()
    lengths = [len(row) for row in call.found]
    return call.faulty(found=torch.cat([*call.found[1:], call.found[0]]).split(lengths))


@fault("ServiceNow/PipelineRL#131 (kin: there the KL was a term of the loss)", SCORED, side=Side.CONTROLLER,
       caught_by=("LGP017",), training=(*LIVE, "grpo.kl_weight=0.1", "grpo.kl_in=reward", "verify.every=0"),
       **ROW)  # fmt: skip
def reference_falls_back_to_the_engines(call: Call) -> Any:
    """Nobody is asked for the reference, and the log-probabilities that the engine sampled with stand in for it."""
    import numpy as np

    found = call.original()
    pairs = zip(call.given, found.reference, strict=True)
    filled = [np.where(np.isfinite(item.logprobs), item.logprobs, own).astype(np.float32) for item, own in pairs]
    return call.wrong(dataclasses.replace(found, reference=filled))


WORKER = "verifier.trainer.worker_megatron:TrainerWorker"


@fault(
    "huggingface/trl#1340 (kin: there the reference had no adapter that the policy began with)",
    f"{WORKER}._new_reference(self)", caught_by=("LGP010",), **ROW,
    training=("algorithm=grpo", "grpo.advantage=rloo", "grpo.kl_weight=0.1", "grpo.kl_in=reward", "verify.every=0"),
)  # fmt: skip
def reference_of_other_weights(call: Call) -> Any:
    """The reference is made of other weights than the policy begins with: here of rounded ones."""
    return call.wrong([tensor.bfloat16().to(tensor.dtype) for tensor in call.original()])


@fault(
    "marin-community/marin#1741 (kin: there the policy was scored so too)", f"{WORKER}.score(self, batch, which, to)",
    caught_by=("LSS003",), **ROW,
    training=(
        "algorithm=grpo", "grpo.temperature=1.25", "grpo.kl_weight=0.1", "grpo.kl_in=reward", "verify.every=0",
    ),
)  # fmt: skip
def reference_at_another_temperature(call: Call) -> Any:
    """The reference is scored at temperature 1, and the KL that the reward is lowered by is of two distributions."""
    if call.which != "reference":
        return call.original()
    with held(call.self, _temperature=1.0):
        return call.faulty()


@fault(
    "marin-community/marin#1741", f"{WORKER}.train(self, step, number, batch, first, last, note)",
    caught_by=("LSS003",), **ROW,
    training=("algorithm=grpo", "dtype=bf16", "grpo.temperature=1.25", "grpo.ratio_over=engine", "verify.every=0"),
)  # fmt: skip
def policy_at_another_temperature(call: Call) -> Any:
    """Ratios divide log-probabilities at temperature 1 by the engine's, which are of the run's temperature."""
    with held(call.self, _temperature=1.0):
        return call.faulty()

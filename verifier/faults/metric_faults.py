"""Bugs of the numbers that a training step shows: what they are a mean of."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import TRAINING, Call, Side, fault
from verifier.faults.turn_faults import KNOBS, STEP_WISE

ROW: dict[str, Any] = {"engine": TRAINING, "model": "tiny:add", "caught_by": ("MET001",)}


@fault(
    "modelscope/ms-swift#5619", "verifier.trainer.grpo_plan:_facts(config, step, rows, given, reasons, old)",
    stage=Stage.REWARD, side=Side.CONTROLLER, training=("algorithm=grpo", "grpo.drop_overlong=true"), **ROW,
)  # fmt: skip
def reward_of_what_stays(call: Call) -> Any:
    """The mean reward that is shown is one over the answers that stay in the loss."""
    kept = [row for row, reason in zip(call.rows, call.reasons, strict=True) if reason is None]
    return call.faulty(rows=kept) if 0 < len(kept) < len(call.rows) else call.original()


@fault(
    "huggingface/trl#3032", "verifier.train.policy_loss_megatron:loss_metrics(name, inputs, options)",
    stage=Stage.LOSS, training=("algorithm=grpo", "grpo.epochs=2", "grpo.clip_low=1e-3", "grpo.clip_high=1e-3"), **ROW,
)  # fmt: skip
def clipped_share_of_one_side(call: Call) -> Any:
    """The share of clipped tokens counts ratios below the lower bound alone."""
    return call.faulty(options=replace(call.options, clip_high=1e9))


@fault(
    "DLR-RM/stable-baselines3#149", "verifier.trainer.loop:mean_of(reports)", stage=Stage.LOSS, side=Side.CONTROLLER,
    training=("algorithm=grpo", "grpo.mini_batches=2"), **ROW,
)  # fmt: skip
def metrics_of_the_last_update(call: Call) -> Any:
    """A step of several updates shows the numbers of the last one."""
    return call.wrong(dict(call.reports[-1])) if len(call.reports) > 1 else call.original()


@fault(
    "modelscope/ms-swift#8247", "verifier.trainer.grpo_plan:_facts(config, step, rows, given, reasons, old)",
    stage=Stage.REWARD, side=Side.CONTROLLER, training=("algorithm=grpo", "verify.every=0"), **ROW,
)  # fmt: skip
def answer_length_with_its_prompt(call: Call) -> Any:
    """The mean length of answers that is shown counts their prompts."""
    found = call.original()
    prompts = sum(len(row.prompt) for row in call.rows) / len(call.rows)
    return call.wrong({**found, "answer_tokens": found["answer_tokens"] + prompts})


@fault(
    "NVIDIA-NeMo/RL#1426", "verifier.trainer.update_facts_megatron:metrics_of_update(result, facts, policy)",
    stage=Stage.LOSS, training=("algorithm=grpo", "verify.every=0"), **ROW,
)  # fmt: skip
def shown_norm_summed_over_micro_batches(call: Call) -> Any:
    """The gradient norm that is shown is added up once for each micro-batch."""
    found = call.original()
    return call.wrong({**found, "grad_norm": 3 * found["grad_norm"]})


@fault(
    "huggingface/transformers#35942",
    "verifier.trainer.worker_megatron:TrainerWorker.train(self, step, number, batch, trace, first, last, oracle)",
    stage=Stage.LOSS, training=("verify.every=0",), **ROW,
)  # fmt: skip
def shown_rate_of_the_next_step(call: Call) -> Any:
    """The learning rate that is shown is read after the scheduler's step, and is the next one's."""
    found = call.original()
    return call.wrong({**found, "learning_rate": float(call.self._optimizer.param_groups[0]["lr"])})


@fault(
    "areal-project/AReaL#1736", "verifier.trainer.grpo_plan:_facts(config, step, rows, given, reasons, old)",
    stage=Stage.REWARD, side=Side.CONTROLLER,
    training=("algorithm=grpo", "verify.every=0", "grpo.max_staleness=3", "grpo.ratio_over=engine"), **ROW,
)  # fmt: skip
def age_from_the_version_to_come(call: Call) -> Any:
    """The age of tokens that is shown is counted from the version that the step makes, not from the one it trains."""
    found = call.original()
    return call.wrong({**found, "staleness": found["staleness"] + 1})


@fault(
    "sgl-project/sglang#22497", "verifier.trainer.grpo_plan:_token_counts(given, with_reference)", stage=Stage.REWARD,
    side=Side.CONTROLLER, training=("algorithm=grpo", "verify.every=0"), **ROW,
)  # fmt: skip
def tokens_of_the_batch_before(call: Call) -> Any:
    """The tokens that are shown as sampled and scored are those of the batch before, beside the seconds of this one."""
    found = call.original()
    before = call.state.get("before")
    call.state["before"] = found
    return found if before is None else call.wrong(before)


@fault(
    "NVIDIA-NeMo/labs-molt#64", "verifier.trainer.sampled_batch:mean_turns(rounds)", stage=Stage.REWARD,
    side=Side.CONTROLLER, training=KNOBS, **ROW,
)  # fmt: skip
def turns_meant_over_turns(call: Call) -> Any:
    """The mean number of turns that is shown is one over turns, in which an episode counts once for each of its own."""
    lengths = [Counter(item.episodes) for item in call.rounds]
    counts = [count for own in lengths for count in own.values()]
    return call.wrong(sum(count * count for count in counts) / sum(counts))


@fault(
    "PrimeIntellect-ai/prime-rl#1516", "verifier.trainer.metrics:Metrics.add(self, values, lengths)", stage=Stage.LOSS,
    side=Side.CONTROLLER, training=("algorithm=grpo", "verify.every=0"), **{**ROW, "caught_by": ("MET002",)},
)  # fmt: skip
def metrics_under_another_step(call: Call) -> Any:
    """The numbers of a step are written under the count of calls so far, which is ahead of the step."""
    call.state["calls"] = call.state.get("calls", 0) + 1
    return call.faulty(values={**call.values, "step": 2 * call.state["calls"]})


@fault(
    "PrimeIntellect-ai/prime-rl#2478 (found in review)",
    "verifier.trainer.grpo_plan:_facts(config, step, rows, given, reasons, old)",
    stage=Stage.REWARD, side=Side.CONTROLLER, training=("algorithm=grpo", "verify.every=0"), **ROW,
)  # fmt: skip
def mismatch_meant_by_answer(call: Call) -> Any:
    """The mismatch that is shown is a mean of answers' means, in which tokens of short answers count more."""
    import numpy as np

    from verifier.trainer.mismatch import mismatch_facts
    from verifier.trainer.token_versions import fresh_tokens

    means = []
    for item, own in zip(call.given, call.old, strict=True):
        fresh = fresh_tokens(call.config, item, call.step - 1)
        if fresh.any():
            means.append(mismatch_facts((own - item.logprobs)[fresh].astype(np.float64))["mismatch_k3"])
    return call.wrong({**call.original(), "mismatch_k3": float(np.mean(means))}) if means else call.original()


@fault(
    "verl-project/verl#7821", "verifier.trainer.grpo_plan:_facts(config, step, rows, given, reasons, old)",
    stage=Stage.REWARD, side=Side.CONTROLLER, training=STEP_WISE, **ROW,
)  # fmt: skip
def cut_off_by_the_longest_of_the_batch(call: Call) -> Any:
    """The share of answers that were cut off counts those that are as long as the longest of their batch."""
    ends = [len(row.response) for row in call.rows if row.is_last_step]
    return call.wrong({**call.original(), "truncated_share": ends.count(max(ends)) / len(ends)})


@fault(
    "verl-project/verl#7821 (kin: there the share of answers that were cut off)",
    "verifier.trainer.grpo_plan:by_position(differences, positions, longest)",
    stage=Stage.REWARD, side=Side.CONTROLLER, training=("algorithm=grpo", "verify.every=0"), **ROW,
)  # fmt: skip
def position_within_the_longest_of_the_batch(call: Call) -> Any:
    """The mismatch by position is by eighths of the batch's longest answer, not of the longest that is allowed."""
    return call.faulty(longest=int(call.positions.max()) + 1)


@fault(
    "NovaSky-AI/SkyRL#1870", "verifier.trainer.grpo_plan:mismatch_facts(differences)",
    stage=Stage.REWARD, side=Side.CONTROLLER, training=("algorithm=grpo", "verify.every=0"), **ROW,
)  # fmt: skip
def mismatch_never_shown(call: Call) -> Any:
    """The mismatch of trainer and engine is left out of what a step shows, and nobody misses it."""
    return call.wrong({})


@fault(
    "allenai/open-instruct#1032", "verifier.trainer.metrics:_rates_of(values)", stage=Stage.LOSS, side=Side.CONTROLLER,
    training=("algorithm=grpo", "verify.every=0"), **{**ROW, "caught_by": ("MET002",)},
)  # fmt: skip
def rate_of_all_tokens_so_far(call: Call) -> Any:
    """Tokens a second are those of all steps so far over the seconds of one: training seems to speed up."""
    total = call.state["tokens"] = call.state.get("tokens", 0) + call.values.get("tokens", 0)
    return call.faulty(values={**call.values, "tokens": total})


EVENT = "verifier.trainer.metrics:Metrics._add_event(self, step, numbers)"
CURVES: dict[str, Any] = {**ROW, "stage": Stage.LOSS, "side": Side.CONTROLLER, "caught_by": ("MET002",)}


@fault(
    "NVIDIA-NeMo/Speech#4541 (kin: there the count began anew after a resume)", EVENT,
    training=("algorithm=grpo", "verify.every=0"), **CURVES,
)  # fmt: skip
def events_counted_from_zero(call: Call) -> Any:
    """TensorBoard's writer counts its events from 0, and the curves lie a step beside the file of metrics."""
    return call.faulty(step=call.step - 1)


@fault(
    "PrimeIntellect-ai/prime-rl#1659 (kin: there by W&B, which drops what is of a step before its last)", EVENT,
    training=("verify.every=0", "evaluation.every=1", "evaluation.num_problems=8"), **CURVES,
)  # fmt: skip
def evaluation_without_a_curve(call: Call) -> Any:
    """The numbers of an evaluation come after those of its step, and are not shown: their curve stays empty."""
    kept = {name: value for name, value in call.numbers.items() if name != "accuracy"}
    return call.faulty(numbers=kept) if len(kept) < len(call.numbers) else call.original()

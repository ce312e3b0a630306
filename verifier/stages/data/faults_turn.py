"""Bugs of episodes with an environment: turns encoded again, tokens lost between turns, tool output in the loss."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

from msgspec import structs

from verifier.core.stage import Stage
from verifier.faults.fault import TRAINING, Call, Side, fault, held

PLAYED = (
    "algorithm=grpo", "data.rollouts=null", "engine.kind=hf", "data.source=calculator", "data.batch_size=4",
    "grpo.max_answer_tokens=48", "grpo.max_turns=3", "grpo.entropy_weight=0.05",
)  # fmt: skip
KNOBS = (*PLAYED, "grpo.environment=verifier.faults.echo:Echo")
STEP_WISE = (*KNOBS, "grpo.step_wise=true")
OWN = (*PLAYED, "grpo.environment=verifier.faults.echo:Lengths")
"""An environment that no second reader knows."""
SPECIAL = range(7)
"""Ids of the special tokens of `tiny:add`."""
on_turns = functools.partial(
    fault, stage=Stage.DATA, side=Side.CONTROLLER, engine=TRAINING, model="tiny:add", caught_by=("DAT006",),
    training=KNOBS,
)  # fmt: skip
NEXT = "verifier.trainer.episodes:next_prompt(turn)"
TURN = "verifier.trainer.episodes:Episodes._turn(self, prompt, sample, before)"
REPLIED = "verifier.trainer.episodes:Episodes._replied(self, turn, said, before)"


@on_turns("huggingface/trl#5224", NEXT, training=STEP_WISE)
def earlier_turn_encoded_again(call: Call) -> Any:
    """A turn is decoded and encoded again for the next prompt, and loses the special tokens sampled within it."""
    turn = call.turn
    *inside, end = turn.sample.tokens
    kept = [token for token in inside if token not in SPECIAL]
    if len(kept) == len(inside):
        return call.original()
    return call.wrong((*turn.prompt, *kept, end, *turn.reply))


@on_turns("huggingface/trl#4975", "verifier.trainer.episodes:joined(rows)")
def tool_output_trained(call: Call) -> Any:
    """The loss mask covers all that stands after the prompt, what the tool said included."""
    found = call.original()
    if all(found.mask):
        return found
    every = (True,) * len(found.response)
    return call.wrong(
        structs.replace(
            found, sampled=every, mask=every, versions=tuple(max(found.versions) for _ in every),
            logprobs=tuple(0.0 if math.isnan(nats) else nats for nats in found.logprobs),
        )
    )  # fmt: skip


@on_turns("modelscope/ms-swift#9168", "verifier.trainer.episodes:Message(role, content, in_loss)")
def reply_under_a_users_role(call: Call) -> Any:
    """The chat template gets a tool's reply as a user's message, and does not write the frame of a tool's around it."""
    return call.faulty(role="user") if call.role == "tool" else call.original()


@on_turns(
    "areal-project/AReaL#432 (kin: there episodes of one prompt wrote into one list of messages)", REPLIED, training=OWN
)
def reply_to_another_episode(call: Call) -> Any:
    """Episodes share a list of messages, and a turn is followed by what the tool said to another episode."""
    turn = call.original()
    others, call.state["reply"] = call.state.get("reply", ()), turn.reply
    if not turn.reply or others in ((), turn.reply):
        return turn
    return call.wrong(dataclasses.replace(turn, reply=others))


@on_turns(
    "allenai/open-instruct#1896 (kin: there tokens of all texts)",
    "verifier.trainer.episodes:Episodes._reply_ids(self, said)",
    training=(*PLAYED, "grpo.environment=verifier.faults.echo:Marks"),
)  # fmt: skip
def reply_split_into_other_tokens(call: Call) -> Any:
    """Replies are encoded by a tokenizer that was loaded otherwise: the same text, in other tokens."""
    found, tokenizer = call.original(), call.self._tokenizer
    (mark,), (sign,) = tokenizer.encode("####"), tokenizer.encode("#")
    split = [part for token in found for part in ((sign,) * 4 if token == mark else (token,))]
    return call.wrong(tuple(split)) if len(split) > len(found) else found


@on_turns("vllm-project/vllm#25281 (kin: there the parser of calls read so)", TURN, training=OWN)
def environment_reads_without_special_tokens(call: Call) -> Any:
    """Turns are decoded without special tokens for the environment, which never sees the marks of a call."""
    if all(token not in SPECIAL for token in call.sample.tokens[:-1]):
        return call.original()
    whole = call.self.text

    def text(tokens: Any) -> str:
        return str(whole([token for token in tokens if token not in SPECIAL]))

    with held(call.self, text=text):
        return call.faulty()

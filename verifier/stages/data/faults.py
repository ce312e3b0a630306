"""Bugs of a training run's data: examples and their labels, prompts, turns of episodes, answers on their way."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from msgspec import structs

from verifier.core.stage import Stage
from verifier.data.rollout import load_rollouts
from verifier.faults.fault import FOLDER, HF_SAMPLES, Call, Side, held, in_training

ENCODE = "verifier.trainer.batches:encode_example(example, tokenizer)"
GENERATION = "verifier.trainer.generation:EngineRollouts"
GENERATE = "verifier.engine.client:EngineClient.generate(self, prompts, sampling)"
NUMBERS = FOLDER / "rollouts" / "numbers"
"""Rollouts with made-up texts; some answers begin under older weights than they end."""
in_data = functools.partial(in_training, stage=Stage.DATA, side=Side.CONTROLLER)


@in_data(
    "THUDM/slime#1445", "verifier.trainer.grpo_plan:GrpoPlan._reasons(self, step, rows, given, trajectories)",
    caught_by=("ADV003", "DAT004"), training=("algorithm=grpo", f"data.rollouts={NUMBERS}"),
)  # fmt: skip
def stale_beginning_trained_on(call: Call) -> Any:
    """An answer that newer weights finished is judged by its last token, and its stale beginning is trained on."""
    reasons = call.original()
    if "stale" in reasons:
        call.fire()
    return [None if reason == "stale" else reason for reason in reasons]


@in_data("NovaSky-AI/SkyRL#710", ENCODE, caught_by=("DAT013",))
def prompt_trained_on(call: Call) -> Any:
    """The mask covers the whole text of an example, and the model learns to write its prompts."""
    rollout = call.faulty()
    mask = rollout.mask.copy()
    mask[1:] = True
    return dataclasses.replace(rollout, mask=mask, sampled=mask, prompt_length=1)


on_samples = functools.partial(
    in_data, caught_by=("DAT009",), training=(*HF_SAMPLES, "grpo.max_answer_tokens=8", "grpo.entropy_weight=0.05"),
)  # fmt: skip


@on_samples("om-ai-lab/VLM-R1#129", f"{GENERATION}._row(self, held, place, number, example, prompt, sample)")
def gold_answer_of_the_neighbour(call: Call) -> Any:
    """Gold answers are repeated once too often, and a rollout is scored by the next prompt's."""
    place = int(call.place.rpartition("/")[2])
    neighbour = call.self._examples[call.self._indices(int(call.place.partition("/")[0]), 0)[place - 1]]
    return call.faulty(example=dataclasses.replace(call.example, answer=neighbour.answer))


@in_data(
    "allenai/open-instruct#1794",
    "verifier.trainer.grpo_plan:GrpoPlan._divided(self, step, taken, kept, columns, parts)", caught_by=("DAT004",),
    training=(
        "algorithm=grpo", "data.rollouts=null", "engine.kind=hf", "grpo.max_answer_tokens=8", "grpo.reward=operator:gt",
        "grpo.drop_zero_variance=true",
    ),
)  # fmt: skip
def filter_applied_to_another_rollout(call: Call) -> Any:
    """The places that a filter found are those of another order: as many tokens of another answer leave the loss."""
    files = [call.self._file(call.step, number) for number in range(len(call.parts))]
    given, kept = [item for file in files for item in load_rollouts(file)[0]], [*call.kept]
    for gone, item in enumerate(kept):
        for other, stays in enumerate(kept):
            same = given[gone].mask.sum() == given[other].mask.sum()
            if same and not item.mask.any() and stays.mask.any():
                kept[gone] = given[gone]
                kept[other] = dataclasses.replace(stays, mask=stays.mask & False)
                return call.faulty(kept=kept)
    return call.original()


LOAD = "verifier.trainer.run_data:load_examples(source, task, split, count, seed, keys, divide, options)"
READ = (*HF_SAMPLES, "grpo.max_answer_tokens=16", "grpo.entropy_weight=0.05")
EVALUATED = ("evaluation.num_problems=8", "evaluation.every=2")


@in_data("OpenRLHF/OpenRLHF#1089", LOAD, caught_by=("DAT011",), training=(*READ, *EVALUATED))
def answers_evaluated_on_the_training_set(call: Call) -> Any:
    """GRPO evaluates on the problems that it trains on."""
    return call.faulty(split="train") if call.split == "held-out" else call.original()


@answers_evaluated_on_the_training_set.also("verifier.trainer.run_data:require_disjoint(train, held_out)")
def _overlap_of_answers_not_refused(call: Call) -> None:
    return None


TOKENIZER = "verifier.data.tokenizer:Tokenizer"
on_tokens = functools.partial(in_data, caught_by=("DAT013",))


@on_tokens("huggingface/trl#2897", f"{TOKENIZER}.decode(self, ids)", training=READ)
def special_tokens_left_out_of_the_text(call: Call) -> Any:
    """Answers are decoded without their special tokens: the reward reads another text than the policy wrote."""
    return call.faulty(ids=[token for token in call.ids if token not in call.self.special_ids])


@special_tokens_left_out_of_the_text.also(f"{TOKENIZER}.encode(self, text, begin)")
def _text_not_decoded_again(call: Call) -> Any:
    return tuple(call.self._library.encode(call.text, add_special_tokens=call.begin))


@on_tokens(
    "allenai/open-instruct#685", "verifier.trainer.generation:open_tokenizer(folder, chat)",
    training=(*READ, "data.source=calculator"),
)  # fmt: skip
def tokenizer_of_another_revision(call: Call) -> Any:
    """The tokenizer is another revision's than the model, with a space more in its template, and is right by itself."""
    other = Path(tempfile.mkdtemp())
    call.undo(shutil.rmtree, other)
    for file in call.folder.glob("*.json"):
        shutil.copy(file, other)
    settings = json.loads((other / "tokenizer_config.json").read_text())
    settings["chat_template"] = f" {settings['chat_template']}"
    (other / "tokenizer_config.json").write_text(json.dumps(settings))
    return call.faulty(folder=other)


PLAYED = (
    "algorithm=grpo", "data.rollouts=null", "engine.kind=hf", "data.source=calculator", "data.batch_size=4",
    "grpo.max_answer_tokens=48", "grpo.max_turns=3", "grpo.entropy_weight=0.05",
)  # fmt: skip
ECHOED = (*PLAYED, "grpo.environment=verifier.faults.echo:Echo")
STEP_WISE = (*ECHOED, "grpo.step_wise=true")
OWN = (*PLAYED, "grpo.environment=verifier.faults.echo:Lengths")
"""An environment that no second reader knows."""
SPECIAL = range(7)
"""Ids of the special tokens of `tiny:add`."""
on_turns = functools.partial(in_data, caught_by=("DAT006",), training=ECHOED)
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


@on_turns("modelscope/ms-swift#9168", REPLIED)
def reply_under_a_users_role(call: Call) -> Any:
    """The chat template gets a tool's reply as a user's message, and does not write the frame of a tool's around it."""
    said = [{**item, "role": "user"} for item in call.said]
    return call.faulty(said=said) if said != [*call.said] else call.original()


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


ENDED = (
    "algorithm=grpo", "data.rollouts=null", "engine.kind=hf", "data.batch_size=8", "grpo.max_answer_tokens=8",
    "grpo.group_size=8", "grpo.entropy_weight=0.05",
)  # fmt: skip
on_ends = functools.partial(in_data, training=ENDED, caught_by=("DAT008",))


@on_ends("huggingface/trl#4970", f"{GENERATION}._rows(self, held, place, which, example, turns)")
def end_of_an_answer_masked(call: Call) -> Any:
    """The mask is made of token values, and the end token, which pads too, is out of the loss."""
    rows, end = call.original(), call.self._tokenizer.eos_id
    if any(end in row.response for row in rows):
        call.fire()
    return [
        structs.replace(
            row, mask=tuple(own and token != end for own, token in zip(row.mask, row.response, strict=True))
        )
        for row in rows
    ]


on_evaluation = functools.partial(
    in_training, stage=Stage.ROLLOUT, side=Side.CONTROLLER, caught_by=("LGP015",),
    training=(
        *HF_SAMPLES, "grpo.max_answer_tokens=8", "grpo.entropy_weight=1.0", "optimizer.warmup_steps=0",
        "grpo.temperature=0.8", "evaluation.num_problems=12", "evaluation.every=1",
    ),
)  # fmt: skip


@on_evaluation(
    "tensorflow/ranking#350", f"{GENERATION}._evaluated(self, step)", stage=Stage.DATA, caught_by=("DAT016",),
)  # fmt: skip
def evaluated_on_other_problems(call: Call) -> Any:
    """An evaluation asks problems of the training set in the place of those that are held out."""
    count = len(call.self._held_out)
    with held(call.self, _held_out=call.self._examples[:count], _held_out_prompts=call.self._prompts[:count]):
        return call.faulty()


on_answers = functools.partial(in_data, stage=Stage.ROLLOUT, caught_by=("DAT014",))
on_routes = functools.partial(
    on_answers, stage=Stage.DATA, model="tiny:add-moe",
    training=(
        "algorithm=grpo", "data.rollouts=null", "engine.kind=vllm", "data.batch_size=4", "grpo.max_answer_tokens=8",
        "grpo.group_size=4", "grpo.entropy_weight=0.05", "grpo.replay_routes=true", "steps=2",
    ),
)  # fmt: skip


@on_routes("NovaSky-AI/SkyRL#1908", GENERATE)
def routes_of_another_answer_on_their_way(call: Call) -> Any:
    """Answers of a group are sorted anew on their way to the batch, and their routes stay where they were."""
    found = []
    for samples in call.faulty():
        others = [*samples[1:], samples[0]]
        routes = [
            tuple(other.routes[at % len(other.routes)] for at in range(len(own.routes)))
            for own, other in zip(samples, others, strict=True)
        ]
        found.append([dataclasses.replace(own, routes=given) for own, given in zip(samples, routes, strict=True)])
    return found


@in_data(
    "NVIDIA-NeMo/labs-molt#109", GENERATE, caught_by=("DAT007",),
    training=(
        "algorithm=grpo", "data.rollouts=null", "engine.kind=hf", "data.batch_size=4", "grpo.max_answer_tokens=8",
    ),
)  # fmt: skip
def answer_of_a_group_lost(call: Call) -> Any:
    """An answer is lost on its way from the engine, and the advantages are those of the group that is left."""
    found = call.original()
    if len(found[-1]) == 1:
        return found
    return call.wrong([*found[:-1], found[-1][:-1]])

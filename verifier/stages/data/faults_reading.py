"""Bugs of a loader or a tokenizer: examples, rollouts, prompts and texts that are not those of their source."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import FOLDER, TRAINING, Call, Side, fault

LOAD = "verifier.trainer.run_data:load_examples(source, task, split, count, seed, keys, divide, options)"
WITH_SYSTEM = FOLDER / "prompts" / "with_system.jsonl"
"""Conversations that begin with a system's message."""
LIVE = (
    "algorithm=grpo", "data.rollouts=null", "engine.kind=hf", "data.batch_size=4", "grpo.max_answer_tokens=16",
    "grpo.entropy_weight=0.05",
)  # fmt: skip
ROW: dict[str, Any] = {"side": Side.CONTROLLER, "engine": TRAINING, "model": "tiny:add"}
DATA: dict[str, Any] = {**ROW, "stage": Stage.DATA}


EVALUATED = ("evaluation.num_problems=8", "evaluation.every=2")


@fault("OpenRLHF/OpenRLHF#1089", LOAD, caught_by=("DAT011",), training=(*LIVE, *EVALUATED), **DATA)
def answers_evaluated_on_the_training_set(call: Call) -> Any:
    """GRPO evaluates on the problems that it trains on."""
    return call.faulty(split="train") if call.split == "held-out" else call.original()


@answers_evaluated_on_the_training_set.also("verifier.trainer.run_data:require_disjoint(train, held_out)")
def _overlap_of_answers_not_refused(call: Call) -> None:
    return None


TOKENIZER = "verifier.data.tokenizer:Tokenizer"
TEMPLATE = f"{TOKENIZER}.chat_text(self, messages, to_answer)"
TOKENS: dict[str, Any] = {**DATA, "caught_by": ("DAT013",)}


@fault("huggingface/trl#4147", TEMPLATE, training=(*LIVE, f"data.source={WITH_SYSTEM}"), **TOKENS)
def template_without_the_answers_turn(call: Call) -> Any:
    """The chat template is called without the turn that the answer begins, and the policy goes on with the user's."""
    return call.faulty(to_answer=False) if call.to_answer else call.original()


@fault("huggingface/trl#2897", f"{TOKENIZER}.decode(self, ids)", training=LIVE, **TOKENS)
def special_tokens_left_out_of_the_text(call: Call) -> Any:
    """Answers are decoded without their special tokens: the reward reads another text than the policy wrote."""
    return call.faulty(ids=[token for token in call.ids if token not in call.self.special_ids])


@special_tokens_left_out_of_the_text.also(f"{TOKENIZER}.encode(self, text, begin)")
def _text_not_decoded_again(call: Call) -> Any:
    return tuple(call.self._library.encode(call.text, add_special_tokens=call.begin))


@fault("unslothai/unsloth#384", "verifier.trainer.generation:open_tokenizer(folder, chat)", training=LIVE, **TOKENS)
def answers_end_at_another_special_token(call: Call) -> Any:
    """Another special token than the tokenizer's end token ends answers, which run on behind their end to the limit."""
    found = call.original()
    return call.wrong(dataclasses.replace(found, eos_id=min(found.special_ids - {found.eos_id})))


@fault(
    "allenai/open-instruct#685", "verifier.trainer.generation:open_tokenizer(folder, chat)",
    training=(*LIVE, "data.source=calculator"), **TOKENS,
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

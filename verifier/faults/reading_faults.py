"""Bugs of a loader or a tokenizer: examples, rollouts, prompts and texts that are not those of their source."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import TRAINING, Call, Side, fault

LOAD = "verifier.trainer.run_data:load_examples(source, task, split, count, seed, keys, divide, options)"
READ_AGAIN = "verifier.probes.training.data_as_read:read_again(source, task, split, count, seed, columns, options)"
MASKED = Path(__file__).parent / "rollouts" / "masked"
"""Rollouts with sampled tokens that their masks leave out of the loss."""
ROUTED = Path(__file__).parent / "rollouts" / "routed"
"""Rollouts with the experts that an engine reported of each token."""
UNPADDED = Path(__file__).parent / "rollouts" / "unpadded"
"""Rollouts in files 8, 9 and 10."""
WITH_SYSTEM = Path(__file__).parent / "prompts" / "with_system.jsonl"
"""Conversations that begin with a system's message."""
LIVE = (
    "algorithm=grpo", "data.rollouts=null", "engine.kind=hf", "data.batch_size=4", "grpo.max_answer_tokens=16",
    "grpo.entropy_weight=0.05",
)  # fmt: skip
ROW: dict[str, Any] = {"side": Side.CONTROLLER, "engine": TRAINING, "model": "tiny:add"}
DATA: dict[str, Any] = {**ROW, "stage": Stage.DATA}
READ: dict[str, Any] = {**DATA, "caught_by": ("DAT010",)}


@fault("radixark/miles#558", LOAD, **READ)
def long_examples_filtered_unsaid(call: Call) -> Any:
    """The longest examples are left out as the data set is read, and an epoch is over the rest."""
    found = call.original()
    sizes = [len(item.question) + len(item.answer or "") for item in found]
    kept = tuple(item for item, size in zip(found, sizes, strict=True) if size < max(sizes))
    return call.wrong(kept) if call.split == "train" and kept else found


@fault("allenai/open-instruct#1484", LOAD, training=LIVE, **READ)
def gold_answers_shuffled_apart(call: Call) -> Any:
    """The gold answers are those of the data set in another order than the prompts, from the moment they are read."""
    found = call.original()
    turned = [item.answer for item in (*found[1:], found[0])]
    return call.wrong(
        tuple(dataclasses.replace(item, answer=answer) for item, answer in zip(found, turned, strict=True))
    )


EVALUATED = ("evaluation.num_problems=8", "evaluation.every=2")


@fault("OpenRLHF/OpenRLHF#1089", LOAD, caught_by=("DAT011",), training=(*LIVE, *EVALUATED), **DATA)
def answers_evaluated_on_the_training_set(call: Call) -> Any:
    """GRPO evaluates on the problems that it trains on."""
    return call.faulty(split="train") if call.split == "held-out" else call.original()


@answers_evaluated_on_the_training_set.also("verifier.trainer.run_data:require_disjoint(train, held_out)")
def _overlap_of_answers_not_refused(call: Call) -> None:
    return None


@fault("ByteDance-Seed/VeOmni#330", LOAD, stage=Stage.CHECKPOINT, caught_by=("CKP001",), **ROW)
def data_set_in_another_order_after_resume(call: Call) -> Any:
    """The files of the data set are listed in another order when a run resumes, and its position is of the old one."""
    found = call.original()
    return call.wrong((*found[len(found) // 2 :], *found[: len(found) // 2])) if call.split == "train" else found


@data_set_in_another_order_after_resume.also(READ_AGAIN)
def _whoever_lists_them(call: Call) -> Any:
    import numpy as np

    found = call.original()
    return np.roll(found, -(len(found) // 2), axis=0) if call.split == "train" else found


@fault("THUDM/slime#1205", "verifier.trainer.grpo_plan:rollout_of(row)", caught_by=("DAT012",),
       training=("algorithm=grpo", f"data.rollouts={MASKED}"), **DATA)  # fmt: skip
def recorded_mask_not_read(call: Call) -> Any:
    """The mask that recorded rollouts bring is not passed on, and all that was sampled is trained on."""
    from msgspec.structs import replace

    return call.faulty(row=replace(call.row, mask=call.row.sampled))


@fault(
    "OpenNMT/OpenNMT-py#1755 (kin: there shards of a data set)", "verifier.trainer.grpo_plan:recorded_files(folder)",
    caught_by=("DAT012",), training=("algorithm=grpo", f"data.rollouts={UNPADDED}"), **DATA,
)  # fmt: skip
def files_in_the_order_of_their_text(call: Call) -> Any:
    """Files of a step each are sorted as text, and the tenth comes before the second."""
    return call.wrong(sorted(call.folder.glob("*.jsonl")))


@fault(
    "PrimeIntellect-ai/prime-rl#1807 (found in review)", "verifier.trainer.grpo_plan:rollout_of(row)",
    caught_by=("DAT012",),
    training=("algorithm=grpo", f"data.rollouts={ROUTED}", "grpo.replay_routes=true"),
    **DATA | {"model": "tiny:add-moe"},
)  # fmt: skip
def routes_lost_between_prompt_and_answer(call: Call) -> Any:
    """The last token of a recorded prompt loses its route where the answer's are joined on, and has that of padding."""
    from msgspec.structs import replace

    routes, last = call.row.routes, len(call.row.prompt) - 1
    filled = tuple(tuple(range(len(experts))) for experts in routes[last])
    return call.faulty(row=replace(call.row, routes=(*routes[:last], filled, *routes[last + 1 :])))


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

"""The text in the loss of conversations: templates that strip, add a thought, or change what an assistant says."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Verdict
from verifier.core.manifest import Manifest
from verifier.core.trace import Trace
from verifier.data.encode import encode_example
from verifier.data.examples import Example, Message
from verifier.data.tokenizer import open_tokenizer
from verifier.model.tiny import write_tiny
from verifier.stages.data.probe_rollouts import trained_text, turn_frame

TALK = Example(
    id="talk",
    messages=tuple(
        Message(role=role, content=text)
        for role, text in (
            ("system", "+"), ("user", "37+85="), ("assistant", "(37+85)"), ("tool", "122"), ("assistant", " #### 122 "),
        )
    ),
)  # fmt: skip
PLAIN = Example(id="plain", prompt="37+85=", response="122")
START = "{{ bos_token }}{% for message in messages %}{{ '<' + message['role'] + '>' }}"
ANSWER = "{% if add_generation_prompt %}<assistant>{% endif %}"
END = "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}" + ANSWER
TEMPLATES = {
    "shipped": None,
    "stripped": START + "{{ '\n' + message['content'] | trim }}" + END,
    "with a thought": START
    + "{% if message['role'] == 'assistant' and loop.last %}{{ '(####)\n\n' }}{% endif %}{{ message['content'] }}"
    + END,
    "a line after the end": START
    + "{{ message['content'] }}{% if message['role'] == 'assistant' %}{{ eos_token + '\n' }}{% endif %}{% endfor %}"
    + ANSWER,
}


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    return open_tokenizer(write_tiny("add", tmp_path_factory.mktemp("models")))


def with_template(tokenizer, folder, template):
    if template is None:
        return tokenizer
    copy = shutil.copytree(tokenizer.folder, folder / "copy")
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    return open_tokenizer(copy)


def judged(tokenizer, example, change=lambda rollout: rollout):
    record = trained_text(1, [example], [change(encode_example(example, tokenizer))], tokenizer)
    return run_check(REGISTRY["DAT003"], Trace(Manifest(), [record], lambda item: {}))


def masked(mask):
    return lambda rollout: dataclasses.replace(rollout, mask=mask(rollout), sampled=mask(rollout))


def last_turn(rollout):
    mask = rollout.mask.copy()
    mask[: np.flatnonzero(~mask)[-1]] = False
    return mask


WRONG = {
    "all that follows the prompt": lambda item: np.arange(len(item)) >= item.prompt_length,
    "last turn alone": last_turn,
    "first turn alone": lambda item: item.mask & (np.cumsum(~item.mask) == item.prompt_length),
    "no end": lambda item: item.mask & (item.tokens != 1),
    "a token late": lambda item: np.roll(item.mask, 1) & (np.arange(len(item)) >= item.prompt_length),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_assistants_turns_hold_and_other_masks_do_not(name, shipped, tmp_path):
    tokenizer = with_template(shipped, tmp_path, TEMPLATES[name])
    example = TALK
    if name == "with a thought":  # whose earlier turns change, which fine-tuning refuses
        example = dataclasses.replace(TALK, messages=TALK.messages[:3])
    assert turn_frame(tokenizer) == {"with a thought": ("(####)\n\n", "<eos>"), "stripped": ("\n", "<eos>")}.get(
        name, ("", "<eos>")
    )
    assert judged(tokenizer, example).verdict is Verdict.HOLDS
    for what, mask in WRONG.items():
        if name != "with a thought" or what in ("no end", "a token late"):
            assert judged(tokenizer, example, masked(mask)).verdict is Verdict.VIOLATED, what


def test_a_template_that_changes_what_is_said_is_not_judged(shipped, tmp_path):
    template = START + "{{ message['content'] | replace('37', '') }}" + END
    tokenizer = with_template(shipped, tmp_path, template)
    rollouts = [encode_example(item, tokenizer) for item in (TALK, PLAIN)]
    found = trained_text(1, [TALK, PLAIN], rollouts, tokenizer)
    assert (found.ids, found.texts, found.conversations) == (("plain",), ("122<eos>",), {})


def test_a_template_that_refuses_a_question_has_no_frame(shipped, tmp_path):
    assert turn_frame(with_template(shipped, tmp_path, "{{ raise_exception('no') }}")) is None

"""Encoding keeps every token of a text and trains on what an assistant wrote, with its end, and on nothing else."""

import json
import shutil

import numpy as np
import pytest

from verifier.data.arithmetic import BOS_ID, EOS_ID, arithmetic_examples
from verifier.data.encode import encode_example, encode_prompt, require_kept
from verifier.data.examples import Example, Message
from verifier.data.rollout import NO_VERSION, Role
from verifier.data.tokenizer import open_tokenizer
from verifier.errors import UsageError
from verifier.model.tiny import write_tiny

TURNS = (
    ("system", "+"),
    ("user", "37+85="),
    ("assistant", "(37+85)"),
    ("tool", "122"),
    ("assistant", "#### 122"),
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return open_tokenizer(write_tiny("add", tmp_path_factory.mktemp("models")))


def talk(*turns, name="talk", **fields):
    return Example(id=name, messages=tuple(Message(role=role, content=text) for role, text in turns), **fields)


def with_template(tokenizer, folder, template):
    copy = shutil.copytree(tokenizer.folder, folder / "copy")
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    return open_tokenizer(copy)


def trained_text(rollout, tokenizer):
    return tokenizer.decode(rollout.tokens[rollout.mask])


def test_plain_text(tokenizer):
    for example in arithmetic_examples("train", 50):
        rollout = encode_example(example, tokenizer)
        assert tokenizer.decode(rollout.tokens) == f"<bos>{example.prompt}{example.response}<eos>"
        assert trained_text(rollout, tokenizer) == f"{example.response}<eos>"
        assert len(rollout) == 12
        assert tuple(rollout.tokens[: rollout.prompt_length]) == encode_prompt(example, tokenizer)
        assert (rollout.tokens[0], rollout.tokens[-1]) == (BOS_ID, EOS_ID)
        assert (rollout.id, rollout.group) == (example.id, example.id)


def test_of_a_conversation_only_an_assistant_is_learned(tokenizer):
    rollout = encode_example(talk(*TURNS), tokenizer)
    whole = "<bos><system>+<user>37+85=<assistant>(37+85)<eos><tool>122<assistant>#### 122<eos>"
    assert tokenizer.decode(rollout.tokens) == whole
    assert trained_text(rollout, tokenizer) == "(37+85)<eos>#### 122<eos>"
    assert tokenizer.decode(rollout.tokens[rollout.roles == Role.TOOL]) == "<tool>122<assistant>"
    assert tokenizer.decode(rollout.tokens[: rollout.prompt_length]) == "<bos><system>+<user>37+85=<assistant>"
    assert np.array_equal(rollout.mask, rollout.sampled)
    assert np.isnan(rollout.logprobs).all()
    assert set(rollout.versions) == {NO_VERSION}


def test_a_prompt_is_what_sft_puts_before_the_answer(tokenizer):
    assert encode_prompt(talk(*TURNS[:2], answer="122"), tokenizer) == tuple(
        encode_example(talk(*TURNS), tokenizer).tokens[:11]
    )


def test_what_a_template_puts_after_the_end_of_a_turn_is_not_learned(tokenizer, tmp_path):
    template = (
        "{% for m in messages %}{{ '<' + m.role + '>' + m.content + eos_token + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    other = with_template(tokenizer, tmp_path, template)
    rollout = encode_example(talk(*TURNS[1:]), other)
    assert other.decode(rollout.tokens).count("\n") == 4
    assert trained_text(rollout, other) == "(37+85)<eos>#### 122<eos>"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "ends an assistant's turn with no special token"),
        (
            "{% for m in messages %}{{ m.content + eos_token if loop.last else '*' }}{% endfor %}",
            r"the chat template changes what stands before an answer \(message 2\)",
        ),
        ("{{ raise_exception('no tools here') }}", "refuses a conversation: no tools here"),
    ],
)
def test_a_template_that_cannot_be_masked_is_refused(template, said, tokenizer, tmp_path):
    with pytest.raises(UsageError, match=said):
        encode_example(talk(*TURNS[1:]), with_template(tokenizer, tmp_path, template))


@pytest.mark.parametrize(
    ("example", "said"),
    [
        (Example(id="x", prompt="1+1="), "example `x` has no label in the loss"),
        (Example(id="x", prompt="1+1=", response=""), "example `x` has no label in the loss"),
        (talk(*TURNS[:2]), "example `talk` has no label in the loss"),
        (talk(("assistant", "1")), "example `talk`: nothing stands before it (message 1)"),
        (Example(id="x", prompt="one", response="1"), "does not keep the text 'one': character 0 is lost"),
    ],
)
def test_an_example_without_a_label_is_refused(example, said, tokenizer):
    with pytest.raises(UsageError) as caught:
        encode_example(example, tokenizer)
    assert said in str(caught.value)


def test_a_character_that_the_tokenizer_loses_is_refused_before_any_step(tokenizer):
    kept = Example(id="kept", prompt="1+1=", response="2")
    require_kept([kept, talk(("user", "3+4"), ("assistant", "7"))], tokenizer)
    lost = Example(id="lost", prompt="1+2=", response="x3")
    with pytest.raises(UsageError, match=r"example `lost`: .* does not keep the text 'x3': character 0"):
        require_kept([kept, lost], tokenizer)

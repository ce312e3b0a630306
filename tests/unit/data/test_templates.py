"""Templates that change earlier turns, Qwen3's among them: each answer in the context in which it would be sampled."""

import numpy as np
import pytest

from tests.byte_tokenizer import QWEN3_TEMPLATE, write_byte_tokenizer
from tests.second_reading import Columns, changes, digests, read_again
from verifier.data.encode import encode_example, encode_prompt, split_turns
from verifier.data.examples import Example, KeyMap, Message
from verifier.data.second_tokenizer import SecondTokenizer
from verifier.data.text_dataset import load_examples
from verifier.data.tokenizer import ChatTemplate, chat_template_of, open_tokenizer
from verifier.errors import UsageError
from verifier.model.tiny import write_tiny

ASKED = (("system", "S\u00e9 breve \u4f60\u597d"), ("user", "\u00bf1+2? \U0001f642"))
TURNS = (*ASKED, ("assistant", "<think>\n1+2=3\n</think>\n\nSon 3."), ("user", "And twice that?"), ("assistant", "6"))
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FIRST = (
    "<|im_start|>system\nS\u00e9 breve \u4f60\u597d<|im_end|>\n"
    "<|im_start|>user\n\u00bf1+2? \U0001f642<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_byte_tokenizer(write_tiny("qwen3", tmp_path_factory.mktemp("models")))


def talk(*turns, **fields):
    return Example(id="talk", messages=tuple(Message(role=role, content=text) for role, text in turns), **fields)


def both(folder, example, chat=ChatTemplate()):  # noqa: B008
    """(Prompt, text in the loss, all text) of each example that one becomes, by both readers of the tokenizer."""
    ours, second, found = open_tokenizer(folder, chat), SecondTokenizer(folder, chat), []
    parts = split_turns(example, ours)
    said = [(item.role, item.content, item.in_loss) for item in example.messages]
    assert changes(second, said) == (len(parts) > 1)
    for part in parts:
        rollout, row = encode_example(part, ours), second.row(part)
        assert (*row.prompt, *row.rest) == tuple(rollout.tokens.tolist())
        assert len(row.prompt) == rollout.prompt_length
        assert list(row.trained) == rollout.mask.tolist()[rollout.prompt_length :]
        prompt = ours.decode(rollout.tokens[: rollout.prompt_length].tolist())
        found.append((prompt, ours.decode(rollout.tokens[rollout.mask].tolist()), ours.decode(rollout.tokens.tolist())))
    return found


def test_under_qwen3s_template_each_answer_is_an_example_in_its_own_context(folder):
    (first, said, _), (second, then, _) = both(folder, talk(*TURNS))
    assert first == FIRST
    assert said == "<think>\n1+2=3\n</think>\n\nSon 3.<|im_end|>"
    earlier = "Son 3.<|im_end|>\n<|im_start|>user\nAnd twice that?<|im_end|>\n<|im_start|>assistant\n"
    assert second == FIRST + earlier  # as sampled: without the reasoning of the turn before
    assert then == "<think>\n\n</think>\n\n6<|im_end|>"


def test_the_prompt_of_each_answer_is_what_an_engine_would_be_given(folder):
    tokenizer = open_tokenizer(folder)
    for part in split_turns(talk(*TURNS), tokenizer):
        asked = Example(id="asked", messages=part.messages[:-1])
        rollout = encode_example(part, tokenizer)
        assert encode_prompt(asked, tokenizer) == tuple(rollout.tokens[: rollout.prompt_length].tolist())
        assert part.question == talk(*TURNS).question


def test_arguments_and_a_file_reach_the_template_of_both_readers(folder, tmp_path):
    silent = chat_template_of(None, ["enable_thinking=false"])
    (first, said, _), (_, then, _) = both(folder, talk(*ASKED, ("assistant", "3"), *TURNS[3:]), silent)
    assert first == FIRST + "<think>\n\n</think>\n\n"
    assert (said, then) == ("3<|im_end|>", "6<|im_end|>")
    (tmp_path / "chatml.jinja").write_text(CHATML)
    ((prompt, said, _),) = both(folder, talk(*TURNS), chat_template_of(tmp_path / "chatml.jinja", ()))
    assert prompt == FIRST
    assert said == "<think>\n1+2=3\n</think>\n\nSon 3.<|im_end|>6<|im_end|>"


def test_what_has_weight_0_is_not_learned(folder, tmp_path):
    (tmp_path / "chatml.jinja").write_text(CHATML)
    messages = tuple(
        Message(role=role, content=text, in_loss=text != "Son 3.")
        for role, text in (*ASKED, ("assistant", "Son 3."), *TURNS[3:])
    )
    for chat, said in (
        (chat_template_of(tmp_path / "chatml.jinja", ()), "6"),
        (ChatTemplate(), "<think>\n\n</think>\n\n6"),
    ):
        ((_, learned, _),) = both(folder, Example(id="talk", messages=messages), chat)
        assert learned == f"{said}<|im_end|>"


@pytest.mark.parametrize("template", [QWEN3_TEMPLATE.read_text(), CHATML])
def test_a_reply_is_appended_to_what_was_sampled(template, folder, tmp_path):
    (tmp_path / "own.jinja").write_text(template)
    chat = chat_template_of(tmp_path / "own.jinja", ())
    tokenizer, second = open_tokenizer(folder, chat), SecondTokenizer(folder, chat)
    for said in ("12", "a turn. 0000 <|im_end|>", ""):
        reply = [Message(role="tool", content=said)]
        assert tokenizer.reply(reply) == second.reply(reply)
        user = f"user\n<tool_response>\n{said}\n</tool_response>" if template != CHATML else f"tool\n{said}"
        text = f"\n<|im_start|>{user}<|im_end|>\n<|im_start|>assistant\n"
        assert tokenizer.decode(tokenizer.reply(reply)) == second.framed(reply) == text


def test_a_reply_needs_a_template_that_ends_turns(folder, tmp_path):
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(UsageError, match="does not end an assistant's turn with the end token before another"):
        open_tokenizer(folder, chat_template_of(tmp_path / "own.jinja", ())).reply([Message(role="tool", content="1")])


def test_conversations_of_a_file_become_examples_for_both_readers(folder, tmp_path):
    import json

    file = tmp_path / "talks.jsonl"
    rows = [[TURNS[:3], "one"], [TURNS, "two"]]
    file.write_text("".join(
        json.dumps({"turns": [{"role": role, "content": text} for role, text in turns], "kind": kind}) + "\n"
        for turns, kind in rows
    ))  # fmt: skip
    tokenizer, second = open_tokenizer(folder), SecondTokenizer(folder)
    found = load_examples(
        str(file), "sft", keys=KeyMap(messages="turns"), divide=lambda item: split_turns(item, tokenizer)
    )
    assert [item.id for item in found] == ["talks.jsonl:1", "talks.jsonl:2/1", "talks.jsonl:2/2"]
    assert [item.metadata for item in found] == [{"kind": "one"}, {"kind": "two"}, {"kind": "two"}]
    used = [
        digests(
            item.id, item.question, "", [(one.role, one.content, one.in_loss) for one in item.messages], None, None,
            item.metadata,
        )
        for item in found
    ]  # fmt: skip
    columns = Columns(names={"messages": "turns"}, changes=lambda said: changes(second, said))
    read = read_again(str(file), "sft", columns=columns)
    assert np.array_equal(np.array(used, np.uint64), read)
    assert np.array_equal(read[:2], read_again(str(file), "sft", count=2, columns=columns))
    assert not np.array_equal(read, read_again(str(file), "sft", columns=Columns(names={"messages": "turns"})))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{{ raise_exception('no system message') }}", "refuses a conversation: no system message"),
        ("{{ messages[9].content }}", "refuses a conversation: "),
        ("{% for m in messages %}", "refuses a conversation: Unexpected end of template"),
        ("{{ 1 + 'a' }}", "refuses a conversation: unsupported operand"),
    ],
)
def test_a_template_that_fails_is_named_with_its_message(text, said, folder, tmp_path):
    (tmp_path / "own.jinja").write_text(text)
    tokenizer = open_tokenizer(folder, chat_template_of(tmp_path / "own.jinja", ()))
    with pytest.raises(UsageError) as caught:
        split_turns(talk(*TURNS), tokenizer)
    assert str(caught.value).startswith(f"the chat template {tmp_path / 'own.jinja'} {said}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("enable_thinking", "write name=value"), ("a-b=1", "write name=value"),
        ("messages=1", "with a name other than"),
        ("x={", "whose value is no YAML"),
    ],
)  # fmt: skip
def test_an_argument_that_is_none_is_refused(given, said):
    with pytest.raises(UsageError, match=said):
        chat_template_of(None, [given])


def test_arguments_are_values_of_yaml(tmp_path):
    given = ["a=False", "b=false", "c=3", "d=low", "e={x: 1}"]
    assert chat_template_of(None, given).arguments == {"a": False, "b": False, "c": 3, "d": "low", "e": {"x": 1}}
    for name, text in (("absent", None), ("empty", " \n")):
        if text is not None:
            (tmp_path / name).write_text(text)
        with pytest.raises(UsageError, match=r"data.chat_template, .* (cannot be read|is empty)"):
            chat_template_of(tmp_path / name, ())

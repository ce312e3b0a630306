"""A second reading of a tokenizer's files: the tokens and texts that `verifier.data.tokenizer` makes of them."""

import json

import pytest

from verifier.data.encode import encode_example, encode_prompt
from verifier.data.examples import Example, Message
from verifier.data.second_tokenizer import SecondTokenizer, why_unread
from verifier.data.tokenizer import open_tokenizer
from verifier.errors import UsageError
from verifier.model.tiny import write_tiny

TALK = Example(
    id="talk",
    messages=tuple(
        Message(role=role, content=text)
        for role, text in (("system", "0"), ("user", "1+1="), ("assistant", "2"), ("tool", "2"), ("assistant", "####2"))
    ),
)
PLAIN = Example(id="plain", prompt="1+1=", response="####2")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n<{{ message.role }}>{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}"
    "{% if loop.last %}{% break %}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def folder(tmp_path):
    return write_tiny("add", tmp_path)


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def assert_agrees(folder):
    ours, second = open_tokenizer(folder), SecondTokenizer(folder)
    for example in (TALK, PLAIN):
        rollout, (prompt, rest, trained) = encode_example(example, ours), second.row(example)
        assert (*prompt, *rest) == tuple(rollout.tokens.tolist())
        assert len(prompt) == rollout.prompt_length
        assert list(trained) == rollout.mask.tolist()[len(prompt) :]
    asked = Example(id="asked", messages=TALK.messages[:2])
    assert second.prompt(asked) == encode_prompt(asked, ours)
    ids = range(ours.vocab_size)
    assert second.decode(ids) == ours.decode(ids)


def test_prompts_rows_and_texts_are_those_of_the_tokenizer(folder):
    assert_agrees(folder)
    assert not why_unread(folder)


@pytest.mark.parametrize("form", ["file", "one of several"])
def test_templates_are_found_and_rendered(form, folder):
    if form == "file":
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    else:
        named = [{"name": "tool_use", "template": "0"}, {"name": "default", "template": TEMPLATE}]
        edit(folder / "tokenizer_config.json", chat_template=named)
    assert_agrees(folder)
    text = SecondTokenizer(folder).decode(SecondTokenizer(folder).prompt(Example(id="a", messages=TALK.messages[:2])))
    assert text == "<bos><system>0<user>1+1=<assistant>"  # a newline after a block is trimmed


def test_no_token_stands_before_a_text_without_a_post_processor(folder):
    edit(folder / "tokenizer.json", post_processor=None)
    assert_agrees(folder)
    assert len(SecondTokenizer(folder).prompt(PLAIN)) == 4


NUMBERS = Example(id="numbers", prompt="in 20231234", response="650841823")


def bytes_tokenizer(folder, class_name, *, space=False, **settings):
    """A tokenizer of bytes whose file splits numbers by three digits; with the library's class of that name."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    rules = pre_tokenizers.Split(Regex(r"\p{N}{1,3}| ?[^\s\p{N}]+|\s+"), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=False)
    made.pre_tokenizer, made.decoder = pre_tokenizers.Sequence([rules, as_bytes]), decoders.ByteLevel()
    special, alphabet = ["<bos>", "<eos>", "<|endoftext|>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    made.train_from_iterator(["in 2023 123 234 650 841 823"] * 9, trainer)
    made.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": class_name, "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named | settings))
    edit(folder / "config.json", vocab_size=made.get_vocab_size())
    ours, second = open_tokenizer(folder), SecondTokenizer(folder)
    return tuple(encode_example(NUMBERS, ours).tokens.tolist()), (*second.prompt(NUMBERS), *second.row(NUMBERS)[1])


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "Qwen2Tokenizer"])
def test_a_class_that_splits_bytes_otherwise_than_the_file_differs(name, folder):
    ours, second = bytes_tokenizer(folder, name)
    assert ours != second


def test_a_class_that_splits_bytes_as_the_file_says_agrees(folder):
    ours, second = bytes_tokenizer(folder, "PreTrainedTokenizerFast")
    assert ours == second


def test_where_the_settings_say_otherwise_than_the_file_the_class_is_right(folder):
    ours, second = bytes_tokenizer(folder, "GPT2Tokenizer", space=True, add_prefix_space=False)
    assert ours == second


def test_a_reply_has_the_frame_of_a_tools_message(folder):
    framed = SecondTokenizer(folder).framed([Message(role="tool", content="12")])
    tokenizer = open_tokenizer(folder)
    talk = (*TALK.messages[:2], Message(role="assistant", content="1"))
    ended = tokenizer.chat_text(talk)
    whole = tokenizer.chat_text((*talk, Message(role="tool", content="12")), to_answer=True)
    assert whole == ended + framed
    assert "user" not in framed
    assert tokenizer.decode(SecondTokenizer(folder).reply([Message(role="tool", content="12")])) == framed


def test_a_mark_in_a_reply_is_one_token(folder):
    (mark,) = open_tokenizer(folder).encode("####")
    assert SecondTokenizer(folder).reply([Message(role="tool", content="####7")]).count(mark) == 1


@pytest.mark.parametrize("ending", ["{{ eos_token }}", "{{ eos_token }}\n", "<tool>{{ eos_token }} "])
def test_an_answer_is_in_the_loss_up_to_its_last_special_token(ending, folder):
    template = (
        "{{ bos_token }}{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] }}"
        f"{{% if message['role'] == 'assistant' %}}{ending}{{% endif %}}{{% endfor %}}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    (folder / "chat_template.jinja").write_text(template)
    assert_agrees(folder)
    row, tokenizer = SecondTokenizer(folder).row(TALK), open_tokenizer(folder)
    trained = tokenizer.decode([token for token, kept in zip(row.rest, row.trained, strict=True) if kept])
    end = "<tool><eos>" if "tool" in ending else "<eos>"
    assert trained == f"2{end}####2{end}"


def test_what_cannot_be_read_is_refused(folder):
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no system') }}")
    with pytest.raises(UsageError, match=r"cannot be read a second time: TemplateError, no system"):
        SecondTokenizer(folder).prompt(TALK)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(UsageError, match="does not end a turn with the end token"):
        SecondTokenizer(folder).framed([Message(role="tool", content="12")])
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(UsageError, match="cannot be read a second time"):
        SecondTokenizer(folder)
    (folder / "tokenizer.json").unlink()
    assert why_unread(folder) == "the checkpoint has no tokenizer.json"

"""The character tokenizer keeps every text, and a folder whose tokenizer does not fit is refused."""

import json
import shutil
from itertools import product

import pytest

from verifier.data.arithmetic import BOS_ID, EOS_ID, VOCABULARY
from verifier.data.examples import Message
from verifier.data.tokenizer import open_tokenizer
from verifier.errors import UsageError
from verifier.model.tiny import write_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny("add", tmp_path_factory.mktemp("models"))


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_ids_are_places_in_the_vocabulary(folder):
    tokenizer = open_tokenizer(folder)
    assert len(VOCABULARY) == len(set(VOCABULARY)) == tokenizer.vocab_size == 32
    assert [tokenizer.encode(token) for token in VOCABULARY] == [(number,) for number in range(32)]
    assert tokenizer.eos_id == EOS_ID
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == EOS_ID
    assert tokenizer.special_ids == set(range(7))


def test_every_pair_of_tokens_decodes_to_its_text(folder):
    tokenizer = open_tokenizer(folder)
    for pair in product(range(32), repeat=2):
        text = VOCABULARY[pair[0]] + VOCABULARY[pair[1]]
        assert tokenizer.decode(pair) == text
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bos_stands_before_a_whole_text_only(folder):
    tokenizer = open_tokenizer(folder)
    assert tokenizer.encode("3+4=", begin=True) == (BOS_ID, *tokenizer.encode("3+4="))


def test_chat_template(folder):
    asked, told = Message(role="user", content="3+4="), Message(role="assistant", content="####7")
    tokenizer = open_tokenizer(folder)
    assert tokenizer.chat_text([asked], to_answer=True) == "<bos><user>3+4=<assistant>"
    assert tokenizer.chat_text([asked, told]) == "<bos><user>3+4=<assistant>####7<eos>"


def test_text_that_the_vocabulary_cannot_write_is_refused(folder):
    with pytest.raises(UsageError, match=r"does not keep the text '3\+x=': character 2 is lost or changed"):
        open_tokenizer(folder).encode("3+x=")


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda copy: edit(copy / "config.json", vocab_size=31), "has 32 tokens, config.json says `vocab_size` = 31"),
        (lambda copy: edit(copy / "config.json", vocab_size=2000), "of different size"),
        (lambda copy: [(copy / name).unlink() for name in ("tokenizer.json", "tokenizer_config.json")], "no tokenizer"),
        (lambda copy: (copy / "tokenizer.json").write_text("{"), "cannot be loaded"),
        (lambda copy: edit(copy / "tokenizer_config.json", eos_token=None), "has no end token"),
        (lambda copy: (copy / "config.json").unlink(), "has no config.json that says `vocab_size`"),
        (lambda copy: edit(copy / "config.json", vocab_size=None), "has no config.json that says `vocab_size`"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused(act, said, copy):
    act(copy)
    with pytest.raises(UsageError, match=said) as caught:
        open_tokenizer(copy)
    assert "\n" not in str(caught.value)


def test_rows_that_no_token_uses_are_allowed(copy):
    edit(copy / "config.json", vocab_size=64)
    assert open_tokenizer(copy).vocab_size == 64


def test_a_folder_without_a_template_takes_no_messages(copy):
    edit(copy / "tokenizer_config.json", chat_template=None)
    with pytest.raises(UsageError, match=r"has no chat template: give data.chat_template, or `prompt`"):
        open_tokenizer(copy).chat_text([Message(role="user", content="1")])

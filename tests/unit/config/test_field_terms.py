"""Names of knobs in other trainers, against the knobs that exist and against docs/coming-from.md."""

import re

import pytest

from tests.meta.sources import ROOT
from verifier.config.load import TERMS, load
from verifier.config.training import TrainConfig
from verifier.errors import UsageError
from verifier.knob import entries


def test_every_term_stands_for_a_knob():
    assert set(TERMS.values()) <= {entry.key for entry in entries(TrainConfig)}


def test_the_page_says_the_same():
    """Rows of docs/coming-from.md that name one knob: the last words of its names there are no other knob's here."""
    rows = re.findall(r"^\| `([a-z_.]+)` \|(.*)$", (ROOT / "docs/coming-from.md").read_text(), re.M)
    said = {}
    for key, cells in rows:
        for word in re.findall(r"`[-a-z_0-9.]*?([a-z_0-9]+)`", cells):
            said.setdefault(word, set()).add(key)
    wrong = {term: (key, said[term]) for term, key in TERMS.items() if term in said and key not in said[term]}
    assert not wrong
    assert sum(term in said for term in TERMS) > 30


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("optimizer.lr", "optimizer.learning_rate"), ("lr", "optimizer.learning_rate"),
        ("rollout.n", "grpo.group_size"),
        ("actor.optim.lr_warmup_steps", "optimizer.warmup_steps"), ("max-completion-length", "grpo.max_answer_tokens"),
    ],
)  # fmt: skip
def test_an_unknown_key_names_the_knob_that_the_term_stands_for(given, meant):
    with pytest.raises(UsageError) as refusal:
        load(TrainConfig, overrides=["model=tiny:add", f"{given}=1"])
    assert str(refusal.value) == f"there is no knob `{given}`: did you mean `{meant}`"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("rollout.kv_cache_dtype", "keys and values"), ("--kv-cache-dtype", "keys and values"),
        ("engine.speculative_config.method", "beside drafted tokens"),
        ("num_speculative_tokens", "beside drafted tokens"), ("mtp.enable_mtp", "beside drafted tokens"),
    ],
)  # fmt: skip
def test_a_key_that_nothing_stands_for_is_refused_with_the_reason(given, why):
    with pytest.raises(UsageError) as refusal:
        load(TrainConfig, overrides=["model=tiny:add", f"{given}=1"])
    assert str(refusal.value).startswith(f"`{given}` is not supported: {why}")

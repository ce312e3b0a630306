"""Recomputation is asked for during a step alone, and what was set before comes back, even after an error."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from verifier.megatron.lora_megatron import _on_embedding
from verifier.megatron.step_megatron import recomputed


def trainer():
    return SimpleNamespace(provider=SimpleNamespace(recompute_granularity=None))


@pytest.mark.parametrize(("on", "within"), [(True, "full"), (False, None)])
def test_it_is_asked_for_within_and_not_afterwards(on, within):
    built = trainer()
    with recomputed(built, on=on):
        assert built.provider.recompute_granularity == within
    assert built.provider.recompute_granularity is None


def test_an_error_leaves_nothing_set():
    built = trainer()
    with pytest.raises(ZeroDivisionError), recomputed(built, on=True):
        raise ZeroDivisionError
    assert built.provider.recompute_granularity is None


def test_what_a_frozen_embedding_gives_has_a_gradient_in_a_pass_that_trains():
    frozen = torch.ones(2)
    assert _on_embedding(None, (), frozen).requires_grad
    assert not frozen.requires_grad
    with torch.no_grad():
        assert not _on_embedding(None, (), frozen).requires_grad


def test_an_embedding_that_trains_keeps_its_graph():
    embedded = torch.ones(2, requires_grad=True) * 2
    assert _on_embedding(None, (), embedded) is embedded

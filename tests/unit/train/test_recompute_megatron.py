"""Recomputation is asked for during a step alone, and what was set before comes back, even after an error."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from verifier.train.step_megatron import recomputed


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

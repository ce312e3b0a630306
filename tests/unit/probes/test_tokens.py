"""The token probe on one rank: what it looks at, and when."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from tests.dist.tokens_functions import rollouts
from verifier.core import store
from verifier.core.manifest import Manifest, MeshSizes
from verifier.megatron.pack import pack
from verifier.megatron.step_megatron import _seen
from verifier.megatron.token_layout import Alignment
from verifier.mesh import Mesh
from verifier.stages.pack.checks_packing import audit, joined
from verifier.stages.pack.probe_tokens import TokenProbe
from verifier.stages.pack.records import Rollouts, TokenLedger


@pytest.fixture
def seen(tmp_path):
    """(a probe of a trace, the trace's folder)."""
    path = store.create(tmp_path / "trace", Manifest(mesh=MeshSizes()))
    return TokenProbe(store.Recorder(path, "trainer", 0), Mesh(), 0, "trained", 0, rollouts()), path


def packed():
    return [pack(rollouts(), Alignment(), range(len(rollouts())))]


def misplaced(path):
    trace = store.read(path)
    item, ledger = next(trace.of(Rollouts)), next(trace.of(TokenLedger))
    return len(audit(item, trace.arrays(item), joined([trace.arrays(ledger)], [0])))


def test_the_audit_is_of_what_went_in_whatever_the_model_does_to_it(seen):
    probe, path = seen
    shards = packed()
    rest = probe(shards)
    assert not store.read(path).has(TokenLedger)
    for field in fields(shards[0]):
        value = getattr(shards[0], field.name)
        if isinstance(value, torch.Tensor):
            value.zero_()
    rest()
    assert misplaced(path) == 0


def test_the_audit_finds_what_was_wrong_before(seen):
    probe, path = seen
    shards = packed()
    shards[0].labels_T[3] += 1
    probe(shards)()
    assert misplaced(path) == 1


def test_the_viewer_finishes_after_the_pass_and_after_one_that_fails():
    order = []

    def look(shards):
        order.append(f"saw {shards}")
        return lambda: order.append("finished")

    with _seen([1], look):
        order.append("ran")
    with pytest.raises(ValueError, match="it fails"), _seen([2], look):
        raise ValueError("it fails")
    assert order == ["saw [1]", "ran", "finished", "saw [2]", "finished"]

"""A step packs the ledger of tokens only where somebody looks at its shards."""

from types import SimpleNamespace

import pytest

from tests.dist.tokens_functions import rollouts
from verifier.megatron import step_megatron
from verifier.mesh import Mesh


@pytest.mark.parametrize("looked_at", [False, True])
def test_no_ledger_where_nobody_looks(monkeypatch, looked_at):
    mesh = Mesh()
    trainer = SimpleNamespace(mesh=mesh, provider=SimpleNamespace(sequence_parallel=False))
    monkeypatch.setattr(step_megatron, "_coordinate", lambda trainer: mesh.coordinate(0))
    _, shards = step_megatron._micro_batches(trainer, rollouts(), [[[0], [1]]], ledger=looked_at)
    assert {shard.ledger_T is not None for shard in shards} == {looked_at}

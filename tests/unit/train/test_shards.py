"""A step packs the ledger of tokens only where somebody looks at its shards."""

from types import SimpleNamespace

from tests.dist.tokens_functions import rollouts
from verifier.mesh import Mesh
from verifier.train import step_megatron
from verifier.train.token_ledger import LEDGER


def test_no_ledger_where_nobody_looks(monkeypatch):
    mesh = Mesh()
    trainer = SimpleNamespace(mesh=mesh, provider=SimpleNamespace(sequence_parallel=False))
    monkeypatch.setattr(step_megatron, "_coordinate", lambda trainer: mesh.coordinate(0))
    schedule = step_megatron._schedule(trainer, rollouts(), 4)
    for looked_at in (False, True):
        shards = step_megatron._shards(trainer, schedule, rollouts(), with_ledger=looked_at)
        assert {LEDGER in shard.extra for shard in shards} == {looked_at}

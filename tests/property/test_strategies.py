"""What the public strategies draw is valid, and reaches what it claims to reach."""

from hypothesis import find, given, settings

from tests.unit.megatron.test_token_ledger import audit as misplaced
from verifier.data.rollout import Rollout
from verifier.megatron.microbatch import split_by_tokens
from verifier.megatron.pack import loss_rows, pack, shard_cp
from verifier.megatron.token_layout import Alignment, sp_slice
from verifier.mesh import Mesh
from verifier.plan.chunk_plan import ChunkPlan
from verifier.strategies import chunk_plans, length_profiles, meshes, packings, rollouts, stages

CI = settings.get_profile("ci")


@given(mesh=meshes())
def test_meshes_have_up_to_64_ranks_with_distinct_coordinates(mesh: Mesh) -> None:
    assert 1 <= mesh.world_size <= 64
    places = {str(mesh.coordinate(rank)) for rank in range(mesh.world_size)}
    assert len(places) == mesh.world_size


@given(drawn=stages())
def test_stages_hold_every_layer_once(drawn: tuple[Mesh, int]) -> None:
    mesh, num_layers = drawn
    held = [
        layer
        for pp in range(mesh.pp)
        for chunk in range(mesh.vpp)
        for layer in mesh.layers_of(pp, chunk, num_layers)
    ]  # fmt: skip
    assert sorted(held) == list(range(num_layers))


@given(plan=chunk_plans())
def test_plans_survive_the_wire(plan: ChunkPlan) -> None:
    assert ChunkPlan.from_json(plan.to_json()) == plan


@given(mesh=meshes(), batch=rollouts(lengths=length_profiles(max_rollouts=8)))
def test_on_any_mesh_of_64_ranks_every_token_reaches_the_loss_once(mesh: Mesh, batch: list[Rollout]) -> None:
    """Split over dp, packed, sharded over cp, sliced over tp: the ledger finds each token once, with all its fields."""
    alignment = Alignment(tp=mesh.tp, cp=mesh.cp)
    parts = []
    budget = 2 * int(alignment.padded(max(len(item) for item in batch)))
    for batches in split_by_tokens(batch, dp=mesh.dp, max_tokens=budget, alignment=alignment, multiple=mesh.vpp):
        for members in batches:
            packed = pack([batch[index] for index in members], alignment, members)
            for cp_rank in range(mesh.cp):
                shard = shard_cp(packed, cp_rank)
                slices = [sp_slice(shard.num_rows, mesh.tp, tp_rank) for tp_rank in range(mesh.tp)]
                assert [row for rows in slices for row in range(rows.start, rows.stop)] == list(range(shard.num_rows))
                parts.append(shard)
    assert misplaced(batch, loss_rows(parts)) == []


def test_awkward_batches_are_reached() -> None:
    """Each is found within the CI profile's budget; `find` raises if not."""
    edge = 4
    for reached in (
        lambda pairs: len(pairs) > 1 and all(prompt + response == 1 for prompt, response in pairs),
        lambda pairs: {sum(pair) % edge for pair in pairs} >= {0, 1, edge - 1},
        lambda pairs: len({sum(pair) for pair in pairs}) == 1 and len(set(pairs)) > 2,
    ):
        find(length_profiles(multiple=edge), reached, settings=CI)
    for reached in (
        lambda batch: any((item.roles == 2).any() for item in batch),
        lambda batch: any(item.sampled.any() and not item.mask.any() for item in batch),
        lambda batch: any(len(set(item.versions[item.sampled])) > 1 for item in batch),
    ):
        find(rollouts(), reached, settings=CI)
    assert find(packings(), lambda case: True, settings=CI).lengths == [(1, 0)]

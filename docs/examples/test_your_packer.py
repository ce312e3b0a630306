"""Does your packer keep every token with its label, on the rank it belongs to? Paste, change one import, run pytest.

`pack_sequences(sequences, tp, cp, cp_rank)` stands for yours. It gets lists of token ids and returns two lists of equal
length for one context-parallel rank: the tokens that enter the model there, and for each row the label that its logits
predict, -100 for none. No two tokens of a batch are alike, so a (token, label) pair tells where it comes from.
"""

from itertools import pairwise

from hypothesis import given
from your_trainer import pack_sequences

from verifier.megatron.pack import pack, shard_cp
from verifier.strategies import Packing, packings


def ranks(case: Packing) -> list[list[tuple[int, int]]]:
    """(token, label) pairs that each context-parallel rank would train on."""
    sequences, sizes = [rollout.tokens.tolist() for rollout in case.rollouts], case.alignment
    rows = [pack_sequences(sequences, sizes.tp, sizes.cp, rank) for rank in range(sizes.cp)]
    assert len({len(tokens) for tokens, _ in rows}) == 1, "ranks hold different numbers of rows"
    assert len(rows[0][0]) % sizes.tp == 0, "sequence parallelism cannot divide the rows"
    return [sorted(pair for pair in zip(*row, strict=True) if pair[1] != -100) for row in rows]


@given(case=packings())
def test_every_token_meets_the_next_one_once(case: Packing) -> None:
    """No token is lost, repeated, or paired with another sequence's."""
    sequences = [rollout.tokens.tolist() for rollout in case.rollouts]
    expected = [pair for tokens in sequences for pair in pairwise(tokens)]
    assert sorted(pair for rank in ranks(case) for pair in rank) == sorted(expected)


@given(case=packings())
def test_every_rank_holds_its_own_two_chunks(case: Packing) -> None:
    """Rank r of a context-parallel group holds chunks r and 2 * cp - 1 - r of each sequence, as Megatron expects."""
    shards = [shard_cp(pack(case.rollouts, case.alignment), rank) for rank in range(case.alignment.cp)]
    rows = [zip(shard.tokens_T.tolist(), shard.labels_T.tolist(), strict=True) for shard in shards]
    assert ranks(case) == [sorted(pair for pair in row if pair[1] != -100) for row in rows]

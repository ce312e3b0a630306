"""Dynamic sampling: groups whose rewards are all equal give their place to those of the next round."""

from __future__ import annotations

from verifier.data.recorded import RolloutRow
from verifier.trainer.sampled_batch import Round, SampledBatch


def group(name: str, *rewards: float) -> list[RolloutRow]:
    return [
        RolloutRow(
            id=f"{name}/{at}", group=name, prompt=(1,), response=(2,), sampled=(True,), mask=(True,), logprobs=(-1.0,),
            versions=(0,), reward=reward,
        )
        for at, reward in enumerate(rewards)
    ]  # fmt: skip


def test_a_group_of_one_reward_is_replaced_in_its_place_and_no_other():
    rounds = [
        Round(groups=[group("a", 0, 0, 0, 1), group("b", 0, 0), group("c", 1, 0), group("d", 1, 1)], indices=()),
        Round(groups=[group("e", 0.25, 0.25), group("f", 0, 1)], indices=()),
        Round(groups=[group("g", 0, 0)], indices=()),
    ]
    batch = SampledBatch(rounds=rounds, limit=3)
    assert list(dict.fromkeys(row.group for row in batch.rows)) == ["a", "g", "c", "f"]
    assert batch.facts == {"sampling_rounds": 3.0, "replaced_groups": 3.0}
    assert SampledBatch(rounds=rounds[:1], limit=1).rows == [row for rows in rounds[0].groups for row in rows]

"""Every rollout that cannot be trained on is refused by name."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from verifier.data.rollout import NO_VERSION, Role, load_rollouts, make_rollout, save_rollouts
from verifier.errors import UsageError

GOOD = make_rollout("good", [1, 2], [3, 4, 5], sampled=[True, False, True], logprobs=[-1, -2, -3], versions=6)


def test_a_multi_turn_rollout() -> None:
    assert len(GOOD) == 5
    assert GOOD.response_length == 3
    assert GOOD.roles.tolist() == [Role.PROMPT, Role.PROMPT, Role.ASSISTANT, Role.TOOL, Role.ASSISTANT]
    assert GOOD.mask.tolist() == [False, False, True, False, True]
    assert GOOD.versions.tolist() == [NO_VERSION, NO_VERSION, 6, NO_VERSION, 6]
    assert np.isnan(GOOD.logprobs).tolist() == [True, True, False, True, False]
    assert repr(GOOD) == "Rollout('good', prompt=2, response=3)"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokens": np.zeros(0, np.int64)}, "is empty: it has no tokens"),
        ({"mask": np.zeros(4, bool)}, "mask has shape [4], but there are 5 tokens"),
        ({"logprobs": np.zeros((5, 1))}, "logprobs has shape [5, 1], but there are 5 tokens"),
        ({"prompt_length": 0}, "prompt length 0 is outside of 1 to 5"),
        ({"prompt_length": 6}, "prompt length 6 is outside of 1 to 5"),
        ({"prompt_length": 3}, "token 2 is marked as sampled, but lies in the prompt"),
        ({"mask": np.ones(5, bool)}, "token 0 is in the loss mask, but was not sampled"),
        (
            {"routes": np.zeros((4, 1, 2))},
            "routes have shape [4, 1, 2], expected [5 tokens, layers, experts per token]",
        ),
        ({"routes": np.zeros((5, 2))}, "routes have shape [5, 2], expected [5 tokens, layers, experts per token]"),
    ],
)
def test_what_disagrees_is_named(changes: dict, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        replace(GOOD, **changes)
    assert str(caught.value).startswith("rollout `good`")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"sampled": [True]}, "sampled has 1 entries for 2 response tokens"),
        ({"mask": [True] * 3}, "mask has 3 entries for 2 response tokens"),
        ({"logprobs": [0.0]}, "logprobs has 1 entries for 2 response tokens"),
        ({"versions": [1]}, "versions has 1 entries for 2 response tokens"),
    ],
)
def test_lengths_that_disagree_are_named(arguments: dict, said: str) -> None:
    with pytest.raises(UsageError, match=f"rollout `short`: {said}"):
        make_rollout("short", [1], [2, 3], **arguments)


def test_no_prompt_and_nothing_at_all_are_refused() -> None:
    with pytest.raises(UsageError, match="rollout `p`: prompt length 0 is outside"):
        make_rollout("p", [], [1])
    with pytest.raises(UsageError, match="rollout `e` is empty"):
        make_rollout("e", [])


def test_columns_of_a_batch_are_read_in_one_order_by_every_process(tmp_path: Path) -> None:
    """The safetensors library gives another at each reading."""
    values = {name: [np.ones(5, np.float32)] for name in ("weight", "divisor", "advantage", "reference")}
    save_rollouts(tmp_path / "batch", [GOOD], values)
    assert {tuple(load_rollouts(tmp_path / "batch")[1]) for _ in range(16)} == {tuple(sorted(values))}

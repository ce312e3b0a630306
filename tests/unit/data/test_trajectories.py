"""Every broken trajectory is named by trajectory and step."""

from dataclasses import replace

import numpy as np
import pytest

from verifier.data.recorded import Step, check_steps
from verifier.data.rollout import Role, make_rollout
from verifier.errors import UsageError


def step(trajectory: str, index: int, prompt: list[int], response: list[int], *, last: bool = False) -> Step:
    rollout = make_rollout(f"{trajectory}/{index}", prompt, response, logprobs=[-index] * len(response), versions=index)
    return Step(trajectory=trajectory, index=index, is_last_step=last, rollout=rollout)


FIRST = step("a", 0, [1, 2], [3])
SECOND = step("a", 1, [1, 2, 3, 8, 9], [4, 5], last=True)
OTHER = step("b", 0, [1], [6], last=True)


def test_whole_trajectories_pass() -> None:
    check_steps([FIRST, SECOND, OTHER])


def masked_outside() -> Step:
    rollout = replace(SECOND.rollout, roles=np.full(7, Role.TOOL, np.int8))
    return replace(SECOND, rollout=rollout)


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([FIRST, OTHER, SECOND], "trajectory `a`, step 1: another trajectory's steps lie between its own"),
        ([OTHER, FIRST, SECOND, OTHER], "trajectory `b`, step 0: another trajectory's steps lie between its own"),
        ([SECOND], "trajectory `a`, step 1: step 0 is expected here"),
        ([SECOND, FIRST], "trajectory `a`, step 1: step 0 is expected here"),
        ([FIRST], "trajectory `a`, step 0: is not marked as last (`is_last_step` belongs on step 0)"),
        ([replace(FIRST, is_last_step=True), SECOND], "trajectory `a`, step 0: is marked as the last one, but others"),
        ([FIRST, step("a", 1, [1, 2], [4], last=True)], "`a`, step 1: its input has 2 tokens, fewer than the 3"),
        ([FIRST, step("a", 1, [1, 7, 3], [4], last=True)], "`a`, step 1: token 1 of its input is 7, the step"),
        ([FIRST, masked_outside()], "trajectory `a`, step 1: token 5 is in the loss mask, but nobody sampled it"),
    ],
)  # fmt: skip
def test_violations_are_named(steps: list[Step], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_steps(steps)
    assert said in str(caught.value)

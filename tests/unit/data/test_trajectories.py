"""Every broken trajectory is named by trajectory and step."""

import pytest
from msgspec.structs import replace

from verifier.data.recorded import RolloutRow, check_steps
from verifier.errors import UsageError


def step(trajectory: str, index: int, prompt: list[int], response: list[int], *, last: bool = False) -> RolloutRow:
    drawn = (True,) * len(response)
    return RolloutRow(
        id=f"{trajectory}/{index}", group=trajectory, prompt=tuple(prompt), response=tuple(response), sampled=drawn,
        mask=drawn, logprobs=(-1.0,) * len(response), versions=(index,) * len(response), reward=0.0,
        trajectory=trajectory, index=index, is_last_step=last,
    )  # fmt: skip


FIRST = step("a", 0, [1, 2], [3])
SECOND = step("a", 1, [1, 2, 3, 8, 9], [4, 5], last=True)
OTHER = step("b", 0, [1], [6], last=True)


def test_whole_trajectories_pass() -> None:
    check_steps([FIRST, SECOND, OTHER])


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
    ],
)  # fmt: skip
def test_violations_are_named(steps: list[RolloutRow], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_steps(steps)
    assert said in str(caught.value)

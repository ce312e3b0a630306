"""Recorded rollouts come back as they were, and a line that cannot be trained on is refused by its number."""

import json
import math
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.recorded import row_of, write_recorded
from verifier.data.recorded import RolloutRow, check_steps, read_recorded, rollout_of
from verifier.data.rollout import make_rollout
from verifier.errors import UsageError

ROW = RolloutRow(
    id="a", group="g", prompt=(1, 2), response=(3, 4, 5), sampled=(True, False, True), mask=(True, False, False),
    logprobs=(-0.5, math.nan, -1.5), versions=(3, -1, 4), reward=0.5, answer="7", text="7",
)  # fmt: skip
OTHER = replace(ROW, id="b")
FIRST = replace(ROW, trajectory="t")
LAST = replace(ROW, id="b", trajectory="t", index=1, is_last_step=True, prompt=(1, 2, 3, 4, 5, 9))


@st.composite
def rollouts(draw):
    prompt, response = (draw(st.lists(st.integers(0, 99), min_size=low, max_size=5)) for low in (1, 0))
    drawn = np.array([draw(st.booleans()) for _ in response], bool)
    total = len(prompt) + len(response)
    return make_rollout(
        draw(st.text(min_size=1)), prompt, response, group=draw(st.text()), sampled=drawn,
        mask=drawn & np.array([draw(st.booleans()) for _ in response], bool),
        logprobs=[draw(st.floats(-50, 0, width=32)) for _ in response],
        versions=[draw(st.integers(0, 9)) for _ in response], reward=draw(st.floats(-9, 9)),
        routes=draw(st.sampled_from([None, np.arange(total * 6).reshape(total, 2, 3)])),
    )  # fmt: skip


@given(given_one=rollouts())
def test_every_field_comes_back(given_one, tmp_path_factory):
    path = tmp_path_factory.mktemp("recorded") / "rollouts.jsonl"
    write_recorded(path, [row_of(given_one)])
    (row,) = read_recorded(path)
    back = rollout_of(row)
    for item in fields(given_one):
        np.testing.assert_array_equal(getattr(back, item.name), getattr(given_one, item.name), err_msg=item.name)


def test_nan_is_null_in_the_file(tmp_path):
    write_recorded(tmp_path / "rollouts.jsonl", [ROW])
    read = json.loads((tmp_path / "rollouts.jsonl").read_text())
    assert read["logprobs"] == [-0.5, None, -1.5]
    assert "routes" not in read
    assert (read["answer"], read["text"]) == ("7", "7")


def test_steps_make_trajectories(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    write_recorded(path, [FIRST, LAST])
    rows = read_recorded(path, group_size=1)
    check_steps(rows)
    assert [row.id for row in rows] == ["a", "b"]


def changed(**changes):
    return lambda row: row | changes


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (changed(logprobs=[None, None, -1.5]), "`b`: response token 0 was sampled, but its log-probability is nan"),
        (changed(logprobs=[-1e999, None, -1.5]), "JSON is malformed"),
        (changed(versions=[3, -1, -1]), "`b`: response token 2 was sampled, but by version -1"),
        (changed(id="a"), "rollout `a` stands already in {path}, line 1"),
        (changed(prompt=[1, 32]), "`b`: token 1 has id 32, outside of the vocabulary of 32"),
        (changed(prompt=[1, -1]), "Expected `int` >= 0 - at `$.prompt[1]`"),
        (changed(prompt=[1, 2**70]), "Expected `int`"),
        (changed(prompt=[]), "`b`: prompt length 0 is outside of 1 to 3"),
        (changed(mask=[True, False]), "`b`: mask has 2 entries for 3 response tokens"),
        (changed(mask=[True, True, True]), "`b`: token 3 is in the loss mask, but was not sampled"),
        (changed(reward=None), "Expected `float`, got `null` - at `$.reward`"),
        (changed(temperature=1), "unknown field `temperature`"),
        (changed(routes=[[[1, 2]]]), "`b`: routes have shape [1, 1, 2]"),
        (changed(routes=[[[1, 2]]] * 4 + [[[1]]]), "`b`: its tokens have routes of different sizes"),
        (changed(trajectory="t"), "either all rollouts of a file have a `trajectory` or none has"),
        (lambda row: {key: value for key, value in row.items() if key != "mask"}, "missing required field `mask`"),
    ],
)
def test_a_bad_line_is_named(change, said, tmp_path):
    path = tmp_path / "rollouts.jsonl"
    write_recorded(path, [ROW, OTHER])
    first, second = path.read_text().splitlines()
    path.write_text(first + "\n" + json.dumps(change(json.loads(second))) + "\n")
    with pytest.raises(UsageError) as caught:
        read_recorded(path, vocab_size=32)
    assert str(caught.value).startswith(f"{path}, line 2: ")
    assert said.format(path=path) in str(caught.value)


@pytest.mark.parametrize(
    ("rows", "line", "said"),
    [
        ([ROW, OTHER, replace(ROW, id="c", group="h")], 3, "group `h` (rollout `c`) has 1 rollouts, every group"),
        ([FIRST, replace(LAST, is_last_step=False)], 1, "trajectory `t`, step 1: is not marked as last"),
        ([FIRST, replace(LAST, prompt=(1, 2, 3, 4, 6))], 1, "token 4 of its input is 6"),
        ([FIRST, replace(LAST, group="h")], 1, "trajectory `t`: its steps belong to several groups"),
        (
            [replace(FIRST, is_last_step=True), replace(FIRST, id="u", trajectory="u", is_last_step=True), LAST],
            3,
            "trajectory `t`, step 1: another trajectory's steps lie between its own",
        ),
        ([FIRST, LAST], 1, "group `g` (rollout `b`) has 1 rollouts, every group must have 2"),
    ],
)
def test_groups_and_trajectories_are_named_by_a_line(rows, line, said, tmp_path):
    path = tmp_path / "rollouts.jsonl"
    write_recorded(path, rows)
    with pytest.raises(UsageError) as caught:
        read_recorded(path, group_size=2)
    assert str(caught.value).startswith(f"{path}, line {line}: ")
    assert said in str(caught.value)


def test_a_file_cut_anywhere_is_refused_or_shorter(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    write_recorded(path, [ROW, OTHER])
    whole = path.read_bytes()
    ends = {len(whole.splitlines(keepends=True)[0]), len(whole)}
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        if {cut, cut + 1} & ends:  # whole lines, with the last line's end or without
            assert len(read_recorded(path)) == 1 + (cut + 1 == len(whole))
        else:
            with pytest.raises(UsageError):
                read_recorded(path)

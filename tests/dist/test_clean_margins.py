"""The campaign of clean margins: what its rows add up to. Its runs take hours (`tests.dist.clean_margins`)."""

from __future__ import annotations

import json

from tests.dist.clean_margins import BOUNDS, CHANGED, KEY, merged, of_today, quantile, rows_of, table

HEAD = {"run": "sft dp2", "seed": 1, "threads": 1, "isa": "default", "cpu": "a processor"}


def row(steps: int, greatest: float, bins: dict[str, int], **other: object) -> dict[str, object]:
    shares = {"ABC001": [sum(bins.values()), greatest, bins]}
    return {**HEAD, "steps": steps, "alarms": [], "shares": shares, **other}


def test_of_two_rows_of_a_run_the_longer_counts(tmp_path):
    file = tmp_path / "margins.jsonl"
    rows = [row(9, 0.1, {"-3": 9}), row(20, 0.2, {"-2": 20}), row(5, 0.9, {"0": 5}), row(7, 0.3, {"-1": 7}, seed=2)]
    file.write_text("".join(json.dumps(item) + "\n" for item in rows))
    found = rows_of(file)
    assert [item["steps"] for item in found.values()] == [20, 7]
    assert {key[KEY.index("seed")] for key in found} == {1, 2}


def test_a_row_by_later_bounds_counts_before_a_longer_one(tmp_path):
    file = tmp_path / "margins.jsonl"
    rows = [row(20, 0.2, {"-2": 20}), row(9, 0.1, {"-3": 9}, bounds=BOUNDS), row(30, 0.2, {"-2": 30})]
    file.write_text("".join(json.dumps(item) + "\n" for item in rows))
    assert [item["steps"] for item in rows_of(file).values()] == [9]


def test_shares_and_alarms_by_older_bounds_are_left_out():
    code = next(iter(CHANGED))
    alarms = [f"000001: {code}: it is off", "000002: ABC001: it is off"]
    old = {**row(9, 0.1, {"-3": 9}), "alarms": alarms}
    old["shares"] = {**row(9, 0.1, {"-3": 9})["shares"], code: [9, 0.9, {"0": 9}]}  # type: ignore[dict-item]
    assert (of_today(old)["alarms"], [*of_today(old)["shares"]]) == (alarms[1:], ["ABC001"])
    assert of_today({**old, "bounds": CHANGED[code]}) == {**old, "bounds": CHANGED[code]}


def test_distributions_add_up_and_give_quantiles():
    parts = [row(9, 0.1, {"-3": 990, "-5": 9}), row(1, 0.4, {"-1": 1, "-3": 10})]
    assert merged(parts) == {"ABC001": [1010, 0.4, {"-3": 1000, "-5": 9, "-1": 1}]}
    bins = merged(parts)["ABC001"][2]
    assert (quantile(bins, 0.5), quantile(bins, 0.999), quantile(bins, 1.0)) == (0.125, 0.125, 0.5)
    assert list(table(parts))[-1] == "| ABC001 | 1,010 | 0.12 | 0.12 | 0.4 | 10 |"

"""Rows of a sweep on the disk: continued, cut, of another sweep, in use; and the summary that is made of them."""

import json

import pytest

from verifier.campaign.sweep.summary import SweepRow, answer, as_json, opened_rows, page, table
from verifier.config import SweepConfig
from verifier.errors import UsageError
from verifier.report.gate_result import LeftOut


def row(layout, max_tokens, tokens_per_s=None, status="ok", **sizes):
    return SweepRow(
        layout=layout, mesh={"tp": 1, **sizes}, recompute="none", max_tokens=max_tokens, status=status,
        step_s=None if tokens_per_s is None else max_tokens / tokens_per_s, tokens_per_s=tokens_per_s,
        peak_bytes=2**30, reserved_bytes=2**30, reason="" if status == "ok" else "rank 0: it did not fit",
    )  # fmt: skip


ROWS = [
    row("1 rank", 1024, 500.0),
    row("1 rank", 2048, 400.0),
    row("1 rank", 4096, status="out_of_memory"),
    row("dp2", 1024, 900.0, dp=2),
    row("dp2", 2048, status="failed", dp=2),
    row("tp2", 1024, status="out_of_memory", tp=2),
]


def config(tmp_path, **knobs):
    return SweepConfig(**{"model": "tiny:qwen3", "run": tmp_path / "run", **knobs})


def test_rows_are_there_after_the_end(tmp_path):
    with opened_rows(config(tmp_path), "cpu") as rows:
        for item in ROWS:
            rows.add(item)
    with opened_rows(config(tmp_path), "cpu") as rows:
        assert rows.rows == ROWS
        assert rows.tried("1 rank") == {1024: True, 2048: True, 4096: False}


@pytest.mark.parametrize("kept", [0, 1, 30])
def test_a_cut_last_line_is_dropped(tmp_path, kept):
    with opened_rows(config(tmp_path), "cpu") as rows:
        rows.add(ROWS[0])
    file = tmp_path / "run" / "trials.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + whole.splitlines()[1][:kept])
    with opened_rows(config(tmp_path), "cpu") as rows:
        assert rows.rows == ROWS[:1]
        rows.add(ROWS[1])
    assert file.read_bytes().startswith(whole)
    with opened_rows(config(tmp_path), "cpu") as rows:
        assert rows.rows == ROWS[:2]


def test_a_cut_first_line_begins_anew(tmp_path):
    with opened_rows(config(tmp_path), "cpu"):
        pass
    file = tmp_path / "run" / "trials.jsonl"
    file.write_bytes(file.read_bytes()[:20])
    with opened_rows(config(tmp_path), "cpu") as rows:
        assert rows.rows == []
    assert json.loads(file.read_text())["model"] == "tiny:qwen3"


def test_layouts_and_budgets_may_change_but_not_what_a_row_means(tmp_path):
    with opened_rows(config(tmp_path), "cpu"):
        pass
    with opened_rows(config(tmp_path, ranks=2, most_tokens=9999, recompute="full"), "cpu"):
        pass
    with pytest.raises(UsageError, match=r"memory_limit=None, and memory_limit=2\.0 is asked for"):
        opened_rows(config(tmp_path, memory_limit=2.0), "cpu").__enter__()
    with pytest.raises(UsageError, match="holds a sweep with device=cpu, and device=NVIDIA H100 is asked for"):
        opened_rows(config(tmp_path), "NVIDIA H100").__enter__()


def test_one_sweep_at_a_time(tmp_path):
    with opened_rows(config(tmp_path), "cpu"), pytest.raises(UsageError, match="is in use by another sweep"):
        opened_rows(config(tmp_path), "cpu").__enter__()


def test_a_line_that_is_no_row_is_named(tmp_path):
    with opened_rows(config(tmp_path), "cpu"):
        pass
    with (tmp_path / "run" / "trials.jsonl").open("a") as file:
        file.write("{}\n")
    with pytest.raises(UsageError, match=r"line 2 of `.*` is no row of a sweep"):
        opened_rows(config(tmp_path), "cpu").__enter__()


def test_the_summary_names_fastest_layout_and_largest_budget(tmp_path):
    invalid = [LeftOut(what="tp3", reason="tp = 3 does not divide the 8 heads")]
    summary = json.loads(as_json(config(tmp_path), "cpu", ROWS, invalid))
    assert summary["fastest"]["knobs"] == {"mesh.dp": 2, "megatron.recompute": "none", "batch.max_tokens": 1024}
    assert summary["largest_budget"]["max_tokens"] == 2048
    assert [item["layout"] for item in summary["layouts"]] == ["dp2", "1 rank", "tp2"]
    assert [item["beyond"]["max_tokens"] for item in summary["layouts"]] == [2048, 4096, 1024]
    assert summary["invalid"] == [
        {"layout": "tp3", "status": "invalid", "reason": "tp = 3 does not divide the 8 heads"}
    ]
    assert answer(ROWS) == (
        "fastest: 900 tokens/s with mesh.dp=2 megatron.recompute=none batch.max_tokens=1024\n"
        "largest budget: 2,048 tokens, 400 tokens/s with megatron.recompute=none batch.max_tokens=2048\n"
    )
    assert "| tp2    |    none |" in table("cpu", ROWS)


def test_nothing_ran(tmp_path):
    assert answer(ROWS[-1:]) == ""
    assert json.loads(as_json(config(tmp_path), "cpu", ROWS[-1:], []))["fastest"] is None


def test_the_page_has_a_card_of_each_layout_with_what_did_not_run():
    text = page("tiny:qwen3, float32, CPU", ROWS)
    assert text.index("<span>dp2</span>") < text.index("<span>1 rank</span>") < text.index("<span>tp2</span>")
    assert "4,096 tokens, out_of_memory</dt><dd>rank 0: it did not fit" in text
    assert text.count("did not run</title>") == 6
    assert "<script" not in text

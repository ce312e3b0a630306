"""`verifier train` with a fault of less than four times a computed bound: suspected, confirmed by the next step.

What this does not exercise: a suspicion that is dropped, and a run that ends before one is decided
(tests/unit/trainer/test_verdicts.py).
"""

from __future__ import annotations

from functools import partial

import verifier.trainer.controller as controller
from verifier.cli.app import run

KNOBS = ("model=tiny:add", "data.batch_size=8", "batch.micro_batch_size=4", "evaluation.num_problems=0")


def test_a_fault_that_stays_in_place_is_confirmed_at_the_next_step(monkeypatch, capsys, tmp_path):
    within = ("tests.dist.suspected_functions:lengthened",)
    monkeypatch.setattr(controller, "Trainer", partial(controller.Trainer, within=within))
    code = run(["train", *KNOBS, "steps=5", "verify.every=0", "--verify", "--run", str(tmp_path / "run")])
    said = capsys.readouterr()
    assert code == 1
    assert "suspected: step 1, TRN006" in said.err
    assert "confirmed: step 1 was suspected" in said.out
    assert "and step 2 is beyond the bound again" in said.out
    assert "TRN006" in said.out.partition("confirmed")[0]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) < 5
    assert {trace.name for trace in (tmp_path / "run" / "steps").iterdir()} >= {"000001", "000002"}

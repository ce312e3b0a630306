"""A run whose last export is wrong ends with the report and leaves no `hf_model`; the next one can finish it."""

import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.cli.train import judge_step
from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.core import store
from verifier.core.finding import Verdict
from verifier.errors import ViolationFound
from verifier.faults.injection import INJECTED
from verifier.faults.training_trial import DeferredJudge
from verifier.probes.training.run_evidence import RunEvidence
from verifier.report.report import report_of
from verifier.runs.resources import Deadline
from verifier.trainer.controller import Trainer


class JudgeHere(DeferredJudge):
    def submit(self, trace):
        done = super().submit(trace)
        done._result = judge_step(str(trace))
        return done


def trained(resources, run, within=()):
    knobs = ("model=tiny:add", "steps=2", "data.batch_size=8", "evaluation.num_problems=0", "verify.steps=true")
    config, _ = load(TrainConfig, overrides=[*knobs, f"run={run}"])
    launcher = resources.launcher(Deadline(300))
    evidence = RunEvidence(JudgeHere())
    return Trainer(config, lambda text: None, evidence, launcher=launcher, resources=resources, within=within).run()


def test_a_wrong_export_ends_the_run_and_the_next_one_finishes_it(resources, tmp_path):
    run = tmp_path / "run"
    with pytest.raises(ViolationFound) as raised:
        trained(resources, run, (INJECTED, "final-export-through-bf16", str(tmp_path)))
    assert raised.value.exit_code == 1
    assert "WGT019 final-export-differs-from-live" in str(raised.value)
    assert [(run / name).exists() for name in ("hf_model", "finished.json", "hf_model.partial")] == [False, False, True]
    summary = trained(resources, run)
    assert (summary.steps, summary.resumed_from) == (2, 2)
    report = report_of(store.read(run / "export"), "")
    assert report.verdict is Verdict.HOLDS
    codes = [item.code for item in report.outcomes]
    assert codes == ["WGT011", "WGT019", "WGT021"]
    assert (run / "hf_model" / "config.json").is_file()
    assert trained(resources, run).finished_before

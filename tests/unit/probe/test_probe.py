"""Traces that `verifier.probe` records, without a model: what they declare, what is missing, and what is refused.

What this does not exercise: a real loop (tests/dist/test_foreign_loop.py).
"""

import subprocess
import sys

import numpy as np
import pytest
import torch

import verifier.checks  # noqa: F401 - fills the registry
from tests.meta.sources import ROOT
from verifier import probe
from verifier.cli.app import run
from verifier.core.finding import ExitCode, Verdict
from verifier.core.store import read
from verifier.errors import UsageError
from verifier.model.checkpoint import open_checkpoint
from verifier.model.tiny import write_tiny
from verifier.report import report_of


def weights(seed=0):
    made = torch.Generator().manual_seed(seed)
    return {f"layers.{at}.weight": torch.randn(4, 3, generator=made) for at in range(3)}


def outcomes(path):
    report = report_of(read(path), str(path))
    return {item.code: item.verdict for item in report.outcomes}, report


def sync(record, version, received=None):
    tensors = weights(version)
    record.weights_exported(tensors, version, live=tensors)
    with probe.attach(record.path) as engine:
        for name, tensor in (received or tensors).items():
            engine.weights_received([(name, tensor)], version)
    record.weights_sent(version)


def batch(step, **changes):
    given = {
        "prompts": [[1, 2], [3]], "responses": [[4, 5, 6], [7, 8]], "loss_mask": [[1, 1, 1], [1, 1]],
        "engine_logprobs": [[-1.0, -2.0, -0.5], [-0.25, -3.0]], "versions": step - 1, "rewards": [1.0, 0.0],
        "groups": ["a", "a"],
    }  # fmt: skip
    return {**given, **changes}


def train(record, step=1, old=None, **changes):
    record.rollouts(step, **batch(step, **changes))
    record.trainer_logprobs(step, old or [[-1.0, -2.0, -0.5], [-0.25, -3.0]])
    deviation = 0.5**0.5 + 1e-6
    record.advantages(step, [0.5 / deviation, -0.5 / deviation], estimator="grpo")
    record.loss(step, "importance")
    record.step(step, loss=0.0, num_tokens=5, grad_norm=1.0)


def test_a_clean_loop_holds_and_declares_what_it_recorded(tmp_path):
    with probe.open(tmp_path / "trace", dtype="float32") as record:
        for version in range(3):
            sync(record, version)
        train(record)
    found, report = outcomes(tmp_path / "trace")
    expected = {"ADV002", "ADV003", "DAT004", "LGP009", "TPT001", "TPT002", "WGT005", "WGT006", "WGT008"}
    assert found.keys() == expected
    assert report.verdict is Verdict.HOLDS
    assert report.manifest.synced_versions == (0, 1, 2)


def test_nothing_recorded_is_inconclusive(tmp_path):
    with probe.open(tmp_path / "trace"):
        pass
    assert outcomes(tmp_path / "trace")[1].verdict is Verdict.INCONCLUSIVE


def test_tensors_are_not_changed(tmp_path):
    tensors = weights()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    with probe.open(tmp_path / "trace", keep_every=1) as record:
        record.weights_exported(tensors.items(), 1)
        record.gradients(1, tensors)
    assert all(torch.equal(tensors[name], before[name]) for name in before)


def test_a_tensor_under_another_name_is_seen(tmp_path):
    with probe.open(tmp_path / "trace") as record:
        a, b, c = weights(1).items()
        sync(record, 1, {a[0]: b[1], b[0]: a[1], c[0]: c[1]})
    found, report = outcomes(tmp_path / "trace")
    assert found["TPT001"] is Verdict.VIOLATED
    assert "holds in what engine rank 0 received what" in report.violated[0].finding.first.sentence


@pytest.mark.parametrize(
    ("undertaken", "code"),
    [("transfer", "TPT001"), ("engine logprobs", "LGP009"), ("gradients", "LSS001"), ("engine weights", "ENG001")],
)
def test_evidence_that_was_undertaken_and_is_missing_is_inconclusive(tmp_path, undertaken, code):
    with probe.open(tmp_path / "trace", dtype="float32", undertakes=[undertaken]) as record:
        record.weights_exported(weights(), 0)
    assert outcomes(tmp_path / "trace")[0][code] is Verdict.INCONCLUSIVE


def test_every_undertaking_gives_its_checks_a_subject(tmp_path):
    for name in probe.UNDERTAKINGS:
        with probe.open(tmp_path / name, undertakes=[name]):
            pass
        assert outcomes(tmp_path / name)[0], name


def test_a_sync_that_delivers_nothing_is_violated(tmp_path):
    with probe.open(tmp_path / "trace") as record:
        record.weights_exported(weights(1), 1)
        record.weights_sent(1)
    assert outcomes(tmp_path / "trace")[0]["TPT002"] is Verdict.VIOLATED


def test_logprobs_of_the_next_token_are_seen(tmp_path):
    with probe.open(tmp_path / "trace", dtype="float32") as record:
        train(record, engine_logprobs=[[-2.0, -0.5, -0.5], [-3.0, -3.0]])
    assert outcomes(tmp_path / "trace")[0]["LGP009"] is Verdict.VIOLATED


def test_a_mask_over_the_prompt_is_seen_in_the_data(tmp_path):
    with probe.open(tmp_path / "trace", dtype="float32") as record:
        train(record, loss_mask=[[1] * 5, [1] * 3])
    _, report = outcomes(tmp_path / "trace")
    assert report.violated[0].finding.first_bad_stage.label == "data"


def test_stale_tokens_are_seen(tmp_path):
    with probe.open(tmp_path / "trace", dtype="float32") as record:
        train(record, step=3, versions=1)
    found, _ = outcomes(tmp_path / "trace")
    assert found["ADV003"] is found["DAT004"] is Verdict.VIOLATED


def test_values_of_three_lengths_are_the_same_columns(tmp_path):
    short = [[-1.0, -2.0, -0.5], [-0.25, -3.0]]
    shifted = [[9.0, -1.0, -2.0, -0.5], [-0.25, -3.0]]
    whole = [torch.tensor([9.0, 9.0, *short[0]]), np.array([9.0, *short[1]])]
    for at, rows in enumerate((short, shifted, whole)):
        path = tmp_path / str(at)
        with probe.open(path, dtype="float32") as record:
            train(record, old=rows)
        assert outcomes(path)[1].verdict is Verdict.HOLDS


def test_bf16_needs_noise_that_the_oracle_measures(tmp_path):
    with probe.open(tmp_path / "trace", dtype="bfloat16") as record:
        train(record)
    found, report = outcomes(tmp_path / "trace")
    assert "LGP009" not in found
    assert any("no noise of bfloat16" in clause for clause in report.not_judged)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_an_engine_without_a_number_is_violated_in_any_dtype(dtype, value, tmp_path):
    with probe.open(tmp_path / "trace", dtype=dtype) as record:
        train(record, engine_logprobs=[[-1.0, value, -0.5], [-0.25, -3.0]])
    found, report = outcomes(tmp_path / "trace")
    assert found["LGP009"] is Verdict.VIOLATED
    sentence = report.violated[0].finding.first.sentence
    assert sentence.endswith(f"gave token 3 of `1/0`, which version 0 sampled, a log-probability of {value}")


def test_without_the_engines_logprobs_nothing_compares_them(tmp_path):
    with probe.open(tmp_path / "trace", dtype="float32") as record:
        train(record, engine_logprobs=None)
    found, report = outcomes(tmp_path / "trace")
    assert "LGP009" not in found
    assert report.verdict is Verdict.HOLDS


def test_a_rank_that_did_not_close_leaves_the_trace_inconclusive(tmp_path):
    path = tmp_path / "trace"
    first = probe.open(path, rank=0, world_size=2)
    second = probe.open(path, rank=1, world_size=2)
    first.weights_exported(weights(1), 1)
    first.weights_sent(1)
    sent = probe.attach(path)
    sent.weights_received(weights(1), 1)
    sent.close()
    first.close()
    assert run(["judge", str(path), "-q"]) == ExitCode.INCONCLUSIVE
    assert "trainer-0001 was not closed" in read(path).manifest.failure
    second.close()
    assert read(path).manifest.complete
    assert run(["judge", str(path), "-q"]) == ExitCode.HOLDS


def test_a_rank_that_never_came_leaves_the_trace_inconclusive(tmp_path):
    with probe.open(tmp_path / "trace", rank=0, world_size=2) as record:
        record.weights_exported(weights(1), 1)
    assert "trainer rank 1 of 2 recorded nothing" in read(tmp_path / "trace").manifest.failure


def test_an_exception_of_the_loop_is_said(tmp_path):
    def loop():
        with probe.open(tmp_path / "trace") as record:
            record.weights_exported(weights(1), 1)
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        loop()
    manifest = read(tmp_path / "trace").manifest
    assert not manifest.complete
    assert manifest.failure == "the loop ended by RuntimeError: out of memory"


def test_ranks_of_a_launcher_find_their_place(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with probe.open(tmp_path / "trace"):
        pass
    assert read(tmp_path / "trace").manifest.world_size == 3


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda path: probe.open(path, undertakes=["weights"]), "a loop cannot undertake `weights`"),
        (lambda path: probe.open(path, keep_every=-1), "keep_every is -1"),
        (lambda path: probe.open(path, rank=2, world_size=2), "rank 2 is none of 2 ranks"),
        (lambda path: probe.open(path, model=path), "is no checkpoint directory"),
        (lambda path: probe.open(path, mesh={"tp": 0}), "has no such sizes"),
        (lambda path: train(probe.open(path), loss_mask=[[1], [1, 1]]), "`loss_mask` has 1 values for rollout 0"),
        (lambda path: train(probe.open(path), prompts=[[], [3]]), "empty prompt"),
        (lambda path: train(probe.open(path), rewards=[1.0]), "step 1 has 2 prompts, 2 responses, 1 rewards"),
        (lambda path: probe.open(path).trainer_logprobs(1, []), "step 1 has no rollouts yet"),
        (lambda path: probe.open(path).step(1, loss=1.0), "give all three, or none"),
    ],
)
def test_what_cannot_be_recorded_is_refused(tmp_path, act, says):
    with pytest.raises(UsageError, match=says):
        act(tmp_path / "trace")


def test_a_trace_takes_each_rank_once(tmp_path):
    probe.open(tmp_path / "trace", rank=0, world_size=2)
    with pytest.raises(UsageError, match="not empty"):
        probe.open(tmp_path / "trace")
    with probe.open(tmp_path / "other"):
        pass
    with pytest.raises(UsageError, match="is sealed"):
        probe.attach(tmp_path / "other")


def test_judge_refuses_an_oracle_without_a_checkpoint(tmp_path, capfd):
    with probe.open(tmp_path / "trace", dtype="float32") as record:
        train(record)
    assert run(["judge", "--oracle", str(tmp_path / "trace")]) == ExitCode.USAGE
    assert "give --model" in capfd.readouterr().err


def test_judge_of_another_commands_trace_is_its_replay(tmp_path):
    from verifier.core import store
    from verifier.core.manifest import Manifest

    path = store.create(tmp_path / "trace", Manifest(command="golden"))
    store.complete(path, Manifest(command="golden"))
    assert run(["judge", str(path), "-q"]) == run(["replay", str(path), "-q"]) == ExitCode.INCONCLUSIVE
    assert run(["judge", "--oracle", str(path)]) == ExitCode.USAGE


def test_the_source_is_compared_with_version_0(tmp_path):
    checkpoint = write_tiny("qwen3", tmp_path)
    source = open_checkpoint(checkpoint)
    tensors = {name: source.read(name) for name in source.names()}
    for name, changed in (("same", 0.0), ("other", 1.0)):
        with probe.open(tmp_path / name, model=checkpoint) as record:
            tensors["model.norm.weight"] = tensors["model.norm.weight"] + changed
            record.weights_exported(tensors, 0)
    assert outcomes(tmp_path / "same")[0]["WGT004"] is Verdict.HOLDS
    assert outcomes(tmp_path / "other")[0]["WGT004"] is Verdict.VIOLATED


def test_judging_loads_no_torch(tmp_path):
    with probe.open(tmp_path / "trace") as record:
        record.weights_exported(weights(1), 1)
    program = f"""
import sys
from verifier.cli.app import run
import verifier.probe
run(["judge", {str(tmp_path / "trace")!r}])
print("LOADED", sorted({{name.split(".")[0] for name in sys.modules}} & {{"torch", "vllm", "transformers"}}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stdout.splitlines()[-1] == "LOADED []", done.stdout + done.stderr


MEANS = {
    "dapo of a longer batch": ({"divisor": 11 * 2 / 4}, lambda losses, masks: (losses * masks).sum(-1) / 5.5),
    "grpo": (
        {"aggregation": "sequence_mean", "divisor": 4},
        lambda losses, masks: (losses * masks).sum(-1) / masks.sum(-1).clamp(min=1) / 4,
    ),
    "dr_grpo": ({"divisor": 4 * 8}, lambda losses, masks: (losses * masks).sum(-1) / (4 * 8)),
    "bnpo": (
        {"aggregation": "prompt_mean", "parts": [0, 0, 1, 1], "divisor": 2},
        lambda losses, masks: (losses * masks).sum(-1) / masks.sum().clamp(min=1) / 2,
    ),
}
"""Mean of TRL -> what a loop says of it, and its sum over two micro-batches of two completions, as TRL writes it."""


@pytest.mark.parametrize("said", MEANS)
@pytest.mark.parametrize("meant", MEANS)
def test_a_mean_of_trl_holds_if_it_is_the_one_that_the_loop_says(tmp_path, said, meant):
    masks = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0]])
    sizes, ids = [3, 1, 2, 2], ["a", "b", "c", "d"]
    with probe.open(tmp_path / "trace", dtype="float32") as record:
        record.rollouts(
            1, prompts=[[9]] * 4, responses=[[5] * size for size in sizes], ids=ids, versions=0, rewards=[0.0] * 4,
            loss_mask=[mask[:size] for mask, size in zip(masks, sizes, strict=True)],
        )  # fmt: skip
        record.trainer_logprobs(
            1, [[-1.0] * size if name != "c" else None for name, size in zip(ids, sizes, strict=True)]
        )
        record.advantages(1, [1.0] * 4)
        record.loss(1, "importance", **MEANS[said][0])
        for part in (slice(0, 2), slice(2, 4)):
            nats = torch.full((2, 4), -1.0, requires_grad=True)
            losses = -(nats - nats.detach()).exp()
            record.token_losses(1, nats, losses, ids=ids[part], mask=masks[part])
            MEANS[meant][1](losses, masks[part]).sum().backward()
        record.step(1)
    found, _ = outcomes(tmp_path / "trace")
    assert found["ADV001"] is (Verdict.HOLDS if said == meant else Verdict.VIOLATED)

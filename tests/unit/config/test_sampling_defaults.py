"""Defaults of a training run that follow from its model, its machine and its work."""

import pytest

from verifier.config.sampling import SamplingOptions
from verifier.config.training import OptimizerOptions, TrainConfig
from verifier.errors import UsageError


@pytest.mark.parametrize(
    ("model", "algorithm", "rank", "expected"),
    [
        ("tiny:add", "sft", None, 1e-3), ("wide:qwen3", "grpo", None, 1e-3), ("checkpoints/qwen", "sft", None, 1e-5),
        ("checkpoints/qwen", "grpo", None, 1e-6), ("published:any", "grpo", None, 1e-6),
        ("checkpoints/qwen", "grpo", 8, 1e-5),
    ],
)  # fmt: skip
def test_a_pretrained_model_has_a_rate_that_it_survives(model, algorithm, rank, expected):
    given = {"lora": {"rank": rank}} if rank else {}
    config = TrainConfig.from_dict({"model": model, "algorithm": algorithm, "dtype": "float32", "run": "r", **given})
    assert config.optimizer.learning_rate == pytest.approx(expected, rel=1e-12)


def test_a_rate_that_was_asked_for_stays():
    config = TrainConfig(model="checkpoints/qwen", dtype="float32", optimizer=OptimizerOptions(learning_rate=3e-5))
    assert config.optimizer.learning_rate == 3e-5
    assert TrainConfig.from_dict(config.to_dict()).optimizer.learning_rate == 3e-5


def test_graphs_are_replayed_on_a_gpu_unless_told_otherwise():
    assert SamplingOptions().replays_graphs("cuda")
    assert not SamplingOptions().replays_graphs("cpu")
    assert not SamplingOptions(kind="hf").replays_graphs("cuda")
    assert not SamplingOptions(cuda_graphs=False).replays_graphs("cuda")
    assert not SamplingOptions(quantization="fp8").replays_graphs("cuda")


def test_the_deadline_of_a_request_grows_with_its_tokens():
    assert SamplingOptions().request_deadline_s(0) == 600
    assert SamplingOptions().request_deadline_s(512 * 1024) > 5_000
    assert SamplingOptions(request_timeout_s=30.0).request_deadline_s(512 * 1024) == 30
    with pytest.raises(UsageError, match=r"engine\.request_timeout_s is -1"):
        SamplingOptions(request_timeout_s=-1.0)

"""Refusals that need the model's sizes, the tier or encoded rollouts."""

from __future__ import annotations

import json

import numpy as np
import pytest

from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.data.examples import Example
from verifier.data.rollout import make_rollout
from verifier.errors import UsageError
from verifier.model.checkpoint import open_checkpoint
from verifier.model.named import config_of
from verifier.model.tiny import write_tiny
from verifier.trainer.batches import SftPlan
from verifier.trainer.fitting import dry_run, near_budget, require_budget, require_fit
from verifier.trainer.generation import EngineRollouts
from verifier.trainer.grpo_plan import RecordedRollouts


def config(*words: str) -> TrainConfig:
    return load(TrainConfig, overrides=["model=tiny:add", "run=r", *words])[0]


def test_offload_is_refused_on_the_cpu_tier_alone():
    asked = config("megatron.optimizer_offload=0.5")
    require_fit(asked, config_of("tiny:add"), "cuda")
    with pytest.raises(UsageError, match=r"megatron.optimizer_offload is 0.5 and this machine has no GPU"):
        require_fit(asked, config_of("tiny:add"), "cpu")


def test_a_score_bias_is_updated_where_there_is_one():
    asked = config("megatron.moe_bias_update_rate=0.001")
    require_fit(asked, config_of("tiny:deepseek-v3"), "cpu")
    with pytest.raises(UsageError, match="no score bias"):
        require_fit(asked, config_of("tiny:qwen3-moe"), "cpu")


def test_a_layer_for_a_further_token_is_trained_where_there_is_one_and_it_is_judged():
    words, sizes = "megatron.mtp_loss_scaling_factor=0.3", config_of("tiny:deepseek_v3-mtp")
    require_fit(config(words, "mesh.tp=2", "mesh.pp=2"), sizes, "cpu")
    for more, told in (("mesh.cp=2", "mesh.cp is 2"), ("lora.rank=4", "lora.rank is 4")):
        with pytest.raises(UsageError, match=rf"megatron.mtp_loss_scaling_factor is 0.3 and {told}.*: leave it out$"):
            require_fit(config(words, more), sizes, "cpu")
    with pytest.raises(UsageError, match=r"is 0.3 and mesh.vpp is 2"):
        require_fit(config(words, "mesh.pp=2", "mesh.vpp=2"), sizes, "cpu")
    with pytest.raises(UsageError, match=r"is 0.3 and grpo.replay_routes is true"):
        require_fit(config(words, "algorithm=grpo", "grpo.replay_routes=true"), sizes, "cpu")


def test_rotary_embeddings_are_fused_where_the_kernel_fits():
    asked = config("megatron.rope_fusion=true")
    require_fit(asked, config_of("tiny:qwen3"), "cpu")
    require_fit(config(), config_of("tiny:deepseek-v3"), "cpu")
    with pytest.raises(UsageError, match=r"megatron.rope_fusion is true, but .* has latent attention"):
        require_fit(asked, config_of("tiny:deepseek-v3"), "cpu")


def test_a_budget_below_the_longest_rollout_is_refused_with_the_padding():
    rollouts = [make_rollout(f"r{size}", np.array([1]), np.arange(1, size)) for size in (5, 9, 7)]
    require_budget(config("batch.max_tokens=9"), rollouts)
    with pytest.raises(UsageError) as refusal:
        require_budget(config("batch.max_tokens=9", "mesh.tp=2"), rollouts)
    assert str(refusal.value) == (
        "batch.max_tokens is 9, below the 10 tokens of `r9`, padded to a multiple of 2: raise it, or shorten the "
        "example"
    )


def test_only_examples_that_may_be_too_long_are_encoded():
    examples = [Example(id=str(size), prompt="x" * size, messages=(), response="y", answer=None) for size in (10, 900)]
    assert [item.id for item in near_budget(config("batch.max_tokens=1000"), examples)] == ["900"]
    assert near_budget(config(), examples) == []


def test_a_budget_below_the_longest_sum_is_refused_before_ranks_start(tmp_path):
    """`<bos>37+85=####122<eos>` are 12 tokens."""
    checkpoint = open_checkpoint(write_tiny("add", tmp_path))
    words = ("data.num_examples=64", "evaluation.num_problems=8")
    SftPlan(config("batch.max_tokens=12", *words), checkpoint, lambda step: tmp_path)
    with pytest.raises(UsageError, match=r"batch.max_tokens is 11, below the 12 tokens of `arithmetic/"):
        SftPlan(config("batch.max_tokens=11", *words), checkpoint, lambda step: tmp_path)


def test_a_budget_below_the_longest_answer_is_refused_before_an_engine_starts(tmp_path):
    """`<bos>37+85=` are 7 tokens."""
    checkpoint = open_checkpoint(write_tiny("add", tmp_path))
    words = ("algorithm=grpo", "data.num_examples=64", "evaluation.num_problems=8", "grpo.max_answer_tokens=8")
    EngineRollouts(config("batch.max_tokens=15", *words), checkpoint)
    EngineRollouts(config("batch.max_tokens=16", "mesh.tp=2", *words), checkpoint)
    with pytest.raises(UsageError) as refusal:
        EngineRollouts(config("batch.max_tokens=15", "mesh.tp=2", *words), checkpoint)
    assert str(refusal.value) == (
        "batch.max_tokens is 15, below the 16 tokens of the longest rollout: a prompt of 7 and 8 of answers and "
        "replies, padded to a multiple of 2: raise it, or lower grpo.max_answer_tokens"
    )


def test_several_engines_under_ray_are_on_nodes_in_turn(monkeypatch):
    words = ("algorithm=grpo", "mesh.dp=2", "ray.use=true", "ray.address=h:1", "ray.nodes=2")
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    asked = config("engine.replicas=3", *words)
    assert "engines: 0 on node 0, 1 on node 1, 2 on node 0; rank 0 is on node 0\n" in dry_run(asked, {})
    with pytest.raises(UsageError, match=r"replicas is 5, .* 3 processes .* a node of 2 like this"):
        dry_run(config("engine.replicas=5", *words), {})
    with pytest.raises(UsageError, match=r"engine.replicas is 3 and ray.use is true: engines on GPUs"):
        require_fit(config("engine.replicas=3", *words), config_of("tiny:add"), "cuda")


def test_turns_count_in_the_longest_rollout(tmp_path):
    checkpoint = open_checkpoint(write_tiny("add", tmp_path))
    words = ("algorithm=grpo", "data.source=calculator", "data.num_examples=64", "evaluation.num_problems=0",
             "grpo.environment=calculator", "grpo.max_turns=3", "grpo.max_answer_tokens=8")  # fmt: skip
    longest = EngineRollouts(config(*words), checkpoint).engine_config("", ()).max_model_len
    EngineRollouts(config(f"batch.max_tokens={longest}", *words), checkpoint)
    with pytest.raises(UsageError, match=f"batch.max_tokens is {longest - 1}, below the {longest} tokens"):
        EngineRollouts(config(f"batch.max_tokens={longest - 1}", *words), checkpoint)


def test_an_engine_has_room_for_held_out_prompts(tmp_path):
    """A held-out prompt of ten characters more, and the same answer, in an engine."""
    checkpoint = open_checkpoint(write_tiny("add", tmp_path))
    for name, prompt in (("train", "1+1="), ("held", "1000000+1000001=")):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"prompt": "{prompt}", "answer": "2"}}\n')
    words = ("algorithm=grpo", "data.batch_size=1", "grpo.max_answer_tokens=8", f"data.source={tmp_path}/train.jsonl")
    evaluated = (f"data.held_out={tmp_path}/held.jsonl", "evaluation.num_problems=1")
    lengths = [
        EngineRollouts(config(*words, *given), checkpoint).engine_config("", ()).max_model_len
        for given in (("evaluation.num_problems=0",), evaluated)
    ]
    assert lengths == [1 + 4 + 8, 1 + 16 + 8]


def test_held_out_problems_of_grpo_need_answers(tmp_path):
    checkpoint = open_checkpoint(write_tiny("add", tmp_path))
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "held.jsonl").write_text('{"prompt": "1+2=", "response": "3"}\n')
    words = ("algorithm=grpo", "data.batch_size=1", f"data.source={tmp_path}/train.jsonl",
             f"data.held_out={tmp_path}/held.jsonl", "evaluation.num_problems=1")  # fmt: skip
    with pytest.raises(UsageError, match=r"evaluation\.num_problems is 1: .*it has no `answer`"):
        EngineRollouts(config(*words), checkpoint)


def recorded(tmp_path, *words: str) -> RecordedRollouts:
    """Two rollouts of five tokens, as a run of one step reads them."""
    rows = [
        {"id": f"r{at}", "group": "g", "prompt": [1, 2], "response": [3, 4, 5], "sampled": [True] * 3,
         "mask": [True] * 3, "logprobs": [-1.0] * 3, "versions": [0] * 3, "reward": at}
        for at in range(2)
    ]  # fmt: skip
    folder = tmp_path / "rollouts"
    folder.mkdir()
    (folder / "1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    checkpoint = open_checkpoint(write_tiny("add", tmp_path))
    asked = config("algorithm=grpo", "steps=1", "grpo.group_size=2", f"data.rollouts={folder}", *words)
    return RecordedRollouts(asked, checkpoint)


def test_recorded_rollouts_fit_a_micro_batch(tmp_path):
    with pytest.raises(UsageError, match=r"batch.max_tokens is 4, below the 5 tokens of `r0`"):
        recorded(tmp_path, "batch.max_tokens=4")


def test_recorded_rollouts_fill_their_mini_batches(tmp_path):
    with pytest.raises(UsageError, match=r"grpo.mini_batches is 3 and `.*1.jsonl` has 2 rollouts: a mini-batch needs"):
        recorded(tmp_path, "grpo.mini_batches=3")


def test_recorded_rollouts_that_fit_are_taken(tmp_path):
    assert len(recorded(tmp_path, "batch.max_tokens=5", "grpo.mini_batches=2").rollouts(1)[0]) == 2


def test_a_cache_below_one_sequence_is_refused_before_an_engine_starts(tmp_path):
    checkpoint = open_checkpoint(write_tiny("add", tmp_path))
    words = ("algorithm=grpo", "data.num_examples=64", "evaluation.num_problems=0")
    assert EngineRollouts(config(*words), checkpoint).engine_config("", ()).kv_cache_bytes == 128 << 20
    asked = EngineRollouts(config("engine.kv_cache_gib=0.25", *words), checkpoint).engine_config("", ())
    assert asked.kv_cache_bytes == 256 << 20
    with pytest.raises(UsageError, match=r"engine.kv_cache_gib is 1e-05, and one sequence of 71 tokens takes"):
        EngineRollouts(config("engine.kv_cache_gib=1e-5", *words), checkpoint)


def test_a_dry_run_tells_what_answers_leave_on_disk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("algorithm=grpo", "steps=1000", "data.batch_size=64", "grpo.group_size=8", "grpo.max_answer_tokens=1024")
    for more, of_a_step, of_all in (
        ((), "19.4 MB", "19.4 GB"),
        (("verify.steps=true",), "10.5 MB", "10.5 GB"),
        (("verify.steps=true", "verify.keep=10"), "10.5 MB", "4.78 GB"),
    ):
        asked = config(*words, *more)
        line = next(line for line in dry_run(asked, {}).splitlines() if line.startswith("disk: "))
        assert line.startswith(f"disk: {of_a_step} a step")
        assert f" {of_all} in 1,000 steps" in line

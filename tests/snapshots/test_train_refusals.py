"""What `verifier train --dry-run` refuses: command words and the one sentence, without torch, in under two seconds.

What this does not exercise: a token budget below the longest sample, which needs the tokenizer (tests/unit/trainer).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.meta.sources import ROOT

ROWS = {
    "sums.jsonl": [{"prompt": f"{number}+1=", "response": f"####{number + 1}"} for number in range(10, 14)],
    "held.jsonl": [{"prompt": "50+1=", "response": "####51"}],
    "twice.jsonl": [{"prompt": "11+1=", "response": "####12"}],
    "unlabelled.jsonl": [{"prompt": "10+1=", "answer": "11"}],
    "unanswered.jsonl": [{"prompt": "10+1=", "response": "####11"}],
    "answered.jsonl": [{"prompt": "20+1=", "answer": "21"}],
    "unknown.jsonl": [{"question": "10+1="}],
}
STALE = "algorithm=grpo grpo.max_staleness=1 grpo.ratio_over=engine"
TOOLS = "algorithm=grpo grpo.max_turns=3"
ADD, MOE, LATENT = "model=tiny:add", "model=tiny:qwen3-moe", "model=tiny:deepseek-v3"
SUMS = f"{ADD} data.source=sums.jsonl data.batch_size=2"
REFUSED = {
    "unknown-key": f"{ADD} optimizer.learn_rate=1e-4",
    "unknown-group": f"{ADD} megatron=fast",
    "key-twice": f"{ADD} steps=3 steps=4",
    "key-and-flag": f"{ADD} --tp 2 mesh.tp=4",
    "key-twice-in-a-file": "twice.yaml",
    "no-number": f"{ADD} optimizer.learning_rate=fast",
    "no-choice": f"{ADD} optimizer.schedule=step",
    "run-under-a-file": f"{ADD} --run sums.jsonl/run",
    "batch-below-dp": f"{ADD} data.batch_size=2 mesh.dp=4",
    "batch-above-examples": f"{ADD} data.batch_size=64 data.num_examples=32",
    "batch-above-data": f"{ADD} data.source=sums.jsonl data.batch_size=8 evaluation.num_problems=0",
    "batch-below-interleaved-stages": f"{ADD} data.batch_size=2 mesh.pp=2 mesh.vpp=2 mesh.dp=2",
    "cut-by-count-and-tokens": f"{ADD} batch.micro_batch_size=4 batch.max_tokens=1024",
    "budget-below-padding": f"{ADD} batch.max_tokens=7 mesh.tp=2 mesh.cp=2",
    "mesh-does-not-divide-heads": f"{ADD} mesh.tp=8",
    "mesh-does-not-divide-layers": f"{ADD} mesh.pp=3",
    "experts-on-a-dense-mesh": f"{ADD} mesh.ep=2",
    "experts-do-not-divide-ranks": f"{MOE} mesh.ep=4 mesh.dp=2",
    "experts-do-not-divide": f"{MOE} mesh.ep=3 mesh.dp=3",
    "vpp-without-pp": f"{ADD} mesh.vpp=2",
    "wide-in-fp32": "model=wide:qwen3-30b-a3b",
    "gather-without-distributed-optimizer": f"{ADD} megatron.distributed_optimizer=false",
    "gather-without-grad-reduce": f"{ADD} megatron.overlap_grad_reduce=false",
    "no-shards-to-save": f"{ADD} megatron.distributed_optimizer=false megatron.overlap_param_gather=false",
    "buckets-without-overlap": (
        f"{ADD} megatron.bucket_size=1000 megatron.overlap_grad_reduce=false megatron.overlap_param_gather=false"
    ),
    "reduced-in-the-type-of-the-weights": f"{ADD} megatron.grad_reduce_in_fp32=false",
    "fsdp-on-a-cpu": f"{ADD} megatron.use_fsdp=true",
    "fsdp-of-a-pipeline": f"{ADD} megatron.use_fsdp=true mesh.pp=2",
    "fsdp-of-adapters": f"{ADD} megatron.use_fsdp=true lora.rank=4",
    "fsdp-with-a-reference": f"{ADD} algorithm=grpo megatron.use_fsdp=true grpo.kl_weight=0.1",
    "fsdp-with-a-sleeping-engine": f"{ADD} algorithm=grpo megatron.use_fsdp=true engine.sleep_level=1",
    "fsdp-without-the-distributed-optimizer": (
        f"{ADD} megatron.use_fsdp=true megatron.distributed_optimizer=false megatron.overlap_param_gather=false"
    ),
    "fsdp-without-overlap": f"{ADD} megatron.use_fsdp=true megatron.overlap_param_gather=false",
    "fsdp-with-offload": f"{ADD} megatron.use_fsdp=true megatron.optimizer_offload=0.5",
    "sharding-without-fsdp": f"{ADD} megatron.fsdp_sharding=optim",
    "offload-without-shards": (
        f"{ADD} megatron.optimizer_offload=0.5 megatron.distributed_optimizer=false megatron.overlap_param_gather=false"
    ),
    "offload-above-one": f"{ADD} megatron.optimizer_offload=2",
    "offload-on-a-cpu": f"{ADD} megatron.optimizer_offload=0.5",
    "overlap-of-no-offload": f"{ADD} megatron.overlap_optimizer_offload=true",
    "recompute-method-without-full": f"{ADD} megatron.recompute_method=block",
    "recompute-layers-with-selective": f"{ADD} megatron.recompute=selective megatron.recompute_layers=2",
    "recompute-modules-with-full": f"{ADD} megatron.recompute=full megatron.recompute_modules=mlp",
    "recompute-unknown-module": f"{ADD} megatron.recompute=selective megatron.recompute_modules=attention",
    "recompute-more-layers-than-a-stage": f"{ADD} mesh.pp=2 megatron.recompute=full megatron.recompute_layers=3",
    "recompute-experts-of-none": f"{ADD} megatron.recompute=selective megatron.recompute_modules=moe",
    "recompute-latent-of-none": f"{ADD} megatron.recompute=selective megatron.recompute_modules=mla_up_proj",
    "recompute-norms-on-a-cpu": f"{ADD} megatron.recompute=selective megatron.recompute_modules=layernorm",
    "aux-loss-of-a-dense-model": f"{ADD} megatron.moe_load_balancing=aux_loss megatron.moe_aux_loss=0.001",
    "aux-loss-of-no-type": f"{MOE} megatron.moe_aux_loss=0.001",
    "balancing-without-coefficient": f"{MOE} megatron.moe_load_balancing=seq_aux_loss",
    "further-loss-of-no-layer": f"{LATENT} megatron.mtp_loss_scaling_factor=0.3",
    "z-loss-below-zero": f"{MOE} megatron.moe_z_loss=-1",
    "bias-update-without-bias": f"{MOE} megatron.moe_bias_update_rate=0.001",
    "router-type-of-a-dense-model": f"{ADD} megatron.moe_router_dtype=fp32",
    "least-above-rate": f"{ADD} optimizer.schedule=linear optimizer.least_learning_rate=0.1",
    "least-of-a-constant": f"{ADD} optimizer.least_learning_rate=1e-5",
    "more-problems-than-held-out": f"{ADD} evaluation.num_problems=5000",
    "no-held-out-file": f"{SUMS} evaluation.num_problems=4",
    "held-out-and-no-evaluation": f"{SUMS} data.held_out=held.jsonl evaluation.num_problems=0",
    "more-problems-than-rows": f"{SUMS} data.held_out=held.jsonl evaluation.num_problems=2",
    "train-and-held-out-overlap": f"{SUMS} data.held_out=twice.jsonl evaluation.num_problems=1",
    "stop-without-evaluation": f"{ADD} evaluation.stop_above=0.9",
    "held-out-without-answer": (
        f"{ADD} algorithm=grpo data.source=answered.jsonl data.held_out=unanswered.jsonl data.batch_size=1 "
        "evaluation.num_problems=1"
    ),
    "no-held-out-file-of-prompts": (
        f"{ADD} algorithm=grpo data.source=answered.jsonl data.batch_size=1 evaluation.num_problems=4"
    ),
    "no-label": f"{ADD} data.source=unlabelled.jsonl data.batch_size=1 evaluation.num_problems=0",
    "unknown-column": f"{ADD} data.source=unknown.jsonl data.batch_size=1 evaluation.num_problems=0",
    "no-answer": f"{ADD} algorithm=grpo data.source=unanswered.jsonl data.batch_size=1",
    "no-data": f"{ADD} data.source=absent.jsonl",
    "replay-in-a-dense-model": f"{ADD} algorithm=grpo grpo.replay_routes=true",
    "replay-of-texts": f"{MOE} grpo.replay_routes=true",
    "replay-without-reported-routes": f"{MOE} algorithm=grpo grpo.replay_routes=true engine.kind=hf",
    "replay-beside-recomputed-routers": (
        f"{MOE} algorithm=grpo grpo.replay_routes=true megatron.recompute=selective megatron.recompute_modules=[moe]"
    ),
    "group-of-one": f"{ADD} algorithm=grpo grpo.group_size=1",
    "baseline-of-a-group-of-one": f"{ADD} algorithm=grpo grpo.advantage=reinforce++_baseline grpo.group_size=1",
    "weights-capped-at-0": f"{ADD} algorithm=grpo grpo.weight_level=token grpo.weight_cap=0",
    "mask-of-no-ratio": f"{ADD} algorithm=grpo grpo.mask_level=token grpo.mask_low=3",
    "dual-clip-below-1": f"{ADD} algorithm=grpo grpo.dual_clip=0.5",
    "cap-of-no-weights": f"{ADD} algorithm=grpo grpo.weight_cap=1.5",
    "bound-of-no-mask": f"{ADD} algorithm=grpo grpo.mask_high=1.5",
    "kl-in-the-reward-without-weight": f"{ADD} algorithm=grpo grpo.kl_in=reward",
    "kl-kind-without-weight": f"{ADD} algorithm=grpo grpo.kl_kind=k1",
    "groups-below-mini-batches": f"{ADD} algorithm=grpo data.batch_size=2 grpo.mini_batches=4",
    "group-below-dp": f"{ADD} algorithm=grpo data.batch_size=2 grpo.group_size=2 grpo.mini_batches=2 mesh.dp=4",
    "replicas-of-no-engine": f"{ADD} algorithm=grpo engine.replicas=2 data.rollouts=rollouts",
    "cache-of-no-engine": f"{ADD} engine.kv_cache_gib=1",
    "cache-of-nothing": f"{ADD} algorithm=grpo engine.kv_cache_gib=0",
    "cache-of-transformers": f"{ADD} algorithm=grpo engine.kv_cache_gib=1 engine.kind=hf",
    "replicas-of-adapters": f"{ADD} algorithm=grpo engine.replicas=2 lora.rank=8 lora.sync=adapter",
    "replicas-without-prompts": f"{ADD} algorithm=grpo engine.replicas=3 data.batch_size=2 grpo.group_size=2",
    "staleness-without-correction": f"{ADD} algorithm=grpo grpo.max_staleness=1",
    "async-without-staleness": f"{ADD} algorithm=grpo grpo.mode=async",
    "inflight-steps-of-another-mode": f"{ADD} algorithm=grpo grpo.inflight_steps=3",
    "kept-cache-of-another-mode": f"{ADD} {STALE} grpo.mode=async grpo.keep_kv_cache=true",
    "kept-cache-of-older-batches": f"{ADD} {STALE.replace('=1', '=2')} grpo.mode=inflight grpo.keep_kv_cache=true",
    "kept-cache-of-transformers": f"{ADD} {STALE} grpo.mode=inflight grpo.keep_kv_cache=true engine.kind=hf",
    "staleness-in-sync": f"{ADD} {STALE}",
    "async-of-recorded-rollouts": f"{ADD} {STALE} grpo.mode=async data.rollouts=rollouts",
    "inflight-on-a-cluster": f"{ADD} {STALE} grpo.mode=inflight ray.use=true",
    "async-with-a-sleeping-engine": f"{ADD} {STALE} grpo.mode=async engine.sleep_level=1",
    "inflight-with-an-adapter": f"{ADD} {STALE} grpo.mode=inflight lora.rank=8",
    "inflight-with-replayed-routes": f"{MOE} {STALE} grpo.mode=inflight grpo.replay_routes=true",
    "rounds-of-groups-of-one": f"{ADD} algorithm=grpo grpo.advantage=reinforce++ grpo.group_size=1 "
    "grpo.max_sampling_rounds=2",
    "rounds-of-recorded-rollouts": f"{ADD} algorithm=grpo grpo.max_sampling_rounds=2 data.rollouts=rollouts",
    "unknown-environment": f"{ADD} {TOOLS} grpo.environment=python",
    "environment-of-one-turn": f"{ADD} algorithm=grpo data.source=calculator grpo.environment=calculator",
    "turns-without-environment": f"{ADD} algorithm=grpo grpo.max_turns=3",
    "steps-of-one-turn": f"{ADD} algorithm=grpo grpo.step_wise=true",
    "turns-of-plain-prompts": f"{ADD} {TOOLS} grpo.environment=calculator data.source=arithmetic",
    "turns-of-recorded-rollouts": f"{ADD} {TOOLS} grpo.environment=calculator data.rollouts=rollouts",
    "turns-inflight": f"{ADD} {TOOLS} grpo.environment=calculator grpo.mode=inflight {STALE.partition(' ')[2]}",
    "turns-with-replayed-routes": f"{MOE} {TOOLS} grpo.environment=calculator grpo.replay_routes=true",
    "rounds-of-steps": f"{ADD} {TOOLS} grpo.environment=calculator grpo.step_wise=true grpo.max_sampling_rounds=2",
    "corrected-twice": f"{ADD} algorithm=grpo grpo.ratio_over=engine grpo.weight_level=token",
    "dual-clip-of-another-loss": f"{ADD} algorithm=grpo grpo.loss=gspo grpo.dual_clip=3",
    "constant-without-length": f"{ADD} aggregation=constant",
    "constant-of-0": f"{ADD} aggregation=constant aggregation_constant=0",
    "constant-below-0": f"{ADD} aggregation=constant aggregation_constant=-8",
    "rollouts-without-grpo": f"{ADD} data.rollouts=rollouts",
    "oracle-without-judge": f"{ADD} verify.every=10",
    "oracle-of-balancing": "model=tiny:add-moe megatron.moe_z_loss=0.01 verify.every=1 verify.steps=true",
    "profile-of-no-step": f"{ADD} steps=3 profile.steps=[4]",
    "profile-of-no-number": f"{ADD} profile.steps=[third]",
    "profile-of-no-rank": f"{ADD} mesh.dp=2 profile.steps=[1] profile.ranks=[0,2]",
    "profile-of-nobody": f"{ADD} profile.steps=[1] profile.ranks=[]",
    "step-without-replay": f"{ADD} --step 3",
    "replay-of-no-run": f"{ADD} --replay absent --step 3",
    "replay-and-dry-run": f"{ADD} --replay replayed --step 3",
    "preflight-and-dry-run": f"{ADD} --preflight",
    "lora-of-rank-0": f"{ADD} lora.rank=0",
    "lora-without-rank": f"{ADD} lora.alpha=16",
    "lora-of-unknown-linears": f"{ADD} lora.rank=8 lora.targets=[q_proj]",
    "lora-of-no-linears": f"{ADD} lora.rank=8 lora.targets=[]",
    "lora-of-one-linear-twice": f"{ADD} lora.rank=8 lora.targets=[linear_qkv,linear_qkv]",
    "lora-of-experts": f"{MOE} lora.rank=8",
    "lora-merged-for-no-engine": f"{ADD} lora.rank=8 lora.sync=merged",
    "lora-in-transformers": f"{ADD} algorithm=grpo lora.rank=8 engine.kind=hf",
    "lora-of-a-rank-that-vllm-has-not": f"{ADD} algorithm=grpo lora.rank=12",
    "lora-of-a-round-trip": f"{ADD} algorithm=grpo engine.lora_rank=8",
    "no-fix": f"{ADD} fixes=all-of-them",
}
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""}
PROGRAM = """
import contextlib, io, json, sys, time
from verifier.cli.app import run
said = {}
for name, words in json.load(sys.stdin).items():
    out, err, before = io.StringIO(), io.StringIO(), time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(["train", *words.split(), "--dry-run"])
    said[name] = [code, out.getvalue(), err.getvalue(), time.process_time() - before]
heavy = {"torch", "megatron", "vllm", "ray", "transformers", "datasets"}
print(json.dumps([said, sorted({name.split(".")[0] for name in sys.modules} & heavy)]))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> tuple[dict[str, list], list[str]]:
    folder = tmp_path_factory.mktemp("refused")
    for name, rows in ROWS.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "twice.yaml").write_text("model: tiny:add\nmesh: {tp: 2}\nmesh.tp: 4\n")
    (folder / "replayed").mkdir()
    (folder / "replayed" / "config.yaml").write_text("model: tiny:add\n")
    before = sorted(folder.iterdir())
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=json.dumps(REFUSED), capture_output=True, text=True, cwd=folder,
        timeout=120, env=ENVIRONMENT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(folder.iterdir()) == before, "a refusal wrote something"
    return json.loads(done.stdout)


def test_each_contradiction_is_one_sentence(said, same_as_file):
    for name, (code, out, err, _) in said[0].items():
        assert (code, out, err.count("\n")) == (4, "", 1), (name, out, err)
    rows = [f"{name}\n  {REFUSED[name]}\n  {err}" for name, (_, _, err, _) in said[0].items()]
    same_as_file("train-refusals.txt", "".join(rows))


def test_each_takes_under_two_seconds_of_a_processor_and_loads_nothing_heavy(said):
    """Wall time is that of a shared machine; of the 2 s that a user may wait, each uses a small part."""
    answers, heavy = said
    assert heavy == []
    assert max(seconds for *_, seconds in answers.values()) < 2


def test_a_config_without_contradiction_prints_its_plan(tmp_path):
    command = [sys.executable, "-m", "verifier", "train", str(ROOT / "configs" / "add-sft.yaml"), "--dry-run"]
    done = subprocess.run(
        [*command, "--run", "run", "mesh.dp=4", "batch.max_tokens=null", "batch.micro_batch_size=5"],
        capture_output=True, text=True, cwd=tmp_path, timeout=60, env=ENVIRONMENT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *_, mesh, data, batch, left = done.stdout.splitlines()
    assert mesh.startswith("mesh: 4 ranks = tp 1 * cp 1 * dp 4 * pp 1")
    assert data.startswith("data: 7,278 examples to train on, 512 held out, none in both")
    assert batch == ("batch: 128 examples a step; 128 = 4 data-parallel ranks * 7 micro-batches of 4 to 5 (at most 5)")
    assert left.startswith("not checked")
    assert list(Path(tmp_path).iterdir()) == []

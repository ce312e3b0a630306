"""Clean training runs: the knobs of each, and what each measured."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import verifier.checks  # noqa: F401  (fills the registry)
from tests.meta.sources import ROOT
from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.core import store
from verifier.core.finding import Verdict
from verifier.core.trace import Trace
from verifier.faults.training_trial import DeferredJudge
from verifier.probes.training.run_evidence import RunEvidence
from verifier.report.report import report_of
from verifier.runs.resources import Deadline, Resources
from verifier.stages.logprob.records import OracleLogprobs, TrainerLogprobs
from verifier.stages.loss.records import GradientRecord
from verifier.trainer.controller import Trainer

STEPS = 3
COMMON = (
    "model=tiny:add", f"steps={STEPS}", "data.batch_size=8", "batch.micro_batch_size=3", "optimizer.schedule=linear",
    "optimizer.warmup_steps=2", "optimizer.weight_decay=0.1", "evaluation.num_problems=0", "verify.steps=true",
)  # fmt: skip
"""Knobs of every run, before its own."""
ROLLOUTS = ROOT / "verifier" / "faults" / "rollouts"
RECORDED = ("algorithm=grpo", f"data.rollouts={ROLLOUTS}", "grpo.group_size=4")
LIVE = (
    "algorithm=grpo", "data.batch_size=4", "grpo.group_size=4", "grpo.max_answer_tokens=8", "grpo.entropy_weight=0.05",
)  # fmt: skip
HF = (*LIVE, "engine.kind=hf")
AHEAD = ("grpo.max_staleness=1", "grpo.ratio_over=engine")
ROUTED = (
    "model=tiny:add-moe", "algorithm=grpo", f"data.rollouts={ROLLOUTS / 'routed'}", "grpo.group_size=4",
    "grpo.replay_routes=true",
)  # fmt: skip
BALANCED = ("model=tiny:add-deepseek", "megatron.moe_bias_update_rate=0.001")
SAMPLED = ("verify.every=1",)
"""Every step is computed by the oracle too."""

SPARSE = (
    "lora.rank=8", "grpo.reward=operator:gt", "grpo.drop_zero_variance=true", "data.batch_size=1", "grpo.group_size=2",
    "grpo.entropy_weight=0", "evaluation.num_problems=4", "evaluation.every=1", "verify.every=0",
)  # fmt: skip
"""Adapters, and too few answers for an advantage in each step."""

RUNS: dict[str, tuple[str, ...]] = {
    # supervised fine-tuning, over meshes
    "sft": SAMPLED,
    "sft dp2": ("mesh.dp=2", *SAMPLED),
    "sft tp2": ("mesh.tp=2", *SAMPLED),
    "sft pp2": ("mesh.pp=2", *SAMPLED),
    "sft pp2 vpp2": ("mesh.pp=2", "mesh.vpp=2", *SAMPLED),
    "sft cp2": ("mesh.cp=2", *SAMPLED),
    "sft tp2 dp2": ("mesh.tp=2", "mesh.dp=2", *SAMPLED),
    "sft tp2 pp2": ("mesh.tp=2", "mesh.pp=2", "verify.every=2"),
    "sft pp2 dp2": ("mesh.pp=2", "mesh.dp=2", "verify.every=3"),
    "sft tokens": ("batch.micro_batch_size=null", "batch.max_tokens=64", "mesh.dp=2", *SAMPLED),
    "sft sequence_mean": ("aggregation=sequence_mean", "mesh.dp=2", *SAMPLED),
    "sft constant": ("aggregation=constant", "aggregation_constant=16", *SAMPLED),
    "sft cosine": (
        "optimizer.schedule=cosine", "optimizer.least_learning_rate=1e-4", "optimizer.clip_grad=0", *SAMPLED,
    ),
    "sft small rate": ("optimizer.learning_rate=1e-6", *SAMPLED),
    "sft bf16 sums": ("dtype=bf16", "mesh.dp=2", "megatron.grad_reduce_in_fp32=false"),
    "sft no overlap": ("mesh.dp=2", "megatron.overlap_param_gather=false", *SAMPLED),
    "sft small buckets": ("mesh.dp=2", "megatron.bucket_size=30000", *SAMPLED),
    "sft recompute full": ("megatron.recompute=full", *SAMPLED),
    "sft recompute block": (
        "megatron.recompute=full", "megatron.recompute_method=block", "megatron.recompute_layers=2", "mesh.pp=2",
        *SAMPLED,
    ),
    "sft recompute mlp": ("megatron.recompute=selective", "megatron.recompute_modules=[core_attn,mlp]", *SAMPLED),
    "sft bf16": ("dtype=bf16", "mesh.dp=2", *SAMPLED),
    "sft lora": ("lora.rank=4", "lora.alpha=6", *SAMPLED),
    "sft lora pp2 dp2": ("lora.rank=8", "mesh.pp=2", "mesh.dp=2", *SAMPLED),
    "sft lora dp2 qkv": ("lora.rank=8", "lora.targets=[linear_qkv,linear_fc2]", "mesh.dp=2", *SAMPLED),
    "sft moe ep2": ("model=tiny:add-moe", "mesh.ep=2", "mesh.dp=2", *SAMPLED),
    "sft moe ep2 tp2": ("model=tiny:add-moe", "mesh.ep=2", "mesh.dp=2", "mesh.tp=2", *SAMPLED),
    "sft moe balanced": (
        "model=tiny:add-moe", "mesh.dp=2", "megatron.moe_load_balancing=aux_loss", "megatron.moe_aux_loss=0.001",
    ),
    "sft score bias ep2": (*BALANCED, "mesh.ep=2", "mesh.dp=2", "evaluation.num_problems=16", "evaluation.every=1"),
    "sft score bias tp2 pp2": (*BALANCED, "mesh.tp=2", "mesh.pp=2", "megatron.recompute=full"),
    "sft score bias bf16": (*BALANCED, "dtype=bf16", "mesh.dp=2", "data.batch_size=48", "fixes=[megatron-7081]"),
    # GRPO and its kin, recorded rollouts
    "grpo": (*RECORDED, *SAMPLED),
    "grpo dp2": (*RECORDED, "mesh.dp=2", "grpo.kl_weight=0.1", *SAMPLED),
    "grpo tp2 dp2": (*RECORDED, "mesh.tp=2", "mesh.dp=2", "grpo.kl_weight=0.1", "grpo.kl_kind=k2", *SAMPLED),
    "grpo pp2 vpp2": (*RECORDED, "mesh.pp=2", "mesh.vpp=2", "grpo.entropy_weight=0.01", *SAMPLED),
    "grpo cp2": (*RECORDED, "mesh.cp=2", "grpo.kl_weight=0.1", "grpo.kl_kind=k1", *SAMPLED),
    "grpo mini-batches": (*RECORDED, "grpo.mini_batches=2", "grpo.epochs=2", "optimizer.warmup_steps=4", *SAMPLED),
    "dr_grpo constant": (
        *RECORDED, "grpo.advantage=dr_grpo", "aggregation=constant", "aggregation_constant=8", "mesh.dp=2", *SAMPLED,
    ),
    "rloo kl in reward": (*RECORDED, "grpo.advantage=rloo", "grpo.kl_weight=0.1", "grpo.kl_in=reward", *SAMPLED),
    "reinforce++": (*RECORDED, "grpo.advantage=reinforce++", "grpo.dual_clip=3.0", *SAMPLED),
    "reinforce++_baseline": (
        *RECORDED, "grpo.advantage=reinforce++_baseline", "aggregation=prompt_mean", "mesh.dp=2", *SAMPLED,
    ),
    "gspo": (
        *RECORDED, "grpo.loss=gspo", "grpo.epochs=2", "grpo.clip_low=0.003", "grpo.clip_high=0.004",
        "aggregation=sequence_mean", *SAMPLED,
    ),
    "cispo tp2": (*RECORDED, "grpo.loss=cispo", "grpo.epochs=2", "mesh.tp=2", *SAMPLED),
    "importance engine": (*RECORDED, "grpo.loss=importance", "grpo.ratio_over=engine", *SAMPLED),
    "weights token": (*RECORDED, "grpo.weight_level=token", "grpo.max_staleness=2", *SAMPLED),
    "weights sequence": (*RECORDED, "grpo.weight_level=sequence", "grpo.weight_cap=1.2", "mesh.dp=2", *SAMPLED),
    "mask geometric": (*RECORDED, "grpo.mask_level=geometric", "grpo.mask_low=0.9", "grpo.mask_high=1.1", *SAMPLED),
    "filters": (*RECORDED, "grpo.drop_overlong=true", "grpo.drop_zero_variance=true", "mesh.dp=2", *SAMPLED),
    "grpo temperature": (*RECORDED, "grpo.temperature=0.7", "grpo.entropy_weight=0.05", "mesh.tp=2", *SAMPLED),
    "grpo recompute": (*RECORDED, "megatron.recompute=full", "grpo.epochs=2", *SAMPLED),
    "grpo lora": (*RECORDED, "lora.rank=8", "grpo.kl_weight=0.1", *SAMPLED),
    "grpo llama lora bf16 pp2, some rollouts": (
        *RECORDED, "model=tiny:llama", "lora.rank=8", "lora.alpha=12", "dtype=bf16", "mesh.pp=2", "verify.rollouts=8",
        "grpo.kl_weight=0.1", *SAMPLED,
    ),
    "grpo bf16": (*RECORDED, "dtype=bf16", "grpo.kl_weight=0.1", *SAMPLED),
    "gspo bf16 pp2 cp2": (
        *RECORDED, "dtype=bf16", "grpo.loss=gspo", "grpo.epochs=3", "grpo.clip_low=0.01", "grpo.clip_high=0.01",
        "mesh.pp=2", "mesh.cp=2", "optimizer.learning_rate=3e-3", *SAMPLED,
    ),
    "grpo moe bf16 tp2": (*RECORDED, "model=tiny:add-moe", "dtype=bf16", "mesh.tp=2", "grpo.epochs=2", *SAMPLED),
    "grpo moe bf16 pp2 recomputed": (
        *RECORDED, "model=tiny:add-moe", "dtype=bf16", "mesh.pp=2", "megatron.recompute=selective",
        "megatron.recompute_modules=[moe]", *SAMPLED,
    ),
    # other families
    "grpo qwen2 tp2": (*RECORDED, "model=tiny:qwen2", "mesh.tp=2", *SAMPLED),
    "grpo llama pp2": (*RECORDED, "model=tiny:llama", "mesh.pp=2", "grpo.kl_weight=0.1", *SAMPLED),
    "grpo qwen3-moe ep2": (*RECORDED, "model=tiny:qwen3-moe", "mesh.ep=2", "mesh.dp=2", "verify.every=2"),
    "grpo qwen3-moe z-loss": (*RECORDED, "model=tiny:qwen3-moe", "megatron.moe_z_loss=0.001"),
    "grpo deepseek-v3 tp2 ep2": (
        *RECORDED, "model=tiny:deepseek-v3", "mesh.tp=2", "mesh.ep=2", "mesh.dp=2", "verify.every=3",
    ),
    "grpo nemotron-h tp2 dp2": (*RECORDED, "model=tiny:nemotron-h", "mesh.tp=2", "mesh.dp=2", "verify.every=3"),
    "grpo score bias ep2": (
        *RECORDED, *BALANCED, "mesh.ep=2", "mesh.dp=2", "grpo.mini_batches=2", "grpo.kl_weight=0.1",
    ),
    "grpo score bias still": (*RECORDED, "model=tiny:add-deepseek", "mesh.ep=2", "mesh.dp=2", *SAMPLED),
    # routes that are replayed
    "routed ep2": (*ROUTED, "mesh.ep=2", "mesh.dp=2", "grpo.kl_weight=0.1", *SAMPLED),
    "routed mini-batches": (*ROUTED, "grpo.mini_batches=2", "grpo.epochs=2", "megatron.recompute=full", *SAMPLED),
    # answers that an engine samples
    "live hf": (*HF, "grpo.temperature=0.8", *SAMPLED),
    "live hf rounds": (
        *HF, "grpo.max_sampling_rounds=3", "grpo.reward=operator:gt", "grpo.group_size=3", "grpo.epochs=2", *SAMPLED,
    ),
    "live vllm dp2": (*LIVE, "mesh.dp=2", "grpo.kl_weight=0.1", *SAMPLED),
    "live hf score bias": (*HF, *BALANCED, "mesh.ep=2", "mesh.dp=2"),
    "live vllm moe bf16 ep2": (*LIVE, "model=tiny:add-moe", "dtype=bf16", "mesh.ep=2", "mesh.dp=2", *SAMPLED),
    "live vllm routed bf16 ep2, async": (
        *LIVE, "model=tiny:add-moe", "grpo.replay_routes=true", "dtype=bf16", "mesh.ep=2", "mesh.dp=2",
        "grpo.kl_weight=0.1", "grpo.kl_in=reward", "grpo.mode=async", *AHEAD, *SAMPLED,
    ),
    "live async": (*LIVE, "grpo.mode=async", *AHEAD, *SAMPLED),
    "live in flight, recomputed": (*LIVE, "grpo.mode=inflight", "grpo.inflight_steps=3", *AHEAD, *SAMPLED),
    "live in flight, kept": (
        *LIVE, "grpo.mode=inflight", "grpo.inflight_steps=3", "grpo.keep_kv_cache=true", *AHEAD, *SAMPLED,
    ),
    # adapters, of which a step without an update sends none
    "live hf lora bf16, merged": (*HF, "lora.rank=8", "lora.sync=merged", "dtype=bf16", *SAMPLED),
    "live lora bf16, ahead": (*LIVE, "lora.rank=8", "dtype=bf16", "grpo.mode=async", *AHEAD, *SAMPLED),
    "live lora, steps without an update": (*LIVE, *SPARSE, "dtype=bf16"),
    "live lora, steps without an update, async": (*LIVE, *SPARSE, "grpo.mode=async", *AHEAD),
}  # fmt: skip
"""Name of a run -> its knobs."""


def run(resources: Resources, name: str, folder: Path) -> dict[str, Any]:
    """Train, require that every check of every step holds, and return the row of the ledger."""
    began = time.monotonic()
    given = {
        text.partition("=")[0]: text for text in (*COMMON, *RUNS[name], f"run={folder}")
    }  # the last of each counts
    config, _ = load(TrainConfig, overrides=[*given.values()])
    launcher = resources.launcher(Deadline(300))
    Trainer(config, lambda text: None, RunEvidence(DeferredJudge()), launcher=launcher, resources=resources).run()
    trained_s = time.monotonic() - began
    traces = [store.read(path) for path in sorted((folder / "steps").iterdir())]
    assert len(traces) == STEPS
    reports = [report_of(trace, "") for trace in [*traces, store.read(folder / "export")]]
    bad = [item for report in reports for item in report.outcomes if item.verdict is not Verdict.HOLDS]
    assert not bad, [(item.code, item.verdict.name, item.finding or item.error) for item in bad]
    assert all(report.verdict is Verdict.HOLDS for report in reports)
    sampled = config.verify.every and [step for step in range(1, STEPS + 1) if step % config.verify.every == 0]
    codes = [{item.code for item in report.outcomes} for report in reports]
    assert "WGT019" in codes[STEPS]
    assert [step for step, found in enumerate(codes, 1) if "LSS001" in found] == (sampled or [])
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    live = config.algorithm == "grpo" and config.data.rollouts is None
    found = {
        "gradient_gap": max(map(_gradient_gap, traces)) if sampled else None,
        "trainer_nats": max(map(_trainer_gap, traces)) if sampled and config.algorithm == "grpo" else None,
        "engine_nats": max(row.get("mismatch_max", 0.0) for row in metrics) if live else None,
    }
    row = {key: None if value is None else float(f"{value:.1e}") for key, value in found.items()}
    return {
        "run": name, "num_checks": len(set().union(*codes)),
        "num_compared": sum(item.num_compared for report in reports for item in report.outcomes), **row,
        "train_s": round(trained_s, 1),
    }  # fmt: skip


def _gradient_gap(trace: Trace) -> float:
    """Greatest distance of a gradient from transformers', of the tensor's greatest gradient."""
    steps = [item for item in trace.of(GradientRecord) if item.gradient and float(item.gradient_scale)]
    return max((float(item.gradient.value) / float(item.gradient_scale) for item in steps if item.gradient), default=0)


def _trainer_gap(trace: Trace) -> float:
    """Greatest distance of the trainer's log-probabilities from transformers', nats."""
    theirs = {(item.name, item.version): trace.array(item).astype(float) for item in trace.of(OracleLogprobs)}
    ours = {(item.name, item.version): trace.array(item).astype(float) for item in trace.of(TrainerLogprobs)}
    return max((float(abs(values - theirs[key]).max()) for key, values in ours.items()), default=0.0)

"""Knobs of clean training runs, drawn by seed: combinations that nobody thought of."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from tests.dist.train_clean_case import AHEAD, BALANCED, ROLLOUTS, STEPS
from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.errors import UsageError

MESHES = ("", "dp=2", "tp=2", "pp=2", "cp=2", "dp=4", "tp=2 dp=2", "pp=2 dp=2", "cp=2 dp=2", "tp=2 pp=2", "pp=2 vpp=2")
OF_EXPERTS = ("ep=2 dp=2", "ep=2 dp=2 tp=2", "ep=2 dp=2 pp=2", "ep=2 dp=2 cp=2")
MODELS = {"tiny:add": 5, "tiny:add-moe": 3, "tiny:add-deepseek": 2}
OTHERS = {"tiny:qwen2": 1, "tiny:llama": 1, "tiny:qwen3-moe": 1, "tiny:deepseek-v3": 1}
"""Models of recorded rollouts alone: their vocabulary is not that of the generated problems."""


class Draw:
    """Choices of one seed.

    Args:
        seed: of the draw.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(f"drawn run {seed}")

    def one(self, choices: Sequence[Any]) -> Any:
        """One of these, each as likely."""
        return self._random.choice(choices)

    def weighed(self, choices: dict[str, float]) -> str:
        """One of these, by weight."""
        return self._random.choices([*choices], [*choices.values()])[0]

    def happens(self, share: float) -> bool:
        """True in this share of draws."""
        return self._random.random() < share

    def some(self, share: float, knob: str, choices: Sequence[Any]) -> list[str]:
        """In this share of draws the knob, with one of the values."""
        return [f"{knob}={self.one(choices)}"] if self.happens(share) else []


def drawn(seed: int) -> list[str]:
    """Overrides of a run that its config allows, without its folder; the draw is repeated until one is allowed."""
    draw = Draw(seed)
    while True:
        found = _drawn(draw)
        try:
            load(TrainConfig, overrides=[*found, "run=unused"])
        except UsageError:
            continue
        return found


def _drawn(draw: Draw) -> list[str]:
    source = draw.weighed({"text": 3, "recorded": 4, "routed": 1, "hf": 2.5, "vllm": 1.5})
    models = {
        "text": MODELS, "recorded": {**MODELS, **OTHERS}, "routed": {"tiny:add-moe": 1}, "hf": MODELS,
        "vllm": {"tiny:add": 5, "tiny:add-moe": 3},  # it has no CPU kernels for multi-head latent attention
    }[source]  # fmt: skip
    model = draw.weighed(models)
    experts = model not in ("tiny:add", "tiny:qwen2", "tiny:llama")
    low, every = draw.happens(0.4), draw.one((0, 1, 1, 2))
    mesh = draw.one((*MESHES, *(OF_EXPERTS * 2 if experts else ()))).split()
    knobs = [
        f"model={model}", f"steps={STEPS}", f"seed={draw.one(range(1, 100))}", "evaluation.num_problems=0",
        "verify.steps=true", f"verify.every={every}", *(["dtype=bf16"] if low else []), *(f"mesh.{it}" for it in mesh),
        f"data.batch_size={draw.one((4, 8, 12) if source in ('text', 'recorded', 'routed') else (2, 4, 6))}",
        f"batch.{draw.one(('micro_batch_size=1', 'micro_batch_size=3', 'max_tokens=64', 'max_tokens=160'))}",
        f"aggregation={draw.one(('token_mean', 'token_mean', 'sequence_mean', 'prompt_mean', 'constant'))}",
    ]  # fmt: skip
    knobs += ["aggregation_constant=16.5"] if "aggregation=constant" in knobs else []
    knobs += _of_optimizer(draw) + _of_megatron(draw, experts)
    if model == "tiny:add-deepseek" and not every:
        knobs += [*BALANCED[1:], *(["fixes=[megatron-7081]"] if low else [])]
    if not experts and not (low and every):
        adapters = draw.some(0.25, "lora.rank", (4, 8))
        knobs += adapters + (["fixes=[bridge-5840]"] if adapters and "tp=2" in mesh else [])
    return knobs if source == "text" else knobs + _of_policy(draw, source, experts)


def _of_optimizer(draw: Draw) -> list[str]:
    return [
        f"optimizer.learning_rate={draw.one((1e-3, 3e-4, 1e-5, 3e-3))}",
        f"optimizer.schedule={draw.one(('constant', 'linear', 'cosine'))}",
        f"optimizer.warmup_steps={draw.one((0, 1, 2))}", f"optimizer.weight_decay={draw.one((0, 0.1, 0.01))}",
        f"optimizer.clip_grad={draw.one((0, 1.0, 100.0, 0.1))}", f"optimizer.beta_2={draw.one((0.95, 0.999))}",
    ]  # fmt: skip


def _of_megatron(draw: Draw, experts: bool) -> list[str]:
    recompute = draw.one(("none", "none", "full", "selective"))
    modules = draw.one(("core_attn", "mlp", "core_attn,mlp", *(("moe",) * 2 if experts else ())))
    overlaps = draw.one(((), (), ("overlap_param_gather",), ("overlap_param_gather", "overlap_grad_reduce")))
    return [
        f"megatron.recompute={recompute}",
        *([f"megatron.recompute_modules=[{modules}]"] if recompute == "selective" else []),
        *(f"megatron.{name}=false" for name in overlaps),
        *draw.some(0.2, "megatron.bucket_size", (20_000, 100_000)),
        *draw.some(0.15, "megatron.rope_fusion", ("false",)),
    ]


def _of_policy(draw: Draw, source: str, experts: bool) -> list[str]:
    knobs = ["algorithm=grpo", f"grpo.loss={draw.one(('clipped', 'clipped', 'gspo', 'cispo', 'importance'))}"]
    if source in ("recorded", "routed"):
        folder = ROLLOUTS / "routed" if source == "routed" else ROLLOUTS
        knobs += [f"data.rollouts={folder}", "grpo.group_size=4"]
        knobs += ["grpo.replay_routes=true"] if source == "routed" else []
    else:
        knobs += [
            f"engine.kind={source}", f"grpo.max_answer_tokens={draw.one((4, 8, 12))}",
            f"grpo.group_size={draw.one((2, 4, 5))}", *draw.some(0.2, "engine.replicas", (2,)),
            *draw.some(0.2, "grpo.max_sampling_rounds", (2,)), *draw.some(0.3, "lora.sync", ("merged", "adapter")),
        ]  # fmt: skip
        knobs += ["grpo.replay_routes=true"] if experts and source == "vllm" and draw.happens(0.5) else []
        knobs += ["grpo.mode=async", *AHEAD] if draw.happens(0.25) else []
    knobs += draw.some(0.3, "grpo.kl_weight", (0.01, 0.5))
    if any(text.startswith("grpo.kl_weight") for text in knobs):
        knobs += [f"grpo.kl_kind={draw.one(('k1', 'k2', 'k3'))}", f"grpo.kl_in={draw.one(('loss', 'loss', 'reward'))}"]
    estimators = ("grpo", "grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline")
    return [
        *knobs, f"grpo.advantage={draw.one(estimators)}", *draw.some(0.3, "grpo.mini_batches", (2,)),
        *draw.some(0.3, "grpo.epochs", (2,)), *draw.some(0.4, "grpo.entropy_weight", (0.01, 0.05)),
        *draw.some(0.3, "grpo.temperature", (0.7, 1.2)), *draw.some(0.1, "grpo.dual_clip", (3.0,)),
        *draw.some(0.2, "grpo.weight_level", ("token", "sequence", "geometric")),
        *draw.some(0.2, "grpo.mask_level", ("token", "sequence", "geometric")),
        *draw.some(0.2, "grpo.drop_overlong", ("true",)), *draw.some(0.2, "grpo.drop_zero_variance", ("true",)),
    ]  # fmt: skip

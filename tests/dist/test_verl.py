"""verl's worker, FSDP engine, losses and estimators, recorded by `verifier.probe`: they hold, planted bugs are caught.

What this does not exercise: GPUs, Ray, FSDP1 (which needs a GPU), Megatron, engines of verl's rollout, critics.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.recorded_loops import FOLDERS, caught, holds, report
from tests.dist.verl_bugs import (
    Plant,
    adapter_before_the_last_step,
    adapter_of_the_other_side,
    end_untrained,
    gradients_of_the_last,
    groups_of_others,
    labels_rolled_back,
    mask_not_shifted,
    mean,
    micro_batch_dropped,
    no_dual_clip,
    not_clipped,
    penalty_of_the_other_sign,
    policy,
    positions_of_the_pack,
    prompts_trained,
    rejection,
    responses_cut_late,
    rows_not_restored,
    scaled_by_root,
    scheduler_each_step,
    sent_before_the_last_step,
    sft_loss,
    stale_old,
    temperature_left_out,
    tokens_of_the_micro_batch,
    weights_of_the_inverse,
)
from tests.meta.sources import ROOT
from verifier.core.finding import Verdict
from verifier.core.stage import Stage
from verifier.model.tiny import write_tiny
from verifier.oracle.oracle import Oracle
from verifier.report import Report, render_text

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs verl: docs/probe.md"),
]
SCRIPT = Path(__file__).with_name("verl_loop.py")
ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
FLOAT32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
MANY = {"steps": 1, f"{ACTOR}.ppo_epochs": 2, f"{ACTOR}.ppo_mini_batch_size": 2}
"""Four optimizer steps on one batch."""
KL = {**MANY, f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0.05}


def loss(name: str, **more: Any) -> dict[str, Any]:
    return {**MANY, f"{ACTOR}.policy_loss.loss_mode": name, **more}


def estimator(name: str) -> dict[str, Any]:
    return {"steps": 1, "algorithm.adv_estimator": name}


STALE = {"steps": 3, "sync_every": 3}
"""Three batches of one version, so that the trainer is away from the engine."""
LORA = {**MANY, "steps": 2, f"{MODEL}.lora_rank": 4, f"{MODEL}.lora_alpha": 8}
REJECTIONS = {
    "token_k1": "0.5_2.5", "token_k3": 0.5, "seq_sum_k1": "0.3_30", "seq_mean_k1": "0.9_1.8", "seq_mean_k2": 0.3,
    "seq_max_k2": 1.0, "token_k2,seq_mean_k3": "0.5,0.4",
}  # fmt: skip


def rejected(rule: str, bounds: str | float) -> dict[str, Any]:
    correction = {"rollout_is": None, "rollout_rs": rule, "rollout_rs_threshold": bounds}
    return {**STALE, "algorithm.rollout_correction": correction}


SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "dual clip": {**MANY, f"{ACTOR}.clip_ratio_c": 1.02},
    "warm-up and cosine": {
        **MANY, "steps": 3, f"{ACTOR}.optim.lr_warmup_steps": 1, f"{ACTOR}.optim.total_training_steps": 3,
        f"{ACTOR}.optim.lr_scheduler_type": "cosine", f"{ACTOR}.optim.min_lr_ratio": 0.1,
    },
    **{
        mode: {"steps": 1, f"{ACTOR}.loss_agg_mode": mode}
        for mode in ("token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
    },
    **{name: loss(name) for name in ("gspo", "cispo", "sapo", "gpg")},
    **{f"KL {kind}": {**KL, f"{ACTOR}.kl_loss_type": kind} for kind in ("k1", "k2", "low_var_kl", "k3+", "abs")},
    "entropy": {**MANY, f"{ACTOR}.entropy_coeff": 0.01},
    "entropy and KL": {**KL, f"{ACTOR}.entropy_coeff": 0.01},
    "KL in the reward": {"algorithm.use_kl_in_reward": True},
    **{name: estimator(name) for name in ("rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")},
    "not divided by the deviation": {"steps": 1, "algorithm.norm_adv_by_std_in_grpo": False},
    **{
        f"weights by {level}": {
            "steps": 1, "algorithm.rollout_correction": {"rollout_is": level, "rollout_is_threshold": 2.0},
        }
        for level in ("token", "sequence")
    },
    "weights far from 1": {
        **STALE, "algorithm.rollout_correction": {"rollout_is": "token", "rollout_is_threshold": 2.0},
    },
    **{f"rejected by {rule}": rejected(rule, bounds) for rule, bounds in REJECTIONS.items()},
    "padded": {"steps": 1, f"{MODEL}.use_remove_padding": False},
    "packs of a size": {**MANY, f"{ACTOR}.pad_to_length": True, f"{ACTOR}.fsdp_config.pad_to_length_bucket": 64},
    "micro-batches by tokens": {**MANY, f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 60},
    "shuffled": {**MANY, f"{ACTOR}.shuffle": True},
    "LoRA": LORA,
    "LoRA in layers": {
        **LORA, "actor_rollout_ref.rollout.layered_summon": True,
        "actor_rollout_ref.rollout.load_format": "safetensors",
    },
    "hotter": {"steps": 1, "actor_rollout_ref.rollout.temperature": 1.3},
    "bf16 autocast": {
        "steps": 1, "dtype": "bfloat16", f"{ACTOR}.fsdp_config.mixed_precision": {**FLOAT32, "param_dtype": "bf16"},
    },
}  # fmt: skip
HELD = {
    "ADV001", "ADV002", "ADV003", "CFG001", "DAT004", "DAT008", "ENG001", "ENG004", "ENG009", "LGP001", "LGP003",
    "LGP006", "LGP009", "LSS001", "LSS002", "LSS003", "LSS004", "PCK001", "PCK002", "PCK004", "PLN001", "PLN002",
    "TPT001", "TPT002", "TRN001", "TRN002", "TRN003", "TRN005", "TRN006", "WGT001", "WGT004", "WGT005", "WGT006",
    "WGT008", "WGT016",
}  # fmt: skip
Judged = Callable[..., Report]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("add", tmp_path_factory.mktemp("verl") / "checkpoint")


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Iterator[Oracle]:
    with Oracle(checkpoint, 120.0) as running:
        yield running


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """This process as the one of verl's workers."""
    with pytest.MonkeyPatch.context() as patch, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        free.close()
        for name, value in {**place, "VERL_ENGINE_DEVICE": "cuda"}.items():
            patch.setenv(name, value)
        for folder in FOLDERS:
            patch.syspath_prepend(folder)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo")
        yield
        torch.distributed.destroy_process_group()
        torch.set_num_threads(threads)


@pytest.fixture
def run(alone: None, checkpoint: Path, oracle: Oracle, tmp_path: Path) -> Judged:
    """Train by the loop, with planted faults where some are; the report."""

    def judged(settings: dict[str, Any], loop: str = "verl_loop") -> Report:
        trace = tmp_path / f"trace-{len(list(tmp_path.iterdir()))}"
        with (tmp_path / "said").open("w") as said, contextlib.redirect_stdout(said):
            importlib.import_module(loop).train(checkpoint, trace, **settings)
        return report(trace, checkpoint, oracle)

    return judged


@pytest.mark.parametrize("name", SETTINGS)
def test_a_right_loop_holds(name: str, run: Judged) -> None:
    found = run(SETTINGS[name])
    less = {"PCK002"} if name == "padded" else set()
    less |= {"WGT016"} if "LoRA" in name else set()
    more = {"LGP012"} if "entropy" in name else {"WGT013"} if "LoRA" in name else set()
    more |= {"LGP010"} if "KL" in name else set()
    more |= {"ADV004"} if name == "KL in the reward" else set()
    holds(found, HELD - less | more)


@pytest.mark.parametrize("settings", [{}, KL, {f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean"}])
def test_two_processes_hold(settings: dict[str, Any], checkpoint: Path, oracle: Oracle, tmp_path: Path) -> None:
    found = in_two_processes("", settings, checkpoint, oracle, tmp_path)
    assert found.verdict is Verdict.HOLDS, render_text(found)
    assert {item.code for item in found.outcomes} >= (HELD | {"WGT002"}) - {"WGT016"}


SFT = {
    "sft": {}, "sft by tokens": {"data.use_dynamic_bsz": True, "data.max_token_len_per_gpu": 40},
    "sft without warm-up": {"optim.lr_warmup_steps": 0, "optim.lr_scheduler_type": "constant"},
    "sft in bf16 autocast": {"dtype": "bfloat16", "engine.mixed_precision": {**FLOAT32, "param_dtype": "bf16"}},
}  # fmt: skip
SFT_HELD = {
    "CFG001", "LSS001", "LSS002", "PCK001", "PCK002", "TRN001", "TRN002", "TRN005", "TRN006", "WGT001", "WGT004",
    "WGT005", "WGT006", "WGT008", "WGT016",
}  # fmt: skip


@pytest.mark.parametrize("name", SFT)
def test_fine_tuning_holds(name: str, run: Judged) -> None:
    found = run(SFT[name], "verl_sft")
    assert found.verdict is Verdict.HOLDS, render_text(found)
    assert {item.code for item in found.outcomes} == SFT_HELD


def test_fine_tuning_in_two_processes_holds(checkpoint: Path, oracle: Oracle, tmp_path: Path) -> None:
    found = in_two_processes("", {}, checkpoint, oracle, tmp_path, "verl_sft")
    assert found.verdict is Verdict.HOLDS, render_text(found)
    assert {item.code for item in found.outcomes} >= SFT_HELD - {"WGT016"}


def in_two_processes(
    planted: str, settings: dict[str, Any], checkpoint: Path, oracle: Oracle, folder: Path, loop: str = "verl_loop"
) -> Report:  # fmt: skip
    script, trace = folder / "planted.py", folder / "trace"
    script.write_text(
        f"from pathlib import Path\nimport torch\nimport {loop} as v\nfrom {loop} import *\n"
        f"{planted}v.train(Path({str(checkpoint)!r}), Path({str(trace)!r}), **{settings!r})\n"
    )
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *FOLDERS, *sys.path]),
    }
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    subprocess.run(launch, env=environment, check=True, timeout=300)
    return report(trace, checkpoint, oracle)


PLANTED: dict[str, tuple[Plant, Stage, str, dict[str, Any]]] = {
    "responses cut a token late": (responses_cut_late, Stage.PACK, "PCK001", MANY),
    "labels rolled back": (labels_rolled_back, Stage.PACK, "PCK001", MANY),
    "positions of the pack": (positions_of_the_pack, Stage.PACK, "PCK001", MANY),
    "micro-batch dropped": (micro_batch_dropped, Stage.PACK, "PCK001", MANY),
    "rows not restored": (rows_not_restored, Stage.LOGPROB, "LGP001", SETTINGS["micro-batches by tokens"]),
    "old of the batch before": (stale_old, Stage.LOGPROB, "LGP001", {}),
    "temperature left out": (temperature_left_out, Stage.LOGPROB, "LGP001", SETTINGS["hotter"]),
    "groups of others": (groups_of_others, Stage.ADVANTAGE, "ADV002", MANY),
    "mean of the micro-batches' means": (mean(batch_num_tokens=None), Stage.ADVANTAGE, "ADV001", MANY),
    "sequences counted by prompts": (
        mean(global_batch_size=4), Stage.ADVANTAGE, "ADV001", SETTINGS["seq-mean-token-mean"],
    ),
    "rejected and kept": (
        rejection(lambda given, kept, other: given), Stage.ADVANTAGE, "ADV003", SETTINGS["rejected by token_k1"],
    ),
    "rejected by the inverse ratio": (
        rejection(lambda given, kept, other: other), Stage.ADVANTAGE, "ADV003",
        {**SETTINGS["rejected by seq_mean_k1"], "steps": 2},
    ),
    "rejected with its sequence": (
        rejection(lambda given, kept, other: kept * (kept == given).all(-1, keepdim=True)), Stage.ADVANTAGE, "ADV003",
        SETTINGS["rejected by token_k3"],
    ),
    "weights of the inverse ratio": (weights_of_the_inverse, Stage.ADVANTAGE, "ADV003", SETTINGS["weights far from 1"]),
    "adapter scaled by the root of its rank": (scaled_by_root, Stage.LOSS, "LSS001", LORA),
    "adapter before the last step": (adapter_before_the_last_step, Stage.EXPORT, "WGT013", LORA),
    "rows of an adapter turned": (adapter_of_the_other_side, Stage.EXPORT, "WGT013", LORA),
    "gradients of the last micro-batch, with LoRA": (gradients_of_the_last, Stage.LOSS, "LSS001", LORA),
    "no dual clip": (policy(no_dual_clip), Stage.LOSS, "LSS004", SETTINGS["dual clip"]),
    "KL of the other sign": (penalty_of_the_other_sign, Stage.LOSS, "LSS004", KL),
    "gradients of the last micro-batch": (gradients_of_the_last, Stage.LOSS, "LSS001", MANY),
    "norm reported, not clipped": (not_clipped, Stage.TRAIN, "TRN005", MANY),
    "schedule by mini-batches": (scheduler_each_step, Stage.TRAIN, "TRN002", SETTINGS["warm-up and cosine"]),
    "sent before the last step": (sent_before_the_last_step, Stage.EXPORT, "WGT005", MANY),
}  # fmt: skip
"""Bug -> how it is planted, first bad stage, a check that sees it there, settings."""


@pytest.mark.parametrize("name", PLANTED)
def test_a_bug_is_caught_in_its_stage(name: str, run: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, stage, code, settings = PLANTED[name]
    import verl_loop  # noqa: F401 - sets verl's platform before a fault imports verl

    plant(monkeypatch)
    caught(run(settings), stage, code)


PLANTED_SFT: dict[str, tuple[Plant, Stage, str]] = {
    "prompts trained": (prompts_trained, Stage.PACK, "PCK001"),
    "end of an answer untrained": (end_untrained, Stage.PACK, "PCK001"),
    "labels rolled back": (labels_rolled_back, Stage.PACK, "PCK001"),
    "mask not shifted": (sft_loss(mask_not_shifted), Stage.LOSS, "LSS001"),
    "mean of the micro-batches' means": (sft_loss(tokens_of_the_micro_batch), Stage.LOSS, "LSS001"),
    "gradients of the last micro-batch": (gradients_of_the_last, Stage.LOSS, "LSS001"),
    "norm reported, not clipped": (not_clipped, Stage.TRAIN, "TRN005"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED_SFT)
def test_a_bug_of_fine_tuning_is_caught_in_its_stage(name: str, run: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, stage, code = PLANTED_SFT[name]
    import verl_sft  # noqa: F401 - sets verl's platform before a fault imports verl

    plant(monkeypatch)
    caught(run({"data.micro_batch_size_per_gpu": 4}, "verl_sft"), stage, code)


@pytest.fixture
def norms(run: Judged, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[float]]:
    """Norm of the first gradient by rows of a micro-batch; `change` is made to each mini-batch."""

    def found(settings: dict[str, Any], sizes: Sequence[int], change: Callable[[Any], None]) -> list[float]:
        import verl_loop

        seen: list[float] = []
        real = verl_loop.Loop.train_batch

        def train_batch(self: Any, data: Any) -> Any:
            real_step = self.real["train_batch"]
            self.real["train_batch"] = lambda own: real_step(change(own) or own)
            answer = real(self, data)
            self.real["train_batch"] = real_step
            seen.append(verl_loop.tu.get(answer, "metrics")["grad_norm"])
            return answer

        monkeypatch.setattr(verl_loop.Loop, "train_batch", train_batch)
        firsts = []
        for size in sizes:
            run({**settings, f"{ACTOR}.ppo_epochs": 1, f"{ACTOR}.ppo_micro_batch_size_per_gpu": size})
            firsts.append(seen[0])
            seen.clear()
        monkeypatch.setattr(verl_loop.Loop, "train_batch", real)
        return firsts

    return found


def test_geo_mean_grows_with_the_number_of_micro_batches(norms: Callable[..., list[float]]) -> None:
    """verl 0.9.1's `geo_mean` takes the mean of each micro-batch, and the engine adds them up."""
    firsts = norms(loss("geo_mean"), (8, 4, 2), lambda data: None)
    assert firsts == pytest.approx([firsts[0], 2 * firsts[0], 4 * firsts[0]], rel=1e-4)


NATS = ("old_log_probs", "advantages")


@pytest.mark.parametrize("constant", [None, 8])
def test_a_norm_by_length_is_of_each_micro_batch(constant: int | None, norms: Callable[..., list[float]]) -> None:
    """In verl 0.9.1's v1 columns are nested, so the greatest length is that of a micro-batch, without a constant."""
    from verl.utils import tensordict_utils

    def nested(data: Any) -> None:
        sizes = data["response_mask"].sum(-1)
        columns = {key: [slice(0, size) for size in sizes] for key in ("responses", "response_mask", *NATS)}
        columns["prompts"] = [slice(-size, None) for size in data["input_ids"].offsets().diff() - sizes]
        for key, parts in columns.items():
            rows = [row[part] for row, part in zip(data[key], parts, strict=True)]
            data[key] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        tensordict_utils.pop(data, key="max_response_len")

    settings = {
        "steps": 1, f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm", f"{ACTOR}.loss_scale_factor": constant,
    }  # fmt: skip
    whole, rows = norms(settings, (16, 1), nested)
    assert (whole == pytest.approx(rows, rel=1e-4)) == (constant is not None)


def test_a_mean_that_forgets_the_other_process_is_caught(checkpoint: Path, oracle: Oracle, tmp_path: Path) -> None:
    planted = (
        "real = core_algos.agg_loss\n"
        "def wrong(**told):\n    return real(**{**told, 'dp_size': 1})\n"
        "core_algos.agg_loss = losses.agg_loss = wrong\n"
    )
    found = in_two_processes(planted, {"steps": 1}, checkpoint, oracle, tmp_path)
    caught(found, Stage.ADVANTAGE, "ADV001")

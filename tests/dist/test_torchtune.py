"""torchtune's recipes of fine-tuning, recorded by `verifier.probe`: they hold, and planted bugs are caught.

What this does not exercise: GPUs, packed datasets, DoRA, quantized bases, the recipes of DPO, PPO and distillation.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import verifier.checks  # noqa: F401 - fills the registry
from tests.meta.sources import ROOT
from verifier.core.finding import Verdict
from verifier.core.stage import Stage
from verifier.core.store import read
from verifier.model.tiny import write_tiny
from verifier.oracle.oracle import Oracle
from verifier.probe.loop_oracle import add_oracle
from verifier.report import Report, render_text, report_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("torchtune") is None, reason="needs torchtune: docs/probe.md"),
]
SCRIPT = Path(__file__).with_name("torchtune_sft.py")
ENDS = {"num_hidden_layers": 2, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2": ("qwen2", "float32", ENDS),
    "qwen2 tied": ("qwen2", "float32", {**ENDS, "tie_word_embeddings": True}),
    "qwen2 bf16": ("qwen2", "bfloat16", ENDS),
    "llama": ("llama", "float32", {**ENDS, "hidden_size": 256}),  # torchtune's heads share the hidden size
}
SMALL = {"gradient_accumulation_steps": 2}
LORA = {**SMALL, "recipe": "lora_finetune_single_device"}
DISTRIBUTED = {**SMALL, "recipe": "full_finetune_distributed"}
HELD = {
    "CFG001", "LSS001", "LSS002", "PCK001", "TRN001", "TRN002", "TRN005", "TRN006", "WGT001", "WGT004", "WGT006",
    "WGT011", "WGT014", "WGT019", "WGT021",
}  # fmt: skip
OF_ADAPTERS = {"WGT005", "WGT008", "WGT010", "WGT013", "WGT018"}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("qwen2", {}),
    "accumulated": ("llama", SMALL),
    "tied": ("qwen2 tied", SMALL),
    "bf16": ("qwen2 bf16", {**SMALL, "dtype": "bf16"}),
}
Judged = Callable[..., Report]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("torchtune")
    return {
        name: write_tiny(kind, folder / name, dtype, changes=changes) for name, (kind, dtype, changes) in MODELS.items()
    }


@pytest.fixture
def run(checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Judged:
    """Train by a recipe, with planted faults where some are; the report."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    torch.set_num_threads(1)

    def judged(name: str, settings: dict[str, Any]) -> Report:
        import torchtune_sft

        torchtune_sft.train(checkpoints[name], tmp_path / "trace", **settings)
        return report(tmp_path / "trace", checkpoints[name])

    return judged


def report(trace: Path, checkpoint: Path) -> Report:
    with Oracle(checkpoint, 120.0) as oracle:
        add_oracle(trace, checkpoint, oracle)
    return report_of(read(trace), "trace")


@pytest.mark.parametrize("name", SETTINGS)
def test_a_recipe_holds(name: str, run: Judged) -> None:
    found = run(*SETTINGS[name])
    assert found.verdict is Verdict.HOLDS, render_text(found)
    assert {item.code for item in found.outcomes} == HELD - ({"TRN005"} if name == "bf16" else set())


@pytest.mark.parametrize(("name", "wrong"), [("llama", {"WGT021"}), ("qwen2", {"WGT013", "WGT019", "WGT021"})])
def test_what_is_saved_of_an_adapter_alone_is_wrong(name: str, wrong: set[str], run: Judged) -> None:
    """torchtune 0.6.1 saves an adapter beside weights that have it within, and turns rows of a Qwen2's queries."""
    found = run(name, LORA)
    assert {item.code for item in found.outcomes} == HELD | OF_ADAPTERS
    assert {item.code for item in found.violated} == wrong, render_text(found)


@pytest.mark.parametrize(("steps", "wrong"), [(1, {"LSS002"}), (2, {"LSS001", "LSS002"})])
def test_a_first_token_in_the_count_is_wrong(steps: int, wrong: set[str], run: Judged) -> None:
    """torchtune 0.6.1 counts tokens before it shifts labels: one more of each sequence whose prompt is trained."""
    found = run("qwen2", {"dataset.train_on_input": True, "gradient_accumulation_steps": steps, "batch_size": 2})
    assert {item.code for item in found.violated} == wrong, render_text(found)


@pytest.mark.parametrize(("name", "dtype"), [("qwen2", "fp32"), ("qwen2 bf16", "bf16")])
def test_two_processes_hold(name: str, dtype: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    found = in_two_processes("", checkpoints[name], tmp_path, dtype=dtype)
    assert found.verdict is Verdict.HOLDS, render_text(found)
    assert {item.code for item in found.outcomes} == (HELD | {"WGT002"}) - ({"TRN005"} if dtype == "bf16" else set())


def test_a_mean_that_forgets_the_other_process_is_caught(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    planted = "real = t.SCALE_GRADS\nt.SCALE_GRADS = lambda model, scaler: real(model, scaler / 2)\n"
    found = in_two_processes(planted, checkpoints["qwen2"], tmp_path)
    caught(found, Stage.LOSS, "LSS001")


def in_two_processes(planted: str, checkpoint: Path, folder: Path, **settings: Any) -> Report:
    script, trace = folder / "planted.py", folder / "trace"
    asked = DISTRIBUTED | settings
    script.write_text(
        f"from pathlib import Path\nimport torchtune_sft as t\n{planted}t.train(Path({str(checkpoint)!r}), "
    )
    with script.open("a") as file:
        file.write(f"Path({str(trace)!r}), **{asked!r})\n")
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(SCRIPT.parent), *sys.path]),
    }
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    subprocess.run(launch, env=environment, check=True, timeout=300)
    return report(trace, checkpoint)


def caught(found: Report, stage: Stage, code: str) -> None:
    assert found.violated, render_text(found)
    first = found.violated[0].finding
    assert first is not None
    assert first.first_bad_stage is stage, render_text(found)
    assert code in [item.code for item in found.violated]
    assert not [item.code for item in found.outcomes if item.error]


def labels_not_shifted(patch: pytest.MonkeyPatch) -> None:
    """Each place is to predict the token that it has."""
    patch.setattr(torch, "hstack", lambda pair: torch.cat((pair[1], pair[0]), 1))


def labels_early(patch: pytest.MonkeyPatch) -> None:
    """The loss reads the labels of the place before."""
    from torchtune.modules.loss import CEWithChunkedOutputLoss

    real = CEWithChunkedOutputLoss.forward
    patch.setattr(
        CEWithChunkedOutputLoss, "forward", lambda self, logits, labels: real(self, logits, labels.roll(-1, -1))
    )


def mean_of_micro_batches(patch: pytest.MonkeyPatch) -> None:
    """Each micro-batch has the same weight, however many tokens it has."""
    from torchtune.modules.loss import CEWithChunkedOutputLoss

    real = CEWithChunkedOutputLoss.forward
    patch.setattr(
        CEWithChunkedOutputLoss, "forward",
        lambda self, logits, labels: real(self, logits, labels) * 13 / (labels != self.ignore_index).sum(),
    )  # fmt: skip


def scaled_twice(patch: pytest.MonkeyPatch) -> None:
    """The gradient is divided by the number of tokens twice."""
    import torchtune_sft

    real = torchtune_sft.SCALE_GRADS
    patch.setattr(torchtune_sft, "SCALE_GRADS", lambda model, scaler: real(model, scaler * scaler))


def converted(name: str, change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[pytest.MonkeyPatch], None]:
    """A bug in one of torchtune's conversions of weights."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        from torchtune.models import convert_weights
        from torchtune.models.qwen2 import _convert_weights

        room = _convert_weights if name.startswith("qwen2") else convert_weights
        real = getattr(room, name)

        def wrong(weights: dict[str, torch.Tensor], **sizes: Any) -> dict[str, torch.Tensor]:
            found = real(weights, **sizes)
            change(found)
            return found

        patch.setattr(room, name, wrong)

    return plant


def keys_as_in_the_file(weights: dict[str, torch.Tensor]) -> None:
    """Rows of keys stay in halves where torchtune has pairs, or the other way round."""
    for name in weights:
        if "k_proj" in name:
            weights[name] = weights[name].unflatten(0, (-1, 16, 2)).transpose(1, 2).flatten(0, 2)


def layer_left_out(weights: dict[str, torch.Tensor]) -> None:
    for name in [name for name in weights if ".layers.1." in name]:
        del weights[name]


def head_of_the_beginning(patch: pytest.MonkeyPatch) -> None:
    """The head is saved as it was loaded."""
    from torchtune.models.qwen2 import _convert_weights

    load, save = _convert_weights.qwen2_hf_to_tune, _convert_weights.qwen2_tune_to_hf
    kept: dict[str, torch.Tensor] = {}

    def loaded(weights: dict[str, torch.Tensor], **sizes: Any) -> dict[str, torch.Tensor]:
        kept["lm_head.weight"] = weights["lm_head.weight"].clone()
        return load(weights, **sizes)

    patch.setattr(_convert_weights, "qwen2_hf_to_tune", loaded)
    patch.setattr(_convert_weights, "qwen2_tune_to_hf", lambda weights, **sizes: save(weights, **sizes) | kept)


def warm_up_longer(patch: pytest.MonkeyPatch) -> None:
    """The schedule is a step late."""
    from torchtune import training

    real = training.get_cosine_schedule_with_warmup
    patch.setattr(
        training, "get_cosine_schedule_with_warmup",
        lambda optimizer, num_warmup_steps, **told: real(optimizer, num_warmup_steps + 1, **told),
    )  # fmt: skip


def not_clipped(patch: pytest.MonkeyPatch) -> None:
    def wrong(parameters: Any, max_norm: float) -> torch.Tensor:
        return torch.nn.utils.get_total_norm([item.grad for item in parameters if item.grad is not None])

    patch.setattr(torch.nn.utils, "clip_grad_norm_", wrong)


def other_base(patch: pytest.MonkeyPatch) -> None:
    """Angles are those of another base than config.json's."""
    from torchtune.models import qwen2

    real = qwen2.qwen2
    patch.setattr(qwen2, "qwen2", lambda rope_base, **sizes: real(rope_base=2 * rope_base, **sizes))


def prompts_trained(patch: pytest.MonkeyPatch) -> None:
    """Prompts are in the loss, which were not asked for."""
    from torchtune import data

    real = data.InputOutputToMessages
    patch.setattr(data, "InputOutputToMessages", lambda: real(train_on_input=True))


PLANTED: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Stage, str, str, dict[str, Any]]] = {
    "labels not shifted": (labels_not_shifted, Stage.PACK, "PCK001", "qwen2", {}),
    "labels off by one in the loss": (labels_early, Stage.LOSS, "LSS001", "qwen2", {}),
    "prompts trained": (prompts_trained, Stage.PACK, "PCK001", "qwen2", {}),
    "mean of the micro-batches' means": (mean_of_micro_batches, Stage.LOSS, "LSS001", "qwen2", {}),
    "gradient scaled twice": (scaled_twice, Stage.LOSS, "LSS001", "qwen2", {}),
    "keys turned on load": (converted("hf_to_tune", keys_as_in_the_file), Stage.LOAD, "WGT001", "llama", {}),
    "keys turned on save": (converted("tune_to_hf", keys_as_in_the_file), Stage.EXPORT, "WGT019", "llama", {}),
    "layer not saved": (converted("qwen2_tune_to_hf", layer_left_out), Stage.EXPORT, "WGT014", "qwen2", {}),
    "head saved stale": (head_of_the_beginning, Stage.EXPORT, "WGT019", "qwen2", {}),
    "schedule a step late": (warm_up_longer, Stage.TRAIN, "TRN002", "qwen2", {}),
    "norm reported, not clipped": (not_clipped, Stage.TRAIN, "TRN005", "qwen2", {}),
    "angles of another base": (other_base, Stage.LOSS, "LSS001", "qwen2", {}),
}
"""Bug -> how it is planted, first bad stage, a check that sees it there, model, settings."""


@pytest.mark.parametrize("name", PLANTED)
def test_a_bug_is_caught_in_its_stage(name: str, run: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, stage, code, model, settings = PLANTED[name]
    import torchtune_sft  # noqa: F401 - faults are planted in it, too

    plant(monkeypatch)
    caught(run(model, {**SMALL, "max_steps_per_epoch": 2, **settings}), stage, code)

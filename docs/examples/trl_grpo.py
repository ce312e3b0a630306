"""TRL's `GRPOTrainer` or `RLOOTrainer` on two CPU cores, sampled by transformers, recorded by `verifier.probe`.

`python trl_grpo.py CHECKPOINT TRACE [SETTING=VALUE ...]`, then `verifier judge TRACE --oracle`. Settings are those of
`trl.GRPOConfig`, such as `loss_type=grpo`; or of `trl.RLOOConfig` with `trainer=rloo`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from datasets import Dataset
from peft import get_peft_model_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from verifier import probe

SETTINGS = {"max_steps": 30, "max_completion_length": 8, "bf16": False, "use_cpu": True, "learning_rate": 1e-3}


def record_weights(record: Any, model: Any, version: int) -> None:
    """Record weights under the checkpoint's names, with a LoRA adapter in them, and its matrices beside them."""
    if not hasattr(model, "peft_config"):
        record.weights_exported(model.state_dict(), version=version)
        return
    base, adapter, config = model.get_base_model(), get_peft_model_state_dict(model), model.peft_config["default"]
    scaling = config.lora_alpha / config.r
    held = {name.replace(".base_layer", ""): item for name, item in base.state_dict().items() if ".lora_" not in name}
    merged, live = dict(held), dict(held)
    for name, module in base.named_modules():
        if hasattr(module, "base_layer"):
            key = f"{name}.weight"
            a, b = (adapter[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
            merged[key] = held[key] + module.get_delta_weight("default").detach()
            live[key] = held[key] + (b @ a) * scaling
            record.adapter_merged(key, version, merged[key], base=held[key], a=a, b=b, scaling=scaling)
    record.weights_exported(merged, version=version, live=live)
    record.adapter_exported(adapter, version, live=adapter, scaling=scaling, live_scaling=scaling)


def gradients_of(model: Any) -> list[tuple[str, torch.Tensor]]:
    """Gradients of what is trained."""
    return [(name, weight.grad) for name, weight in model.named_parameters() if weight.requires_grad]


class Recording:
    """Hands over what each optimizer step of TRL reads and makes; generation and training stay TRL's."""

    record: Any

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, ids: Any) -> torch.Tensor:
        found = super()._calculate_rewards(inputs, prompts, completions, ids)
        rewards, at = (found * self.reward_weights).nansum(1), self.accelerator.process_index * len(ids)
        self.known = {
            "reward": rewards[at : at + len(ids)],  # TRL gathers those of all processes
            "group": torch.arange(at, at + len(ids)) // self.num_generations,
            "size": torch.tensor([len(row) for row in ids]),
        }
        return found

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        self.passes: list[torch.Tensor] = []
        found = super()._generate_and_score_completions(inputs)
        self.sampled_by = self.state.global_step
        if "old_logps" in found:  # RLOO keeps sums; its passes are of the policy, and with `beta` of the reference
            names = ("old_per_token_logps", "ref_per_token_logps")
            found |= dict(zip(names, self.passes, strict=False))
        return found | self.known  # TRL shuffles all of these alike

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        inputs = super()._prepare_inputs(generation_batch)
        steps = self.args.gradient_accumulation_steps
        at = self._step % self.args.steps_per_generation
        if self._step % steps == 0:
            self.window, self.scored, self.losses = self._buffered_inputs[at : at + steps], [], []
            self._record_rollouts(self.state.global_step + 1)
        return inputs

    def _rows(self, name: str) -> list[torch.Tensor]:
        """Values of the tokens of each completion of the step, padding left out."""
        return [row[: len(ids)] for row, ids in zip(self._all(name), self.completions, strict=True)]

    def _all(self, name: str) -> list[torch.Tensor]:
        return [row for batch in self.window for row in batch[name]]

    def _record_rollouts(self, step: int) -> None:
        self.completions = [
            row[:size] for row, size in zip(self._all("completion_ids"), self._all("size"), strict=True)
        ]
        self.ids = [f"{step}/{self.accelerator.process_index}/{at}" for at in range(len(self.completions))]
        asked = zip(self._all("prompt_ids"), self._all("prompt_mask"), strict=True)
        prompts = [row[own.bool()] for row, own in asked]
        self.record.rollouts(
            step,
            prompts=prompts,
            responses=self.completions,
            loss_mask=self._rows("completion_mask"),
            versions=self.sampled_by,
            rewards=[float(row) for row in self._all("reward")],
            groups=[int(row) for row in self._all("group")],
            ids=self.ids,
            temperature=self.temperature,
            end_token=self.eos_token_ids,
            max_response_tokens=self.max_completion_length,
            finish_reasons=["stop" if int(row[-1]) in self.eos_token_ids else "length" for row in self.completions],
        )
        is_whole = self.args.steps_per_generation == self.args.gradient_accumulation_steps
        behind = self.num_iterations * self.args.steps_per_generation // self.args.gradient_accumulation_steps
        self.judged = {
            "estimator": self.estimator() if is_whole else "",
            "dtype": "float32",
            "epsilon": 1e-4,
            "ddof": 1,
            "reasons": ["" if row.any() else "overlong" for row in self._rows("completion_mask")],
            "max_staleness": behind - 1,
        }
        self.record.loss(step, **self.objective())

    def estimator(self) -> str:
        """Estimator of advantages, by its name in `verifier.probe`."""
        return {"group": "grpo", "none": "dr_grpo", "batch": "grpo_batch"}[self.scale_rewards]

    def objective(self) -> dict[str, Any]:
        """The loss that TRL documents."""
        name = "gspo" if self.importance_sampling_level == "sequence" else "clipped"
        clip: dict[str, Any] = {
            "clip_low": self.epsilon_low,
            "clip_high": self.epsilon_high,
            "dual_clip": self.args.delta,
        }
        if self.loss_type == "cispo":  # `epsilon_high` is the greatest ratio
            name, clip = "cispo", {"clip_low": 1.0, "clip_high": self.epsilon_high - 1}
        if self.loss_type == "sapo":
            name, clip = "sapo", {"steepness": (self.args.sapo_temperature_pos, self.args.sapo_temperature_neg)}
        kl_ratio = self.beta != 0 and self.args.use_bias_correction_kl
        return {"name": name, **clip, "kl_weight": self.beta, "kl_ratio": kl_ratio, **self._mean()}

    def _mean(self) -> dict[str, Any]:
        """The mean of a loss type, by TRL's documentation of it; over all processes."""
        rows, batches = len(self.completions), len(self.window)
        ranks = self.accelerator.num_processes
        size = self.args.steps_per_generation / batches
        if self.loss_type in ("dapo", "cispo"):  # tokens of the generation batch, a share of them for each step
            return {"aggregation": "token_mean", "divisor": max(int(self.window[0]["num_items_in_batch"]), 1) / size}
        if self.loss_type in ("grpo", "sapo"):  # a completion without tokens in the loss counts
            return {"aggregation": "sequence_mean", "divisor": rows * ranks}
        if self.loss_type == "dr_grpo":
            return {"aggregation": "token_mean", "divisor": rows * ranks * self.max_completion_length}
        parts = [
            f"{self.accelerator.process_index}/{at}" for at, batch in enumerate(self.window) for _ in batch["group"]
        ]
        return {"aggregation": "prompt_mean", "parts": parts, "divisor": batches * ranks}  # each micro-batch's mean

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        if torch.is_grad_enabled():
            self.scored += found[0].detach()
        else:
            self.passes.append(found[0])
        return found

    def training_step(self, *args: Any) -> torch.Tensor:
        """One micro-batch, whose loss is a part of the step's."""
        loss = super().training_step(*args)
        self.losses.append(float(loss))
        return loss

    def _clip_grad_norm(self, model: Any) -> Any:
        step, own = self.state.global_step + 1, self.window[0]
        scored = [row[: len(ids)] for row, ids in zip(self.scored, self.completions, strict=True)]
        old = self._rows("old_per_token_logps") if "old_per_token_logps" in own else scored
        reference = self._rows("ref_per_token_logps") if "ref_per_token_logps" in own else None
        version = self.sampled_by if "old_per_token_logps" in own else step - 1
        in_loss = [bool(row.any()) for row in self._rows("completion_mask")]  # TRL scores no others
        old = [row if any_of else None for row, any_of in zip(old, in_loss, strict=True)]
        if getattr(self, "ref_model", None) is not None:
            self.record.reference_weights(step, self.ref_model.state_dict())
        self.record.trainer_logprobs(step, old, reference=reference, version=version)
        self.record.advantages(step, self._all("advantages"), **self.judged, **self.penalties(step))
        self.record.gradients(step, gradients_of(self.accelerator.unwrap_model(model)))
        norm = super()._clip_grad_norm(model)
        tokens = sum(int(batch["completion_mask"].sum()) for batch in self.window)
        self.report = {"loss": sum(self.losses), "num_tokens": tokens, "grad_norm": norm}  # of this process
        return norm

    def penalties(self, step: int) -> dict[str, Any]:
        """What a KL penalty took from each reward."""
        return {}


class Recorded(Recording, GRPOTrainer):
    """TRL's GRPO, recorded."""


class RecordedRLOO(Recording, RLOOTrainer):
    """TRL's RLOO, recorded."""

    def estimator(self) -> str:
        """Estimator of advantages; normalized ones have no name."""
        return "" if self.normalize_advantages else "rloo"

    def objective(self) -> dict[str, Any]:
        """The clipped loss of whole completions: its ratio is the product of the tokens' ratios."""
        rows = len(self.completions) * self.accelerator.num_processes
        clip = {"clip_low": self.epsilon_low, "clip_high": self.epsilon_high}
        return {"name": "sequence", "aggregation": "sequence_mean", "divisor": rows, **clip}

    def penalties(self, step: int) -> dict[str, Any]:
        """What TRL's KL penalty took from each reward: `beta` times the sum of the log-ratios to the reference."""
        if not self.beta:
            return {}
        old, reference, masks = map(self._rows, ("old_per_token_logps", "ref_per_token_logps", "completion_mask"))
        sums = [((a - b) * mask).sum() for a, b, mask in zip(old, reference, masks, strict=True)]
        return {"penalties": [self.beta * float(total) for total in sums], "kl_weight": self.beta, "kl_kind": "k1"}


class Ends(TrainerCallback):
    """Begin and end of a step."""

    def __init__(self, record: Any) -> None:
        self.record = record

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Watch the optimizer, and record the weights of the beginning."""
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        self.record.optimizer(
            getattr(optimizer, "optimizer", optimizer),
            model.named_parameters(),
            clip_grad=args.max_grad_norm,
            asked={"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon},
            scheduler=kwargs["lr_scheduler"],
            schedule="linear",
            learning_rate=args.learning_rate,
            total_steps=state.max_steps,
            weight_decay=args.weight_decay,
        )
        record_weights(self.record, model, 0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the report and the weights."""
        self.record.step(state.global_step, **self.trainer.report)
        record_weights(self.record, kwargs["model"], state.global_step)


def digits(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Share of the answer's digits that a completion has."""
    return [len({*text} & {*own}) / len(own) for text, own in zip(completions, answer, strict=True)]


def train(checkpoint: Path, trace: Path, *, peft: Any = None, dtype: str = "float32", **settings: Any) -> None:
    """Train for some steps; settings of `GRPOConfig` beside `SETTINGS`."""
    asked = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(1, 16, 3) for b in (2, 21, 110, 123)]
    with tempfile.TemporaryDirectory() as folder:
        settings = {**SETTINGS, **settings}
        kind, trainer_of = (
            (RLOOConfig, RecordedRLOO) if settings.pop("trainer", "") == "rloo" else (GRPOConfig, Recorded)
        )
        config = kind(output_dir=folder, report_to="none", save_strategy="no", **settings)
        with probe.open(trace, model=checkpoint, dtype=dtype, engine="hf", keep_every=1) as record:
            ends = Ends(record)
            trainer = trainer_of(
                model=AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32),
                args=config,
                processing_class=AutoTokenizer.from_pretrained(checkpoint),
                reward_funcs=digits,
                train_dataset=Dataset.from_list(asked),
                callbacks=[ends],
                peft_config=peft,
            )
            trainer.record, ends.trainer = record, trainer
            trainer.train()


if __name__ == "__main__":
    given = dict(item.split("=", 1) for item in sys.argv[3:])
    train(Path(sys.argv[1]), Path(sys.argv[2]), **{name: yaml.safe_load(value) for name, value in given.items()})

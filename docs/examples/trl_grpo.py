"""GRPO by TRL's `GRPOTrainer` on two CPU cores, sampled by transformers, recorded by `verifier.probe`.

`python trl_grpo.py CHECKPOINT TRACE [SETTING=VALUE ...]`, then `verifier judge TRACE --oracle`. Settings are those of
`trl.GRPOConfig`, such as `loss_type=grpo`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from verifier import probe

SETTINGS = {"max_steps": 30, "max_completion_length": 8, "bf16": False, "use_cpu": True, "learning_rate": 1e-3}


class Recorded(GRPOTrainer):
    """Hands over what each optimizer step of TRL reads and makes; generation and training stay TRL's."""

    record: Any

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, ids: Any) -> torch.Tensor:
        found = super()._calculate_rewards(inputs, prompts, completions, ids)
        self.known = {
            "reward": (found * self.reward_weights).nansum(1),
            "group": torch.arange(len(ids)) // self.num_generations,
            "size": torch.tensor([len(row) for row in ids]),
        }
        return found

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        found = super()._generate_and_score_completions(inputs)
        self.sampled_by = self.state.global_step
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
        self.ids = [f"{step}/{at}" for at in range(len(self.completions))]
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
        scale = {"group": "grpo", "none": "dr_grpo", "batch": "grpo_batch"}[self.scale_rewards]
        is_whole = self.args.steps_per_generation == self.args.gradient_accumulation_steps
        behind = self.num_iterations * self.args.steps_per_generation // self.args.gradient_accumulation_steps
        self.record.advantages(
            step,
            self._all("advantages"),
            estimator=scale if is_whole else "",
            dtype="float32",
            epsilon=1e-4,
            ddof=1,
            reasons=["" if row.any() else "overlong" for row in self._rows("completion_mask")],
            max_staleness=behind - 1,
        )
        kl_ratio = self.beta != 0 and self.args.use_bias_correction_kl
        self.record.loss(
            step,
            "clipped",
            kl_weight=self.beta,
            kl_ratio=kl_ratio,
            clip_low=self.epsilon_low,
            clip_high=self.epsilon_high,
            **self._mean(),
        )

    def _mean(self) -> dict[str, Any]:
        """The mean of a loss type, by TRL's documentation of it."""
        rows, batches = len(self.completions), len(self.window)
        whole = sum(int(batch["completion_mask"].sum()) for batch in self._buffered_inputs)
        size = self.args.steps_per_generation / batches
        if self.loss_type == "dapo":  # tokens of the generation batch, a share of them for each step
            return {"aggregation": "token_mean", "divisor": max(whole, 1) / size}
        if self.loss_type == "grpo":  # a completion without tokens in the loss counts
            return {"aggregation": "sequence_mean", "divisor": rows}
        if self.loss_type == "dr_grpo":
            return {"aggregation": "token_mean", "divisor": rows * self.max_completion_length}
        parts = [number for number, batch in enumerate(self.window) for _ in batch["group"]]
        return {"aggregation": "prompt_mean", "parts": parts, "divisor": batches}  # bnpo: each micro-batch's mean

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        if torch.is_grad_enabled():
            self.scored += found[0].detach()
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
        self.record.trainer_logprobs(step, old, reference=reference, version=version)
        self.record.gradients(step, [(name, weight.grad) for name, weight in self.model.named_parameters()])
        norm = super()._clip_grad_norm(model)
        tokens = sum(int(batch["completion_mask"].sum()) for batch in self.window)
        self.report = {"loss": sum(self.losses), "num_tokens": tokens, "grad_norm": norm}
        return norm


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
        self.record.weights_exported(model.state_dict(), version=0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the report and the weights."""
        self.record.step(state.global_step, **self.trainer.report)
        self.record.weights_exported(kwargs["model"].state_dict(), version=state.global_step)


def digits(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Share of the answer's digits that a completion has."""
    return [len({*text} & {*own}) / len(own) for text, own in zip(completions, answer, strict=True)]


def train(checkpoint: Path, trace: Path, **settings: Any) -> None:
    """Train for some steps; settings of `GRPOConfig` beside `SETTINGS`."""
    asked = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(1, 16, 3) for b in (2, 21, 110, 123)]
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(output_dir=folder, report_to="none", save_strategy="no", **{**SETTINGS, **settings})
        with probe.open(trace, model=checkpoint, dtype="float32", engine="hf", keep_every=1) as record:
            ends = Ends(record)
            trainer = Recorded(
                model=AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32),
                args=config,
                processing_class=AutoTokenizer.from_pretrained(checkpoint),
                reward_funcs=digits,
                train_dataset=Dataset.from_list(asked),
                callbacks=[ends],
            )
            trainer.record, ends.trainer = record, trainer
            trainer.train()


if __name__ == "__main__":
    given = dict(item.split("=", 1) for item in sys.argv[3:])
    train(Path(sys.argv[1]), Path(sys.argv[2]), **{name: yaml.safe_load(value) for name, value in given.items()})

"""TRL's `SFTTrainer` on two CPU cores, recorded by `verifier.probe`.

`python trl_sft.py CHECKPOINT TRACE [SETTING=VALUE ...]`, then `verifier judge TRACE --oracle`. Settings are those of
`trl.SFTConfig`, such as `packing=true`; with `chat=true` the examples are conversations.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
from trl_grpo import Ends, gradients_of

from verifier import probe

SETTINGS = {
    "max_steps": 30, "max_length": 64, "bf16": False, "use_cpu": True, "learning_rate": 1e-3,
    "per_device_train_batch_size": 4,
}  # fmt: skip
TEMPLATE = """{% for turn in messages %}{% if turn.role == "assistant" %}{% generation %}{{ turn.content }}\
{{ eos_token }}{% endgeneration %}{% else %}{{ turn.content }}{% endif %}{% endfor %}"""


def sequences(batch: dict[str, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens of each sequence of a batch, padded or packed, and whether each token is in the loss."""
    labels, ids = batch["labels"] != -100, batch["input_ids"]
    if "attention_mask" in batch:
        kept = batch["attention_mask"].bool()
        return [(row[own], label[own]) for row, label, own in zip(ids, labels, kept, strict=True)]
    starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
    ends = [*starts[1:], ids.shape[1]]
    return [(ids[0, begin:end], labels[0, begin:end]) for begin, end in zip(starts, ends, strict=True)]


class Recorded(SFTTrainer):
    """Hands over the batches of each optimizer step of TRL, its gradients and its loss."""

    record: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.batches: list[dict[str, torch.Tensor]] = []  # of the step
        self.losses: list[float] = []

    def training_step(self, model: Any, inputs: Any, *args: Any) -> torch.Tensor:
        """One micro-batch, whose loss is a part of the step's."""
        self.batches.append({name: tensor.clone() for name, tensor in inputs.items() if torch.is_tensor(tensor)})
        loss = super().training_step(model, inputs, *args)
        self.losses.append(float(loss))
        return loss

    def _clip_grad_norm(self, model: Any) -> Any:
        step, at = self.state.global_step + 1, self.accelerator.process_index
        rows = [row for batch in self.batches for row in sequences(batch)]
        self.record.rollouts(
            step,
            prompts=[ids[:1] for ids, _ in rows],  # the first token is no prediction
            responses=[ids[1:] for ids, _ in rows],
            loss_mask=[mask[1:] for _, mask in rows],
            versions=-1,  # no weights sampled them
            ids=[f"{step}/{at}/{number}" for number in range(len(rows))],
        )
        self.record.loss(step, "cross_entropy")
        self.record.gradients(step, gradients_of(self.accelerator.unwrap_model(model)))
        norm = super()._clip_grad_norm(model)
        tokens = sum(int(mask[1:].sum()) for _, mask in rows)
        self.report = {"loss": sum(self.losses), "num_tokens": tokens, "grad_norm": norm}
        self.batches, self.losses = [], []
        return norm


def train(
    checkpoint: Path, trace: Path, *, peft: Any = None, dtype: str = "float32", chat: bool = False, **settings: Any
) -> None:
    """Train for some steps; settings of `SFTConfig` beside `SETTINGS`."""
    pairs = [(f"{a}+{b}=", str(a + b)) for a in range(1, 16) for b in (2, 21, 45, 110, 123)]
    examples: list[dict[str, Any]] = [{"prompt": asked, "completion": answer} for asked, answer in pairs]
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    if chat:
        tokenizer.chat_template = TEMPLATE
        turns = (zip(("user", "assistant"), pair, strict=True) for pair in pairs)
        examples = [{"messages": [{"role": role, "content": text} for role, text in pair]} for pair in turns]
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(output_dir=folder, report_to="none", save_strategy="no", **{**SETTINGS, **settings})
        with probe.open(trace, model=checkpoint, dtype=dtype, engine="hf", keep_every=1) as record:
            ends = Ends(record)
            trainer = Recorded(
                model=AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32),
                args=config,
                processing_class=tokenizer,
                train_dataset=Dataset.from_list(examples),
                callbacks=[ends],
                peft_config=peft,
            )
            trainer.record, ends.trainer = record, trainer
            trainer.train()


if __name__ == "__main__":
    given = dict(item.split("=", 1) for item in sys.argv[3:])
    train(Path(sys.argv[1]), Path(sys.argv[2]), **{name: yaml.safe_load(value) for name, value in given.items()})

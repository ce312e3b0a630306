"""verl's trainer of supervised fine-tuning on CPU cores, recorded by `verifier.probe`.

`python verl_sft.py CHECKPOINT TRACE [KEY=VALUE ...]`, then `verifier judge TRACE --oracle`. Keys are those of verl's
config, such as `data.micro_batch_size_per_gpu=2`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pandas
import torch
import verl_loop  # sets verl's platform
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from verl.trainer import sft_trainer
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp import transformer_impl

from verifier import probe

TEMPLATE = """{% for turn in messages %}{{ turn.content }}\
{% if turn.role == "assistant" %}{{ eos_token }}{% endif %}{% endfor %}"""
CONFIG = {
    "engine.strategy": "fsdp2", "engine.use_torch_compile": False, "optim.lr": 1e-3, "optim.weight_decay": 0.1,
    "engine.mixed_precision": {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
    "optim.lr_warmup_steps": 1, "optim.lr_scheduler_type": "cosine", "model.custom_chat_template": TEMPLATE,
    "model.override_config": {"attn_implementation": "sdpa"}, "data.train_batch_size": 8, "data.num_workers": 0,
    "data.micro_batch_size_per_gpu": 2, "data.use_dynamic_bsz": False, "data.ignore_input_ids_mismatch": True,
    "trainer.device": "cpu", "trainer.total_training_steps": 3, "trainer.logger": [], "trainer.resume_mode": "disable",
    "checkpoint.save_contents": ["hf_model"],
}  # fmt: skip
"""Settings beside verl's defaults."""


class Recorded(sft_trainer.SFTTrainer):
    """Hands over what each optimizer step reads and makes."""

    record: Any

    def _init_engine(self) -> None:
        with patch.object(transformer_impl, "CPUOffloadPolicy", lambda **_: None):  # which pins memory of a GPU
            super()._init_engine()
        engine, optim = self.engine, self.optimizer_config
        self.number, self.rank = 0, torch.distributed.get_rank()
        self.record.optimizer(
            engine.optimizer, engine.module.named_parameters(), clip_grad=optim.clip_grad,
            asked={"betas": tuple(optim.betas), "weight_decay": optim.weight_decay}, scheduler=engine.lr_scheduler,
            schedule=optim.lr_scheduler_type, learning_rate=optim.lr, weight_decay=optim.weight_decay,
            warmup_steps=optim.lr_warmup_steps, total_steps=self.total_training_steps,
            least_learning_rate=(optim.min_lr_ratio or 0.0) * optim.lr,
        )  # fmt: skip
        self.real = {name: getattr(engine, name) for name in ("optimizer_step", "prepare_model_inputs")}
        for name in self.real:
            setattr(engine, name, getattr(self, name))
        self.train, self.training_client.train_batch = self.training_client.train_batch, self.train_batch
        loss = self.training_client.loss_fn
        self.training_client.set_loss_fn(lambda model_output, data, **told: self.loss(loss, model_output, data, told))
        self.hold("load")

    def hold(self, after: str) -> None:
        """Record the weights."""
        held = list(self.engine.module.state_dict().items())
        self.record.weights_held(held, self.number, after=after)
        self.record.weights_exported(self.engine.get_per_tensor_param()[0], self.number, live=held)

    def train_batch(self, data: Any) -> Any:
        """One optimizer step, on this process's part of a batch."""
        self.number += 1
        rows, equals = data["input_ids"].unbind(), self.model_config.tokenizer.convert_tokens_to_ids("=")
        data["row"] = torch.arange(len(rows))
        self.ids = [f"{self.number}/{self.rank}/{at}" for at in range(len(rows))]
        self.record.rollouts(
            self.number,
            prompts=[row[:1] for row in rows],  # the first token is no prediction
            responses=[row[1:] for row in rows],
            loss_mask=[(row == equals).cumsum(0)[:-1] for row in rows],  # what follows the first `=`
            versions=-1,  # no weights sampled them
            ids=self.ids,
        )
        self.record.loss(self.number, "cross_entropy")
        found = self.train(data)
        metrics = tu.get(found, "metrics")
        self.record.step(
            self.number, loss=metrics["loss"], num_tokens=self.num_tokens, grad_norm=metrics["grad_norm"]
        )  # fmt: skip
        self.hold("step")
        return found

    def names(self, micro_batch: Any) -> list[str]:
        """Ids of the rows of a micro-batch."""
        return [self.ids[int(row)] for row in micro_batch["row"]]

    def prepare_model_inputs(self, micro_batch: Any) -> Any:
        """What the model gets of a micro-batch."""
        inputs, told = self.real["prepare_model_inputs"](micro_batch)
        if torch.is_grad_enabled():
            mask = micro_batch["loss_mask"].values().roll(-1)
            self.record.micro_batch(
                self.number, self.names(micro_batch), inputs["input_ids"], position_ids=inputs["position_ids"],
                cu_seqlens=micro_batch["input_ids"].offsets(), labels=told["input_ids_rmpad_rolled"],
                loss_mask=mask[None],
            )  # fmt: skip
        return inputs, told

    def loss(self, real: Any, model_output: Any, data: Any, told: Any) -> Any:
        """verl's loss of a micro-batch."""
        self.num_tokens = data["batch_num_tokens"]
        return real(model_output=model_output, data=data, **told)

    def optimizer_step(self) -> float:
        """verl's clip and step."""
        named = [(name, value.grad) for name, value in self.engine.module.named_parameters()]
        self.record.gradients(self.number, named)
        return self.real["optimizer_step"]()


def train(checkpoint: Path, trace: Path, **settings: Any) -> None:
    """Train by verl; settings of its config beside `CONFIG`."""
    verl_loop.join()
    dtype = settings.pop("dtype", "float32")
    folder = trace.with_name(f"{trace.name}-work")
    folder.mkdir(exist_ok=True)
    rank = torch.distributed.get_rank()
    file = folder / f"additions-{rank}.parquet"
    pairs = [(f"{a}+{b}=", str(a + b)) for a in range(1, 16) for b in (2, 21, 110)]
    turns = [[{"role": "user", "content": asked}, {"role": "assistant", "content": said}] for asked, said in pairs]
    pandas.DataFrame({"messages": turns}).to_parquet(file)
    told: Mapping[str, Any] = {
        **CONFIG, "model.path": str(checkpoint), "data.train_files": str(file),
        "trainer.default_local_dir": str(folder / "saved"), **settings,
    }  # fmt: skip
    with initialize_config_dir(str(Path(sft_trainer.__file__).parent / "config"), version_base=None):
        config = compose("sft_trainer_engine", overrides=["optim=fsdp", "engine=fsdp"])
    OmegaConf.set_struct(config, False)
    for key, value in told.items():
        OmegaConf.update(config, key, value, force_add=True)
    with probe.open(trace, model=checkpoint, dtype=dtype, engine="hf", keep_every=1) as record:
        torch.distributed.barrier()
        Recorded.record = record
        Recorded(config).fit()


if __name__ == "__main__":
    given = dict(item.split("=", 1) for item in sys.argv[3:])
    train(Path(sys.argv[1]), Path(sys.argv[2]), **{key: OmegaConf.create(f"v: {it}").v for key, it in given.items()})

"""torchtune's recipes of supervised fine-tuning on CPU cores, recorded by `verifier.probe`.

`python torchtune_sft.py CHECKPOINT TRACE [KEY=VALUE ...]`, then `verifier judge TRACE --oracle`. Keys are those of a
recipe's config, such as `gradient_accumulation_steps=2`; `recipe=lora_finetune_single_device` names another recipe.
The checkpoint is a Qwen2 or a Llama 3.2.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torchtune
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torchtune import data, datasets, training
from torchtune.modules.peft import get_merged_lora_ckpt

from verifier import probe

CONFIG = OmegaConf.create("""
{device: cpu, dtype: fp32, seed: 1, shuffle: true, epochs: 1, batch_size: 4, max_steps_per_epoch: 3,
 gradient_accumulation_steps: 1, optimizer_in_bwd: false, clip_grad_norm: 1.0, compile: false,
 resume_from_checkpoint: false, tokenizer: {_component_: torchtune_sft.Characters},
 dataset: {_component_: torchtune_sft.additions}, loss: {_component_: torchtune.modules.loss.CEWithChunkedOutputLoss},
 optimizer: {_component_: torch.optim.AdamW, lr: 0.001, weight_decay: 0.1},
 lr_scheduler: {_component_: torchtune.training.get_cosine_schedule_with_warmup, num_warmup_steps: 1},
 metric_logger: {_component_: torchtune.training.metric_logging.StdoutLogger}}
""")
IGNORED, SCALE_GRADS, A = -100, training.scale_grads, ".lora_A.weight"
LORA = {"lora_attn_modules": ["q_proj", "v_proj"], "apply_lora_to_mlp": True, "lora_rank": 4, "lora_alpha": 8}
NAMES = {
    "layers.": "model.layers.", "tok_embeddings.": "model.embed_tokens.", "norm.scale": "model.norm.weight",
    "output.": "lm_head.", "attn.output_proj.": "self_attn.o_proj.", "attn.": "self_attn.", "mlp.w1.": "mlp.gate_proj.",
    "mlp.w2.": "mlp.down_proj.", "mlp.w3.": "mlp.up_proj.", "sa_norm.scale": "input_layernorm.weight",
    "mlp_norm.scale": "post_attention_layernorm.weight", "lora_a": "lora_A", "lora_b": "lora_B",
}  # fmt: skip
"""Part of a name in torchtune -> part of a checkpoint's."""
OF_GPUS = ("get_memory_stats", "log_memory_stats", "cleanup_before_training")
"""Functions that recipes for several processes call on CPUs, too, where they fail."""
TURNED = ("q_proj.weight", "k_proj.weight", "q_proj.lora_b.weight", "k_proj.lora_b.weight")
"""Matrices whose rows torchtune has in another order than a Llama's checkpoint: pairs that rotate stand together."""


class Characters:
    """Tokenizer of single bytes, as torchtune's recipes call one."""

    pad_id, eos_id, equals = 0, 1, 3 + ord("=")

    def __call__(self, sample: dict[str, Any], inference: bool = False) -> dict[str, Any]:
        """Tokens of a conversation, and a mask of those that are not trained."""
        turns = [([3 + byte for byte in item.text_content.encode()], item.masked) for item in sample["messages"]]
        turns.append(([self.eos_id], False))
        mask = [masked for tokens, masked in turns for _ in tokens]
        return {**sample, "tokens": [token for tokens, _ in turns for token in tokens], "mask": mask}


def additions(tokenizer: Any, data_files: str, **settings: Any) -> Any:
    """torchtune's dataset of a file of additions."""
    transform = data.InputOutputToMessages(**settings)
    return datasets.SFTDataset(
        source="json",
        split="train",
        data_files=data_files,
        message_transform=transform,
        model_transform=tokenizer,
        cache_dir=str(Path(data_files).parent),
    )


class Recording:
    """Hands over what each optimizer step of a recipe reads and makes."""

    record: Any

    def setup(self, cfg: Any) -> None:
        """Set the recipe up, and watch its optimizer, its model's inputs, its loss's labels and its log."""
        super().setup(cfg)
        self.examples, self.inputs, self.labels = [], [], []
        self.is_whole = bool(cfg.dataset.get("train_on_input"))  # prompts are in the loss, too
        self.sizes, self.is_turned = (
            self.sizes_of(cfg.checkpointer.checkpoint_dir),
            cfg.checkpointer.model_type != "QWEN2",
        )
        self.scaling = cfg.model.get("lora_alpha", 0) / cfg.model.get("lora_rank", 1)
        self.record.optimizer(
            self._optimizer, self.named(self._model.named_parameters(), convert=False), clip_grad=cfg.clip_grad_norm,
            asked={"betas": (0.9, 0.999), "weight_decay": cfg.optimizer.weight_decay}, scheduler=self._lr_scheduler,
            schedule="cosine", learning_rate=cfg.optimizer.lr, warmup_steps=cfg.lr_scheduler.num_warmup_steps,
            total_steps=self.total_epochs * self._steps_per_epoch, weight_decay=cfg.optimizer.weight_decay,
        )  # fmt: skip
        self._optimizer.register_step_post_hook(lambda *_: self.record_weights(self.global_step + 1))
        self._model.register_forward_pre_hook(lambda _, __, given: self.inputs.append(given), with_kwargs=True)
        self._loss_fn.register_forward_pre_hook(lambda _, given: self.labels.append(given[1]))
        if self.is_first:
            self._metric_logger.log_dict = self.record_report
        self.record_weights(0)

    @property
    def is_first(self) -> bool:
        """This process logs and saves."""
        return getattr(self, "rank", 0) == 0

    @staticmethod
    def sizes_of(folder: str) -> dict[str, Any]:
        """Sizes of a checkpoint."""
        return json.loads((Path(folder) / "config.json").read_text())

    def _setup_data(self, *args: Any, **kwargs: Any) -> Any:
        loader = super()._setup_data(*args, **kwargs)
        collate = loader.collate_fn
        loader.collate_fn = lambda rows: self.examples.extend(row["tokens"] for row in rows) or collate(rows)
        return loader

    def named(self, pairs: Iterable[tuple[str, Any]], *, convert: bool = True) -> Iterator[tuple[str, Any]]:
        """Tensors by a checkpoint's names; queries and keys of a Llama in its order: halves of a head."""
        for name, tensor in pairs:
            own = name
            for part, other in NAMES.items():
                own = own.replace(part, other) if f".{part}" in f".{own}" else own
            if convert and tensor is not None:
                tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                if self.is_turned and name.split("attn.")[-1] in TURNED:
                    half = self.sizes["head_dim"] // 2
                    tensor = tensor.unflatten(0, (-1, half, 2)).transpose(1, 2).flatten(0, 2)
            yield own, tensor

    def record_weights(self, version: int) -> None:
        """Record weights, with an adapter within, and its matrices; those of the last version as they are saved."""
        held = dict(self.named(self._model.state_dict().items()))
        adapter = {name: held.pop(name) for name in [*held] if ".lora_" in name}
        self.adapter, self.live = adapter, dict(held)
        merged = held if not adapter else dict(self.named(self.merged().items()))
        for name in (name for name in adapter if name.endswith(A)):
            base, a, b = name.replace(A, ".weight"), adapter[name], adapter[name.replace(A, ".lora_B.weight")]
            told = {"base": held[base], "a": a, "b": b, "scaling": self.scaling}
            if self._dtype == torch.float32:
                self.record.adapter_merged(base, version, merged[base], **told)
            self.live[base] = held[base] + (b @ a) * self.scaling
        self.record.weights_held(held, version, after="load" if not version else "adapter step" if adapter else "step")
        self.record.weights_exported(merged, version, live=self.live if adapter else None)
        if adapter and version < self.total_epochs * self._steps_per_epoch:
            told = {"live": adapter, "scaling": self.scaling, "live_scaling": self.scaling}
            self.record.adapter_exported(adapter, version, **told)
        self.live = merged

    def merged(self) -> dict[str, torch.Tensor]:
        """Weights with the adapter in them, by torchtune."""
        copied = {name: tensor.clone() for name, tensor in self._model.state_dict().items()}
        return get_merged_lora_ckpt(copied, self._lora_rank, self._lora_alpha)

    def scale_grads(self, model: Any, scaler: torch.Tensor) -> None:
        """Scale the gradients as torchtune does, and record the step before the clip."""
        SCALE_GRADS(model, scaler)
        step, rank = self.global_step + 1, getattr(self, "rank", 0)
        rows = [torch.tensor(row) for row in self.examples]
        ids = [f"{step}/{rank}/{at}" for at in range(len(rows))]
        answers = [(row == Characters.equals).cumsum(0).roll(1, 0) for row in rows]  # what follows the first `=`
        self.record.rollouts(
            step,
            prompts=[row[:1] for row in rows],  # the first token is no prediction
            responses=[row[1:] for row in rows],
            loss_mask=[(mask > 0)[1:] | self.is_whole for mask in answers],
            versions=-1,  # no weights sampled them
            ids=ids,
        )
        self.record.loss(step, "cross_entropy")
        for given, labels in zip(self.inputs, self.labels, strict=True):
            own, size = given["tokens"], len(given["tokens"])
            names, ids = ids[:size], ids[size:]
            real = [torch.arange(own.shape[1]) < len(row) for row in rows[:size]]
            rows, labels = rows[size:], labels.reshape(own.shape)
            self.record.micro_batch(
                step, names, own, attention_mask=torch.stack(real), labels=labels, loss_mask=labels != IGNORED
            )
        grads = ((name, value.grad) for name, value in model.named_parameters() if value.requires_grad)
        self.record.gradients(step, self.named(grads))
        self.num_tokens = round(getattr(self, "world_size", 1) / float(scaler))
        self.examples, self.inputs, self.labels = [], [], []

    def record_report(self, found: dict[str, Any], step: int) -> None:
        """Record what torchtune logs of a step."""
        self.record.step(step, loss=found["loss"], num_tokens=self.num_tokens, grad_norm=found["grad_norm"])

    def train(self) -> None:
        """Train and save by the recipe."""
        with patch.object(training, "scale_grads", self.scale_grads):
            super().train()
        folder, version = Path(self._output_dir) / f"epoch_{self.total_epochs - 1}", self.global_step
        if self.is_first:
            self.record.export_saved(folder, version, live=self.live)
        if self.adapter:
            told = json.loads((folder / "adapter_config.json").read_text())
            scaling, saved = told["lora_alpha"] / told["r"], load_file(folder / "adapter_model.safetensors")
            self.record.adapter_exported(saved, version, live=self.adapter, scaling=scaling, live_scaling=self.scaling)


def train(checkpoint: Path, trace: Path, recipe: str = "full_finetune_single_device", **settings: Any) -> None:
    """Train by a recipe; settings of its config beside `CONFIG`."""
    folder = trace.with_name(f"{trace.name}-work")
    folder.mkdir(exist_ok=True)
    file = folder / "additions.json"
    pairs = [{"input": f"{a}+{b}=", "output": str(a + b)} for a in range(1, 16) for b in (2, 21, 110)]
    file.write_text("\n".join(map(json.dumps, pairs)))
    sizes = Recording.sizes_of(str(checkpoint))
    is_qwen, is_lora = sizes["model_type"] == "qwen2", recipe.startswith("lora")
    model = {
        "_component_": f"torchtune.models.{'qwen2' if is_qwen else 'llama3_2'}.{'lora_' if is_lora else ''}"
        f"{'qwen2' if is_qwen else 'llama3_2'}",
        "vocab_size": sizes["vocab_size"], "num_layers": sizes["num_hidden_layers"],
        "num_heads": sizes["num_attention_heads"], "num_kv_heads": sizes["num_key_value_heads"],
        "embed_dim": sizes["hidden_size"], "intermediate_dim": sizes["intermediate_size"], "max_seq_len": 64,
        "rope_base": int(sizes["rope_theta"]), "norm_eps": sizes["rms_norm_eps"],
        "tie_word_embeddings": sizes["tie_word_embeddings"], **(LORA if is_lora else {}),
    }  # fmt: skip
    checkpointer = {
        "_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": str(checkpoint),
        "checkpoint_files": [file.name for file in checkpoint.glob("*.safetensors")],
        "model_type": "QWEN2" if is_qwen else "LLAMA3_2", "output_dir": str(folder / "out"),
    }  # fmt: skip
    told = {"model": model, "checkpointer": checkpointer, "output_dir": str(folder / "out")}
    told["dataset"] = {"data_files": str(file)}
    cfg = OmegaConf.merge(CONFIG, told, OmegaConf.from_dotlist([f"{key}={value}" for key, value in settings.items()]))
    place = Path(torchtune.__file__).parents[1] / "recipes" / f"{recipe}.py"  # no package, by their own word
    spec = importlib.util.spec_from_file_location(recipe, place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    own = next(item for name, item in vars(module).items() if "Recipe" in name and item.__module__ == recipe)
    own = type("Recorded", (Recording, own), {})(cfg)
    dtype = {"fp32": "float32", "bf16": "bfloat16"}[cfg.dtype]
    with (
        patch.multiple(training, **{name: lambda *_, **__: {} for name in OF_GPUS}),
        probe.open(trace, model=checkpoint, dtype=dtype, engine="hf", keep_every=1) as own.record,
    ):
        own.setup(cfg)
        own.train()
    own.cleanup()


if __name__ == "__main__":
    import torchtune_sft

    given = dict(item.split("=", 1) for item in sys.argv[3:])
    torchtune_sft.train(Path(sys.argv[1]), Path(sys.argv[2]), **given)

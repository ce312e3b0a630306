"""Engines of `grpo_loop.py`: transformers in the same process, and vLLM. Each records what it gets and holds."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from verifier import probe


class TransformersEngine:
    """A copy of the model that samples answers to prompts of one length, token by token."""

    def __init__(self, checkpoint: Path, trace: Path, rank: int = 0) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        self.record = probe.attach(trace, rank=rank)
        self.version = 0

    @torch.no_grad()
    def generate(
        self, prompts: list[list[int]], ends: list[int], seeds: list[int], most: int, temperature: float = 1.0
    ) -> list[dict[str, Any]]:
        """Answers up to their first end token, or `most` tokens."""
        rows, drawn = torch.tensor(prompts), [torch.Generator().manual_seed(seed) for seed in seeds]
        nats = torch.zeros(len(prompts), 0)
        for _ in range(most):
            found = (self.model(rows).logits[:, -1] / temperature).log_softmax(-1)
            token = torch.stack(
                [torch.multinomial(own.exp(), 1, generator=made) for own, made in zip(found, drawn, strict=True)]
            )
            rows, nats = torch.cat([rows, token], 1), torch.cat([nats, found.gather(1, token)], 1)
        answers = []
        for tokens, own in zip(rows[:, len(prompts[0]) :].tolist(), nats.tolist(), strict=True):
            size = next((at + 1 for at, token in enumerate(tokens) if token in ends), most)
            reason = "stop" if tokens[size - 1] in ends else "length"
            answers.append({"tokens": tokens[:size], "logprobs": own[:size], "reason": reason})
        return answers

    def sync(self, named: Any, version: int, trace: Path) -> None:
        """Take the weights of a version."""
        state = dict(self.model.named_parameters())
        if version:
            self.record.engine_served(state)
        sent = dict(self.record.receiving(named, version))
        missing = self.model.load_state_dict(sent, strict=False).missing_keys
        self.record.engine_loaded(version, [name for name in state if name not in missing])
        held = self.model.state_dict()  # a tied head has two names
        self.record.engine_views(version, {name: held[name] for name in sent})
        self.record.engine_held(version, state)
        self.version = version

    def close(self) -> None:
        """End the engine."""
        self.record.close()


class VllmEngine:
    """VLLM, which gets weights by files; its workers record what they get and hold."""

    def __init__(self, checkpoint: Path, trace: Path) -> None:
        from vllm import LLM

        self.folder, self.checkpoint = trace.with_name(trace.name + " weights"), checkpoint
        self.version = 0
        self.llm = LLM(
            model=str(checkpoint),
            dtype="float32",
            max_model_len=64,
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_num_seqs=32,
            kv_cache_memory_bytes=1 << 26,
            block_size=32,
            generation_config="vllm",
            worker_extension_cls="verifier.probe.recording_worker_vllm.RecordingWorker",
        )

    def generate(self, prompts: list[list[int]], ends: list[int], seeds: list[int], most: int) -> list[dict[str, Any]]:
        """Answers up to their first end token, or `most` tokens."""
        from vllm import SamplingParams

        params = [
            SamplingParams(max_tokens=most, logprobs=0, seed=seed, stop_token_ids=ends, detokenize=False)
            for seed in seeds
        ]
        found = self.llm.generate([{"prompt_token_ids": row} for row in prompts], params, use_tqdm=False)
        return [
            {
                "tokens": list(own.outputs[0].token_ids),
                "reason": own.outputs[0].finish_reason,
                "logprobs": [
                    row[token].logprob
                    for row, token in zip(own.outputs[0].logprobs, own.outputs[0].token_ids, strict=True)
                ],
            }
            for own in found
        ]

    def sync(self, named: Any, version: int, trace: Path) -> None:
        """Take the weights of a version."""
        self.llm.collective_rpc("verifier_receives", args=(str(trace), version))
        path = self.folder / str(version)
        path.mkdir(parents=True)
        shutil.copy(self.checkpoint / "config.json", path)
        tensors = {name: value.detach().contiguous() for name, value in named}
        save_file(tensors, path / "model.safetensors")
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
        self.llm.reset_prefix_cache()
        self.llm.collective_rpc("verifier_received", kwargs={"held": version, "carried": list(tensors)})
        self.version = version

    def close(self) -> None:
        """End the engine."""
        self.llm.llm_engine.engine_core.shutdown()

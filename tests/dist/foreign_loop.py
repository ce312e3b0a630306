"""A loop of somebody else: transformers, torch and vLLM; of verifier it imports `verifier.probe` alone.

Policy gradient on a made-up reward, two micro-batches a step, weights to vLLM by files.
`python foreign_loop.py CHECKPOINT FOLDER FAULT...` starts vLLM once and runs the loop once with each fault ("clean" for
none), a trace each. Every fault is a bug of the loop itself, at the place where such a bug was shipped.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams

from verifier import probe

STEPS = 2
PROMPTS = [[5, 17, 33, 8], [9, 40, 2, 71, 18], [100, 3, 3]]
GROUP = 4
MOST = 12
END = 7
WORKER = "verifier.probe.recording_worker_vllm.RecordingWorker"


class Loop:
    """A run of the loop, with one of its faults."""

    def __init__(self, llm: LLM, checkpoint: Path, folder: Path, fault: str) -> None:
        self.llm, self.checkpoint, self.folder, self.fault = llm, checkpoint, folder, fault
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.3)
        self.cached: dict[str, torch.Tensor] = {}
        self.seconds: list[float] = []

    def run(self, record: probe.LoopRecorder) -> None:
        self.sync(record, 0)
        for step in range(1, STEPS + 1):
            begin = time.perf_counter()
            self.train(record, step)
            self.sync(record, step)
            self.seconds.append(time.perf_counter() - begin)

    def train(self, record: probe.LoopRecorder, step: int) -> None:
        batch = self.sample(step)
        record.rollouts(step, **batch, end_token=END, max_response_tokens=MOST)
        with torch.no_grad():
            old = [self.logprobs(*row) for row in zip(batch["prompts"], batch["responses"], strict=True)]
        record.trainer_logprobs(step, old)
        advantages = []
        for begin in range(0, len(old), GROUP):
            own = batch["rewards"][begin : begin + GROUP]
            mean, deviation = statistics.fmean(own), statistics.stdev(own)
            advantages += [(reward - mean) / (deviation + 1e-6) for reward in own]
        record.advantages(step, advantages, estimator="grpo")
        record.loss(step, "importance", aggregation="token_mean")
        count = sum(sum(mask) for mask in batch["loss_mask"])
        total, half = 0.0, len(old) // 2
        self.optimizer.zero_grad()
        for micro in (range(half), range(half, len(old))):
            if self.fault == "micro-batch dropped":
                self.optimizer.zero_grad()
            loss = torch.zeros(())
            for at in micro:
                current = self.logprobs(batch["prompts"][at], batch["responses"][at])
                kept = torch.tensor(batch["loss_mask"][at][-len(current) :], dtype=torch.float32)
                loss = loss - ((current - old[at]).exp() * kept).sum() * advantages[at] / count
            loss.backward()
            total += float(loss)
        record.gradients(step, [(name, value.grad) for name, value in self.model.named_parameters()])
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1e9))
        record.step(step, loss=total, num_tokens=count, grad_norm=norm)
        self.optimizer.step()

    def sample(self, step: int) -> dict[str, Any]:
        params = SamplingParams(
            n=GROUP, temperature=1.0, max_tokens=MOST, logprobs=0, seed=step, stop_token_ids=[END], detokenize=False
        )
        found = self.llm.generate([{"prompt_token_ids": row} for row in PROMPTS], params, use_tqdm=False)
        prompts = [list(output.prompt_token_ids) for output in found for _ in output.outputs]
        samples = [sample for output in found for sample in output.outputs]
        responses = [list(sample.token_ids) for sample in samples]
        nats = [
            [row[token].logprob for row, token in zip(sample.logprobs, sample.token_ids, strict=True)]
            for sample in samples
        ]
        masks = [[1] * len(row) for row in responses]
        if self.fault == "logprobs off by one":
            nats = [[*row[1:], row[-1]] for row in nats]
        if self.fault == "mask covers the prompt":
            masks = [[1] * (len(prompt) + len(row)) for prompt, row in zip(prompts, responses, strict=True)]
        return {
            "prompts": prompts, "responses": responses, "engine_logprobs": nats, "loss_mask": masks,
            "versions": step - 1, "rewards": [sum(token % 5 for token in row) / len(row) for row in responses],
        }  # fmt: skip

    def logprobs(self, prompt: list[int], response: list[int]) -> torch.Tensor:
        tokens = torch.tensor([[*prompt, *response]])
        nats = self.model(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        return nats.gather(-1, tokens[0, len(prompt) :, None])[:, 0]

    def sync(self, record: probe.LoopRecorder, version: int) -> None:
        exported = list(self.export(version))
        self.llm.collective_rpc("verifier_receives", args=(str(record.path), version))
        self.send(record.sending(exported, version, live=list(self.model.named_parameters())), version)
        names = [name for name, _ in exported]
        self.llm.collective_rpc("verifier_received", kwargs={"held": version, "carried": names})

    def export(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in self.model.named_parameters():
            if self.fault == "stale at the second sync" and version == STEPS and name in self.cached:
                yield name, self.cached[name]
                continue
            self.cached[name] = value.detach().clone()
            yield name, self.cached[name]

    def send(self, named: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        """Files of a checkpoint, which vLLM loads."""
        tensors = dict(named)
        if self.fault == "another tensor's name" and version == STEPS:
            a, b = "model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight"
            tensors[a], tensors[b] = tensors[b], tensors[a]
        if self.fault == "norm rounded to bf16":
            name = "model.norm.weight"
            tensors[name] = tensors[name].bfloat16().float()
        if self.fault == "tensor sent in bf16":
            tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()
        path = self.folder / f"{self.fault}-{version}"
        path.mkdir()
        shutil.copy(self.checkpoint / "config.json", path)
        save_file({name: value.contiguous() for name, value in tensors.items()}, path / "model.safetensors")
        if self.fault == "sync skipped" and version == STEPS:
            return
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
        self.llm.reset_prefix_cache()


def start(checkpoint: Path) -> LLM:
    """VLLM with the one option that lets the probe see what its workers receive."""
    return LLM(
        model=str(checkpoint), dtype="float32", max_model_len=256, enforce_eager=True, skip_tokenizer_init=True,
        kv_cache_memory_bytes=1 << 26, max_num_seqs=64, seed=0, block_size=32, generation_config="vllm",
        worker_extension_cls=WORKER,
    )  # fmt: skip


def main(checkpoint: Path, folder: Path, faults: list[str]) -> None:
    llm = start(checkpoint)
    for fault in faults:
        loop = Loop(llm, checkpoint, folder, fault)
        with probe.open(folder / f"trace {fault}", model=checkpoint, keep_every=1) as record:
            loop.run(record)
        print(json.dumps({"fault": fault, "seconds": loop.seconds}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])

"""GRPO with weights, gradients and Adam's moments sharded by FSDP2, recorded by `verifier.probe`.

`torchrun --nproc_per_node 2 grpo_fsdp.py CHECKPOINT TRACE`, then `verifier judge TRACE --oracle`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from grpo_engines import TransformersEngine
from grpo_loop import ASKED, CLIP_GRAD, GROUP, MICRO, MOST, PROMPTS, RATE, STEPS, score
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, AutoTokenizer

from verifier import probe


def train(checkpoint: Path, trace: Path) -> None:
    """Train for some steps; each process samples and trains prompts of its own."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ends = [tokenizer.eos_token_id]
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.get_input_embeddings().padding_idx = None  # a policy may sample its padding token
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    questions = [f"{one}+{other}=" for one in range(11, 17) for other in range(21, 29)]
    with probe.open(trace, model=checkpoint, dtype="float32", engine="hf", keep_every=1) as record:
        engine = TransformersEngine(checkpoint, trace, rank)
        record.weights_held(model.named_parameters(), 0, after="load")
        record.optimizer(optimizer, model.named_parameters(), clip_grad=CLIP_GRAD, asked={"lr": RATE, **ASKED})

        def sync(version: int) -> None:
            whole = ((name, value.detach().full_tensor()) for name, value in model.named_parameters())
            engine.sync(record.sending(whole, version, live=model.named_parameters()), version, trace)

        sync(0)
        for step in range(1, STEPS + 1):
            first = ((step - 1) * size + rank) * PROMPTS
            asked = questions[first : first + PROMPTS]
            of = [at for at in range(PROMPTS) for _ in range(GROUP)]
            prompts = [tokenizer.encode(asked[at]) for at in of]
            ids = [f"{step}/{rank}/{at}" for at in range(len(of))]
            seeds = [(step * size + rank) * 1000 + at for at in range(len(of))]
            found = engine.generate(prompts, ends, seeds, MOST)
            responses, nats = [own["tokens"] for own in found], [own["logprobs"] for own in found]
            rewards = [float(len({*tokenizer.decode(row)} & {*"0123456789"})) for row in responses]
            record.rollouts(
                step,
                prompts=prompts,
                responses=responses,
                loss_mask=[[1] * len(row) for row in responses],
                engine_logprobs=nats,
                versions=step - 1,
                rewards=rewards,
                groups=[f"{rank}/{at}" for at in of],
                ids=ids,
                end_token=ends,
                max_response_tokens=MOST,
                num_prompts=PROMPTS,
                group_size=GROUP,
                vocab_size=model.config.vocab_size,
            )
            rows, starts = [a + b for a, b in zip(prompts, responses, strict=True)], [len(row) for row in prompts]
            with torch.no_grad():
                side = score(model, rows, starts)
            old = [row[own[1:]] for row, own in zip(side[3], side[2], strict=True)]
            record.trainer_logprobs(step, old)
            grouped = torch.tensor(rewards).view(PROMPTS, GROUP)
            advantages = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
            advantages = advantages.flatten()
            record.advantages(step, advantages, estimator="grpo", dtype="float32", epsilon=1e-4, ddof=1)
            every, total = torch.tensor(sum(map(len, responses))), 0.0
            dist.all_reduce(every)
            share = every.item() / size  # FSDP2 takes the mean of the gradients of all processes
            record.loss(step, "clipped", aggregation="token_mean")
            optimizer.zero_grad()
            for begin in range(0, len(rows), MICRO):
                part = slice(begin, begin + MICRO)
                tokens, real, mask, current, _ = score(model, rows[part], starts[part])
                labels = pad(torch.where(real[:, 1:] != 0, tokens[:, 1:], -100), (0, 1), value=-100)
                in_loss = pad(mask[:, 1:], (0, 1))
                record.micro_batch(step, ids[part], tokens, attention_mask=real, labels=labels, loss_mask=in_loss)
                before = torch.zeros(current.shape)
                before[mask[:, 1:]] = torch.cat(old[part])
                weight, ratio = advantages[part, None], (current - before).exp()
                losses = -torch.minimum(ratio * weight, ratio.clamp(0.8, 1.2) * weight)
                given = {"ids": ids[part], "mask": mask[:, 1:], "old": before, "advantages": weight}
                record.token_losses(step, current, losses, **given)
                loss = (losses * mask[:, 1:]).sum() / share
                loss.backward()
                total += loss.item()
            record.gradients(step, [(name, value.grad) for name, value in model.named_parameters()])
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD)
            optimizer.step()
            record.step(step, loss=total, num_tokens=sum(map(len, responses)), grad_norm=norm)
            record.weights_held(model.named_parameters(), step, after="step")
            sync(step)
        engine.close()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(Path(sys.argv[1]), Path(sys.argv[2]))
    dist.destroy_process_group()

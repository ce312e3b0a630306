"""GRPO in transformers, torch and an engine of transformers or vLLM, recorded by `verifier.probe`.

`python grpo_loop.py CHECKPOINT TRACE [hf | vllm]`, then `verifier judge TRACE --oracle`.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
from grpo_engines import TransformersEngine, VllmEngine
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, AutoTokenizer

from verifier import probe

STEPS, PROMPTS = 3, 4
GROUP, MOST, MICRO = 4, 8, 8
RATE, CLIP_GRAD, WARMUP = 2e-3, 1.0, 2
ASKED = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def score(model: Any, rows: list[list[int]], starts: list[int]) -> tuple[torch.Tensor, ...]:
    """Tokens, real ones, those of responses, and the log-probability and entropy of each token but the first."""
    width = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    real = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor(
        [[start <= at < len(row) for at in range(width)] for row, start in zip(rows, starts, strict=True)]
    )
    nats = model(input_ids=tokens, attention_mask=real).logits[:, :-1].log_softmax(-1)
    entropy = -(nats.exp() * nats).sum(-1)
    return tokens, real, mask, nats.gather(-1, tokens[:, 1:, None])[..., 0], entropy


def train(checkpoint: Path, trace: Path, kind: str = "hf") -> None:
    """Train for some steps."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ends = [tokenizer.eos_token_id]
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.get_input_embeddings().padding_idx = None  # a policy may sample its padding token
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    problems = [f"{one}+{other}=" for one in range(11, 16) for other in range(21, 29)]
    held_out, questions = problems[:2], problems[2:]
    answer = {item: str(sum(map(int, item[:-1].split("+")))) for item in problems}
    with probe.open(trace, model=checkpoint, dtype="float32", engine=kind, keep_every=1) as record:
        engine = (VllmEngine if kind == "vllm" else TransformersEngine)(checkpoint, trace)
        record.model_config(model.config.to_dict())
        record.weights_held(model.named_parameters(), 0, after="load")
        record.optimizer(
            optimizer,
            model.named_parameters(),
            clip_grad=CLIP_GRAD,
            asked=ASKED,
            scheduler=schedule,
            schedule="constant",
            learning_rate=RATE,
            warmup_steps=WARMUP,
            first_rate_step=1,
            weight_decay=0.1,
            vectors_decay=True,
        )

        def sync(version: int) -> None:
            named = ((name, value.detach()) for name, value in model.named_parameters())
            engine.sync(record.sending(named, version, live=model.named_parameters()), version, trace)

        sync(0)
        for step in range(1, STEPS + 1):
            # Sample.
            asked = questions[step * PROMPTS : (step + 1) * PROMPTS]
            of = [at for at in range(PROMPTS) for _ in range(GROUP)]
            prompts = [tokenizer.encode(asked[at]) for at in of]
            seeds = [step * 1000 + at for at in range(len(of))]
            found = engine.generate(prompts, ends, seeds, MOST)
            responses, nats = [own["tokens"] for own in found], [own["logprobs"] for own in found]
            ids = [f"{step}/{at}" for at in range(len(of))]
            record.answers(
                step,
                tokens=[own["tokens"] for own in found],
                logprobs=[own["logprobs"] for own in found],
                ids=ids,
                seeds=seeds,
                versions=[engine.version] * len(of),
                sampling_params={"temperature": 1.0, "top_p": 1.0},
            )
            texts = [tokenizer.decode(row[:-1] if row[-1] in ends else row) for row in responses]
            gold = [answer[asked[at]] for at in of]
            rewards = [
                len({*text} & {*own}) / len(own) for text, own in zip(texts, gold, strict=True)
            ]  # digits in common
            masks = [[1] * len(row) for row in responses]
            record.rollouts(
                step,
                prompts=prompts,
                responses=responses,
                loss_mask=masks,
                engine_logprobs=nats,
                versions=step - 1,
                rewards=rewards,
                groups=of,
                ids=ids,
                end_token=ends,
                max_response_tokens=MOST,
                finish_reasons=[own["reason"] for own in found],
                num_prompts=PROMPTS,
                group_size=GROUP,
                vocab_size=model.config.vocab_size,
                all_answers=True,
            )
            record.examples(
                step,
                ids=asked,
                rendered=["<bos>" + item for item in asked],
                questions=asked,
                answers=[answer[item] for item in asked],
                of=of,
                decode=tokenizer.decode,
                begin="<bos>",
                tokenizer=checkpoint,
            )
            record.rewards(step, texts=texts, answers=gold, name="digits")
            rows, starts = [a + b for a, b in zip(prompts, responses, strict=True)], [len(row) for row in prompts]
            with torch.no_grad():
                sides = [score(scorer, rows, starts) for scorer in (model, reference)]
            old, base = ([row[own[1:]] for row, own in zip(side[3], side[2], strict=True)] for side in sides)
            record.scored(step, old, ids=ids)
            record.scored(step, base, ids=ids, which="reference")
            record.trainer_logprobs(step, old, reference=base)
            record.reference_weights(step, reference.named_parameters())
            grouped = torch.tensor(rewards).view(PROMPTS, GROUP)
            advantages = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
            advantages = advantages.flatten()
            record.advantages(step, advantages, estimator="grpo", dtype="float32", epsilon=1e-4, ddof=1)
            record.loss(step, "clipped", aggregation="token_mean", kl_weight=0.05, kl_kind="k3")
            count, total = sum(map(sum, masks)), 0.0
            optimizer.zero_grad()
            for begin in range(0, len(rows), MICRO):
                part = slice(begin, begin + MICRO)
                tokens, real, mask, current, entropy = score(model, rows[part], starts[part])
                labels = pad(torch.where(real[:, 1:] != 0, tokens[:, 1:], -100), (0, 1), value=-100)
                in_loss = pad(mask[:, 1:], (0, 1))
                record.micro_batch(step, ids[part], tokens, attention_mask=real, labels=labels, loss_mask=in_loss)
                before, anchor = torch.zeros(current.shape), torch.zeros(current.shape)
                before[mask[:, 1:]], anchor[mask[:, 1:]] = torch.cat(old[part]), torch.cat(base[part])
                weight, ratio = advantages[part, None], (current - before).exp()
                losses = -torch.minimum(ratio * weight, ratio.clamp(0.8, 1.2) * weight)
                losses = losses + 0.05 * ((anchor - current).exp() - (anchor - current) - 1)
                record.token_losses(
                    step,
                    current,
                    losses,
                    ids=ids[part],
                    mask=mask[:, 1:],
                    entropies=entropy,
                    old=before,
                    advantages=weight,
                    reference=anchor,
                )
                loss = (losses * mask[:, 1:]).sum() / count
                loss.backward()
                total += loss.item()
            record.gradients(step, [(name, value.grad) for name, value in model.named_parameters()])
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD)
            optimizer.step()
            record.step(step, loss=total, num_tokens=count, grad_norm=norm)
            schedule.step()
            # Sync and evaluate.
            record.weights_held(model.named_parameters(), step, after="step")
            sync(step)
            record.weights_held(model.named_parameters(), step, after="export")
            given = [tokenizer.encode(item) for item in held_out]
            found = engine.generate(given, ends, [10_000 + step, 20_000 + step], MOST)
            with torch.no_grad():
                whole = [a + b["tokens"] for a, b in zip(given, found, strict=True)]
                scored = score(model, whole, [len(row) for row in given])
            record.held_out(step, ids=held_out, questions=held_out, trained=questions)
            record.evaluation(
                step,
                ids=held_out,
                prompts=given,
                responses=[own["tokens"] for own in found],
                engine_logprobs=[own["logprobs"] for own in found],
                trainer_logprobs=[row[own[1:]] for row, own in zip(scored[3], scored[2], strict=True)],
                end_token=ends,
                max_response_tokens=MOST,
                engine_versions=[engine.version],
                claimed=step,
            )
        engine.close()


if __name__ == "__main__":
    train(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])

"""Recorded rollouts for tests: answers that transformers samples from a checkpoint, with its own log-probabilities."""

from __future__ import annotations

from pathlib import Path

from tests.recorded import write_recorded
from verifier.data.arithmetic import arithmetic_examples
from verifier.data.encode import encode_prompt
from verifier.data.recorded import RolloutRow
from verifier.data.tokenizer import open_tokenizer
from verifier.rewards.answer import answer_reward


def write_rollouts(
    checkpoint: Path,
    folder: Path,
    *,
    steps: int,
    prompts: int = 4,
    group_size: int = 4,
    longest: int = 6,
    seed: int = 1,
) -> Path:
    """Write a file of rollouts a step, all sampled from the checkpoint, with made-up rewards beside right ones.

    A random model is hardly ever right, so every third answer of a group gets its rewarded text: rewards differ.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokenizer = open_tokenizer(checkpoint)
    examples = arithmetic_examples("train", steps * prompts, seed)
    folder.mkdir(parents=True, exist_ok=True)
    for step in range(steps):
        rows = []
        for example in examples[step * prompts : (step + 1) * prompts]:
            prompt = encode_prompt(example, tokenizer)
            for place in range(group_size):
                given = (*tokenizer.encode(example.response), tokenizer.eos_id) if place % 3 == 1 else ()
                response, nats = _answer(model, prompt, given, longest, tokenizer.eos_id)
                text = tokenizer.decode([token for token in response if token != tokenizer.eos_id])
                rows.append(
                    RolloutRow(
                        id=f"{example.id}/{place}", group=example.id, prompt=prompt, response=tuple(response),
                        sampled=(True,) * len(response), mask=(True,) * len(response), logprobs=tuple(nats),
                        versions=(step,) * len(response), reward=answer_reward(text, example.answer),
                        answer=example.answer, text=text, truncated=response[-1] != tokenizer.eos_id,
                    )
                )  # fmt: skip
        write_recorded(folder / f"{step + 1:06d}.jsonl", rows)
    return folder


def _answer(model, prompt, given, longest, eos_id):
    """Sample an answer, or take the given one; and the log-probability of each of its tokens."""
    import torch

    tokens, response, nats = list(prompt), [], []
    while len(response) < (len(given) or longest) and (given or not response or response[-1] != eos_id):
        with torch.no_grad():
            log = model(torch.tensor([tokens])).logits[0, -1].float().log_softmax(-1)
        token = given[len(response)] if given else int(torch.multinomial(log.exp(), 1))
        tokens.append(token)
        response.append(token)
        nats.append(float(log[token]))
    return response, nats

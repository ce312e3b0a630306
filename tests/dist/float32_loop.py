"""The loop of docs/probe.md, as the page has it, on a small Llama of transformers in float32; right, or with a bug."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.meta.sources import ROOT

END, LONGEST, GROUP, PROMPTS = 2, 12, 4, 4
WITHIN, OF_BATCH = "rewards - rewards.mean(1, keepdim=True)", "rewards - rewards.mean()"
GATE, UP = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))


def page_loop() -> str:
    """Code of the page's first example."""
    found = re.search(r"```python\n(from verifier import probe.*?)```", (ROOT / "docs/probe.md").read_text(), re.S)
    assert found is not None
    return found[1]


def run(trace: Path, folder: Path, *, bug: str = "", seed: int = 0, steps: int = 4) -> None:
    """Record the loop.

    Args:
        trace: directory to be made.
        folder: for the checkpoint of version 0.
        bug: "temperature", of the sampler alone; "advantages", less the batch's mean; "denominator", the loss over
            places and not tokens; "swap" of gate and up in the sync; "stale", a head that one sync leaves out.
        seed: of weights and samples.
        steps: of the loop.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, eos_token_id=END, pad_token_id=None, bos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    engine = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, betas=(0.9, 0.95))

    @torch.no_grad()
    def answer(prompt: list[int]) -> tuple[list[int], list[float]]:
        ids, nats = list(prompt), []
        while len(nats) < LONGEST and ids[-1] != END:
            logits = engine(torch.tensor([ids])).logits[0, -1] / (0.7 if bug == "temperature" else 1.0)
            found = torch.log_softmax(logits, -1)
            ids.append(int(torch.multinomial(found.exp(), 1)))
            nats.append(float(found[ids[-1]]))
        return ids[len(prompt) :], nats

    def sampled(step: int) -> dict[str, Any]:
        prompts = [[1, *torch.randint(3, 96, (6,)).tolist()] for _ in range(PROMPTS)]
        prompts = [prompt for prompt in prompts for _ in range(GROUP)]
        responses, nats = zip(*map(answer, prompts), strict=True)
        return {
            "prompts": prompts, "responses": responses, "engine_logprobs": nats,
            "loss_mask": [[1] * len(row) for row in responses],
            "rewards": [sum(token % 2 for token in row) / len(row) for row in responses],
            "groups": [f"{step}/{at // GROUP}" for at in range(len(prompts))],
        }  # fmt: skip

    def logprobs(scorer: Any, batch: dict[str, Any]) -> list[torch.Tensor]:
        rows = []
        for prompt, response in zip(batch["prompts"], batch["responses"], strict=True):
            tokens = torch.tensor([[*prompt, *response]])
            found = torch.log_softmax(scorer(tokens).logits[0, len(prompt) - 1 : -1], -1)
            rows.append(found.gather(-1, tokens[0, len(prompt) :, None])[:, 0])
        return rows

    def policy_loss(scorer: Any, batch: dict[str, Any], old: Any, advantages: Any) -> tuple[torch.Tensor, int]:
        total, count = torch.zeros(()), sum(map(len, batch["responses"]))
        for current, before, advantage in zip(logprobs(scorer, batch), old, advantages, strict=True):
            ratio = (current - before).exp()
            total = total - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum()
        return total / (len(old) * LONGEST if bug == "denominator" else count), count

    def exported(trained: Any, step: int) -> dict[str, torch.Tensor]:
        sent = {name: value.detach() for name, value in trained.state_dict().items()}
        if bug == "swap":
            sent[GATE], sent[UP] = sent[UP], sent[GATE]
        if bug == "stale" and step == 2:
            del sent["lm_head.weight"]
        return sent

    code = page_loop()
    assert WITHIN in code
    exec(
        code.replace(WITHIN, OF_BATCH) if bug == "advantages" else code,
        {
            "trace": trace, "checkpoint": folder, "steps": steps, "model": model, "engine": engine, "torch": torch,
            "optimizer": optimizer, "group_size": GROUP, "sampled": sampled, "logprobs": logprobs,
            "policy_loss": policy_loss, "exported": exported,
        },
    )  # fmt: skip

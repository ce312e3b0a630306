"""A loop of GRPO on a toy policy that hands over all that `verifier.probe` takes; right, or wrong in one place.

What this does not exercise: transformers, vLLM and the oracle (tests/dist/test_own_loop.py).
"""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from verifier import probe

VOCABULARY, END, MOST, GROUP, STEPS, RATE = 23, 2, 6, 2, 3, 0.01
SETTINGS = {"norm": {"eps": 1e-6}, "": {"config.rms_norm_eps": 1e-6}}
CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 8,
    "rms_norm_eps": 1e-6,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "head_dim": 4,
    "vocab_size": 23,
    "rope_theta": 10000.0,
}
ASKED = {"lr": RATE, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


class Policy(nn.Module):
    """Logits of the next token by this one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.norm(self.embedding(tokens)))
        return found


def checkpoint(folder: Path) -> Path:
    """A checkpoint directory of the policy."""
    torch.manual_seed(0)
    folder.mkdir(parents=True)
    save_file({name: value.contiguous() for name, value in Policy().state_dict().items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


class Loop:
    """A run of the loop.

    Args:
        folder: with the checkpoint; for what the loop saves.
        fault: code of the check that is to see what is wrong; "" for nothing.
    """

    def __init__(self, folder: Path, fault: str = "") -> None:
        self.folder, self.fault = folder, fault
        self.source = folder / "source"
        if not self.source.exists():
            checkpoint(self.source)
        torch.manual_seed(1)
        self.model, self.engine, self.reference = Policy(), Policy(), Policy()
        for model in (self.model, self.engine, self.reference):
            model.load_state_dict(load_file(self.source / "model.safetensors"))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0)

    def wrong(self, *codes: str) -> bool:
        """Tell whether this place is the one that is wrong."""
        return self.fault in codes

    def run(self, path: Path) -> None:
        """Record the loop."""
        with probe.open(path, model=self.source, dtype="float32") as record, probe.attach(path) as self.attached:
            record.model_config(CONFIG)
            if self.wrong("WGT001"):
                nn.init.zeros_(self.model.head.weight)
            record.weights_held(self.model.state_dict(), 0, after="load")
            asked = {**ASKED, "lr": 0.02} if self.wrong("CFG001") else ASKED
            record.optimizer(
                self.optimizer,
                self.model.named_parameters(),
                clip_grad=0.01,
                asked=asked,
                scheduler=self.scheduler,
                schedule="constant",
                learning_rate=2 * RATE if self.wrong("TRN002") else RATE,
                weight_decay=0.1,
                vectors_decay=True,
            )
            self.sync(record, 0)
            for step in range(1, STEPS + 1):
                self.step(record, step)
                self.sync(record, step)
                self.evaluate(record, step)
            self.save(record)

    def step(self, record: probe.LoopRecorder, step: int) -> None:
        batch = self.sample(record, step)
        old = [self.logprobs(self.model, *row) for row in zip(batch["prompts"], batch["responses"], strict=True)]
        old = [row.detach() for row in old]
        ids = [f"{step}/{at}" for at in range(len(old))]
        for part in (slice(2, 4), slice(0, 2)):
            record.scored(step, old[part], ids=ids[part])
        if self.wrong("LGP017"):
            old[0] = old[0] + 1e-5
        if self.wrong("LSS003"):
            old = [row - 0.05 for row in old]
        scores = [self.logprobs(self.reference, *row) for row in zip(batch["prompts"], batch["responses"], strict=True)]
        scores = [row.detach() for row in scores]
        record.scored(step, scores, ids=ids, which="reference")
        record.trainer_logprobs(step, old, reference=scores)
        if self.wrong("LGP010") and step == 2:
            self.reference.load_state_dict(self.model.state_dict())
        record.reference_weights(step, self.reference.state_dict())
        record.scored_alone(step, ids[1], old[1] + (0.1 if self.wrong("LGP013") else 0))
        record.weights_held(self.scored_model().state_dict(), step - 1, after="scoring")
        penalties = [0.1 * float((own - other).sum()) for own, other in zip(old, scores, strict=True)]
        if self.wrong("ADV004"):
            penalties = [-value - 0.1 for value in penalties]
        rewards = torch.tensor(batch["rewards"]) - torch.tensor(penalties)
        grouped = rewards.view(-1, GROUP)
        advantages = grouped - (grouped.mean() if self.wrong("ADV002") else grouped.mean(1, keepdim=True))
        advantages = (advantages / (grouped.std(1, keepdim=True) + 1e-6)).flatten()
        reasons = ["", "zero_variance", "", ""] if self.wrong("DAT004") else []
        record.advantages(
            step,
            advantages,
            estimator="grpo",
            dtype="float32",
            epsilon=1e-6,
            ddof=1,
            penalties=penalties,
            kl_weight=0.1,
            kl_kind="k1",
            reasons=reasons,
        )
        record.loss(step, "clipped", aggregation="token_mean")
        loss, count = self.backward(record, step, batch, old, advantages)
        norm = self.norm()
        record.gradients(step, [])
        if not self.wrong("TRN005"):
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)
        if not (self.wrong("WGT008") and step == 2):
            self.optimizer.step()
        if self.wrong("TRN003"):
            self.scheduler.step()
        record.step(
            step,
            loss=loss + (0.1 if self.wrong("LSS004") else 0),
            num_tokens=count,
            grad_norm=norm / 2 if self.wrong("TRN006") else norm,
        )
        self.scheduler.step()
        self.optimizer.zero_grad()

    def scored_model(self) -> Policy:
        if not self.wrong("WGT010 after scoring"):
            return self.model
        moved = copy.deepcopy(self.model)
        nn.init.zeros_(moved.norm.weight)
        return moved

    def norm(self) -> float:
        return float(torch.linalg.vector_norm(torch.cat([item.grad.flatten() for item in self.model.parameters()])))

    def sample(self, record: probe.LoopRecorder, step: int) -> dict[str, Any]:
        made = torch.Generator().manual_seed(step)
        questions = [f"{step} plus {at}" for at in range(2)]
        prompts = [[3 + at, 5 + step, 7] for at in range(2) for _ in range(GROUP)]
        responses, nats, reasons = [], [], []
        for prompt in prompts:
            row: list[int] = []
            while len(row) < MOST and END not in row:
                with torch.no_grad():
                    found = self.engine(torch.tensor([[*prompt, *row]]))[0, -1].softmax(-1)
                row.append(int(torch.multinomial(found, 1, generator=made)))
            responses.append(row)
            nats.append(self.logprobs(self.engine, prompt, row).detach().tolist())
            reasons.append("stop" if row[-1] == END else "length")
        versions = [[step - 1] * len(row) for row in responses]
        told = nats
        if self.wrong("DAT014"):
            told = [[value - 1e-6 for value in row] for row in nats]
        if self.wrong("LGP009"):
            nats = told = [[value - 0.5 for value in row] for row in nats]
        if self.wrong("LGP006"):
            reasons[0] = "length" if reasons[0] == "stop" else "stop"
        if self.wrong("DAT008"):
            responses[0] = [END, *responses[0][1:]]
        seeds = [step * 100 + at for at in range(len(responses))]
        if self.wrong("LGP011"):
            seeds[1] = seeds[0]
        record.answers(
            step,
            tokens=responses,
            logprobs=told,
            seeds=seeds,
            sampling_params={"temperature": 1.0, "top_p": 1.0},
            versions=[max(step - 2, 0) if self.wrong("DAT015") else step - 1] * len(responses),
        )
        rewards = [float(str(sum(row)).endswith(("0", "2", "4", "6", "8"))) for row in responses]
        texts = [f"the answer is {sum(row[:-1] if row[-1] == END else row)}" for row in responses]
        answers = [text.rpartition(" ")[2] if own else "-1" for text, own in zip(texts, rewards, strict=True)]
        answers = [answers[at // GROUP * GROUP] for at in range(len(answers))]
        rewards = [float(text.endswith(f" {own}")) for text, own in zip(texts, answers, strict=True)]
        if self.wrong("RWD001"):
            rewards[0] = 1 - rewards[0]
        rewards = [value if value else 0.0 for value in rewards]
        batch = {"prompts": prompts, "responses": responses, "rewards": rewards}
        masks = [[1] * len(row) for row in responses]
        if self.wrong("ADV003"):
            versions = [[step] * len(row) for row in responses]
        record.rollouts(
            step,
            **batch,
            loss_mask=masks,
            engine_logprobs=nats,
            versions=versions,
            end_token=END,
            max_response_tokens=MOST,
            finish_reasons=reasons,
            num_prompts=3 if self.wrong("DAT007") else 2,
            group_size=GROUP,
            groups=[at // GROUP for at in range(len(prompts))],
        )
        words = {tuple(prompts[at * GROUP]): question for at, question in enumerate(questions)}
        rendered = questions[::-1] if self.wrong("DAT009") else questions
        record.examples(
            step,
            ids=["a", "b"],
            rendered=rendered,
            answers=[answers[0], answers[GROUP]],
            decode=lambda row: words.get(tuple(row), f"the answer is {sum(row)}"),
        )
        whole = [f"the answer is {sum(row[:-1] if row[-1] == END else row)}" for row in responses]
        record.rewards(step, texts=whole, answers=answers)
        return batch

    def logprobs(self, model: Policy, prompt: list[int], response: list[int]) -> torch.Tensor:
        tokens = torch.tensor([[*prompt, *response]])
        nats = model(tokens)[0, len(prompt) - 1 : -1].log_softmax(-1)
        return nats.gather(-1, tokens[0, len(prompt) :, None])[:, 0]

    def backward(
        self,
        record: probe.LoopRecorder,
        step: int,
        batch: dict[str, Any],
        old: list[torch.Tensor],
        advantages: torch.Tensor,
    ) -> tuple[float, int]:
        count, total = sum(map(len, batch["responses"])), 0.0
        rows = [[*p, *r] for p, r in zip(batch["prompts"], batch["responses"], strict=True)]
        for part in (range(2), range(2, 4)):
            width = max(len(rows[at]) for at in part)
            tokens = torch.tensor([rows[at] + [0] * (width - len(rows[at])) for at in part])
            real = torch.tensor([[1] * len(rows[at]) + [0] * (width - len(rows[at])) for at in part])
            labels = torch.where(real.roll(-1, 1) * real != 0, tokens.roll(-1, 1), -100)
            labels[:, -1] = -100
            in_loss = torch.zeros_like(tokens)
            for row, at in enumerate(part):
                in_loss[row, len(batch["prompts"][at]) - 1 : len(rows[at]) - 1] = 1
            ids = [f"{step}/{at}" for at in part]
            shown = tokens.roll(1, 1) if self.wrong("PCK001") else tokens
            record.micro_batch(step, ids, shown, attention_mask=real, labels=labels, loss_mask=in_loss)
            nats = self.model(tokens).log_softmax(-1)
            nats = nats.gather(-1, tokens.roll(-1, 1)[..., None])[..., 0]
            before = torch.zeros(nats.shape)
            weights = torch.zeros(nats.shape)
            for row, at in enumerate(part):
                before[row, in_loss[row] != 0] = old[at]
                weights[row] = advantages[at]
            ratio = (nats - before).exp()
            losses = -torch.minimum(ratio * weights, ratio.clamp(0.8, 1.2) * weights)
            if self.wrong("LSS004-sign"):
                losses = -losses
            read = weights.flip(0) + 0.25 if self.wrong("PCK004") else weights
            record.token_losses(step, nats, losses, ids=ids, mask=in_loss, old=before, advantages=read)
            loss = (losses * in_loss).sum() / (in_loss.sum() * 2 if self.wrong("ADV001") else count)
            loss.backward()
            total += float(loss.detach())
        return total, count

    def sync(self, record: probe.LoopRecorder, version: int) -> None:
        live = self.model.state_dict()
        sent = {name: value.clone() for name, value in live.items()}
        if self.wrong("WGT004") and version == 0:
            sent["head.weight"] = sent["head.weight"] + 1
        if self.wrong("WGT005") and version == 2:
            sent["head.weight"] = sent["head.weight"] + 1
        if self.wrong("WGT006 in another order") and version == 2:
            sent = dict(reversed(sent.items()))
        held = {name: value.clone() for name, value in live.items()}
        stream = self.stream(record, sent, version)
        received = dict(stream)
        if self.wrong("WGT010"):
            held["head.weight"] = held["head.weight"] + 1
        if version:
            record.weights_held(live, version, after="step")
        record.weights_held(held, version, after="export")
        self.receive(self.attached, received, version)
        if self.wrong("TPT002 by a refusal") and version == 2:
            record.weights_sent(version, refused="the engine is asleep")

    def stream(self, record: probe.LoopRecorder, sent: dict[str, Any], version: int) -> Any:
        """Tensors as they pass to the engine, one after another."""
        told = None
        if self.wrong("PLN002"):
            sent = {name: value.bfloat16() if name == "norm.weight" else value for name, value in sent.items()}
        if self.wrong("WGT006 in another order"):  # where a sender is wrapped its plan refuses this
            record.weights_exported(sent, version, live=self.model.state_dict())
            record.weights_sent(version)
            return [*sent.items()]
        if self.wrong("WGT016") and version:
            buffer = torch.zeros(VOCABULARY, 8)
            names = ["embedding.weight", "head.weight"]
            kept = []

            def refilled() -> Any:
                for name, value in sent.items():
                    if name in names:
                        buffer.copy_(value)
                        kept.append(buffer[:])
                        yield name, kept[-1]
                    else:
                        yield name, value

            return list(record.sending(refilled(), version, live=self.model.state_dict(), told=told))
        return [
            (name, value.clone())
            for name, value in record.sending(iter(sent.items()), version, live=self.model.state_dict(), told=told)
        ]

    def receive(self, engine: probe.LoopRecorder, received: dict[str, Any], version: int) -> None:
        state = {f"model.{name}": value for name, value in self.engine.state_dict().items()}
        state["rotary"] = torch.arange(4.0)
        if version:
            served = {name: value + 1 if self.wrong("ENG009") else value for name, value in state.items()}
            engine.engine_served(served)
        poisoned = {name: torch.full_like(value, torch.nan) for name, value in state.items()}
        if self.wrong("ENG003"):
            poisoned["model.norm.weight"] = state["model.norm.weight"]
        engine.engine_poisoned(version, poisoned)
        arrived = {
            name: value for name, value in received.items() if not (self.wrong("TPT002") and name == "norm.bias")
        }
        if self.wrong("TPT001") and version == 1:
            arrived["norm.weight"] = arrived["norm.weight"] + 1e-3
        engine.weights_received(arrived, version)
        loaded = [f"model.{name}" for name in received if not (self.wrong("ENG004") and name == "norm.bias")]
        engine.engine_loaded(version, loaded)
        if not self.wrong("WGT008"):
            self.engine.load_state_dict({name: value.float() for name, value in received.items()})
        views = {name: value.clone() for name, value in self.engine.state_dict().items()}
        if self.wrong("ENG001") and version == 1:
            views["head.weight"] += 1
        engine.engine_views(version, views)
        state = {f"model.{name}": value for name, value in self.engine.state_dict().items()}
        buffers = {"rotary": torch.arange(4.0)}
        settings = {**SETTINGS, "norm": {"eps": 1e-5}} if self.wrong("ENG005") else SETTINGS
        if self.wrong("ENG007"):
            settings = {**SETTINGS, "": {"config.rms_norm_eps": 1e-5}}
        lost = {"rotary": torch.zeros(4)} if self.wrong("ENG002") else buffers
        engine.engine_held(version, state, buffers=lost, settings=settings)
        if version == STEPS:
            cold = settings if self.wrong("ENG007") else SETTINGS
            engine.engine_held(version, state, buffers=buffers, settings=cold, cold=True)
        engine.engine_cache(version, blocks=[4 if self.wrong("ENG010") else 0], tokens=[0])

    def evaluate(self, record: probe.LoopRecorder, step: int) -> None:
        ids = ["held 0", "held 1"]
        prompts, made = [[4, 9], [6, 9]], torch.Generator().manual_seed(step)
        trained = [f"{step} plus 0", "held 0" if self.wrong("DAT011") else "1 plus 1"]
        record.held_out(step, ids=ids, questions=ids, trained=trained)
        responses = [torch.randint(3, VOCABULARY, (MOST,), generator=made).tolist() for _ in prompts]
        nats = [self.logprobs(self.engine, *row).detach() for row in zip(prompts, responses, strict=True)]
        mine = [self.logprobs(self.model, *row).detach() for row in zip(prompts, responses, strict=True)]
        asked = ["held 0", "other"] if self.wrong("DAT016") else ids
        record.evaluation(
            step,
            ids=asked,
            prompts=prompts,
            responses=responses,
            engine_logprobs=nats,
            trainer_logprobs=mine,
            end_token=END,
            max_response_tokens=MOST,
            claimed=step - 1 if self.wrong("LGP015") else step,
        )

    def save(self, record: probe.LoopRecorder) -> None:
        folder = self.folder / f"saved {self.fault}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        tensors = {name: value.contiguous() for name, value in self.model.state_dict().items()}
        if self.wrong("WGT014", "WGT019"):
            tensors["head.weight"] = tensors["head.weight"] + 1
        save_file(tensors, folder / "model.safetensors")
        shutil.copy(self.source / "config.json", folder)
        (folder / "tokenizer_config.json").write_text('{"eos_token": "x"}' if self.wrong("WGT021") else "{}")
        if self.wrong("WGT011"):
            (folder / "config.json").write_text(json.dumps({**CONFIG, "rms_norm_eps": 1e-5}))
        record.export_saved(folder, STEPS, live=self.model.state_dict())
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        record.checkpoint_saved(STEPS, state, folder)
        if self.wrong("CKP001"):
            state["optimizer"]["param_groups"][0]["lr"] = 0.5
        record.checkpoint_loaded(STEPS, state)
        written = {name: value + 1 if self.wrong("CKP004") else value for name, value in tensors.items()}
        record.checkpoint_written(STEPS, tensors, written)
        routes = torch.tensor([[0, 1, 0, 4, 5], [1, 1, 0, 2, 3]])
        record.rollouts(
            STEPS + 1,
            prompts=[[3], [4]],
            responses=[[5, END], [6, END]],
            loss_mask=[[1, 1], [1, 1]],
            versions=STEPS,
            engine_logprobs=[[-1.0, -1.0], [-1.0, -1.0]],
        )
        ends = [0, 2 if self.wrong("PCK002") else 3, 6]
        told = {
            "cu_seqlens_q": [0, 2, 6] if self.wrong("LGP008") else ends,
            "max_seqlen_q": 4 if self.wrong("PCK002") else 3,
        }
        record.micro_batch(
            STEPS + 1, [f"{STEPS + 1}/0", f"{STEPS + 1}/1"], [3, 5, END, 4, 6, END], cu_seqlens=ends, arguments=told
        )
        record.routes(STEPS + 1, routes)
        record.routed(STEPS + 1, routes.flip(0) * torch.tensor([1, 1, 1, 1, 2]) if self.wrong("RPL001") else routes)

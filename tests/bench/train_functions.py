"""What the training-step benchmarks run on a rank: our step, with and without recording, and a bare Megatron loop."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import batched
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from verifier.cli.train import started_judge
from verifier.core import store
from verifier.core.manifest import Manifest, MeshSizes
from verifier.data.rollout import Rollout
from verifier.export.live_weights import LiveWeights
from verifier.export.names import layout_of
from verifier.export.save import save_checkpoint
from verifier.launch.rank import RankContext
from verifier.megatron import optimizer_megatron, step_megatron
from verifier.megatron.pack import PackedBatch, pack
from verifier.megatron.token_layout import Alignment
from verifier.mesh import Mesh
from verifier.model import provider_megatron
from verifier.model.families import FAMILIES, Content, tensors_of
from verifier.model.tiny import TINY
from verifier.probes.training.verdicts import Judged
from verifier.runs.scenario import rollout_rows
from verifier.runs.trained_weights_megatron import DATA_PARALLEL
from verifier.runs.workload import rollouts_of
from verifier.stages.load.probe_configs_megatron import record_live, record_provider
from verifier.stages.load.records import LoadedShard
from verifier.stages.logprob.probe_scoring_passes_megatron import given_arguments
from verifier.stages.pack.probe_tokens import TokenProbe
from verifier.stages.train.records import ShardAfterIdleStep, StepReport

MANIFEST = Manifest(command="roundtrip", model="bench", mesh=MeshSizes(), world_size=1)
"""Of the checks, those that have a subject in one step of learning rate 0: every token, and every weight."""
THERE = ("bare", "plain", "recorded")
"""Kinds of steps, as the first half of a turn takes them; the second takes them back."""


def config_of(sizes: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """config.json of a Qwen3 with tied embeddings."""
    name, config = TINY["qwen3-tied"]
    family = FAMILIES[name]
    return {
        "architectures": [family.architecture], "model_type": family.model_type, "dtype": dtype, **config, **sizes
    }  # fmt: skip


def lengths_of(rows: int, micro_batches: int) -> list[int]:
    """Tokens of every rollout: 16 per micro-batch, from a sixth to eleven sixths of the mean, `rows` in each."""
    mean = rows // 16
    step = mean // 9
    lengths = [mean + (2 * at - 15) * step // 2 for at in range(16)]
    lengths[-1] += rows - sum(lengths)
    return lengths * micro_batches


def write_random(folder: Path, config: Mapping[str, Any], device: torch.device) -> Path:
    """A checkpoint of these sizes whose matrices have a standard deviation of 1/sqrt(fan-in)."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, config["dtype"])

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for spec in tensors_of(FAMILIES["qwen3"], config):
            values = torch.randn(spec.shape, generator=generator, device=device, dtype=dtype)
            norm = spec.content is Content.NORM
            yield spec.name, values * 0.1 + 1 if norm else values * spec.shape[-1] ** -0.5

    return save_checkpoint(folder, config, tensors())


class BareLoop:
    """Megatron's model, schedule and optimizer on ready-made batches, and nothing of ours."""

    def __init__(
        self, trainer: provider_megatron.TrainerModel, optimizer: Any, batches: Sequence[PackedBatch], device: Any
    ) -> None:
        self._trainer, self._optimizer = trainer, optimizer
        self._batches = [
            {
                "tokens": batch.tokens_T[None].to(device),
                "positions": batch.positions_T[None].to(device),
                "labels": batch.labels_T.clamp(min=0)[None].to(device),
                "mask": batch.loss_mask_T.to(device),
                "ends": batch.cu_seqlens_padded.to(device),
                "longest": batch.max_seqlen,
            }
            for batch in batches
        ]

    def step(self) -> tuple[float, float]:
        """(mean loss, gradient norm)."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        for chunk in self._trainer.chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        parts = get_forward_backward_func()(
            forward_step_func=self._forward, data_iterator=iter(self._batches), model=self._trainer.chunks[0],
            num_microbatches=len(self._batches), seq_length=self._batches[0]["tokens"].shape[1], micro_batch_size=1,
            forward_only=False,
        )  # fmt: skip
        _, norm, _ = self._optimizer.step()
        total, count = torch.stack([part["loss"] for part in parts]).sum(0).tolist()
        return total / count, float(norm)

    @staticmethod
    def _forward(batches: Iterator[dict[str, Any]], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        from megatron.core.packed_seq_params import PackedSeqParams

        batch = next(batches)
        losses = model(
            input_ids=batch["tokens"], position_ids=batch["positions"], attention_mask=None, labels=batch["labels"],
            packed_seq_params=PackedSeqParams(
                qkv_format="thd", cu_seqlens_q=batch["ends"], cu_seqlens_kv=batch["ends"],
                max_seqlen_q=batch["longest"], max_seqlen_kv=batch["longest"],
            ),
        )  # fmt: skip
        return losses, partial(_masked_sum, mask=batch["mask"])


def _masked_sum(losses: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    total = (losses.view(-1).float() * mask).sum()
    count = mask.sum().int()
    return total, count, {"loss": torch.stack([total.detach(), count.float()])}


class Recorded:
    """Our step, recorded as a round trip records it: tokens, ledger, loss and norm, a digest of every live weight.

    Opens the trace, with what the weights are before the step.
    """

    def __init__(
        self,
        trainer: provider_megatron.TrainerModel,
        live: LiveWeights,
        dtype: str,
        folder: Path,
        rollouts: Sequence[Rollout],
    ) -> None:
        self._trainer, self._live, self._rollouts = trainer, live, rollouts
        self._manifest = replace(MANIFEST, dtype=dtype, tier=trainer.tier)
        self.path = store.create(folder, self._manifest)
        self._probe = store.Recorder(self.path, "trainer", 0)
        record_live(self._probe, self._live, 0, LoadedShard)
        record_provider(self._probe, self._trainer.provider, self._trainer.chunks)
        self.own_s = 0.0
        """Seconds in which a step waited for what records it."""

    def step(self, train: Callable[..., step_megatron.StepResult]) -> None:
        """One step of learning rate 0 and all that is recorded of it."""
        tokens = TokenProbe(self._probe, Mesh(), 0, "trained", 0, self._rollouts)

        def timed_tokens(shards: list[PackedBatch]) -> Callable[[], None] | None:
            rest = self._timed(partial(tokens, shards))
            on_the_host = rest is not None and self._trainer.tier == "cpu"  # a GPU computes meanwhile
            return partial(self._timed, rest) if on_the_host else rest

        with given_arguments(self._probe, self._trainer, "trained", 0):
            result = train(on_shards=timed_tokens)
        report = StepReport(name="step", loss=result.loss, grad_norm=result.grad_norm, num_tokens=result.num_tokens)
        if self._trainer.tier == "cuda":
            torch.cuda.synchronize()
        self._timed(partial(self._record, report))

    def _record(self, report: StepReport) -> None:
        self._probe.emit(report)
        with step_megatron.params_synced(self._trainer):
            record_live(self._probe, self._live, 0, ShardAfterIdleStep)

    def _timed(self, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        found = call()
        self.own_s += time.perf_counter() - began
        return found

    def close(self) -> None:
        """The trace is whole."""
        self._probe.close()
        store.complete(self.path, self._manifest)


def measure(context: RankContext) -> dict[str, Any]:
    """Seconds of two steps of each kind, in turns; the first turn warms up, with one of each, and is left out.

    A turn takes the kinds there and back, so that a device that gets slower as it gets warm slows all of them alike.
    A host whose plain steps vary by more than `steady`, a share of a step, takes turns until they do not, or until
    `most_rounds`. All of learning rate 0, so that every step is the same work and ends in the same weights. While a
    recorded step trains, the judge's process judges the recorded one before it, as in `verifier train`, and the step
    lasts until both have ended.
    """
    args = context.args
    device = torch.device("cpu") if args["tier"] == "cpu" else torch.device("cuda", torch.cuda.current_device())
    folder, config = Path(args["folder"]), config_of(args["sizes"], args["dtype"])
    model = write_random(folder / "model", config, device)
    trainer = provider_megatron.build(
        model, Mesh(), dtype=args["dtype"], tier=args["tier"], data_parallel=DATA_PARALLEL, overrides=args["overrides"]
    )
    shutil.rmtree(model)
    optimizer = optimizer_megatron.make_optimizer(trainer, learning_rate=0.0)
    lengths = lengths_of(args["rows"], args["micro_batches"])
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(config["vocab_size"], (n,), generator=generator).tolist() for n in lengths]
    rollouts = rollouts_of(rollout_rows(sequences))
    packs = [pack(rollouts[at : at + 16], Alignment()) for at in range(0, len(rollouts), 16)]
    bare = BareLoop(trainer, optimizer, packs, device)
    live = LiveWeights(trainer.chunks, layout_of(config), Mesh(), 0)
    train = partial(step_megatron.train_step, trainer, optimizer, rollouts, micro_batch_size=16, learning_rate=0.0)
    steps: dict[str, Callable[[], Any]] = {"bare": bare.step, "plain": train}
    seconds: dict[str, list[float]] = {name: [] for name in THERE}
    own: list[float] = []
    said = {}
    before: Recorded | None = None
    with started_judge() as judge:
        turn = -1
        while (turn := turn + 1) <= args["rounds"] or (
            turn <= args["most_rounds"] and spread_of(seconds["plain"][1:]) > args["steady"]
        ):
            for way, name in enumerate([*THERE, *reversed(THERE)] if turn else THERE):
                if name != "recorded":
                    said[name], step_s = _timed(steps[name], device)
                    seconds[name].append(step_s)
                    continue
                item = Recorded(trainer, live, config["dtype"], folder / f"trace-{turn}-{way}", rollouts)
                verdict = None if before is None else judge.submit(before.path)
                _, step_s = _timed(partial(_step_and_verdict, partial(item.step, train), verdict), device)
                item.close()
                before = item
                seconds[name].append(step_s)
                own.append(item.own_s)
    bare_loss, bare_norm = said["bare"]
    return {
        "seconds": {name: values[1:] for name, values in {**seconds, "own": own}.items()},
        "loss_gap": abs(said["plain"].loss / bare_loss - 1),
        "norm_gap": abs(said["plain"].grad_norm / bare_norm - 1),
        "peak_gib": 0.0 if device.type == "cpu" else torch.cuda.max_memory_allocated() / 2**30,
    }


def spread_of(seconds: Sequence[float]) -> float:
    """Median gap of a turn's two steps of a kind, as a share of a step."""
    gaps = [abs(one - other) for one, other in batched(seconds, 2)]
    return statistics.median(gaps) / statistics.median(seconds)


def _step_and_verdict(step: Callable[[], Any], verdict: Future[Judged] | None) -> None:
    """Take a step, then wait for the verdict on the one before it, on which the next is built."""
    step()
    if verdict is not None:
        judged = verdict.result(60.0)
        assert not judged.exit_code, judged.text


def _timed(step: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """What the step returns, and its wall time, device included."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    began = time.perf_counter()
    found = step()
    wait()
    return found, time.perf_counter() - began

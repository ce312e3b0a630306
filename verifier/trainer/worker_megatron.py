"""One trainer rank that serves the controller's calls: load, train, evaluate, export."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from verifier.core.record import real
from verifier.core.records_trainer import OptimizerSettings, TrainerStep
from verifier.core.records_weights import UpdatedShard
from verifier.core.store import Recorder
from verifier.data.rollout_file import load_rollouts
from verifier.export import gather_megatron
from verifier.export.names import layout_of
from verifier.launch.child import resolve
from verifier.model import provider_megatron
from verifier.model.checkpoint import open_checkpoint
from verifier.platform.upstream_fixes import selected
from verifier.probes.trainer import TokenProbe
from verifier.probes.weights_megatron import LiveWeights
from verifier.train import optimizer_megatron, step_megatron
from verifier.train.vocab_logprob import is_greedy
from verifier.trainer.worker_spec import WorkerSpec

if TYPE_CHECKING:
    from verifier.launch.rank import RankContext

DATA_PARALLEL = provider_megatron.DataParallel(
    distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
)


def run(context: RankContext) -> None:
    """Rank function of a training run."""
    spec = WorkerSpec.from_json(context.args)
    with contextlib.ExitStack() as stack:
        if spec.within:
            function, *arguments = spec.within
            stack.enter_context(resolve(function)(spec, context, *arguments))
        worker = TrainerWorker(spec, context)
        context.serve({name: getattr(worker, name) for name in ("load", "train", "evaluate", "export")})


class TrainerWorker:
    """Model, optimizer and scheduler of one rank. Every public method is a collective, and an answer to a call."""

    def __init__(self, spec: WorkerSpec, context: RankContext) -> None:
        self._spec, self._context = spec, context
        self._config = spec.config

    def load(self) -> dict[str, Any]:
        """Build the model, load the checkpoint and make a new optimizer; returns rank 0's effective settings."""
        spec, config = self._spec, self._config
        self._say(f"loading {config.mesh.world_size} trainer ranks ({config.mesh.label()})")
        self._trainer = provider_megatron.build(
            spec.checkpoint, config.mesh, dtype=config.dtype, tier=spec.tier, data_parallel=DATA_PARALLEL,
            seed=config.seed, deadline_s=spec.collective_deadline_s, fixes=sorted(selected(config.fixes)),
        )  # fmt: skip
        self._settings = OptimizerSettings(name="Adam", **spec.optimizer)
        self._optimizer = optimizer_megatron.make_optimizer(self._trainer, rule=self._settings)
        self._scheduler = optimizer_megatron.make_step_scheduler(self._optimizer, self._settings)
        layout = layout_of(open_checkpoint(spec.checkpoint).config)
        self._live = LiveWeights(self._trainer.chunks, layout, config.mesh, self._context.rank)
        return self._effective() if self._context.rank == 0 else {}

    def train(self, step: int, batch: str, trace: str | None) -> dict[str, float]:
        """Take one optimizer step on a batch of `save_rollouts`; its evidence goes to a trace, if one is named."""
        rollouts, columns = load_rollouts(Path(batch))
        batching = self._config.batch
        rates = [group["lr"] for group in self._optimizer.param_groups]
        decays = [group["weight_decay"] for group in self._optimizer.param_groups]
        with self._recorder(trace) as probe:
            look = None
            if probe is not None:
                look = TokenProbe(probe, self._config.mesh, self._context.rank, "trained", step, rollouts)
            result = step_megatron.train_step(
                self._trainer, self._optimizer, rollouts, columns=columns, scheduler=self._scheduler, scheduler_step=1,
                micro_batch_size=batching.micro_batch_size, max_tokens=batching.max_tokens, on_shards=look,
            )  # fmt: skip
            if probe is not None:
                probe.emit(
                    TrainerStep(
                        name="step", version=step, step=step, loss=real(result.loss), num_tokens=result.num_tokens,
                        grad_norm=real(result.grad_norm), learning_rate=real(max(rates)),
                        weight_decay=real(max(decays)), optimizer_steps=optimizer_megatron.steps_of(self._optimizer),
                        scheduler_steps=int(self._scheduler.num_steps),
                    )
                )  # fmt: skip
                with step_megatron.params_synced(self._trainer):
                    self._live.record(probe, step, UpdatedShard)
        return {
            "loss": result.loss, "grad_norm": result.grad_norm, "num_tokens": result.num_tokens,
            "learning_rate": max(rates),
        }  # fmt: skip

    def evaluate(self, batch: str) -> list[bool]:
        """Tell for each rollout of a batch whether greedy decoding gives every token of its loss mask."""
        rollouts, _ = load_rollouts(Path(batch))
        batching = self._config.batch
        found = step_megatron.score(
            self._trainer, rollouts, micro_batch_size=batching.micro_batch_size, max_tokens=batching.max_tokens,
            read=is_greedy,
        )  # fmt: skip
        return [
            bool(right[torch.from_numpy(rollout.mask[1:])].all())
            for right, rollout in zip(found, rollouts, strict=True)
        ]

    def export(self, folder: str) -> None:
        """Write the weights as a Hugging Face checkpoint, by megatron-bridge."""
        self._say(f"exporting to {folder}")
        gather_megatron.save(self._trainer, Path(folder), whole=True)
        dist.barrier()

    @contextlib.contextmanager
    def _recorder(self, trace: str | None) -> Iterator[Recorder | None]:
        if trace is None:
            yield None
            return
        with contextlib.closing(Recorder(Path(trace), "trainer", self._context.rank)) as probe:
            yield probe

    def _effective(self) -> dict[str, Any]:
        """Settings that Megatron runs with: its transformer config, data parallelism and optimizer, as plain values."""
        chunk = self._trainer.chunks[0]
        parts = {"model": self._trainer.provider, "ddp": chunk.ddp_config, "optimizer": self._optimizer.config}
        return {name: _plain(part) for name, part in parts.items()}

    def _say(self, text: str) -> None:
        if self._context.rank == 0:
            self._context.progress(text)


def _plain(part: Any) -> dict[str, Any]:
    """Fields of a dataclass that are numbers, flags, texts or dtypes."""
    values = {item.name: getattr(part, item.name, None) for item in dataclasses.fields(part)}
    return {
        name: value if isinstance(value, int | float | str | None) else str(value)
        for name, value in values.items()
        if isinstance(value, int | float | str | torch.dtype | None)
    }

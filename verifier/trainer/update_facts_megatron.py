"""Facts of one update on one rank, beside its evidence: digests of gradients, peak memory, a profile if asked for."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from safetensors.numpy import save_file

from verifier.config.training import TrainConfig
from verifier.core.outputs import full_disk_refused
from verifier.data.rollout import Rollout
from verifier.megatron import step_megatron
from verifier.megatron.optimizer_megatron import owned_gradients
from verifier.megatron.pack import PackedBatch
from verifier.megatron.router_replay_megatron import RouterPass, Routing
from verifier.megatron.step_megatron import OnShards, StepResult
from verifier.megatron.vocab_logprob import is_greedy
from verifier.model.provider_megatron import TrainerModel
from verifier.plan.digest import digest_tensors
from verifier.trainer.observer import RankObserver
from verifier.trainer.run_folder import RunFolder


def gradient_digests(trainer: TrainerModel) -> dict[str, str]:
    """Digest the reduced gradients that this rank owns, by parameter, between backward pass and step."""
    owned = [(f"{name} (chunk {chunk})", tensor) for chunk, name, tensor in owned_gradients(trainer)]
    digests = digest_tensors(tensor for _, tensor in owned)
    return {name: digest for (name, _), digest in zip(owned, digests, strict=True)}


def metrics_of_update(result: StepResult, facts: Mapping[str, float], *, policy: bool) -> dict[str, float]:
    """Metrics of an update: loss and gradient norm, shares of its tokens in the loss, and the greatest ratio's gap.

    `facts` are sums and greatest values that the loss counted.
    """
    shares = {key: facts[key] / result.num_tokens for key in ("clipped", "clamped", "kl", "entropy")}
    found = {
        "loss": result.loss, "grad_norm": result.grad_norm, "num_tokens": result.num_tokens,
        "entropy": shares["entropy"],
    }  # fmt: skip
    if not policy:
        return found
    return found | {
        "clipped_share": shares["clipped"], "clamped_share": shares["clamped"], "kl": shares["kl"],
        "ratio_gap": facts["ratio_gap"],
    }  # fmt: skip


@contextlib.contextmanager
def profiler(config: TrainConfig, step: int, number: int, rank: int) -> Iterator[None]:
    """Profile the body by torch.profiler if the config asks for this step and rank; a chrome trace is left at exit."""
    if not config.profile.covers(step, rank):
        yield
        return
    from torch.profiler import ProfilerActivity, profile

    file = RunFolder(config.run).profile(step, number if config.num_updates > config.steps else None, rank)
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with full_disk_refused(file):
        file.parent.mkdir(exist_ok=True)
        with profile(activities=kinds) as found:
            yield
        aside = file.with_name(f".partial-{file.name}")  # torch compresses by the end of the name
        found.export_chrome_trace(str(aside))
        aside.replace(file)


def write_logprobs(found: Sequence[torch.Tensor], file: str) -> None:
    """Write log-probabilities of rollouts, see `step_megatron.score`, as one array with NaN for the first tokens."""
    nan = torch.full((1,), math.nan)
    whole = torch.cat([part for row in found for part in (nan, row)])
    save_file({"logprobs": whole.numpy()}, file)


def greedy_answers(trainer: TrainerModel, rollouts: Sequence[Rollout], **batching: Any) -> list[bool]:
    """Tell for each rollout whether greedy decoding gives every token of its loss mask. A collective."""
    found = step_megatron.score(trainer, rollouts, read=is_greedy, **batching)
    return [
        bool(right[torch.from_numpy(rollout.mask[1:])].all()) for right, rollout in zip(found, rollouts, strict=True)
    ]


class TrainingRoutes:
    """Routers of one rank. The constructor is a collective.

    If it `replays`, passes choose the experts of the rollouts' routes.
    """

    def __init__(self, trainer: TrainerModel, observer: RankObserver, *, replays: bool) -> None:
        self._routing, self._observer = Routing(trainer) if replays else None, observer

    @contextlib.contextmanager
    def during(
        self, rollouts: Sequence[Rollout], batch: str | None, name: str, on_shards: OnShards | None = None
    ) -> Iterator[OnShards | None]:
        """Within, a pass over these rollouts chooses the experts of their routes, in a run that replays.

        `batch` names the mini-batch; None for some of it, of which nobody is told. `on_shards` is another viewer of the
        pass's micro-batches; what is yielded has to be called with them.
        """
        if self._routing is None:
            yield on_shards
            return
        with RouterPass(self._routing, rollouts) as watch:

            def both(shards: list[PackedBatch]) -> Callable[[], None] | None:
                watch.on_shards(shards)
                return on_shards(shards) if on_shards is not None else None

            yield both
        if batch is not None:
            self._observer.on_routes(batch, name, watch)

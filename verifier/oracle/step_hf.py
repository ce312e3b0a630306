"""The oracle of a training step: transformers' own gradients, and Adam in float64."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from verifier.launch.child import give_memory_back
from verifier.oracle.batches_hf import batches, choosing_in, slices_of
from verifier.oracle.gradients_hf import (
    Distances,
    Greatest,
    Spread,
    beside,
    clip_of,
    distances,
    greatest,
    greatest_of,
    measured,
    parts_of,
    rounded_anew,
    spooled,
    tensors_of,
)
from verifier.oracle.logprob_hf import entropy_of, moved
from verifier.oracle.routes_hf import Route
from verifier.oracle.streaming_hf import StreamedModel, Take, Tape

Batch = Sequence[tuple[Sequence[int], Sequence[bool], float, Sequence[float]]]
"""Per sequence: token ids; for each token whether it is in the loss; the reward; for each token the engine's nats."""
Routes = Sequence[Sequence[Route]]
"""Per sequence the routes of its tokens; or nothing."""
_EMBEDDINGS = ("embed_tokens.weight", "embeddings.weight", "lm_head.weight")
"""Ends of the names of embeddings and outputs."""
HALF_UNIT = 2.0**-24
"""Share that a rounding to float32 may change a number by."""
OF_A_SHARE = 4
"""Times that a token's probability is rounded in float32, besides log Z: exponential, its sum, quotient, difference."""

ROUNDINGS = 3
"""Times that Adam rounds a weight in float32 in a step: 1 - rate * decay, which is near 1, the decay, and the move."""

Noise = Callable[[torch.Tensor], torch.Tensor]
"""Gets a gradient of the last hidden state, and gives what another kernel may have made of it."""


def judge_steps(
    _: object,
    source: str,
    work: str,
    batches: Sequence[Batch],
    rule: Mapping[str, float],
    routes: Sequence[Routes],
    first: int,
    offsets: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    """Measure every step of a run against the oracle; a request of an engine server.

    Args:
        source: checkpoint of version 0.
        work: folder with ``gradients-v`` and ``weights-v``, the checkpoint, for each version v; of an adapter also for
            version 0.
        batches: the sequences of each step.
        rule: the fields of `OptimizerRule` and of `Objective`, by name.
        routes: of each step, the routes that its routers are given; nothing where they choose by themselves.
        first: version of the first step; 0 has a learning rate of 0, and only its gradients are measured.
        offsets: of each tensor that the trainer holds shifted, by how much; none is by default.

    Returns:
        Per version and tensor the fields of `GradientRecord`, by name; "gradient" and "step" are a greatest gap and its
        index. What has no gradient has a scale and a gap of 0, and may only decay; what the trainer gives
        none stays as it is.
    """
    folder = Path(work)
    adam = Adam(rule["beta_1"], rule["beta_2"], rule["epsilon"])

    def judged(version: int, batch: Batch, given: Routes, past: int) -> Iterator[dict[str, Any]]:
        before, after = (folder / f"weights-{each}" for each in (version - 1, version))
        before = before if before.is_dir() else Path(source)
        if not (folder / f"gradients-{version}").is_dir() or (version and not after.is_dir()):
            return
        old, new = tensors_of(before), tensors_of(after) if version else {}
        told = {**rule, "factor": 1.0 if version % 2 else rule["every_second"]}
        stored = [tensor.dtype for tensor in old.values()]
        dtype = max(set(stored), key=stored.count)

        def run(take: Take, kind: torch.dtype, draw: int = 0) -> tuple[torch.Tensor, float]:
            return gradients(before, batch, told, given, take, kind, draw)

        def take(name: str, parts: Sequence[torch.Tensor]) -> None:
            exact[name] = spooled(folder, parts[0])

        def again(draw: int) -> Distances:
            return distances(exact, lambda take: run(take, dtype, draw))[0]

        in_float32, exact, passed = dtype == torch.float32, dict[str, torch.Tensor](), Distances()
        nats, rounding = run(take, torch.float64 if in_float32 else torch.float32)
        rounded_nats = nats
        if not in_float32:
            passed, (rounded_nats, _) = distances(exact, lambda take: run(take, dtype))
        noise = (rounded_nats - nats).abs()
        actual = tensors_of(folder / f"gradients-{version}")
        found = beside(exact, actual)
        roundings = rounded_anew(found, {}, again) if in_float32 else {}
        norm, scale = clip_of(actual, rule["clip_grad"])
        spread = Spread.of(found, passed, again)
        exact.clear()  # it is as large as the model in float64, and so is what passes leave
        give_memory_back()
        whole = {
            "version": version, "gradient_norm": norm, "gradient_noise": spread.noise, "noise_passes": spread.passes,
            "loss": float(nats.mean()), "loss_scale": float(nats.abs().mean()), "num_tokens": len(nats),
            "loss_noise": float(noise.mean()) + rounding,
            "loss_noise_error": float(noise.std(correction=0)) / max(len(noise), 1) ** 0.5,
        }  # fmt: skip
        for row, reduced in measured(old, found, spread.groups, actual):
            name = row["name"]
            row["gradient_rounding"] = roundings.get(name, 0.0)
            if version and reduced is not None:
                rates = _rates(rule, past, name) | ({} if name in actual else {"decay": 0.0})
                shift = (offsets or {}).get(name, 0.0)
                row["step"] = adam.gap(name, old[name], new[name], reduced, version, clip=scale, offset=shift, **rates)
            yield {**row, **whole}

    records, past = list[dict[str, Any]](), 0
    for version, (batch, given) in enumerate(zip(batches, routes, strict=True), start=first):
        rows = [*judged(version, batch, given, past)]
        if not rows:
            break
        records += rows
        past += len(batch) if version else 0
    return records


@contextlib.contextmanager
def rounding_anew(model: StreamedModel, draw: int, at: int = 0) -> Iterator[Noise | None]:
    """Within, a model's embeddings round otherwise, for draws from 1 on; gives what makes the head's gradients do so.

    `at` is the place of the batch among those of the draw.

    A gradient of the last hidden state is a sum over the vocabulary, of V terms. Kernels that add them one after
    another are off by half a unit of rounding times the root of V, of the sum's size: 1.3e-5 for V of 49,152. torch's
    own, on two threads, is so for some numbers of rows and not for others (ADR 0103).
    """
    if not draw:
        yield None
        return
    generator = torch.Generator(model.device).manual_seed(draw << 20 | at)  # a CPU's takes the lower 32 bits alone
    share = HALF_UNIT * float(model.config.get_text_config().vocab_size) ** 0.5

    def back(gradient: torch.Tensor) -> torch.Tensor:
        size = gradient.square().mean(dim=-1, keepdim=True).sqrt()
        noise = torch.randn(gradient.shape, generator=generator, device=gradient.device, dtype=gradient.dtype)
        return gradient + share * size * noise

    with moved(model.model, generator):
        yield back


def chosen(
    tape: Tape, hidden: torch.Tensor, labels: torch.Tensor, temperature: float, shifts: Sequence[float],
    noise: Noise | None,
) -> torch.Tensor:  # fmt: skip
    """Distributions that tokens are of, in float64, on the host, on a tape; [N, H] of them the head is given.

    Returns:
        [2 + S, N], nats: log-probabilities of [N] `labels`, the logarithms of the sums that shares are divided by, and
        for each of S `shifts` the entropies, see `entropy_of`.
    """
    model = tape.model

    def told(some: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        if noise is not None and some.requires_grad:
            some = some.view_as(some)
            some.register_hook(noise)
        scaled = model.logits(some).double() / temperature
        log_sum = torch.logsumexp(scaled, dim=-1)
        logprob = scaled.gather(1, own[:, None])[:, 0] - log_sum
        return torch.stack([logprob, log_sum, *(entropy_of(scaled, shift) for shift in shifts)]).cpu()

    parts = slices_of(model, len(labels))
    labels = labels.to(model.device)
    return torch.cat([tape.call(model.head_unit, told, hidden[part], labels[part]) for part in parts], dim=1)


def gradients(
    checkpoint: Path,
    batch: Batch,
    rule: Mapping[str, float],
    routes: Routes,
    take: Take,
    dtype: torch.dtype = torch.float32,
    draw: int = 0,
) -> tuple[torch.Tensor, float]:
    """Each token's loss by transformers, one sequence at a time; `take` gets the gradient of their mean.

    Per token: -reward * logprob - entropy weight * entropy + drift weight / 2 * (logprob - engine's logprob)^2, all of
    the softmax of logits / temperature, in float64 from the logits on; times the step's factor. `draw`: see
    `rounding_anew`.

    Returns:
        [N] float64, nats, one for each token in the loss; and the greatest change of the mean by rounding of
        log-probabilities to float32, nats.
    """
    model = StreamedModel(checkpoint, dtype)
    tape = Tape(model)
    num_tokens = sum(sum(mask) for _, mask, _, _ in batch)
    found, rounding = [], 0.0
    for at, (tokens, mask, reward, engine) in enumerate(batch):
        (alone,) = batches([tokens], [routes[at]] if routes else ())
        kept = torch.tensor(mask[1:])
        with tape.sequence(choosing_in(model, alone)), rounding_anew(model, draw, at) as noise:
            hidden = model.hidden(alone.tokens)[0, :-1][kept]
            told = chosen(tape, hidden, alone.tokens[0, 1:][kept], rule["temperature"], [0.0], noise)
        logprob, log_sum, entropy = told
        reported = torch.tensor(list(engine)[1:], dtype=torch.float32)[kept].double()
        drift = rule["drift_weight"] / 2 * (logprob - reported).square()
        nats = rule["factor"] * (-reward * logprob - rule["entropy_weight"] * entropy + drift)
        found.append(nats.detach())
        slope = rule["factor"] * (rule["drift_weight"] * (logprob - reported) - reward).detach()
        rounding += float((slope.abs() * rounding_of(log_sum.detach())).sum()) / num_tokens
        (nats.sum() / num_tokens).backward()
    tape.backward(1, take)
    return torch.cat(found), rounding


def rounding_of(log_sum: torch.Tensor) -> torch.Tensor:
    """Greatest change of each log-probability, logit - log Z, by rounding to float32, nats; see docs/adr/0034.

    Args:
        log_sum: log Z of each token.
    """
    return HALF_UNIT * (OF_A_SHARE + log_sum.abs())


class Adam:
    """Adam in float64, with moments of its own (Kingma and Ba 2015, algorithm 1), and weight decay beside it.

    Matrices decay (Loshchilov and Hutter 2019, algorithm 2); vectors, which are norms and biases, do not, nor do the
    biases of all experts of a layer, which GPT-OSS keeps in one tensor. Of weights that are rounded to less than
    float32 it keeps the unrounded ones too, as a trainer's masters do. Each weight may be off by `ROUNDINGS` to float32
    of its own size, which matter where the learning rate is small beside it. What it keeps from step to
    step it keeps on the host; on another `device` each step begins with `begin`.
    """

    def __init__(self, beta_1: float, beta_2: float, epsilon: float, device: str = "cpu") -> None:
        self._betas, self._epsilon, self._device = (beta_1, beta_2), epsilon, device
        self._moments: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._masters: dict[str, torch.Tensor] = {}

    def begin(self, name: str, first: torch.Tensor, second: torch.Tensor, master: torch.Tensor | None) -> None:
        """Take the moments of a tensor, and the unrounded weights where it is rounded, in float32, for one step."""
        self._moments[name] = (first, second)
        if master is not None:
            self._masters[name] = master

    def gap(
        self, name: str, old: torch.Tensor, live: torch.Tensor, gradient: torch.Tensor, step: int,
        learning_rate: float, decay: float = 0.0, clip: float = 1.0, offset: float = 0.0,
    ) -> Greatest:  # fmt: skip
        """Greatest distance of `live` from the stepped weight beyond what rounding explains, in learning rates.

        `clip`: factor of the gradient. `offset`: the trainer holds, and rounds, the weight and this, and an export
        rounds once more.
        """
        if name not in self._moments:
            zero = torch.zeros(gradient.shape, dtype=torch.float64)
            self._moments[name] = (zero, zero.clone())
        rounded = old.dtype != torch.float32
        if rounded and name not in self._masters:
            self._masters[name] = old.double()
        kept = 1 - learning_rate * decay if old.ndim > 1 and not name.endswith("bias") else 1.0
        whole = (self._masters[name] if rounded else old, live, gradient, *self._moments[name])
        found = []
        for begin, new, part, *moments in parts_of(*whole, device=self._device):
            slope = part.double() * clip
            first, second = (each.double() for each in moments)  # its own, in float64, are kept
            first.mul_(self._betas[0]).add_(slope, alpha=1 - self._betas[0])
            second.mul_(self._betas[1]).addcmul_(slope, slope, value=1 - self._betas[1])
            denominator = (second / (1 - self._betas[1] ** step)).sqrt_().add_(self._epsilon)
            move = (first * (learning_rate / (1 - self._betas[0] ** step))).div_(denominator)
            stepped = (kept * begin.double()).sub_(move)
            magnitude = torch.maximum(new.double().abs(), stepped.abs())
            held = magnitude + abs(offset)
            allowed = ROUNDINGS * half_step(held, torch.float32)
            if rounded:
                allowed += half_step(held, live.dtype)
                if begin.dtype == torch.float64:
                    begin.copy_(stepped)
            if offset:
                allowed += half_step(magnitude, live.dtype)
            excess = (new.double() - stepped).abs_().sub_(allowed).clamp_(min=0)
            found.append(greatest(torch.where(excess == 0, 0.0, excess / learning_rate)))
        return greatest_of(found, live.shape, self._device)


def _rates(rule: Mapping[str, float], past: int, name: str) -> dict[str, float]:
    """Learning rate and weight decay of a tensor in the step after `past` rollouts; see `OptimizerRule`."""
    group = "embedding_learning_rate" if name.endswith(_EMBEDDINGS) else "learning_rate"
    warm_up, end = rule["warm_up"], rule["num_rollouts"]
    if past < warm_up:
        low, height = rule["first_learning_rate"], past / warm_up
    else:
        low, height = rule[f"least_{group}"], math.cos(math.pi / 2 * min((past - warm_up) / (end - warm_up), 1.0)) ** 2
    rising = rule["weight_decay"] + min(past / end, 1.0) * (rule["greatest_weight_decay"] - rule["weight_decay"])
    return {"learning_rate": low + height * (rule[group] - low), "decay": rising}


def half_step(magnitude: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Half the distance between neighbours of a dtype at these magnitudes: what rounding may move a number by."""
    _, exponent = torch.frexp(magnitude)
    return torch.ldexp(torch.full_like(magnitude, torch.finfo(dtype).eps / 4), exponent)

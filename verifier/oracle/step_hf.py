"""Parts of the oracle of a training step: distributions of tokens, what rounds them, and Adam in float64."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from verifier.oracle.batches_hf import slices_of
from verifier.oracle.gradients_hf import Greatest, greatest, greatest_of, parts_of
from verifier.oracle.logprob_hf import entropy_of, moved
from verifier.oracle.streaming_hf import StreamedModel, Tape

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


def rates_of(rule: Mapping[str, float], past: int, name: str) -> dict[str, float]:
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

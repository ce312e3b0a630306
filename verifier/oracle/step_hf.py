"""The oracle of a training step: transformers' own gradients, an adapter's from them, and Adam in float64."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from verifier.model.checkpoint import open_checkpoint
from verifier.oracle.batches_hf import batches, choosing_in, slices_of
from verifier.oracle.logprob_hf import entropy_of, moved
from verifier.oracle.oracle import DRAWS
from verifier.oracle.routes_hf import Route
from verifier.oracle.streaming_hf import StreamedModel, Tape
from verifier.plan.digest import dtype_name
from verifier.stages.logprob.records import ROUNDINGS as FLOAT32_ROUNDINGS
from verifier.stages.loss.records import in_all_layers

Batch = Sequence[tuple[Sequence[int], Sequence[bool], float, Sequence[float]]]
"""Per sequence: token ids; for each token whether it is in the loss; the reward; for each token the engine's nats."""
Routes = Sequence[Sequence[Route]]
"""Per sequence the routes of its tokens; or nothing."""
Greatest = tuple[float, list[int]]
"""A value and the index of its element."""
_A, _B = ".lora_A.weight", ".lora_B.weight"
"""Ends of the names of an adapter's two matrices, in the place of a checkpoint tensor's ``.weight``."""
_EMBEDDINGS = ("embed_tokens.weight", "embeddings.weight", "lm_head.weight")
"""Ends of the names of embeddings and outputs."""
HALF_UNIT = 2.0**-24
"""Share that a rounding to float32 may change a number by."""
OF_A_SHARE = 4
"""Times that a token's probability is rounded in float32, besides log Z: exponential, its sum, quotient, difference."""

ELEMENTS = 2**18
"""Elements of a weight whose step is computed at once: 2 MiB in float64, which a core's cache holds."""
ROUNDINGS = 3
"""Times that Adam rounds a weight in float32 in a step: 1 - rate * decay, which is near 1, the decay, and the move."""

NEAR = 1e-5
"""Share of a tensor's greatest gradient within which the trainer's lies far inside of what LSS001 allows, 3e-5."""
NEAR_ROUNDED = 2
"""Noises of one pass in less than float32 within which a gradient, or the length of one, lies far inside of what
LSS001 allows, 5 and 12."""
Gradients = Mapping[str, torch.Tensor]
"""Checkpoint name -> gradient."""
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
    adapter: Mapping[str, Sequence[str]] | None = None,
) -> list[dict[str, Any]]:
    """Measure every step of a run against the oracle; a request of an engine server.

    Gradients of an adapter are derived from those of the matrices that it adds to.

    Args:
        source: checkpoint of version 0, to which an adapter adds nothing.
        work: folder with ``gradients-v`` and ``weights-v``, the checkpoint, for each version v; of an adapter
            ``matrices-v`` too, also for version 0.
        batches: the sequences of each step.
        rule: the fields of `OptimizerRule` and of `Objective`, by name; of an adapter also "scaling", of the product.
        routes: of each step, the routes that its routers are given; nothing where they choose by themselves.
        first: version of the first step; 0 has a learning rate of 0, and only its gradients are measured.
        adapter: of each A that is the same for several tensors, its name to those of all; None trains all weights.

    Returns:
        Per version and tensor the fields of `GradientRecord`, by name; "gradient" and "step" are a greatest gap and its
        index. What has no gradient has a scale and a gap of 0, and may only decay.
    """
    records = []
    folder = Path(work)
    adam = Adam(rule["beta_1"], rule["beta_2"], rule["epsilon"])
    past = 0
    for version, (batch, given) in enumerate(zip(batches, routes, strict=True), start=first):
        before = folder / f"weights-{version - 1}" if version > 1 else Path(source)
        held = [folder / f"matrices-{v}" if adapter else folder / f"weights-{v}" for v in (version - 1, version)]
        if not (folder / f"gradients-{version}").is_dir() or (version and not held[1].is_dir()):
            break
        old, new = tensors_of(held[0] if adapter else before), tensors_of(held[1]) if version else {}
        told = {**rule, "factor": 1.0 if version % 2 else rule["every_second"]}
        stored = [tensor.dtype for tensor in tensors_of(before).values()]
        dtype = max(set(stored), key=stored.count)
        trained, compute = partial(_trained, old, rule, adapter), partial(gradients, before, batch, told, given)
        in_float32 = dtype == torch.float32
        nats, expected, rounding = compute(torch.float64 if in_float32 else torch.float32)
        rounded_nats, rounded = (nats, expected) if in_float32 else compute(dtype)[:2]
        noise = (rounded_nats - nats).abs()
        expected, rounded = trained(expected), trained(rounded)
        actual = tensors_of(folder / f"gradients-{version}")
        roundings: Mapping[str, float] = {}
        if in_float32:
            rounded = expected
            roundings = rounded_anew(actual, expected, {}, lambda *asked: trained(compute(*asked)[1]))  # noqa: B023
        norm, scale = clip_of(actual, rule["clip_grad"])
        spread = Spread.of(actual, expected, rounded, lambda draw: trained(compute(dtype, draw)[1]))  # noqa: B023
        whole = {
            "version": version, "gradient_norm": norm, "gradient_noise": spread.noise, "noise_passes": spread.passes,
            "loss": float(nats.mean()), "loss_scale": float(nats.abs().mean()), "num_tokens": len(nats),
            "loss_noise": float(noise.mean()) + rounding,
            "loss_noise_error": float(noise.std(correction=0)) / max(len(noise), 1) ** 0.5,
        }  # fmt: skip
        for row, reduced in measured(old, expected, spread.groups, actual):
            name = row["name"]
            row["gradient_rounding"] = roundings.get(name, 0.0)
            if version and reduced is not None:
                rates = _rates(rule, past, name)
                row["step"] = adam.gap(name, old[name], new[name], reduced * scale, version, **rates)
            records.append({**row, **whole})
        past += len(batch) if version else 0
    return records


def _trained(
    old: Gradients, rule: Mapping[str, float], adapter: Mapping[str, Sequence[str]] | None, found: Gradients
) -> Gradients:
    """Gradients of what is trained: an adapter's matrices, or the whole weights."""
    return found if adapter is None else adapter_gradients(found, old, rule["scaling"], adapter)


def clip_of(actual: Mapping[str, torch.Tensor], clip_grad: float) -> tuple[float, float]:
    """Norm of all gradients, and the factor by which they are clipped; a `clip_grad` of 0 clips none."""
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in actual.values()))
    return norm, min(1.0, clip_grad / (norm + 1e-6)) if clip_grad > 0 else 1.0


def measured(
    old: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    groups: Mapping[str, Mapping[str, Any]],
    actual: Mapping[str, torch.Tensor],
) -> Iterator[tuple[dict[str, Any], torch.Tensor | None]]:
    """Per tensor the fields of `GradientRecord` that are its own, and the trainer's gradient, float64.

    `groups` are those of `groups_of`.

    The gradient is zero where neither side has one, and None where transformers has one and the trainer has not.
    """
    for name, weight in old.items():
        gradient, reduced = expected.get(name, torch.zeros(())), None
        row: dict[str, Any] = {"name": name, "gradient_scale": float(gradient.abs().max())}
        row |= groups.get(group_of(name), {})
        if name in actual or name not in expected:
            reduced = actual[name].double() if name in actual else torch.zeros_like(weight, dtype=torch.float64)
            row["gradient_dtype"] = dtype_name(actual[name].dtype) if name in actual else "float32"
            row["gradient"] = greatest((reduced - gradient.double()).abs())
        yield row, reduced


def adapter_gradients(
    found: Mapping[str, torch.Tensor],
    adapter: Mapping[str, torch.Tensor],
    scaling: float,
    names: Mapping[str, Sequence[str]],
) -> dict[str, torch.Tensor]:
    """Gradients of an adapter's matrices, float64: with W + s B A, that of B is s G A^T and that of A is s B^T G.

    Args:
        found: gradients G of whole matrices, by checkpoint name.
        adapter: its matrices; an A that several tensors share under its first name alone.
        scaling: s, of the product.
        names: of each A, that name to the names for all tensors that share it, whose gradients are summed.
    """
    derived = {}
    for first, all_names in names.items():
        inward, of_inward = adapter[first].double(), []
        for name in all_names:
            base = name.removesuffix(_A)
            gradient = scaling * found[f"{base}.weight"].double()
            derived[base + _B] = gradient @ inward.T
            of_inward.append(adapter[base + _B].double().T @ gradient)
        derived[first] = torch.stack(of_inward).sum(0)
    return derived


def rounded_anew(
    actual: Gradients, exact: Gradients, doubts: Gradients, compute: Callable[[torch.dtype, int], Gradients]
) -> dict[str, float]:
    """Measure how far float32 rounds gradients, where the trainer's are not `NEAR` those in float64.

    Args:
        actual: the trainer's.
        exact: by transformers in float64.
        doubts: what each may be off by beside that.
        compute: gradients in a dtype; with a draw from 1 on, rounded anew, see `rounding_anew`.

    Returns:
        The greatest distance of each in up to `DRAWS` passes in float32 from the exact one. A pass is made until each
        of the trainer's is near, or within a third of `FLOAT32_ROUNDINGS` times that distance.
    """
    found = dict[str, float]()
    for draw in range(1, DRAWS + 1):
        if all_near(actual, exact, doubts, found):
            break
        for name, gradient in compute(torch.float32, draw).items():
            found[name] = max(found.get(name, 0.0), float((gradient.double() - exact[name]).abs().max()))
    return found


def all_near(
    actual: Gradients, expected: Gradients, doubts: Gradients, roundings: Mapping[str, float] | None = None
) -> bool:
    """Say if all gradients that the trainer has lie far inside of what they may be off by."""
    for name, gradient in expected.items():
        doubt = float(doubts[name].abs().max()) if name in doubts else 0.0
        off = (actual.get(name, gradient).double() - gradient.double()).abs().max()
        rounding = (roundings or {}).get(name, 0.0)
        if not off <= max(
            NEAR * gradient.abs().max() + doubt / 3, FLOAT32_ROUNDINGS / 3 * rounding
        ):  # not of NaN either
            return False
    return True


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
    generator = torch.Generator(model.device).manual_seed(draw << 32 | at)
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


def noise_of(rounded: Mapping[str, torch.Tensor], exact: Mapping[str, torch.Tensor]) -> float:
    """Greatest distance of a gradient from the exact one, in units of its tensor's greatest element."""
    if rounded is exact:
        return 0.0
    shares = (
        float((rounded[name].double() - gradient.double()).abs().max() / gradient.abs().max())
        for name, gradient in exact.items()
        if gradient.any()
    )
    return max(shares, default=0.0)


def group_of(name: str) -> str:
    """A tensor's own name, or one for all experts' tensors of its kind in its layer: one expert has few tokens."""
    return re.sub(r"\.experts\.\d+\.", ".experts.*.", name)


def groups_of(
    exact: Mapping[str, torch.Tensor], rounded: Mapping[str, torch.Tensor], actual: Mapping[str, torch.Tensor]
) -> dict[str, dict[str, Any]]:
    """Per group of tensors that has a gradient: its name, the length of `actual` along `exact`, and the noise."""
    sums: dict[str, list[float]] = {}
    for name, gradient in exact.items():
        right, group = gradient.double(), sums.setdefault(group_of(name), [0.0, 0.0, 0.0])
        group[0] += float(right.square().sum())
        group[1] += float((actual[name].double() * right).sum()) if name in actual else 0.0
        group[2] += 0.0 if rounded is exact else float((rounded[name].double() - right).square().sum())
    return {
        group: {"group": group, "group_length": along / square, "group_noise": math.sqrt(off / square)}
        for group, (square, along, off) in sums.items()
        if square
    }


@dataclass(frozen=True, slots=True)
class Spread:
    """Noise of gradients in less than float32."""

    noise: float
    """Greatest of all passes, see `noise_of`."""
    groups: Mapping[str, Mapping[str, Any]]
    """See `groups_of`; the noise of each is the greatest of all passes."""
    passes: int = 1

    @classmethod
    def of(
        cls, actual: Gradients, exact: Gradients, rounded: Gradients, compute: Callable[[int], Gradients]
    ) -> Spread:  # fmt: skip
        """Measure it by one pass, and by up to `DRAWS` where the trainer's gradients are not near the exact ones.

        Args:
            actual: the trainer's.
            exact: by transformers in float32.
            rounded: by transformers in the run's dtype; the exact ones where that is float32.
            compute: gradients in the run's dtype, rounded anew by a draw from 1 on.
        """
        found = cls(noise_of(rounded, exact), groups_of(exact, rounded, actual))
        if rounded is exact:
            return found
        for draw in range(1, DRAWS):
            if found.is_near(actual, exact):
                break
            again = compute(draw)
            groups = {
                name: max(found.groups[name], group, key=lambda row: row["group_noise"])
                for name, group in groups_of(exact, again, actual).items()
            }
            found = cls(max(found.noise, noise_of(again, exact)), groups, draw + 1)
        return found

    def is_near(self, actual: Gradients, exact: Gradients) -> bool:
        """Say if the passes so far show the trainer's gradients to be far inside of what they may be off by."""
        kinds: dict[str, float] = {}
        for name, row in self.groups.items():
            kinds[in_all_layers(name)] = max(kinds.get(in_all_layers(name), 0.0), row["group_noise"])
        own = FLOAT32_ROUNDINGS / 3 if self.passes > 1 else 0.0
        for name, row in self.groups.items():
            if not abs(row["group_length"] - 1) <= max(
                NEAR_ROUNDED * kinds[in_all_layers(name)], own * row["group_noise"]
            ):
                return False
        told = {name: actual.get(name, gradient) for name, gradient in exact.items()}
        return noise_of(told, exact) <= NEAR_ROUNDED * self.noise


def gradients(
    checkpoint: Path,
    batch: Batch,
    rule: Mapping[str, float],
    routes: Routes,
    dtype: torch.dtype = torch.float32,
    draw: int = 0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor], float]:
    """Each token's loss by transformers, one sequence at a time, and the gradient of their mean by checkpoint name.

    Per token: -reward * logprob - entropy weight * entropy + drift weight / 2 * (logprob - engine's logprob)^2, all of
    the softmax of logits / temperature, in float64 from the logits on; times the step's factor. `draw`: see
    `rounding_anew`.

    Returns:
        [N] float64, nats, one for each token in the loss; the gradients, on the host; and the greatest change of the
        mean by rounding of log-probabilities to float32, nats.
    """
    model = StreamedModel(checkpoint, dtype)
    tape, by_name = Tape(model), dict[str, torch.Tensor]()
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
    tape.backward(1, lambda name, parts: by_name.update({name: parts[0]}))
    return torch.cat(found), by_name, rounding


def rounding_of(log_sum: torch.Tensor) -> torch.Tensor:
    """Greatest change of each log-probability, logit - log Z, by rounding to float32, nats; see docs/adr/0034.

    Args:
        log_sum: log Z of each token.
    """
    return HALF_UNIT * (OF_A_SHARE + log_sum.abs())


def greatest(gaps: torch.Tensor) -> Greatest:
    """The greatest element, and its index; NaN is greater than any number."""
    at = int(gaps.argmax())
    return float(gaps.flatten()[at]), [int(place) for place in torch.unravel_index(torch.tensor(at), gaps.shape)]


class Adam:
    """Adam in float64, with moments of its own (Kingma and Ba 2015, algorithm 1), and weight decay beside it.

    Matrices decay (Loshchilov and Hutter 2019, algorithm 2); vectors, which are norms and biases, do not, nor do the
    biases of all experts of a layer, which GPT-OSS keeps in one tensor. Of weights that are rounded to less than
    float32 it keeps the unrounded ones too, as a trainer's masters do. Each weight may be off by `ROUNDINGS` to float32
    of its own size, which matter where the learning rate is small beside it.
    """

    def __init__(self, beta_1: float, beta_2: float, epsilon: float) -> None:
        self._betas, self._epsilon = (beta_1, beta_2), epsilon
        self._moments: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._masters: dict[str, torch.Tensor] = {}

    def begin(self, name: str, first: torch.Tensor, second: torch.Tensor, master: torch.Tensor | None) -> None:
        """Take the moments of a tensor, and the unrounded weights where it is rounded, as those before the step."""
        self._moments[name] = (first.double(), second.double())
        if master is not None:
            self._masters[name] = master.double()

    def gap(
        self, name: str, old: torch.Tensor, live: torch.Tensor, gradient: torch.Tensor, step: int,
        learning_rate: float, decay: float = 0.0,
    ) -> Greatest:  # fmt: skip
        """Greatest distance of `live` from the stepped weight beyond what rounding explains, in learning rates."""
        if name not in self._moments:
            zero = torch.zeros(gradient.shape, dtype=torch.float64)
            self._moments[name] = (zero, zero.clone())
        rounded = old.dtype != torch.float32
        if rounded and name not in self._masters:
            self._masters[name] = old.double()
        kept = 1 - learning_rate * decay if old.ndim > 1 and not name.endswith("bias") else 1.0
        whole = (self._masters[name] if rounded else old, live, gradient, *self._moments[name])
        found = []
        for begin, new, slope, first, second in zip(*(each.flatten().split(ELEMENTS) for each in whole), strict=True):
            first.mul_(self._betas[0]).add_(slope, alpha=1 - self._betas[0])
            second.mul_(self._betas[1]).addcmul_(slope, slope, value=1 - self._betas[1])
            denominator = (second / (1 - self._betas[1] ** step)).sqrt_().add_(self._epsilon)
            move = (first * (learning_rate / (1 - self._betas[0] ** step))).div_(denominator)
            stepped = (kept * begin.double()).sub_(move)
            magnitude = torch.maximum(new.double().abs(), stepped.abs())
            allowed = ROUNDINGS * half_step(magnitude, torch.float32)
            if rounded:
                allowed += half_step(magnitude, live.dtype)
                begin.copy_(stepped)
            excess = (new.double() - stepped).abs_().sub_(allowed).clamp_(min=0)
            found.append(greatest(torch.where(excess == 0, 0.0, excess / learning_rate)))
        values = torch.tensor([value for value, _ in found], dtype=torch.float64)
        part = int(values.argmax())
        at = torch.tensor(part * ELEMENTS + found[part][1][0])
        return found[part][0], [int(place) for place in torch.unravel_index(at, live.shape)]


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


def tensors_of(path: Path) -> Mapping[str, torch.Tensor]:
    """All tensors of a checkpoint directory."""
    checkpoint = open_checkpoint(path)
    return {name: checkpoint.read(name) for name in checkpoint.names()}

"""The oracle of a training step: transformers' own gradients, an adapter's from them, and Adam in float64."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from verifier.model.checkpoint import open_checkpoint
from verifier.model.transformers_hf import checkpoint_places, load_model, release_model
from verifier.oracle.routes_hf import choosing, experts_of, mixtures_of
from verifier.transport.buffer import dtype_name

Batch = Sequence[tuple[Sequence[int], Sequence[bool], float, Sequence[float]]]
"""Per sequence: token ids; for each token whether it is in the loss; the reward; for each token the engine's nats."""
Routes = Sequence[Sequence[Sequence[int]]]
"""Per sequence, one row for each token and layer that has a route: position, global layer, experts; or nothing."""
BETA_1, BETA_2, EPSILON = 0.9, 0.95, 1e-8
_A, _B = ".lora_A.weight", ".lora_B.weight"
"""Ends of the names of an adapter's two matrices, in the place of a checkpoint tensor's ``.weight``."""


def judge_steps(
    _: object, source: str, work: str, batches: Sequence[Batch], rule: Mapping[str, float], routes: Sequence[Routes]
) -> list[dict[str, Any]]:
    """Measure every step of a run against the oracle; a request of an engine host.

    Args:
        source: checkpoint of version 0.
        work: folder with ``gradients-v`` and ``live-v`` for each version v.
        batches: the sequences of each step.
        rule: "learning_rate" and "weight_decay", of matrices, of the first step, which become "least_learning_rate" and
            "greatest_weight_decay" linearly in "num_steps"; "clip", greatest L2 norm of the gradient; "temperature",
            "entropy" and "drift" of the loss.
        routes: of each step, what its routers are told; nothing where they choose by themselves.

    Returns:
        One record per (version, tensor): "gradient_gap", greatest |trainer - transformers|, "gradient_scale", greatest
        |transformers|, "gradient_dtype", the trainer's; "gradient_noise", of all tensors the greatest distance between
        transformers' gradient in the checkpoint's dtype and in float32, over its greatest element: 0 for float32;
        "group", the tensor's name, or one for all experts' tensors of its kind in its layer; "group_length", how long
        the trainer's gradients of the group are along transformers', which are 1, and "group_noise", how far off that
        dtype alone puts transformers' own, as a share of their length: 0 for float32;
        "gradient_norm", L2 norm of all the trainer's gradients of that version; "loss", "loss_scale", "loss_noise" and
        "num_tokens" of that version; "step_gap", how far the live weights are from what Adam and rounding to their
        dtype allow, in units of the step's learning rate. What has no gradient has a scale and a gap of 0, and may only
        decay.
    """
    checkpoint = _checkpoints(source, work)
    return _judged(work, batches, rule, routes, checkpoint, checkpoint, lambda version, found: dict(found))


def judge_adapter_steps(
    _: object,
    source: str,
    work: str,
    batches: Sequence[Batch],
    rule: Mapping[str, float],
    routes: Sequence[Routes],
    names: Mapping[str, Sequence[str]],
) -> list[dict[str, Any]]:
    """`judge_steps` of a run that trains an adapter: its matrices, by the gradients of the matrices that it adds to.

    Args:
        source: checkpoint of version 0, to which the adapter adds nothing.
        work: folder with ``gradients-v`` and ``matrices-v``, of the adapter, for each version v, 0 too for the latter,
            and with ``live-v``, the checkpoint with the adapter added.
        batches: see `judge_steps`.
        rule: see `judge_steps`; besides, "scaling" of the product of the two matrices.
        routes: see `judge_steps`.
        names: of each A that is the same for several tensors, its name to those of all.
    """

    def matrices(version: int) -> Path:
        return Path(work) / f"matrices-{version}"

    def derived(version: int, found: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return adapter_gradients(found, _tensors(matrices(version)), rule["scaling"], names)

    return _judged(work, batches, rule, routes, _checkpoints(source, work), matrices, derived)


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


def _checkpoints(source: str, work: str) -> Callable[[int], Path]:
    """Checkpoint per version that transformers computes its gradients with."""
    return lambda version: Path(work) / f"live-{version}" if version else Path(source)


def _judged(
    work: str,
    batches: Sequence[Batch],
    rule: Mapping[str, float],
    routes: Sequence[Routes],
    checkpoint: Callable[[int], Path],
    trained: Callable[[int], Path],
    derived: Callable[[int, Mapping[str, torch.Tensor]], dict[str, torch.Tensor]],
) -> list[dict[str, Any]]:
    """See `judge_steps`.

    Args:
        work: see there.
        batches: see there.
        rule: see there.
        routes: see there.
        checkpoint: what transformers computes with, of a version.
        trained: what the trainer's optimizer moves, of a version.
        derived: gradients of these, from a version and those of its checkpoint.
    """
    records = []
    adam = _Adam()
    for version, (batch, told) in enumerate(zip(batches, routes, strict=True), start=1):
        found, live, before = Path(work) / f"gradients-{version}", trained(version), checkpoint(version - 1)
        if not found.is_dir() or not live.is_dir():
            break
        nats, expected = gradients(before, batch, rule, told)
        rounded_nats, rounded = _rounded(before, batch, rule, told, nats, expected)
        expected, rounded = derived(version - 1, expected), derived(version - 1, rounded)
        actual = _tensors(found)
        groups = _groups(expected, rounded, actual)
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in actual.values()))
        scale = min(1.0, rule["clip"] / (norm + 1e-6)) if rule["clip"] > 0 else 1.0
        old, new = _tensors(trained(version - 1)), _tensors(live)
        rates = _rates(rule, version)
        whole = {
            "version": version, "gradient_norm": norm, "gradient_noise": _noise(rounded, expected),
            "loss": float(nats.mean()), "loss_scale": float(nats.abs().mean()), "num_tokens": len(nats),
            "loss_noise": float((rounded_nats - nats).abs().mean()),
        }  # fmt: skip
        for name, weight in old.items():
            gradient = expected.get(name, torch.zeros(()))
            row: dict[str, Any] = {"name": name, "gradient_scale": float(gradient.abs().max()), **whole}
            row |= groups.get(_group(name), {})
            if name in actual or name not in expected:
                reduced = actual[name].double() if name in actual else torch.zeros_like(weight, dtype=torch.float64)
                row["gradient_dtype"] = dtype_name(actual[name].dtype) if name in actual else "float32"
                row["gradient_gap"] = float((reduced - gradient.double()).abs().max())
                row["step_gap"] = adam.gap(name, weight, new[name], reduced * scale, version, **rates)
            records.append(row)
    return records


def _rounded(
    checkpoint: Path,
    batch: Batch,
    rule: Mapping[str, float],
    routes: Routes,
    nats: torch.Tensor,
    exact: Mapping[str, torch.Tensor],
) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """`gradients` in the checkpoint's dtype; in float32 they are known."""
    stored = [tensor.dtype for tensor in _tensors(checkpoint).values()]
    dtype = max(set(stored), key=stored.count)
    return (nats, exact) if dtype == torch.float32 else gradients(checkpoint, batch, rule, routes, dtype)


def _noise(rounded: Mapping[str, torch.Tensor], exact: Mapping[str, torch.Tensor]) -> float:
    return max(
        float((rounded[name].double() - gradient.double()).abs().max() / gradient.abs().max())
        for name, gradient in exact.items()
        if gradient.any()
    )


def _group(name: str) -> str:
    """A tensor's own name, or one for all experts' tensors of its kind in its layer: one expert has few tokens."""
    return re.sub(r"\.experts\.\d+\.", ".experts.*.", name)


def _groups(
    exact: Mapping[str, torch.Tensor], rounded: Mapping[str, torch.Tensor], actual: Mapping[str, torch.Tensor]
) -> dict[str, dict[str, Any]]:
    """Per group of tensors that has a gradient: its name, the length of `actual` along `exact`, and the noise."""
    sums: dict[str, list[float]] = {}
    for name, gradient in exact.items():
        right, group = gradient.double(), sums.setdefault(_group(name), [0.0, 0.0, 0.0])
        group[0] += float(right.square().sum())
        group[1] += float((actual[name].double() * right).sum()) if name in actual else 0.0
        group[2] += float((rounded[name].double() - right).square().sum())
    return {
        group: {"group": group, "group_length": along / square, "group_noise": math.sqrt(off / square)}
        for group, (square, along, off) in sums.items()
        if square
    }


def gradients(
    checkpoint: Path, batch: Batch, rule: Mapping[str, float], routes: Routes, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Each token's loss by transformers, one sequence at a time, and the gradient of their mean by checkpoint name.

    Per token: -reward * logprob - entropy weight * entropy + drift weight / 2 * (logprob - engine's logprob)^2, all of
    the softmax of logits / temperature, in float64 from the logits on.

    Returns:
        [N] float64, nats, one for each token in the loss; and the gradients, on the host.
    """
    release_model()
    model = load_model(checkpoint, dtype).requires_grad_(True)
    blocks = mixtures_of(model)
    num_tokens = sum(sum(mask) for _, mask, _, _ in batch)
    found = []
    for (tokens, mask, reward, engine), rows in zip(batch, routes or [[]] * len(batch), strict=True):
        ids = torch.tensor([list(tokens)])
        with choosing(blocks, experts_of(rows, len(tokens), "cpu")):
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].double() / rule["temperature"]
        every = torch.log_softmax(logits, dim=-1)[torch.tensor(mask[1:])]
        kept = ids[0, 1:][torch.tensor(mask[1:])]
        logprob = every.gather(1, kept[:, None])[:, 0]
        entropy = -(every.exp() * every).sum(-1)
        said = torch.tensor(list(engine)[1:], dtype=torch.float32)[torch.tensor(mask[1:])].double()
        nats = -reward * logprob - rule["entropy"] * entropy + rule["drift"] / 2 * (logprob - said).square()
        found.append(nats.detach())
        (nats.sum() / num_tokens).backward()
    return torch.cat(found), dict(_gradients_of(model))


def _gradients_of(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    buffers = {name for name, _ in model.named_buffers()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    for name, (holder, tensor) in checkpoint_places(model).items():
        if holder not in buffers:
            yield name, tensor


class _Adam:
    """Adam in float64, with moments of its own (Kingma and Ba 2015, algorithm 1), and weight decay beside it.

    Matrices decay (Loshchilov and Hutter 2019, algorithm 2); vectors, which are norms and biases, do not. Of weights
    that are rounded to less than float32 it keeps the unrounded ones too, as a trainer's masters do.
    """

    def __init__(self) -> None:
        self._moments: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._masters: dict[str, torch.Tensor] = {}

    def gap(
        self, name: str, old: torch.Tensor, live: torch.Tensor, gradient: torch.Tensor, step: int,
        learning_rate: float, decay: float = 0.0,
    ) -> float:  # fmt: skip
        """Greatest distance of `live` from the stepped weight beyond what rounding explains, in learning rates."""
        zero = torch.zeros_like(gradient)
        first, second = self._moments.get(name, (zero, zero))
        first = BETA_1 * first + (1 - BETA_1) * gradient
        second = BETA_2 * second + (1 - BETA_2) * gradient.square()
        self._moments[name] = (first, second)
        denominator = (second / (1 - BETA_2**step)).sqrt() + EPSILON
        rounded = old.dtype != torch.float32
        begin = self._masters.get(name, old.double()) if rounded else old.double()
        kept = 1 - learning_rate * decay if begin.ndim > 1 else 1.0
        stepped = kept * begin - learning_rate * (first / (1 - BETA_1**step)) / denominator
        excess = (live.double() - stepped).abs()
        if rounded:
            self._masters[name] = stepped
            excess = (excess - _half_step(torch.maximum(live.double().abs(), stepped.abs()), live.dtype)).clamp(min=0)
        return float(excess.max()) / learning_rate


def _rates(rule: Mapping[str, float], version: int) -> dict[str, float]:
    """Learning rate and weight decay of the step that makes a version, on straight lines from those of the first."""
    past = min((version - 1) / rule["num_steps"], 1.0)
    falling = rule["learning_rate"] + past * (rule["least_learning_rate"] - rule["learning_rate"])
    rising = rule["weight_decay"] + past * (rule["greatest_weight_decay"] - rule["weight_decay"])
    return {"learning_rate": falling, "decay": rising}


def _half_step(magnitude: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Half the distance between neighbours of a dtype at these magnitudes: what rounding may move a number by."""
    _, exponent = torch.frexp(magnitude)
    return torch.ldexp(torch.full_like(magnitude, torch.finfo(dtype).eps / 4), exponent)


def _tensors(path: Path) -> Mapping[str, torch.Tensor]:
    checkpoint = open_checkpoint(path)
    return {name: checkpoint.read(name) for name in checkpoint.names()}

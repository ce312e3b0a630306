"""The oracle of a training step: the true loss of recorded tokens in float64, its gradient, and Adam from its moments.

Written from the papers' formulas. It shares no code with the losses under test.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from verifier.oracle.batches_hf import MAX_TOKENS, Batch, at_once, batches, choosing_in
from verifier.oracle.gradients_hf import (
    Distances,
    Spread,
    all_near,
    beside,
    clip_of,
    distances,
    measured,
    rounded_anew,
    spooled,
    tensors_of,
)
from verifier.oracle.logprob_hf import full_float32, sides
from verifier.oracle.step_hf import Adam, chosen, rates_of, rounding_anew, rounding_of
from verifier.oracle.streaming_hf import Room, StreamedModel, Take, Tape

SHIFT = 1e-5
"""Nats by which log-probabilities of two right sides in float32 may differ (LGP001), at a temperature of 1 and more."""
LIMIT = 20.0
"""Greatest log-ratio that is exponentiated, nats; beyond it a ratio has no gradient.

Source:
    verl, trainer/ppo/core_algos.py `compute_policy_loss_vanilla` (clamp to 20).
"""
NOISES = 6
"""Times the greatest noise of a log-probability that a right trainer's may be off by, as LGP001 has it."""
Row = Mapping[str, torch.Tensor]
"""Columns of one sequence: tokens, mask, and where the loss reads them weight, advantage, divisor, reference; and
``routes``, of a step that replays them; ``score``, the trainer's own log-probability, NaN where it has none."""
WHOLE = ("gspo", "sequence")
"""Losses whose ratio is that of a sequence, by the mean or the sum of its log-ratios."""
SUMMED = 2.0**-24
"""Nats, times the root of the vocabulary: what a sum of so many exponentials in float32 changes a log-probability by.

One half unit of rounding a summand, in random directions (Higham 2002, section 2.8). torch's sum of 49,152 is off by
7.7e-6 nats in the mean (ADR 0080), and the root gives 1.3e-5.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """Loss of a batch by one model."""

    nats: torch.Tensor
    """[N] float64: weight times loss of each token in the loss; by the trainer's own log-probability where `told`."""
    told: torch.Tensor
    """[N] bool: the trainer's own log-probability is known, and within the noise."""
    shifted: tuple[torch.Tensor, ...]
    """[N] each, with shifted log-probabilities."""
    rounding: float
    """Change of the loss by rounding of log-probabilities to float32, and of the sum that each is divided by, nats."""
    acting: int
    """Tokens whose loss has a gradient."""
    further: Mapping[str, float]
    """Fields of `GradientRecord` on the loss of further tokens."""


def judge_updates(
    _: object,
    folder: str,
    rule: Mapping[str, float],
    objective: Mapping[str, Any],
    updates: Sequence[Mapping[str, Any]],
    device: str = "cpu",
    offsets: Mapping[str, float] | None = None,
    from_first: bool = False,
) -> list[dict[str, Any]]:
    """Measure every update of one step, or of a run, against the oracle; a request of an engine server.

    Args:
        folder: for update n it has the checkpoints ``weights-n`` and that before it, of adapters alone where these are
            trained (`Adapted`), ``gradients-n``, ``exp_avg-n``, ``exp_avg_sq-n``, of rounded
            weights ``master-n``, and ``inputs-n.safetensors``, with ``routes`` [N, 2 + K] where routers are told some,
            see `Route`, the ``route_counts`` of each sequence and maybe a ``route_margin``, see `choosing`; and of a
            run of less than float32 maybe ``score``, log-probabilities by the trainer: within the noise they make the
            loss, and say which tokens are clipped. Where ``inputs-n`` are of some of the update's rollouts,
            ``sampled-n`` has the trainer's gradient of these. Without moments Adam's step is not judged, and needs no
            ``weights-n``.
        rule: "clip_grad", "beta_1", "beta_2", "epsilon", "weight_decay"; of a run all of `OptimizerRule`.
        objective: "loss", its name; "temperature"; and the fields of its options by name; and maybe "padding", a token
            whose embedding gets no gradient as an input (`padding_idx`), and the "dtype" that the trainer computes in,
            and the factor of a "further" loss: the mean cross-entropy of all tokens in the loss but one ahead.
        updates: of each in order its "number", from 1, and "learning_rate"; of a run the rollouts "past", which its
            scheduler has counted, and maybe a first update 0, of a learning rate of 0, whose gradients alone are
            measured.
        device: "cpu", or "cuda": where transformers computes.
        offsets: of each tensor that the trainer holds shifted, by how much; none is by default.
        from_first: these are all updates of a run. Adam's moments are the oracle's own, and what the trainer gives no
            gradient stays as it is. Gradients are computed a sequence at a time, in float64 where the run is in
            float32, and nothing is in doubt.

    Returns:
        Per update and tensor the fields of `GradientRecord`, by name; "gradient" and "step" are a greatest gap and its
        index. What has no gradient has a scale and a gap of 0, and may only decay.
    """
    full_float32()
    records, path = [], Path(folder)
    noises = (_noise(path, int(update["number"]), objective["temperature"], device) for update in updates)
    margin = NOISES * max(noises, default=0.0)
    adam = Adam(rule["beta_1"], rule["beta_2"], rule["epsilon"], device)
    for update in updates:
        number = int(update["number"])
        before, has_moments = path / f"weights-{max(number - 1, 0)}", (path / f"exp_avg-{number}").is_dir()
        old, steps = tensors_of(before), number > 0 if from_first else has_moments
        new = tensors_of(path / f"weights-{number}") if steps else {}
        rows = rows_of(path / f"inputs-{number}.safetensors")
        stored = [tensor.dtype for tensor in old.values()]
        dtype = max(set(stored), key=stored.count)
        if dtype == torch.float32:  # autocast computes in less
            dtype = getattr(torch, objective.get("dtype") or "float32")

        def run(take: Take, kind: torch.dtype, within: float = margin, draw: int = 0) -> _Found:
            return _loss(before, rows, objective, kind, take, within, device, draw, from_first)  # noqa: B023

        def again(draw: int) -> Distances:
            within = margin if dtype == torch.float32 else math.inf  # noqa: B023
            return distances(exact, lambda take: run(take, dtype, within, draw), device)[0]  # noqa: B023

        def take(name: str, parts: Sequence[torch.Tensor]) -> None:
            own = room.held(parts[0])  # noqa: B023
            exact[name] = own if own.is_cuda else spooled(path, own)  # noqa: B023
            if len(parts) > 1:
                doubts[name] = float(parts[1].abs().max())  # noqa: B023

        exact, doubts, roundings = dict[str, torch.Tensor](), dict[str, float](), dict[str, float]()
        room = Room(torch.device(device))
        right = rounded = run(take, torch.float64 if from_first and dtype == torch.float32 else torch.float32)
        stepped, passed = tensors_of(path / f"gradients-{number}"), Distances()
        actual = tensors_of(sampled) if (sampled := path / f"sampled-{number}").is_dir() else stepped
        found = beside(exact, actual, device)
        if dtype != torch.float32:
            passed, rounded = distances(exact, lambda take: run(take, dtype, math.inf), device)  # noqa: B023
        elif not all_near(found, doubts):
            if not from_first:
                exact.clear()
                run(take, torch.float64)
                found = beside(exact, actual, device)
            roundings = rounded_anew(found, doubts, again)
        norm, scale = clip_of(stepped, rule["clip_grad"], device)
        spread = Spread.of(found, passed, again)
        noise = torch.where(rounded.told & ~right.told, 0.0, rounded.nats - right.nats).abs()
        off = [noise.sum(), *((part - right.nats).abs().sum() for part in right.shifted)]
        whole = {
            "update": number, "gradient_norm": norm, "gradient_noise": spread.noise,
            "noise_passes": spread.passes,
            "loss": float(right.nats.sum()), "loss_scale": float(right.nats.abs().sum()),
            "loss_noise": float(max(off)) + right.rounding,
            "loss_noise_error": float(noise.std(correction=0)) * len(noise) ** 0.5, "num_tokens": len(right.nats),
            "acting": None if from_first else right.acting, **right.further,
        }  # fmt: skip
        moments = [tensors_of(path / f"{part}-{number}") for part in ("exp_avg", "exp_avg_sq") if has_moments]
        masters = tensors_of(path / f"master-{number}") if has_moments and dtype != torch.float32 else {}
        for row, reduced in measured(old, found, spread.groups, actual):
            name = row["name"]
            gradient = stepped.get(name, reduced if from_first else None)
            if steps and gradient is not None:
                if from_first:
                    rates = rates_of(rule, update["past"], name) | ({} if name in stepped else {"decay": 0.0})
                else:
                    adam = Adam(rule["beta_1"], rule["beta_2"], rule["epsilon"], device)
                    adam.begin(name, *(part[name] for part in moments), masters.get(name))
                    rates = {"learning_rate": update["learning_rate"], "decay": rule["weight_decay"]}
                shift = (offsets or {}).get(name, 0.0)
                row["step"] = adam.gap(name, old[name], new[name], gradient, number, clip=scale, offset=shift, **rates)
            row |= {"gradient_rounding": roundings.get(name, 0.0), "gradient_doubt": doubts.get(name, 0.0)}
            records.append({**row, **whole})
    return records


def rows_of(file: Path) -> list[Row]:
    """Columns of each sequence of ``inputs-n``."""
    columns = load_file(file)
    lengths = columns.pop("lengths").tolist()
    counts = columns.pop("route_counts").tolist() if "routes" in columns else []
    margin = float(columns.pop("route_margin", math.inf))
    parts = {name: values.split(counts if name == "routes" else lengths) for name, values in columns.items()}
    rows = [{name: values[at] for name, values in parts.items()} for at in range(len(lengths))]
    return [{**row, "margin": torch.tensor(margin)} for row in rows]


def _noise(folder: Path, number: int, temperature: float, device: str) -> float:
    """Greatest distance, in an update, of a log-probability by the weights as they are stored from float32, nats.

    Of all tokens, those of prompts too: answers are sure, and have little noise but for a few of them. 0 where the
    trainer has told no log-probabilities.
    """
    rows, weights = rows_of(folder / f"inputs-{number}.safetensors"), folder / f"weights-{number - 1}"
    if not any("score" in row for row in rows):
        return 0.0
    stored = [tensor.dtype for tensor in tensors_of(weights).values()]
    tokens, dtype = [row["tokens"].tolist() for row in rows], str(max(set(stored), key=stored.count))
    told = (tokens, dtype.removeprefix("torch."), device, temperature, _routes(rows))
    margin = float(rows[0].get("margin", math.inf))
    exact, other = (np.concatenate(part) for part in sides(None, str(weights), *told, margin=margin)[0][:2])
    return float(np.abs(exact - other).max(initial=0.0))


def _loss(
    checkpoint: Path, rows: Sequence[Row], objective: Mapping[str, Any], dtype: torch.dtype, take: Take,
    margin: float = 0.0, device: str = "cpu", draw: int = 0, from_first: bool = False,
) -> _Found:  # fmt: skip
    """Loss by transformers, of whose gradient `take` gets each tensor's; in float32 of each sequence by itself.

    There `take` gets another kind beside it, but for `from_first`: what two right sides may differ by.

    Log-probabilities of two right sides differ by `SHIFT`, at a temperature below 1, which magnifies what float32
    rounds of logits, by more; so do logits of every second id, which an entropy is of. That changes the slope of a
    token's loss in its log-probability, and puts it on the other side of a clip's edge. The gradient of a
    log-probability with respect to its logits is one_hot - p, so rounding of p = exp(logit - log Z) changes it by a
    share of p however small it is: by that share of the gradient of log Z, which is p. log Z is rounded too, and so are
    the sums that it is of, see `SUMMED`. That share is also what rounding changes the log-probability by, however near
    to 0 it is.

    One more backward pass of each sequence has the gradient of all these changes, taken as of one sign in a sequence;
    the magnitudes of sequences are added. A change of a slope counts against the log-probability and that of p with
    log Z, so that the logits of all ids but the token's own are changed to one side by both, see docs/adr/0087.

    In less than float32 sequences of one length are computed together, and a gradient is rounded once a batch, as a
    trainer rounds it once a micro-batch. A `draw` from 1 on is rounded anew, see `rounding_anew`: of few tokens, whose
    gradients rounding moves along one direction, one pass may be near the exact one by chance.

    Where the trainer's own log-probability, `score`, is at most `margin` nats away, the loss is that of it: the noise
    of a few tokens, some of which are off by far more than the rest, tells little of what another right side's loss
    is. And it says on which side of a clip's edge the token is. The gradient is taken at the model's own.
    """
    factor = objective.get("further", 0.0)
    model = StreamedModel(checkpoint, dtype, device, further=bool(factor))
    if (padding := objective.get("padding")) is not None:
        model.model.get_input_embeddings().register_forward_hook(
            lambda _, asked, found: torch.where((asked[0] == padding)[..., None], found.detach(), found)
        )
    tape = Tape(model, magnitudes=[1])
    rounds, off = dtype == torch.float32 and not draw and not from_first, SHIFT / min(objective["temperature"], 1.0)
    shifts = [0.0, off, -off] if rounds and objective["loss"] != "cross_entropy" else [0.0]
    of_entropy = rounds and objective["entropy_weight"] and objective["temperature"] < 1
    moves = [0.0, off][: bool(objective["entropy_weight"]) + bool(of_entropy)]
    kept_rows = [row for row in rows if row["mask"][1:].any()]
    nats = [[torch.zeros(0, dtype=torch.float64)] * len(kept_rows) for _ in range(len(shifts) + bool(of_entropy))]
    told = [torch.zeros(0, dtype=torch.bool)] * len(kept_rows)
    rounding, acting = 0.0, 0
    num_further = sum(int(row["mask"][2:].sum()) for row in rows) if factor else 0
    of_further = torch.zeros(2, dtype=torch.float64)
    summed = SUMMED * model.config.get_text_config().vocab_size ** 0.5 if rounds else 0.0
    most = 1 if rounds or from_first else min(MAX_TOKENS, at_once(model))
    for batch in _batches(kept_rows, most):
        stacked = {name: torch.stack([kept_rows[at][name] for at in batch.places])[:, 1:] for name in _columns(rows)}
        kept = stacked.pop("mask").bool()
        counts = kept.sum(1).tolist()
        columns = {name: values[kept].double() for name, values in stacked.items()}
        with tape.sequence(choosing_in(model, batch)), rounding_anew(model, draw, batch.places[0]) as noise:
            whole, labels = model.hidden(batch.tokens), batch.tokens[:, 1:]
            logprob, log_sum, *by_shift = chosen(
                tape, whole[:, :-1][kept], labels[kept], objective["temperature"], moves, noise
            )
            if later := int(kept[:, 1:].sum()) and bool(factor):
                ahead = model.ahead(batch.tokens, whole)[:, :-2][kept[:, 1:]]
                further_nats, further_sum = chosen(tape, ahead, labels[:, 1:][kept[:, 1:]], 1.0, [], noise)
        entropy = by_shift[0] if by_shift else torch.zeros(())
        own, near = logprob.detach(), torch.zeros(len(logprob), dtype=torch.bool)
        if "score" in columns:
            score = columns.pop("score")
            near = (score - own).abs() <= margin  # no NaN is near
            columns["side"] = torch.where(near, score, own)

        def nats_of(logprob: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
            return columns["weight"] * token_losses(logprob, entropy, columns, objective, counts)  # noqa: B023

        slopes, found = [], []
        for shift in shifts:
            leaf = own.clone().requires_grad_(True)
            loss = nats_of(leaf + shift, entropy.detach())
            slopes.append(torch.autograd.grad(loss.sum(), leaf)[0])
            found.append(loss.detach())
        if of_entropy:
            further = nats_of(own, by_shift[1]) - nats_of(own, entropy)
            found.append(found[0] + further.detach())
        if near.any():
            found = [nats_of(columns["side"], entropy.detach())] * len(found)
        for values, parts in zip([*found, near], [*nats, told], strict=True):
            for index, part in zip(batch.places, values.split(counts), strict=True):
                parts[index] = part
        change = torch.stack([slope - slopes[0] for slope in slopes]).abs().amax(0)
        if not (slopes[0].any() or change.any() or objective["entropy_weight"] or later):
            continue  # an advantage of 0, as of a group of equal rewards: the gradient is 0 and right sides agree
        tape.kind, loss = 0, nats_of(logprob, entropy).sum()
        if later:
            loss = loss - factor / num_further * further_nats.sum()
            shares = (rounding_of(further_sum.detach()) + summed) / num_further
            of_further += torch.stack([-further_nats.detach().sum() / num_further, shares.sum()])
        loss.backward(retain_graph=rounds)
        share = slopes[0].abs() * (rounding_of(log_sum.detach()) + summed)
        rounding += float(share.sum())
        acting += len(own) if objective["entropy_weight"] else int(slopes[0].count_nonzero())
        if rounds:
            doubt = (share * log_sum - change * logprob).sum() + (further.sum() if of_entropy else 0.0)
            doubt = doubt + (factor * (shares * further_sum).sum() if later else 0.0)
            tape.kind = 1
            doubt.backward()
    tape.backward(2 if rounds else 1, take)
    mean, of_rounding = of_further.tolist()
    joined = [torch.cat(part) if part else torch.zeros(0, dtype=torch.float64) for part in nats]
    return _Found(
        nats=joined[0], told=torch.cat(told) if told else torch.zeros(0, dtype=torch.bool), shifted=tuple(joined[1:]),
        rounding=rounding, acting=acting,
        further={"further_loss": mean, "further_noise": of_rounding, "num_further": num_further},
    )  # fmt: skip


def _batches(rows: Sequence[Row], most: int = MAX_TOKENS) -> Iterator[Batch]:
    margin = float(rows[0].get("margin", math.inf)) if rows else math.inf
    return batches([row["tokens"].tolist() for row in rows], _routes(rows), margin, most)


def _routes(rows: Sequence[Row]) -> list[Any]:
    return [row["routes"].tolist() if "routes" in row else () for row in rows]


def _columns(rows: Sequence[Row]) -> set[str]:
    return {name for row in rows[:1] for name in row} - {"tokens", "routes", "margin"}


def token_losses(
    logprob: torch.Tensor, entropy: torch.Tensor, columns: Mapping[str, torch.Tensor], objective: Mapping[str, Any],
    counts: Sequence[int],
) -> torch.Tensor:  # fmt: skip
    """Loss of each token of some sequences that is in the loss, before its weight.

    Args:
        logprob: [K] float64 log-probabilities by the weights that are trained, nats.
        entropy: [K] float64, nats.
        columns: [K] "advantage", "divisor" and "reference"; maybe "side", log-probabilities that tell what is clipped,
            and "kl" and "entropy", what the weights of these terms are multiplied by.
        objective: "loss" and its options.
        counts: of each sequence, how many of the K tokens are its own.

    Returns:
        [K] float64.

    Raises:
        ValueError: the loss is unknown here, such as one of a plugin.

    Source:
        PPO (arXiv 1707.06347), equation 7; DAPO (arXiv 2503.14476), equation 10; dual clip: arXiv 1912.09729,
        equation 5; GSPO (arXiv 2507.18071), equation 14; CISPO: arXiv 2506.13585, equation 4; SAPO: arXiv 2511.20347;
        "sequence", the ratio of a whole answer: RLOO (arXiv 2402.14740), TRL 1.16 `RLOOTrainer._compute_loss`; k1, k2,
        k3: http://joschu.net/blog/kl-approx.html.
    """
    name = objective["loss"]
    if name == "cross_entropy":
        total = -logprob
    else:
        advantage, low, high = columns["advantage"], max(0.0, 1 - objective["clip_low"]), 1 + objective["clip_high"]
        difference, side = (values - columns["divisor"] for values in (logprob, columns.get("side", logprob.detach())))
        if name in WHOLE:  # in the form by token
            sizes = torch.tensor(counts).repeat_interleave(torch.tensor(counts)) if name == "sequence" else 1
            difference, side = (sizes * _means(values, counts) for values in (difference, side))
            difference = difference + sizes * (logprob - logprob.detach())
        ratio, told = (torch.exp(torch.clamp(values, -LIMIT, LIMIT)) for values in (difference, side))
        if name in ("clipped", *WHOLE):
            at_edge = torch.clamp(told, low, high) * advantage
            gain = torch.where(at_edge < told * advantage, at_edge, ratio * advantage)
            if (most := objective["dual_clip"]) is not None:
                beyond = (advantage < 0) & (torch.minimum(told * advantage, at_edge) < most * advantage)
                gain = torch.where(beyond, most * advantage, gain)
            total = -gain
        elif name == "cispo":
            total = -torch.clamp(ratio.detach(), low, high) * advantage * logprob
        elif name == "importance":
            total = -ratio * advantage
        elif name == "reinforce":
            total = -logprob * advantage
        elif name == "sapo":
            steep = torch.where(advantage > 0, *advantage.new_tensor(objective["steepness"]))
            total = -4 / steep * torch.sigmoid(steep * (ratio - 1)) * advantage
        else:
            raise ValueError(f"no formula of the loss `{name}` is known")
    if objective["kl_weight"]:
        distance = logprob - columns["reference"]
        near = torch.clamp(distance, -LIMIT, LIMIT)
        estimates = {
            "k1": distance, "k2": distance.square() / 2, "k3": torch.exp(-near) - 1 + near, "abs": distance.abs()
        }  # fmt: skip
        most = objective.get("kl_limit") or math.inf
        times = torch.exp(logprob - logprob.detach()) if objective.get("kl_ratio") == "own" else 1.0
        divergence = torch.clamp(estimates[objective["kl_kind"].removesuffix("+")] * times, max=most)
        if objective["kl_kind"].endswith("+"):
            divergence = divergence.detach() + estimates["k2"] - estimates["k2"].detach()
        if objective.get("kl_ratio") is True:
            own = _means(divergence, counts) if name in WHOLE else divergence.detach()
            divergence = ratio.detach() * divergence + own * (ratio - ratio.detach())
        total = total + objective["kl_weight"] * columns.get("kl", 1.0) * divergence
    if objective["entropy_weight"]:
        total = total - objective["entropy_weight"] * columns.get("entropy", 1.0) * entropy
    return total


def _means(values: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    return torch.cat([part.mean().expand(len(part)) for part in values.detach().split(list(counts))])

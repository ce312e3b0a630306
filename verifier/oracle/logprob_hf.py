"""The independent oracle of logprobs: transformers, float32 weights, float64 log-softmax, no padding.

On a GPU float32 means float32: no TF32, and of state-space layers transformers' own operations, not the kernels that
the trainer and the engine call. Routers of a mixture can be given the experts to choose. Functions whose first argument
is unused are requests of an engine server.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import msgspec
import torch
from transformers import DynamicCache

from verifier.engine.api import Sampling
from verifier.engine.shaping import shaped
from verifier.oracle.batches_hf import Batch, alike, batches, hidden_of, remembers, repeated, slices_of
from verifier.oracle.routes_hf import Route
from verifier.oracle.streaming_hf import StreamedModel

_Wanted = Mapping[float, Sequence[tuple[int, int]]]
"""Per temperature, places among all sequences, and numbers of tokens."""


@torch.inference_mode()
def score(
    _: object,
    path: str,
    sequences: Sequence[Sequence[int]],
    dtype: str,
    device: str = "cpu",
    temperature: float | Sequence[float] = 1.0,
    routes: Sequence[Sequence[Route]] = (),
) -> list[list[float]]:
    """Teacher-forced log-probabilities, nats.

    Args:
        path: the checkpoint; its weights are brought to the dtype before anything is computed.
        sequences: token ids, each of at least 2.
        dtype: "float32"; "bfloat16" to measure what that dtype alone costs, "float64" what "float32" does.
        device: "cpu", or "cuda".
        temperature: divisor of the logits, of all sequences or of each; 0 gives the undivided log-probability of the
            likeliest token instead.
        routes: of each sequence, what its routers choose; none where they choose by themselves.

    Returns:
        Per sequence, entry t is log p(token t + 1 | tokens 0..t).

    Raises:
        ContractError: transformers finds a tensor missing or superfluous, or see `choosing`.
    """
    full_float32()
    model = StreamedModel(path, getattr(torch, dtype), device)
    found: list[list[float]] = [[]] * len(sequences)
    for part in _parts([model], sequences, temperature, routes):
        (every,) = part.nats
        part.hand(found, part.told(every).float())
    return found


@torch.inference_mode()
def sides(
    _: object, path: str, sequences: Sequence[Sequence[int]], dtype: str, device: str = "cpu",
    temperature: float | Sequence[float] = 1.0, routes: Sequence[Sequence[Route]] = (),
    ends: Sequence[int] | None = None, draws: int = 1,
) -> list[list[list[list[float]]]]:  # fmt: skip
    """Describe the distributions after all tokens but the last by float32 weights, and by those of another dtype.

    Args:
        path: see `score`.
        sequences: see `score`.
        dtype: of the other weights; "float64" also measures what float32 changes at each place.
        device: see `score`.
        temperature: see `score`; above 0 with ends.
        routes: see `score`.
        ends: end tokens, maybe none. With None log-probabilities are all that is asked for.
        draws: passes in float32 that the scale is the greatest of; see `verifier.oracle.oracle.DRAWS`.

    Returns:
        Of log-probabilities; and with ends, of the probability that a draw is an end token, and of entropies, nats:
        each by float32 weights; by the others; and, with the others in float64, the scale of what right sides in
        float32 differ by, else rows without values. All as `score` has them. Ends have no scale, entropies always.

        Rounding moves the last hidden state, and so the logits of all tokens: thousands of them tell how far it moved
        at that very place. The scale of a log-probability is the root mean square, over the vocabulary, of the
        differences of the two log-probabilities, each less their mean by the distribution; squares of what a float32
        log-softmax, which trainers and engines have, is off by are added. Where rounding moves along one direction, a
        pass may be near zero by chance: the greatest of `draws`. That of an entropy, see `entropy_scale`.
    """
    full_float32()
    rounds = dtype == "float64"
    models = [StreamedModel(path, kind, device) for kind in (getattr(torch, dtype), torch.float32)]
    found = [[[[]] * len(sequences) for _ in range(3)] for _ in range(1 if ends is None else 3)]
    for part in _parts(models, sequences, temperature, routes, again=draws - 1 if rounds else 0, shares=True):
        other, exact = part.nats
        part.hand(found[0][0], part.told(exact).float())
        part.hand(found[0][1], part.told(other) if rounds else part.told(other).float())
        if rounds:
            part.hand(found[0][2], _scale(exact, other, part.again))
        if ends is not None:
            for rows, nats in zip(found[1], (exact, other), strict=False):
                part.hand(rows, nats[..., list(ends)].exp().sum(dim=-1))
            for rows, nats in zip(found[2], (exact, other), strict=False):
                part.hand(rows, -(nats.exp() * nats).sum(dim=-1))
            part.hand(found[2][2], entropy_scale(exact, other))
    return found


def _scale(low: torch.Tensor, high: torch.Tensor, again: Iterator[torch.Tensor]) -> torch.Tensor:
    """[N] scale of rounding of float32 log-probabilities, nats, see `sides`; of [N, V] in float32 and float64."""
    share, moved = high.exp(), torch.zeros_like(high[..., 0])
    for drawn in chain([low], again):
        off = drawn - high
        off -= (off * share).sum(dim=-1, keepdim=True)
        moved = torch.maximum(moved, off.square().mean(dim=-1))
    softmax = torch.log_softmax(low.float(), dim=-1).double() - low
    return (moved + softmax.square().mean(dim=-1)).sqrt()


def entropy_scale(exact: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """[B, T] most that differences of logits of their size change the entropy by, nats; of [B, T, V].

    The entropy changes by the sum of p (log p + H) times each difference: by the spread of log p times that of the
    differences at most, both by the distribution (Cauchy and Schwarz).
    """
    share = exact.exp()

    def spread(values: torch.Tensor) -> torch.Tensor:
        return (share * (values - (share * values).sum(dim=-1, keepdim=True)) ** 2).sum(dim=-1).sqrt()

    return spread(exact) * spread(other - exact)


def entropy_of(scaled: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
    """[..., K] entropy of [..., K, V] logits, nats, once the shift is added to those of every second id."""
    turns = torch.arange(scaled.shape[-1], device=scaled.device) % 2
    every = torch.log_softmax(scaled + shift * turns, dim=-1)
    return -(every.exp() * every).sum(-1)


def full_float32() -> None:
    """Let float32 be float32 on a GPU."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Distributions at some tokens of sequences of one length at one temperature."""

    members: Sequence[Sequence[tuple[int, int]]]
    """Per row the sequences that it is, or begins with: place among all, and number of tokens from its first on."""
    width: int
    """Tokens of a row."""
    begin: int
    """Number of the first of these tokens among those of all rows, row by row."""
    labels: torch.Tensor
    """[N, 1] next tokens."""
    temperature: float
    nats: Sequence[torch.Tensor]
    """[N, V] float64 log-probabilities, by each model."""
    again: Iterator[torch.Tensor]
    """The last model's, rounded anew each time; one by one."""

    def told(self, every: torch.Tensor) -> torch.Tensor:
        """[N] log-probabilities of the next tokens, or at a temperature of 0 of the likeliest."""
        return every.gather(1, self.labels)[:, 0] if self.temperature else every.amax(dim=-1)

    def rows(self) -> Iterator[tuple[Sequence[tuple[int, int]], int, slice]]:
        """Rows that have some of these tokens: members, the place of the first of them in the row, and which."""
        end = self.begin + len(self.labels)
        for row in range(self.begin // self.width, -(-end // self.width)):
            first = max(self.begin, row * self.width)
            last = min(end, (row + 1) * self.width)
            yield self.members[row], first - row * self.width, slice(first - self.begin, last - self.begin)

    def hand(self, found: list[list[float]], values_N: torch.Tensor) -> None:
        """Give every sequence its values, after those that it has."""
        values = values_N.tolist()
        for members, at_first, some in self.rows():
            for at, length in members:
                found[at] = [*found[at], *values[some][: max(length - 1 - at_first, 0)]]


def _parts(
    models: Sequence[StreamedModel], sequences: Sequence[Sequence[int]], temperature: float | Sequence[float],
    routes: Sequence[Sequence[Route]] = (), again: int = 0, *, shares: bool = False,
) -> Iterator[_Part]:  # fmt: skip
    """Distributions after each token but the last of sequences, by some models, each computed once.

    The last model's are computed `again` some times, from embeddings that are moved by a unit of rounding at most.
    A sequence with which another begins is not computed by itself, as later tokens change nothing before them. With
    `shares`, what several sequences begin with is a part of its own before theirs, and they attend to its keys and
    values; not in models that remember more than these.
    """
    divisors = [temperature] * len(sequences) if isinstance(temperature, (int, float)) else temperature
    first = range(len(sequences)) if any(routes) else longest_of(sequences)
    asked: dict[int, dict[float, list[tuple[int, int]]]] = {}
    for at, place in enumerate(first):
        asked.setdefault(place, {}).setdefault(divisors[at], []).append((at, len(sequences[at])))
    places = [*asked]
    generator = torch.Generator(models[-1].device).manual_seed(0)
    runs = [*((model, False) for model in models), *((models[-1], True) for _ in range(again))]

    def parts(
        batch: Batch, labels_BT: torch.Tensor, wanted: Sequence[_Wanted], pasts: Sequence[DynamicCache | None]
    ) -> Iterator[_Part]:  # fmt: skip
        hidden = []
        for (model, moves), past in zip(runs, pasts, strict=True):
            with moved(model.model, generator) if moves else contextlib.nullcontext():
                hidden.append(hidden_of(model, batch, past=past)[:, : labels_BT.shape[1]])
        for divisor in sorted({key for item in wanted for key in item}):
            rows = [row for row, item in enumerate(wanted) if divisor in item]
            kept, labels = [each[rows].flatten(0, 1) for each in hidden], labels_BT[rows].flatten()[:, None]
            if not len(labels):
                continue
            with contextlib.ExitStack() as heads:
                for model in models:
                    heads.enter_context(model.weights_of(model.head_unit))

                def nats(run: int, some: slice, kept: Any = kept, by: float = divisor or 1.0) -> torch.Tensor:
                    return torch.log_softmax(runs[run][0].logits(kept[run][some]).double() / by, dim=-1)

                for some in slices_of(models[-1], len(labels)):
                    yield _Part(
                        members=[wanted[row][divisor] for row in rows], width=labels_BT.shape[1], begin=some.start,
                        labels=labels[some].to(models[-1].device), temperature=divisor,
                        nats=[nats(run, some) for run in range(len(models))],
                        again=(nats(run, some) for run in range(len(models), len(runs))),
                    )  # fmt: skip

    if not shares or any(routes) or not remembers(models[-1]):
        given = [routes[at] for at in places] if any(routes) else ()
        for batch in batches([sequences[at] for at in places], given):
            yield from parts(batch, batch.tokens[:, 1:], [asked[places[at]] for at in batch.places], [None] * len(runs))
        return
    for shared, group in alike([sequences[at] for at in places]):
        members, pasts = [places[at] for at in group], []
        if shared:
            ids, every = torch.tensor([list(sequences[members[0]][: shared + 1])]), {}
            for place in members:
                for divisor, rows in asked[place].items():
                    every.setdefault(divisor, []).extend((at, min(length, shared + 1)) for at, length in rows)
            pasts = [DynamicCache(config=model.config) for model, _ in runs]
            yield from parts(Batch(places=(0,), tokens=ids[:, :-1], experts={}), ids[:, 1:], [every], pasts)
        for batch in batches([sequences[place][shared:] for place in members]):
            after = [asked[members[at]].items() for at in batch.places]
            wanted = [{key: [(at, length - shared) for at, length in rows] for key, rows in item} for item in after]
            own = [repeated(past, len(wanted)) for past in pasts] or [None] * len(runs)
            yield from parts(batch, batch.tokens[:, 1:], wanted, own)


@contextlib.contextmanager
def moved(model: Any, generator: torch.Generator) -> Iterator[None]:
    """Within, embeddings are moved by a unit of rounding at most."""

    def move(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        share = torch.rand(output.shape, generator=generator, device=output.device, dtype=output.dtype)
        return output * (1 + (2 * share - 1) * torch.finfo(output.dtype).eps)

    hook = model.get_input_embeddings().register_forward_hook(move)
    try:
        yield
    finally:
        hook.remove()


def longest_of(sequences: Sequence[Sequence[int]]) -> list[int]:
    """Per sequence, the place of the longest one that begins with it, which may be its own."""
    found = [*range(len(sequences))]
    order = sorted(found, key=lambda at: tuple(sequences[at]))  # those that begin with one come right after it
    for at, after in reversed([*pairwise(order)]):
        if [*sequences[after][: len(sequences[at])]] == [*sequences[at]]:
            found[at] = found[after]
    return found


@torch.inference_mode()
def next_token(
    _: object, path: str, tokens: Sequence[int], device: str = "cpu", temperature: float = 1.0,
    bias: Sequence[tuple[int, float]] = (),
) -> list[float]:  # fmt: skip
    """Log-probability of every token of the vocabulary after these, at least 1, by float32 weights, nats.

    `bias` has tokens and the nats that the request adds to their logits, before the temperature divides them.
    """
    model = StreamedModel(path, torch.float32, device)
    logits = model.logits(model.hidden(torch.tensor([list(tokens)]))[0, -1:])[0].double()
    for token, nats in bias:
        logits[token] += nats
    return torch.log_softmax(logits / temperature, dim=-1).tolist()


@torch.inference_mode()
def places(
    _: object, path: str, rows: Sequence[Sequence[Any]], shares: Sequence[float], num_earlier: int, device: str = "cpu"
) -> list[list[Any]]:
    """Describe the distribution at each sampled token by float32 weights: a row of `OracleOfPlaces` a token.

    `rows` are [prompt, sampled tokens, temperature above 0]; `num_earlier` is the number of earlier tokens.
    """
    model = StreamedModel(path, torch.float32, device)
    found: list[list[list[Any]]] = [[]] * len(rows)
    sequences = [[*prompt, *tokens] for prompt, tokens, _ in rows]
    for part in _parts([model], sequences, [temperature for *_, temperature in rows]):
        for members, at_first, some in part.rows():
            described: dict[tuple[int, int], list[list[Any]]] = {}  # of the same tokens, once
            for at, length in members:
                tokens = rows[at][1]
                skipped = length - 1 - len(tokens) - at_first  # tokens of this part before the first sampled one
                if (span := (skipped, length - 1 - at_first)) not in described:
                    share = part.nats[0][some][max(skipped, 0) : max(span[1], 0)].exp().cpu()
                    described[span] = [*_described(share, tokens, max(-skipped, 0), shares, num_earlier)]
                found[at] = [*found[at], *described[span]]
    return [row for part in found for row in part]


def _described(
    share_TV: torch.Tensor, tokens: Sequence[int], begin: int, shares: Sequence[float], num_earlier: int
) -> Iterator[list[Any]]:
    """Rows of `places`, of the tokens from `begin` on."""
    for at, share in enumerate(share_TV, begin):
        likeliest, order = share.sort(descending=True, stable=True)
        reached = likeliest.cumsum(0)
        kept = (torch.searchsorted(reached, torch.tensor(shares, dtype=torch.float64)) + 1).tolist()
        before = [tokens[at - back] if back <= at else None for back in range(1, num_earlier + 1)]
        earlier = [math.nan if token is None else float(share[token]) for token in before]
        rest = [float(likeliest[end:].sum()) for end in kept]
        rank = int((order == tokens[at]).nonzero())
        yield [rank, kept, rest, earlier, [token == tokens[at] for token in before]]


@torch.inference_mode()
def shaped_logprobs(
    _: object, path: str, rows: Sequence[Sequence[Any]], slack: float, device: str = "cpu"
) -> list[list[tuple[float, float]]]:
    """Bounds of the log-probabilities of sampled tokens by float32 weights, nats, as their requests shape them.

    They lie apart only where rounding decides whether truncation keeps a token.

    Args:
        path: the checkpoint.
        rows: [prompt, sampled tokens, the request's `Sampling`] each.
        slack: by how much rounding may move the edge of a truncated distribution.
        device: "cpu", or "cuda".
    """
    model = StreamedModel(path, torch.float32, device)
    found = []
    for prompt, tokens, asked in rows:
        sampling = msgspec.convert(asked, Sampling)
        hidden = model.hidden(torch.tensor([[*prompt, *tokens]]))[0, len(prompt) - 1 : -1]
        row = []
        for some in slices_of(model, len(tokens)):
            for at, logits in enumerate(model.logits(hidden[some]).double().cpu(), some.start):
                least = float(shaped(logits, prompt, tokens[:at], sampling, slack)[tokens[at]])
                most = least
                if math.isfinite(least):  # with fewest tokens beside it
                    most = float(shaped(logits, prompt, tokens[:at], sampling, -slack, tokens[at])[tokens[at]])
                row.append((least, most))
        found.append(row)
    return found

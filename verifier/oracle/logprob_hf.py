"""The independent oracle of logprobs: transformers, float32 weights, float64 log-softmax, no padding.

On a GPU float32 means float32: no TF32, and of state-space layers transformers' own operations, not the kernels that
the trainer and the engine call. Routers of a mixture can be given the experts to choose. Functions whose first argument
is unused are requests of an engine server.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import DynamicCache

from verifier.engine.api import Sampling
from verifier.engine.shaping import shaped
from verifier.oracle.batches_hf import Batch, alike, batches, hidden_of, remembers, repeated, slices_of
from verifier.oracle.oracle import DRAWS, NEAR, UNROUNDED, Reported
from verifier.oracle.routes_hf import Route
from verifier.oracle.streaming_hf import StreamedModel
from verifier.stages.logprob.records import SHARES

EARLIER = 4
"""Places back to which a sampled token may be repeated."""
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
    for group in _groups(model, sequences, temperature, routes):
        for part in group.parts([model], [group.hidden(model)]):
            part.hand(found, part.told(part.nats[0]).float())
    return found


@torch.inference_mode()
def sides(
    _: object, path: str, sequences: Sequence[Sequence[int]], dtype: str, device: str = "cpu",
    temperature: float | Sequence[float] = 1.0, routes: Sequence[Sequence[Route]] = (),
    ends: Sequence[int] | None = None, reported: Reported | None = None, sampled: Sequence[int] = (),
    margin: float | None = None,
) -> list[list[list[Any]]]:  # fmt: skip
    """Describe the distributions after all tokens but the last by float32 weights, and by those of another dtype.

    Args:
        path: see `score`.
        sequences: see `score`.
        dtype: of the other weights; "float64" also measures what float32 changes at each place.
        device: see `score`.
        temperature: see `score`; above 0 with ends, and of sequences with sampled tokens.
        routes: see `score`.
        ends: end tokens, maybe none. With None log-probabilities are all that is asked for.
        reported: see `verifier.oracle.oracle.Reported`. A scale is the greatest of as many passes in float32, up to
            `DRAWS`, as show all of a sequence to be near; of `DRAWS` with None.
        sampled: of each sequence, how many of its last tokens to describe the distributions of.
        margin: of the routes, see `choosing`; None for any.

    Returns:
        Of log-probabilities; with ends, of the probability that a draw is an end token, and of entropies, nats:
        each by float32 weights; by the others; and, with the others in float64, the scale of what right sides in
        float32 differ by, else rows without values. All as `score` has them. Ends have no scale, entropies always.
        With `sampled`, by float32 weights, per sequence the columns of `OracleOfPlaces` of each such token.

        Rounding moves the last hidden state, and so the logits of all tokens: thousands of them tell how far it moved
        at that very place. The scale of a log-probability is the root mean square, over the vocabulary, of the
        differences of the two log-probabilities, each less their mean by the distribution; squares of what a float32
        log-softmax, which trainers and engines have, is off by are added. Where rounding moves along one direction, a
        pass may be near zero by chance: the greatest of several. That of an entropy, see `entropy_scale`.
    """
    full_float32()
    rounds = dtype == "float64"
    models = [StreamedModel(path, kind, device) for kind in (getattr(torch, dtype), torch.float32)]
    generator = torch.Generator(models[-1].device).manual_seed(0)
    found = [[_rows_of(sequences) for _ in range(3)] for _ in range(1 if ends is None else 3)]
    exact_rows, other_rows, scales = found[0]
    described, kinds = _rows_of(sequences), [(scales, _scale)]
    kinds += [(found[2][2], entropy_scale)] if ends is not None else []
    for group in _groups(models[-1], sequences, temperature, routes, margin, shares=True):
        hidden = [group.hidden(model) for model in models]
        for part in group.parts(models, hidden):
            other, exact = part.nats
            part.hand(exact_rows, part.told(exact).float())
            part.hand(other_rows, part.told(other) if rounds else part.told(other).float())
            if rounds:
                part.hand(scales, _scale(exact, other))
            if ends is not None:
                for rows, nats in zip(found[1], (exact, other), strict=False):
                    part.hand(rows, nats[..., list(ends)].exp().sum(dim=-1))
                for rows, nats in zip(found[2], (exact, other), strict=False):
                    part.hand(rows, -(nats.exp() * nats).sum(dim=-1))
                part.hand(found[2][2], entropy_scale(exact, other))
            if any(sampled):
                part.describe(described, exact, sequences, sampled)
        waiting = group.members
        for _draw in range(1, DRAWS if rounds else 1):
            if reported is not None:
                asked = {at for at in waiting if at < len(reported)}
                waiting = {at for at in asked if not is_near(exact_rows[at], scales[at], reported[at])}
            if not waiting:
                break
            kept, rest = group.part(waiting)
            with moved(models[-1].model, generator):
                again, more = rest.hidden(models[-1]), [_rows_of(sequences) for _ in kinds]
            for part in rest.parts(models, [[hidden[0][job] for job in kept], again]):
                for rows, (_, scale) in zip(more, kinds, strict=True):
                    part.hand(rows, scale(part.nats[1], part.nats[0]))
            for rows, (known, _) in zip(more, kinds, strict=True):
                for at in waiting:
                    known[at] = [*map(max, known[at], rows[at])]
    return [*found, described] if sampled else found


def _rows_of(sequences: Sequence[Any]) -> list[list[Any]]:
    return [[] for _ in sequences]


def is_near(exact: Sequence[float], scales: Sequence[float], reported: Sequence[Sequence[float]]) -> bool:
    """Say if passes show all that others gave the last tokens of a sequence to be far inside of its bound."""
    near = NEAR * max(scales, default=0.0)
    for row in reported:
        count = min(len(row), len(exact))
        gaps = np.abs(np.array(row[len(row) - count :]) - np.array(exact[len(exact) - count :]))
        if ((gaps > near) & (gaps < UNROUNDED)).any():
            return False
    return True


def _scale(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """[N] scale of rounding of float32 log-probabilities, nats, see `sides`; of [N, V] in float32 and float64."""
    off = low - high
    off -= (off * high.exp()).sum(dim=-1, keepdim=True)
    softmax = torch.log_softmax(low.float(), dim=-1).double() - low
    return (off.square().mean(dim=-1) + softmax.square().mean(dim=-1)).sqrt()


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
    offset: int
    """Tokens of the sequences before these rows."""
    temperature: float
    nats: Sequence[torch.Tensor]
    """[N, V] float64 log-probabilities, by each model."""

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

    def hand(self, found: list[list[Any]], values_N: torch.Tensor) -> None:
        """Give every sequence its values, after those that it has."""
        values = values_N.tolist()
        for members, at_first, some in self.rows():
            for at, length in members:
                found[at] = [*found[at], *values[some][: max(length - 1 - at_first, 0)]]

    def describe(
        self, found: list[list[Any]], every: torch.Tensor, sequences: Sequence[Sequence[int]], sampled: Sequence[int]
    ) -> None:
        """Give every sequence rows of its sampled tokens, see `sides`, by [N, V] log-probabilities."""
        for members, at_first, some in self.rows():
            described: dict[tuple[int, int], list[list[Any]]] = {}  # of the same tokens, once
            for at, length in members:
                first = len(sequences[at]) - sampled[at] - 1 - self.offset
                skipped = first - at_first  # tokens of this part before the first sampled one
                if (span := (skipped, length - 1 - at_first)) not in described:
                    share = every[some][max(skipped, 0) : max(span[1], 0)].exp().cpu()
                    tokens = sequences[at][len(sequences[at]) - sampled[at] :]
                    described[span] = [*_described(share, tokens, max(-skipped, 0))]
                found[at] = [*found[at], *described[span]]


@dataclass(frozen=True, slots=True)
class _Job:
    """A batch, what is asked for, and what it goes on from."""

    batch: Batch
    labels: torch.Tensor
    """[B, T] next tokens."""
    wanted: Sequence[_Wanted]
    """Per row."""
    begin: int = 0
    """Tokens before each row."""
    after: int | None = None
    """Index of the job, of one row, whose keys and values it attends to; None without."""
    kept: bool = False
    """True if others attend to its keys and values."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences that are computed in one batch; or in several, after what some of them begin with."""

    jobs: Sequence[_Job]

    @property
    def members(self) -> set[int]:
        """Places of its sequences among all."""
        return {at for job in self.jobs for item in job.wanted for rows in item.values() for at, _ in rows}

    def part(self, members: set[int]) -> tuple[list[int], _Group]:
        """Indices of the jobs that these sequences need, and a group of them."""
        needed = set[int]()
        for at, job in reversed([*enumerate(self.jobs)]):
            if at in needed or not members.isdisjoint(_Group([job]).members):
                needed |= {at} if job.after is None else {at, job.after}
        kept = {at: place for place, at in enumerate(sorted(needed))}
        jobs = [
            replace(job, after=None if job.after is None else kept[job.after])
            for at, job in enumerate(self.jobs)
            if at in kept
        ]
        return [*kept], _Group(jobs)

    def hidden(self, model: StreamedModel) -> list[torch.Tensor]:
        """Per job [B, T, H] that the head is given."""
        kept: dict[int, DynamicCache] = {}
        found = []
        for at, job in enumerate(self.jobs):
            past = DynamicCache(config=model.config) if job.kept else None
            if job.after is not None:
                past = repeated(kept[job.after], len(job.labels))
            if job.kept and past is not None:
                kept[at] = past
            found.append(hidden_of(model, job.batch, past=past)[:, : job.labels.shape[1]])
        return found

    def parts(self, models: Sequence[StreamedModel], hidden: Sequence[Sequence[torch.Tensor]]) -> Iterator[_Part]:
        """Distributions, some tokens at a time, from what each model's head is given."""
        for job, *each in zip(self.jobs, *hidden, strict=True):
            for divisor in sorted({key for item in job.wanted for key in item}):
                rows = [row for row, item in enumerate(job.wanted) if divisor in item]
                kept, labels = [own[rows].flatten(0, 1) for own in each], job.labels[rows].flatten()[:, None]
                if not len(labels):
                    continue
                with contextlib.ExitStack() as heads:
                    for model in models:
                        heads.enter_context(model.weights_of(model.head_unit))
                    for some in slices_of(models[-1], len(labels)):
                        logits = (model.logits(own[some]).double() for model, own in zip(models, kept, strict=True))
                        yield _Part(
                            members=[job.wanted[row][divisor] for row in rows], width=job.labels.shape[1],
                            begin=some.start, labels=labels[some].to(models[-1].device), offset=job.begin,
                            temperature=divisor,
                            nats=[torch.log_softmax(every / (divisor or 1.0), dim=-1) for every in logits],
                        )  # fmt: skip


def _groups(
    model: StreamedModel, sequences: Sequence[Sequence[int]], temperature: float | Sequence[float],
    routes: Sequence[Sequence[Route]] = (), margin: float | None = None, *, shares: bool = False,
) -> Iterator[_Group]:  # fmt: skip
    """All sequences, of which the tokens but the first are asked for, each computed once.

    A sequence with which another begins is not computed by itself, as later tokens change nothing before them. With
    `shares`, what several sequences begin with is computed before them, and they attend to its keys and values; not in
    models that remember more than these.
    """
    divisors = [temperature] * len(sequences) if isinstance(temperature, (int, float)) else temperature
    first = range(len(sequences)) if any(routes) else longest_of(sequences)
    asked: dict[int, dict[float, list[tuple[int, int]]]] = {}
    for at, place in enumerate(first):
        asked.setdefault(place, {}).setdefault(divisors[at], []).append((at, len(sequences[at])))
    places = [*asked]
    if not shares or any(routes) or not remembers(model):
        given = [routes[at] for at in places] if any(routes) else ()
        for batch in batches([sequences[at] for at in places], given, math.inf if margin is None else margin):
            yield _Group([_Job(batch, batch.tokens[:, 1:], [asked[places[at]] for at in batch.places])])
        return
    own = [sequences[at] for at in places]
    runs, last = alike(own)

    def rows_of(members: Sequence[int], begin: int, end: int | None = None) -> _Wanted:
        """Questions on tokens from `begin` to `end`, which these begin with."""
        every: dict[float, list[tuple[int, int]]] = {}
        for divisor, rows in (item for member in members for item in asked[places[member]].items()):
            every.setdefault(divisor, []).extend(
                (at, (length if end is None else min(length, end + 1)) - begin) for at, length in rows
            )
        return every

    groups: list[list[_Job]] = []
    where: list[tuple[list[_Job], int]] = []  # of each run, the jobs of its group, and its own index among them
    for run in runs:
        jobs, after = ([], None) if run.after is None else where[run.after]
        if run.after is None:
            groups.append(jobs)
        where.append((jobs, len(jobs)))
        ids = torch.tensor([list(own[run.members[0]][run.begin : run.end + 1])])
        batch, told = Batch(places=(0,), tokens=ids[:, :-1], experts={}), rows_of(run.members, run.begin, run.end)
        jobs.append(_Job(batch, ids[:, 1:], [told], run.begin, after, kept=True))
    for number in dict.fromkeys(last):
        members, begin = [at for at, run in enumerate(last) if run == number], 0 if number is None else runs[number].end
        for batch in batches([own[at][begin:] for at in members]):
            jobs, after = ([], None) if number is None else where[number]
            if number is None:
                groups.append(jobs)
            wanted = [rows_of([members[at]], begin) for at in batch.places]
            jobs.append(_Job(batch, batch.tokens[:, 1:], wanted, begin, after))
    yield from map(_Group, groups)


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
    _: object, path: str, tokens: Sequence[int], asked: Sequence[tuple[float, Sequence[tuple[int, float]]]],
    device: str = "cpu",
) -> list[list[float]]:  # fmt: skip
    """Log-probability of every token of the vocabulary after these, at least 1, by float32 weights, nats.

    Each request asked is a temperature, and tokens with the nats that it adds to their logits, before the temperature
    divides them.
    """
    model = StreamedModel(path, torch.float32, device)
    logits = model.logits(model.hidden(torch.tensor([list(tokens)]))[0, -1:])[0].double()
    found = []
    for temperature, bias in asked:
        own = logits.clone()
        for token, nats in bias:
            own[token] += nats
        found.append(torch.log_softmax(own / temperature, dim=-1).tolist())
    return found


def _described(share_TV: torch.Tensor, tokens: Sequence[int], begin: int) -> Iterator[list[Any]]:
    """Rank, kept, rest, earlier and repeats, see `OracleOfPlaces`, of the tokens from `begin` on."""
    for at, share in enumerate(share_TV, begin):
        likeliest, order = share.sort(descending=True, stable=True)
        reached = likeliest.cumsum(0)
        kept = (torch.searchsorted(reached, torch.tensor(SHARES, dtype=torch.float64)) + 1).tolist()
        before = [tokens[at - back] if back <= at else None for back in range(1, EARLIER + 1)]
        earlier = [math.nan if token is None else float(share[token]) for token in before]
        rest = [float(likeliest[end:].sum()) for end in kept]
        rank = int((order == tokens[at]).nonzero())
        yield [rank, kept, rest, earlier, [token == tokens[at] for token in before]]


@torch.inference_mode()
def shaped_logprobs(
    _: object, path: str, rows: Sequence[Sequence[Any]], slack: float, device: str = "cpu"
) -> list[list[tuple[float, float]]]:
    """Bounds of the log-probabilities of sampled tokens by float32 weights, nats, as their requests shape them.

    They lie apart only where rounding decides whether truncation keeps a token. Rows are [prompt, sampled tokens, the
    request's `Sampling`]; rounding may move the edge of a truncated distribution by `slack`.
    """
    model = StreamedModel(path, torch.float32, device)
    found: list[list[tuple[float, float]]] = [[] for _ in rows]
    together = batches([[*prompt, *tokens] for prompt, tokens, _ in rows])
    for number, own in (pair for batch in together for pair in zip(batch.places, hidden_of(model, batch), strict=True)):
        prompt, tokens, asked = rows[number]
        sampling, hidden, row = msgspec.convert(asked, Sampling), own[len(prompt) - 1 : -1], found[number]
        for some in slices_of(model, len(tokens)):
            for at, logits in enumerate(model.logits(hidden[some]).double().cpu(), some.start):
                least = float(shaped(logits, prompt, tokens[:at], sampling, slack)[tokens[at]])
                most = least
                if math.isfinite(least):  # with fewest tokens beside it
                    most = float(shaped(logits, prompt, tokens[:at], sampling, -slack, tokens[at])[tokens[at]])
                row.append((least, most))
    return found

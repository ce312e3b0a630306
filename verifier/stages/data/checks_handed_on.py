"""Answers as engines gave them and as a step has them, and the weights that they name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from verifier.core import ragged
from verifier.core.check import At, Comparison, Stage, Trace, check, compare_value
from verifier.core.condition import on, recorded, told
from verifier.core.seal import NO_SEAL, seal_of_array
from verifier.knob import flat
from verifier.stages.advantage.records import PolicyColumns
from verifier.stages.checks_conditions import LIVE, WEIGHTS_SENT
from verifier.stages.data.checks_answer_ends import spans
from verifier.stages.data.records import EpisodeTurns, RequestSeeds, SamplingAsked
from verifier.stages.pack.records import Rollouts
from verifier.stages.replay.records import GivenRoutes
from verifier.stages.rollout.records import EvaluatedAnswers, SampledTokens
from verifier.stages.train.records import PreviousStep

TOKENS, NATS, ROUTES = "token ids", "log-probabilities", "routes"
"""Parts of an answer; log-probabilities are the engine's, so that they are wrong where its checks find them so."""
T = TypeVar("T")
MISSING = -1
"""Expert of a token and a layer without a route, before the last token that has one."""
Answer = tuple[str, int]
"""Rollout, or episode, and turn of an answer."""


class _Seals(NamedTuple):
    """Seals of an answer."""

    tokens: int
    nats: int
    routes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """One turn of a rollout, as the step has it."""

    answer: Answer
    version: int
    """Weights that sampled its first token, as it claims: facts of the engine about them come after it."""
    seal: int


@check(
    "DAT014",
    needs=(RequestSeeds, PolicyColumns),
    applies=on(step=LIVE, loop=recorded(RequestSeeds, PolicyColumns, SampledTokens)),
)
def answer_differs_from_engines(trace: Trace) -> Iterator[Comparison]:
    """Every live answer is trained with the token ids, log-probabilities and routes that the engine gave for it.

    What it checks: per turn of a rollout (an answer without an environment is one), seals that were taken of the
    engine's answer as it came: of its token ids, against the rollouts that ranks pack, and of its log-probabilities,
    against those of the policy loss. Where routes are replayed, also the seal that the engine's process took of its
    routes, against those that the batch has.
    Why it matters: log-probabilities that are rounded or clamped on their way, or replaced by the trainer's where some
    are missing, make an importance weight of the wrong policy. Routes of another answer, token or layer are replayed as
    faithfully as the right ones.
    Evidence: data/seeds, data/turns, advantage/policy, pack/rollouts, replay/routes.
    Tolerance and its source: exact; both are copied (CRC-32 of the bytes).
    Where to look: what rounds, clamps, fills in or reorders answers between the engine and the batch.
    What it does not catch: an answer that is wrong as it comes from the engine (LGP003, LGP009, LGP011); versions of
    tokens; numbers of the layers that routes are of (RPL001); a rollout without a token in the loss, which no rank
    packs, beyond its log-probabilities.
    References: slime#245, unsloth-zoo#891, AReno#524, SkyRL#1908.
    """
    for policy in trace.of(PolicyColumns):
        noted = _noted(trace, policy.version)
        if not noted:
            continue
        columns, begun = [ragged.split(trace.array(policy, each), policy.lengths) for each in ("version", "engine")], {}
        for name, versions, nats in zip(policy.ids, *columns, strict=True):
            for turn in _turns(trace, policy.version, name, versions, nats.astype(np.float32)):
                begun[turn.answer] = turn.version
                yield _same(turn, NATS, noted[turn.answer].nats if turn.answer in noted else None)
        for rollouts in trace.of(Rollouts, version=policy.version):
            columns = [ragged.split(trace.array(rollouts, each), rollouts.lengths) for each in ("versions", "tokens")]
            for name, versions, tokens in zip(rollouts.ids, *columns, strict=True):
                for turn in _turns(trace, policy.version, name, versions, tokens.astype(np.int64)):
                    if turn.answer in noted:
                        yield _same(turn, TOKENS, noted[turn.answer].tokens)
        for given in trace.of(GivenRoutes, version=policy.version):
            for name, routes in zip(given.rollouts, _routes(trace.array(given), len(given.rollouts)), strict=True):
                answer = name, 0
                if answer in begun and answer in noted and noted[answer].routes != NO_SEAL:
                    turn = _Turn(answer=answer, version=begun[answer], seal=seal_of_array(routes))
                    yield _same(turn, ROUTES, noted[answer].routes)


def _routes(rows: np.ndarray, num_rollouts: int) -> Iterator[np.ndarray]:
    """[tokens, layers, experts per token] int32 of each rollout, up to its last token with a route."""
    layers = np.unique(rows[:, 2])
    for own in np.split(rows, np.searchsorted(rows[:, 0], range(1, num_rollouts))):  # they stand in this order
        routes = np.full((own[:, 1].max(initial=-1) + 1, len(layers), rows.shape[1] - 3), MISSING, np.int32)
        routes[own[:, 1], np.searchsorted(layers, own[:, 2])] = own[:, 3:]
        yield routes


def _noted(trace: Trace, version: int) -> Mapping[Answer, _Seals]:
    """Seals of each answer of a step's rounds."""

    def seals_of(item: RequestSeeds) -> Iterator[list[_Seals]]:
        of_routes = item.routes or [[NO_SEAL] * len(own) for own in item.seals]
        for seals, routed in zip(item.seals, of_routes, strict=True):
            yield [_Seals(*own, routes) for own, routes in zip(seals, routed, strict=True)]

    return by_answer(trace, version, seals_of)


def by_answer(trace: Trace, version: int, of: Callable[[RequestSeeds], Iterable[Sequence[T]]]) -> Mapping[Answer, T]:
    """Give what was noted of the answers of each turn of a round to these answers, in all rounds of a step."""
    found: dict[Answer, T] = {}
    for item in trace.of(RequestSeeds, version=version):
        played = next(trace.of(EpisodeTurns, version=version, name=item.name), None)
        for turn, noted in enumerate(of(item)):
            owners = item.answers
            if turn and played is not None:
                pairs = zip(played.episodes, played.indices, strict=True)
                owners = tuple(episode for episode, index in pairs if index == turn)
            # An answer without a turn, or a turn without an answer, stays without its other side.
            found |= {(owner, turn): own for owner, own in zip(owners, noted, strict=False)}
    return found


def _turns(trace: Trace, version: int, name: str, versions: np.ndarray, values: np.ndarray) -> Iterator[_Turn]:
    """Turns of a rollout of a step, by the tokens that some weights sampled."""
    for answer, begin, end in answers_in(trace, version, name, versions):
        yield _Turn(answer=answer, version=int(versions[begin]), seal=seal_of_array(values[begin:end]))


def answers_in(trace: Trace, version: int, name: str, versions: np.ndarray) -> Iterator[tuple[Answer, int, int]]:
    """Answers in a rollout of a step, with the begin and the end of their tokens, which some weights sampled."""
    begin_at = 0
    if any(item.step_wise for item in trace.of(EpisodeTurns, version=version)):
        name, _, number = name.rpartition("/")
        begin_at = int(number)
    for turn, (begin, end) in enumerate(spans(versions >= 0), begin_at):
        yield (name, turn), begin, end


def _same(turn: _Turn, what: str, right: int | None) -> Comparison:
    name, number = turn.answer
    own = f"turn {number} of `{name}`" if number else f"`{name}`"
    sentence = f"the {what} of {own} are not those that the engine gave"
    sentence = f"the engine gave no answer that is {own}" if right is None else sentence
    at, noun = At(Stage.ROLLOUT if what == NATS else Stage.DATA, turn.version), f"{what} of {own}".replace("`", "")
    left, wanted = (None if seal is None else f"checksum {seal:08x}" for seal in (turn.seal, right))
    return compare_value(at, noun, left, wanted, same=turn.seal == right, sentence=sentence)


def compare_answers(trace: Trace, asked: SamplingAsked, policy: PolicyColumns) -> Iterator[Comparison]:
    """Compare each sampled token of a step's answers; those of engines that name no weights are left out."""
    named = by_answer(trace, policy.version, lambda item: item.weights)
    columns = ragged.split(trace.array(policy, "version"), policy.lengths)
    for name, versions in zip(policy.ids, columns, strict=True):
        for answer, begin, end in answers_in(trace, policy.version, name, versions):
            if not named.get(answer):
                continue
            held = [version for version, count in named[answer] for _ in range(count)]
            claimed = versions[begin:end].tolist()
            wrong = _wrong(trace, asked.sent, claimed, held)
            own = f"turn {answer[1]} of `{answer[0]}`" if answer[1] else f"`{answer[0]}`"
            at = next(iter(wrong), 0)
            at_name, where = f"weights of {own}".replace("`", ""), At(Stage.ROLLOUT, policy.version, "engine")
            sentence = f"{len(wrong):,} of {len(claimed):,} tokens of {own} claim other weights than its engine held"
            found = f"version {held[at]}" if at < len(held) else "no token"
            right, same = f"version {claimed[at]} of token {at}, as it claims", not wrong and len(claimed) == len(held)
            yield compare_value(where, at_name, found, right, same=same, sentence=sentence)


def compare_evaluated(trace: Trace, item: EvaluatedAnswers) -> Iterator[Comparison]:
    """Compare the weights of all answers of an evaluation; those of engines that name none are left out."""
    sent = () if item.sent is None else (item.sent,)
    for held in item.weights:
        at, same = At(Stage.ROLLOUT, item.version, "engine"), not _wrong(trace, sent, [item.claimed], [held])
        sentence = f"an evaluation names version {item.claimed}, and its engine held version {held}"
        yield compare_value(at, f"weights {held}", held, item.claimed, same=same, sentence=sentence)


def _wrong(trace: Trace, sent: Collection[int], claimed: list[int], held: list[int]) -> list[int]:
    """Places of tokens that other weights sampled than they claim; tokens without a name of weights are all wrong."""
    right = {version: sent_as(trace, sent, version) for version in {*claimed}}
    found = np.full(len(claimed), -1)
    found[: len(held)] = held[: len(claimed)]
    return [
        at
        for at, (version, own) in enumerate(zip(claimed, found.tolist(), strict=True))
        if own < 0 or (own > version if right[version] is None else own != right[version])
    ]


def sent_as(trace: Trace, sent: Collection[int], version: int) -> int | None:
    """Return the version under which an engine was sent the weights of a version.

    A step without an update sends nothing: its version is sampled by the weights that were sent last before it. Of
    weights that an earlier process sent it is known alone that they are no newer.

    Args:
        trace: of a step, with what is known of the one before.
        sent: versions that the engine was sent last.
        version: that tokens claim.

    Returns:
        The version itself, or an older one; None where it is not known.
    """
    before = next(trace.of(PreviousStep, version=version), None)
    if before is not None and before.updated:
        return version
    return max((own for own in sent if own <= version), default=None)


def adapters_named(trace: Trace, versions: Iterable[int], sent: Collection[int]) -> list[str] | None:
    """Return names of the adapters that sampled some versions, as an engine gets them; see `sent_as`.

    Returns:
        A name for each version; empty for a run whose engine gets no adapter; None where it is not known.
    """
    config = flat(trace.manifest.config)
    if not config.get("lora.rank") or config.get("lora.sync") != "adapter":
        return []
    held = {sent_as(trace, sent, version) for version in versions}
    return None if None in held else [f"version-{own:06d}" for own in sorted(own for own in held if own is not None)]


@check(
    "DAT015",
    needs=(SamplingAsked, PolicyColumns, PreviousStep),
    applies=on(
        step=LIVE & WEIGHTS_SENT,
        loop=recorded(SamplingAsked, PolicyColumns, RequestSeeds)
        & told("engine versions", "the engine names no version of its weights"),
    ),
)
def version_of_other_weights(trace: Trace) -> Iterator[Comparison]:
    """Sampled tokens claim the version of the weights that sampled them.

    What it checks: per answer, the version that each token claims against the one that the engine's own process says it
    held when it sampled the token: the version that came with its last completed update.
    Why it matters: a rollout that is stamped one version too old is dropped too early, and is compared with nobody's
    weights between sampled steps. Answers that are sampled before a sync, and claim the version after it, are trained
    as if on-policy; in bf16 one update of the weights moves a log-probability by less than noise.
    Evidence: advantage/policy ("version"), train/previous (whether the step before took an update), data/seeds
    ("weights"), data/asked ("sent").
    Tolerance and its source: exact; versions are copied.
    Where to look: what counts versions, and whether answers are sampled before or after a sync.
    What it does not catch: answers that are sampled further ahead than was asked for, beyond the bound of their age
    (ADV003); a transfer that brings other weights than its version says (WGT020, ENG001), or weights that change after
    it (ENG001, ENG009); of engines that get adapters, which adapter (LGP011); in the first step after a resume, older
    weights than a batch from before claims.
    References: prime-rl#1764, rllm#622, cosmos-rl#592.
    """
    for asked in trace.of(SamplingAsked):
        for policy in trace.of(PolicyColumns, version=asked.version):
            yield from compare_answers(trace, asked, policy)

"""Answers as engines gave them and as a step has them, and the weights that they name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from verifier.core import ragged
from verifier.core.check import At, Comparison, Stage, Trace, check, compare_value
from verifier.core.condition import NEEDS, on, recorded, told
from verifier.core.seal import NO_SEAL, seal_of_array
from verifier.knob import flat
from verifier.stages.advantage.records import Advantages, PolicyColumns
from verifier.stages.checks_conditions import LIVE, SYNCED, WEIGHTS_SENT
from verifier.stages.data.records import Drops, EpisodeTurns, RequestSeeds, SamplingAsked
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
    it (ENG001, ENG009); of engines that get adapters, which adapter (LGP011); in the first `grpo.max_staleness` steps
    after a resume, older weights than a batch from before claims.
    References: prime-rl#1764, rllm#622, cosmos-rl#592.
    """
    for asked in trace.of(SamplingAsked):
        for policy in trace.of(PolicyColumns, version=asked.version):
            yield from compare_answers(trace, asked, policy)


@check(
    "DAT008", needs=(SamplingAsked, PolicyColumns, Drops, Rollouts),
    applies=on(step=SYNCED, loop=recorded(PolicyColumns, Advantages, Drops, SamplingAsked)
        & told("ends", "no end token is known")),
)  # fmt: skip
def answer_ends_elsewhere(trace: Trace) -> Iterator[Comparison]:
    """A live answer is in the loss from its first token to its end token, and was cut off only at the greatest length.

    What it checks: per rollout that stays in the batch, that the loss has each token that a version of the weights
    sampled, and no other; of those that a recorded loop rejected since, that it had them. Per turn of a rollout that
    was packed (an answer without an environment is one), that the end token stands at its last place alone, that it has
    no more tokens than are allowed, and as many as that if no end token ends it; in an episode of several turns each
    but the last was ended. And that a rollout is said to be cut off just if its last turn has no end token.
    Why it matters: an end token that is masked, as one that is also padding, is never learned, and answers grow until
    they are cut off. An answer that counts as cut off is left out; one whose stop token does not reach the engine runs
    on.
    Evidence: data/asked (as the config asks), advantage/policy, data/drops, pack/rollouts.
    Tolerance and its source: exact; tokens and flags.
    Where to look: what makes the loss mask of an answer, its end token above all; which stop tokens and which limit
    reach the engine; and what tells a whole answer from one that was cut off.
    What it does not catch: tokens that were rejected wrongly (ADV003); an answer that is shorter than allowed and ends
    with another end token that the checkpoint names, at which engines stop too; tokens of an answer that are lost with
    their versions (LGP009, by what comes after); a rollout without a token in the loss, which no rank packs, beyond its
    flag.
    References: trl#4970, RL#4089, SkyRL#1319, verl#213.
    """
    for asked in trace.of(SamplingAsked):
        if not asked.max_answer_tokens:  # a step of a recorded loop that does not say
            continue
        for policy in trace.of(PolicyColumns, version=asked.version):
            for drops in trace.of(Drops, version=asked.version):
                yield from _masks(trace, policy, dict(zip(drops.ids, drops.reasons, strict=True)))
        turns: dict[str, list[list[int]]] = {}
        for rollouts in trace.of(Rollouts, version=asked.version):
            turns |= _sampled_turns(trace, rollouts)
        ends, at = (asked.end, *asked.other_ends) if asked.ends else (), At(Stage.ROLLOUT, asked.version, "engine")
        for name, own in turns.items():
            yield compare_end(at, f"end of {name}", f"the answer `{name}`", own, asked.max_answer_tokens, ends)
        for drops in trace.of(Drops, version=asked.version):
            for name, truncated in zip(drops.ids, drops.truncated, strict=True):
                if name in turns:
                    yield _flag(asked, name, turns[name][-1], truncated)


def _masks(trace: Trace, policy: PolicyColumns, reasons: Mapping[str, str]) -> Iterator[Comparison]:
    masks = ragged.split(trace.array(policy, "own" if policy.rejects else "mask").astype(bool), policy.lengths)
    versions = ragged.split(trace.array(policy, "version"), policy.lengths)
    for name, mask, version in zip(policy.ids, masks, versions, strict=True):
        if reasons.get(name):
            continue
        sampled = version >= 0
        wrong = np.flatnonzero(mask != sampled)
        side = "" if not wrong.size else "out of" if sampled[wrong[0]] else "in"
        outside = f"{wrong.size} of the {int(sampled.sum())} tokens that were sampled for `{name}` are out of the loss"
        others = f"{wrong.size} tokens of `{name}` are wrongly in or out of the loss"
        right = f"{int(sampled.sum())} tokens in the loss"
        found = f"{int(mask.sum())}, token {wrong[:1]} {side} the loss"
        at, sentence = At(Stage.DATA, policy.version), outside if side == "out of" else others
        yield compare_value(at, name, found, right, same=not wrong.size, sentence=sentence)


def _sampled_turns(trace: Trace, rollouts: Rollouts) -> Mapping[str, list[list[int]]]:
    """Sampled tokens of each turn of each rollout; an answer without an environment is one."""
    tokens = ragged.split(trace.array(rollouts, "tokens"), rollouts.lengths)
    sampled = ragged.split(trace.array(rollouts, "sampled").astype(bool), rollouts.lengths)
    found = {}
    for name, ids, drawn in zip(rollouts.ids, tokens, sampled, strict=True):
        if own := spans(drawn):
            found[name] = [ids[at:end].tolist() for at, end in own]
    return found


def compare_end(
    at: At, what: str, subject: str, turns: Sequence[Sequence[int]], most: int, ends: Sequence[int]
) -> Comparison:
    """Compare the end of each turn of an answer with what ends it; see `wrong_end`."""
    said = (
        wrong_end(turn, most, ends, is_last=turn is turns[-1], where=f" in turn {number}" if number else "")
        for number, turn in enumerate(turns)
    )
    wrong = next((words for words in said if words), "")
    right = f"up to the first token {ends[0]}, or {most:,} tokens" if ends else f"{most:,} tokens"
    found = ", ".join(f"{len(turn):,} tokens, the last is {turn[-1]}" for turn in turns[-2:])
    return compare_value(at, what, found, right, same=not wrong, sentence=f"{subject} {wrong}")


def wrong_end(tokens: Sequence[int], most: int, ends: Sequence[int], *, is_last: bool, where: str = "") -> str:
    """Words for what is wrong with the end of an answer or turn; empty if nothing is.

    Args:
        tokens: that were sampled.
        most: tokens that are allowed.
        ends: tokens that end it, the tokenizer's end token first; empty where none does.
        is_last: nothing comes after it.
        where: words that say which turn it is.
    """
    size, end = len(tokens), ends[0] if ends else None
    if size > most:
        return f"has {size:,} tokens{where}, {most:,} are allowed"
    ended = tokens[-1] == end
    if end in tokens[:-1]:
        return f"runs on after its end token, {end}, at place {[*tokens].index(ends[0])} of {size}{where}"
    if not ended and not is_last:
        return f"goes on without an end token{where}"
    if tokens[-1] not in ends and size != most:
        return f"stops after {size:,} tokens{where}, without an end token and before {most:,}"
    return ""


def spans(drawn: np.ndarray) -> list[tuple[int, int]]:
    """Beginning and end of each run of sampled tokens, which are turns."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], drawn, [False]])))
    return [(begin, end) for begin, end in edges.reshape(-1, 2).tolist()]


def _flag(asked: SamplingAsked, name: str, last: Sequence[int], truncated: bool) -> Comparison:
    words = {True: "cut off", False: "whole"}
    says = "", f"its last token is {last[-1]}, the end token {asked.end}"
    right, subject = words[last[-1] != asked.end], f"the answer `{name}`, by its flag,"
    return compare_value(asked, f"flag of {name}", words[truncated], right, subject=subject, says=says)


@check(
    "DAT007", needs=(SamplingAsked, Advantages),
    applies=on(step=LIVE, loop=NEEDS & told("sizes", "the loop does not say how many answers it asks for")),
)  # fmt: skip
def step_of_another_size(trace: Trace) -> Iterator[Comparison]:
    """A live batch has the prompts, and of each prompt the answers, that were asked of the engine.

    What it checks: the number of prompts with an answer, and the number of answers to each, where the turns of a
    trajectory are one answer, against what the step asked of the engine.
    Why it matters: an answer that is lost on its way changes the group that its advantages are relative to. All other
    counts are then those of what was left, and agree.
    Evidence: data/asked, advantage/advantages.
    Tolerance and its source: exact; these are counts.
    Where to look: what loses answers of the engine.
    What it does not catch: recorded rollouts; which groups further rounds of sampling replace.
    References: labs-molt#109, SkyRL#1529.
    """
    for asked in trace.of(SamplingAsked):
        for given in trace.of(Advantages, version=asked.version):
            answers: dict[str, set[str]] = defaultdict(set)
            for group, trajectory in zip(given.groups, given.trajectories, strict=True):
                answers[group].add(trajectory)
            counts = [("prompts with an answer", len(answers), asked.batch_size)]
            counts += [(f"answers to prompt `{group}`", len(own), asked.group_size) for group, own in answers.items()]
            for what, actual, expected in counts:
                says = "", f"batch size {asked.batch_size}, {asked.group_size} answers"
                yield compare_value(
                    asked, what, actual, expected, subject=f"the number of {what} in the step", says=says
                )

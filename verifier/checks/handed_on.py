"""Answers and rewards as the processes that made them gave them, against those that a step trains on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from verifier.checks.answer_ends import spans
from verifier.core import ragged
from verifier.core.check import check
from verifier.core.comparison import Comparison
from verifier.core.records_policy import (
    EpisodeTurns,
    GivenRewards,
    PolicyColumns,
    RequestSeeds,
    RewardSeals,
)
from verifier.core.records_tokens import Rollouts
from verifier.core.seal import seal_of_array, seal_of_reward
from verifier.core.stage import Stage
from verifier.core.trace import Trace

TOKENS, NATS = "token ids", "log-probabilities"
"""Parts of an answer; the latter are the engine's, so that they are wrong where its checks find them so."""
_Answer = tuple[str, int]
"""Rollout, or episode, and turn of an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """One turn of a rollout, as the step has it."""

    answer: _Answer
    version: int
    """Weights that sampled its first token, as it claims: facts of the engine about them come after it."""
    seal: int


@check("DAT014", needs=(RequestSeeds, PolicyColumns), scope="draws")
def answer_differs_from_engines(trace: Trace) -> Iterator[Comparison]:
    """Every live answer is trained with the token ids and the log-probabilities that the engine gave for it.

    What it checks: per turn of a rollout (an answer without an environment is one), seals that were taken of the
    engine's answer as it came: of its token ids, against the rollouts that ranks pack, and of its log-probabilities,
    against those of the policy loss.
    Why it matters: log-probabilities that are rounded or clamped on their way, or replaced by the trainer's where some
    are missing, make an importance weight of the wrong policy. Replaced ones agree with the trainer on every token, so
    that a mismatch seems to be gone and the correction is off.
    Evidence: data/seeds, data/turns, advantage/policy, pack/rollouts.
    Tolerance and its source: exact; both are copied (CRC-32 of the bytes).
    What it does not catch: an answer that is wrong as it comes from the engine (LGP003, LGP009, LGP011); versions of
    tokens; a rollout without a token in the loss, which no rank packs, beyond its log-probabilities.
    References: slime#245, unsloth-zoo#891.
    """
    for policy in trace.of(PolicyColumns):
        noted = _noted(trace, policy.version)
        if not noted:
            continue
        columns = [ragged.split(trace.array(policy, each), policy.lengths) for each in ("version", "engine")]
        for name, versions, nats in zip(policy.ids, *columns, strict=True):
            for turn in _turns(trace, policy.version, name, versions, nats.astype(np.float32)):
                yield _same(turn, NATS, noted.get(turn.answer, (None, None))[1])
        for rollouts in trace.of(Rollouts, version=policy.version):
            columns = [ragged.split(trace.array(rollouts, each), rollouts.lengths) for each in ("versions", "tokens")]
            for name, versions, tokens in zip(rollouts.ids, *columns, strict=True):
                for turn in _turns(trace, policy.version, name, versions, tokens.astype(np.int64)):
                    if turn.answer in noted:
                        yield _same(turn, TOKENS, noted[turn.answer][0])


def _noted(trace: Trace, version: int) -> Mapping[_Answer, tuple[int, int]]:
    """Seals of token ids and log-probabilities of each answer of a step's rounds."""
    found: dict[_Answer, tuple[int, int]] = {}
    for item in trace.of(RequestSeeds, version=version):
        played = next(trace.of(EpisodeTurns, version=version, name=item.name), None)
        for turn, seals in enumerate(item.seals):
            owners = item.answers
            if turn and played is not None:
                pairs = zip(played.episodes, played.indices, strict=True)
                owners = tuple(episode for episode, index in pairs if index == turn)
            # An answer without a turn, or a turn without an answer, stays without its other side.
            found |= {(owner, turn): seal for owner, seal in zip(owners, seals, strict=False)}
    return found


def _turns(trace: Trace, version: int, name: str, versions: np.ndarray, values: np.ndarray) -> Iterator[_Turn]:
    """Turns of a rollout of a step, by the tokens that some weights sampled."""
    begin_at = 0
    if any(item.step_wise for item in trace.of(EpisodeTurns, version=version)):
        name, _, number = name.rpartition("/")
        begin_at = int(number)
    for turn, (begin, end) in enumerate(spans(versions >= 0), begin_at):
        yield _Turn(answer=(name, turn), version=int(versions[begin]), seal=seal_of_array(values[begin:end]))


def _same(turn: _Turn, what: str, right: int | None) -> Comparison:
    name, number = turn.answer
    stage = Stage.DATA if what == TOKENS else Stage.ROLLOUT
    own = f"turn {number} of `{name}`" if number else f"`{name}`"
    return Comparison(
        what=f"{what} of {own}".replace("`", ""), same=turn.seal == right, stage=stage, version=turn.version,
        badness=1.0,
        sentence=f"the {what} of {own} are not those that the engine gave"
        if right is not None else f"the engine gave no answer that is {own}",
        expected="nothing" if right is None else f"{right:08x} (checksum, as the engine's answer came)",
        actual=f"{turn.seal:08x} (checksum, as the step has them)", allowed="exact (they are copied)",
        hint="look at what rounds, clamps, fills in or reorders answers between the engine and the batch",
    )  # fmt: skip


@check("RWD003", needs=(RewardSeals, GivenRewards), scope="draws")
def reward_of_another_text(trace: Trace) -> Iterator[Comparison]:
    """Every reward of a live answer was given by the reward's own process, for this text and this gold answer.

    What it checks: per rollout with a text, that the process in which the reward function runs named this reward, for
    this text and this gold answer, in this step, whatever the function is.
    Why it matters: rewards that come back in another order, stay in another order when a batch is sorted or filtered,
    come from a cache by a part of what they depend on, or are 0 where the function raised: each looks like a reward,
    and the policy learns from noise.
    Evidence: reward/seals, reward/rewards.
    Tolerance and its source: exact (CRC-32 of text, gold answer and reward).
    What it does not catch: a function that is wrong itself (RWD001, of the reward `answer`); equal rewards that are
    exchanged, which change nothing; rewards of evaluations.
    References: verl#2185, NeMo-RL#3794, open-r1#134.
    """
    for given in trace.of(GivenRewards):
        sealed = [item for item in trace.of(RewardSeals, version=given.version) if item.seals]
        known = {seal for item in sealed for seal in item.seals}
        if not known or not (given.name == "rewards" or given.name.startswith("replaced ")):
            continue
        for name, text, answer, reward in zip(given.ids, given.texts, given.answers, given.rewards, strict=True):
            if text is None:
                continue
            yield Comparison(
                what=name, same=seal_of_reward(text, answer or "", reward) in known, stage=Stage.REWARD,
                version=given.version, badness=1.0,
                sentence=f"the reward of `{name}`, {reward:g}, is none that `{given.reward}` gave for its text",
                expected=f"a reward that its process gave for `{text[-40:]}`", actual=f"{reward:g}",
                allowed="exact (rewards are copied)",
                hint="look at what orders, caches or replaces rewards between their function and the batch",
            )  # fmt: skip

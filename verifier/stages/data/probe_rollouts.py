"""Evidence of a step's batch: prompts, requests and rewards, what has left the loss, advantages, inputs of the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

import numpy as np
import xxhash
from msgspec import structs

from verifier.config import TrainConfig
from verifier.config.grpo import GrpoOptions
from verifier.core.record import Probe
from verifier.data.examples import Example
from verifier.data.recorded import RolloutRow
from verifier.data.rollout import Rollout, route_rows
from verifier.data.second_tokenizer import ReadRow, SecondTokenizer, why_unread
from verifier.data.tokenizer import AS_SHIPPED, ChatTemplate, Tokenizer
from verifier.model.checkpoint import Checkpoint
from verifier.model.families import size_if_any
from verifier.rewards.answer import is_number
from verifier.stages.advantage.records import Advantages, LossColumns, PolicyColumns
from verifier.stages.data.records import (
    DataOrder,
    Drops,
    EpisodeTurns,
    HeldOutRead,
    RequestSeeds,
    RolloutTexts,
    SamplingAsked,
    TokensRead,
)
from verifier.stages.replay.records import GivenRoutes
from verifier.stages.reward.records import GivenRewards
from verifier.trainer.batches import SCORED, OptimizerUpdate, ScoredRollouts, Values
from verifier.trainer.episodes import PlayedTurns
from verifier.trainer.evaluation import ends_of
from verifier.trainer.observer import PolicyBatch
from verifier.trainer.run_data import RunData
from verifier.trainer.sampled_batch import SampledBatch


def record_sampled(probe: Probe, config: TrainConfig, data: RunData, step: int, batch: SampledBatch) -> None:
    """Record the prompts of a step, its requests, and the rewards of groups that were replaced."""
    reward, resets = config.grpo.reward, not config.grpo.keep_kv_cache
    for number, item in enumerate(batch.rounds):
        probe.emit(order_of(data, step, number, [data.train[at] for at in item.indices]))
        if item.turns is not None:
            probe.emit(turns_of(config.grpo, f"round {number}", step, item.turns))
        probe.emit(
            RequestSeeds(
                name=f"round {number}", version=step, round=number,
                turns=tuple(tuple(note.seed for note in own) for own in item.noted),
                seals=tuple(tuple((note.tokens, note.nats) for note in own) for own in item.noted),
                routes=tuple(tuple(note.routes for note in own) for own in item.noted),
                shaped=tuple(sorted({note.shaped for own in item.noted for note in own})),
                weights=tuple(tuple(note.weights for note in own) for own in item.noted),
                cached=tuple(tuple(note.cached for note in own) for own in item.noted) if resets else (),
                common=tuple(tuple(note.common for note in own) for own in item.noted) if resets else (),
                answers=tuple({row.trajectory or row.id: None for group in item.groups for row in group}),
                rewards=tuple(item.seals),
            )
        )  # fmt: skip
        lost = item.without_variance() if number + 1 < batch.limit else []
        if replaced := [row for at in lost for row in item.groups[at]]:
            probe.emit(rewards_of(f"replaced in round {number}", step, reward, replaced))


def turns_of(options: GrpoOptions, name: str, step: int, turns: PlayedTurns) -> EpisodeTurns:
    """Record of the turns of episodes."""
    return EpisodeTurns(
        name=name, version=step, environment=options.environment, max_turns=options.max_turns,
        step_wise=options.step_wise, **structs.asdict(turns),
    )  # fmt: skip


def order_of(data: RunData, step: int, number: int, examples: Sequence[Example]) -> DataOrder:
    """Record of the examples that a round of sampling asks, and of how their prompts read."""
    return DataOrder(
        name=f"examples of round {number}" if number else "examples", version=step, step=step, round=number,
        examples=tuple(example.id for example in examples), prompts=tuple(example.question for example in examples),
        answers=tuple(example.answer for example in examples),
        rendered=tuple(rendered(example, data.tokenizer) for example in examples),
    )  # fmt: skip


def sampling_asked(
    config: TrainConfig, checkpoint: Checkpoint, tokenizer: Tokenizer, step: int, *, whole_answers: bool
) -> SamplingAsked:  # fmt: skip
    """Record of what the config asks of a step's answers."""
    options, ends = config.grpo, ends_of(checkpoint, tokenizer)
    return SamplingAsked(
        name="answers", version=step, seed=config.seed, batch_size=config.data.batch_size,
        group_size=options.group_size, max_rounds=options.max_sampling_rounds, max_turns=options.max_turns,
        replicas=config.engine.replicas,
        temperature=options.temperature, max_answer_tokens=options.max_answer_tokens, end=tokenizer.eos_id,
        other_ends=tuple(item for item in ends if item != tokenizer.eos_id), ends=not whole_answers,
        vocab_size=size_if_any(checkpoint.config, "vocab_size") or 0, quantized=bool(config.engine.quantization),
        filtered=options.drop_overlong or options.drop_zero_variance or options.max_sampling_rounds > 1,
    )  # fmt: skip


def has_second_reader(reward: str, rows: Sequence[RolloutRow]) -> bool:
    """Tell whether RWD001 judges the reward of any of these rollouts, of a reward that has this name."""
    known = [(row.text, row.answer) for row in rows if row.text is not None and row.answer is not None]
    if reward:
        return reward == "answer" and bool(known)
    zero_or_one = all(row.reward in (0.0, 1.0) for row in rows)
    return zero_or_one and any("\\" not in text and is_number(answer) for text, answer in known)


def rewards_of(name: str, step: int, reward: str, rows: Sequence[RolloutRow]) -> GivenRewards:
    """Record of the rewards of rollouts, and what they were given for."""
    return GivenRewards(
        name=name, version=step, reward=reward, ids=tuple(row.id for row in rows),
        texts=tuple(row.text for row in rows), answers=tuple(row.answer for row in rows),
        rewards=tuple(row.reward for row in rows),
    )  # fmt: skip


def record_policy(probe: Probe, config: TrainConfig, batch: PolicyBatch) -> None:
    """Record what became of the rollouts of a step: those that have left the loss, advantages, inputs of the loss."""
    options, rows, scored = config.grpo, batch.rows, batch.scored
    ids = tuple(row.id for row in rows)
    probe.emit(
        Drops(
            name="batch", version=batch.step, ids=ids, truncated=tuple(row.truncated for row in rows),
            reasons=tuple(batch.reasons), drop_overlong=options.drop_overlong,
            drop_zero_variance=options.drop_zero_variance,
        )
    )  # fmt: skip
    probe.emit(rewards_of("rewards", batch.step, batch.reward, rows))
    in_reward = options.kl_in == "reward"
    probe.emit(
        Advantages(
            name="advantages", version=batch.step, estimator=options.advantage, ids=ids,
            groups=tuple(row.group for row in rows), trajectories=tuple(row.trajectory or row.id for row in rows),
            rewards=tuple(row.reward for row in rows), penalties=tuple(batch.penalties),
            kl_weight=options.kl_weight if in_reward else 0.0, kl_kind=options.kl_kind,
            token_counts=tuple(int(item.mask.sum()) for item in scored.rollouts), advantages=tuple(batch.advantages),
        )
    )  # fmt: skip
    flat = dict(batch.columns)
    if scored.reference is not None and in_reward:
        flat["penalty_reference"] = scored.reference
    record_policy_columns(probe, config, batch.step, scored, batch.kept, flat)
    for update in batch.updates:
        record_columns(probe, config, update)


def record_policy_columns(
    probe: Probe, config: TrainConfig, step: int, scored: ScoredRollouts, kept: Sequence[Rollout],
    columns: Mapping[str, Values] = MappingProxyType({}),
) -> None:  # fmt: skip
    """Record columns of the loss by token; those that rollouts and the scores before it have, and others."""
    options, given = config.grpo, scored.rollouts
    flat = {
        "old": scored.old, "engine": [item.logprobs for item in given], "mask": [item.mask for item in kept],
        "own": [item.mask for item in given], "version": [item.versions for item in given], **columns,
    }  # fmt: skip
    probe.emit(
        PolicyColumns(
            name="policy inputs", version=step, ids=tuple(item.id for item in given),
            lengths=tuple(map(len, given)),
            ratio_over=options.ratio_over, weight_level=options.weight_level or "", weight_cap=options.weight_cap,
            masks=((options.mask_level, options.mask_low, options.mask_high),) if options.mask_level else (),
            max_staleness=options.max_staleness, keep_kv_cache=options.keep_kv_cache, trained_version=step - 1,
        ),
        {name: np.concatenate([*values]) for name, values in flat.items()},
    )  # fmt: skip


def record_columns(probe: Probe, config: TrainConfig, update: OptimizerUpdate) -> None:
    """Record the weights of an update's tokens."""
    arrays = {
        "weight": np.concatenate([*update.weights]), "mask": np.concatenate([item.mask for item in update.rollouts])
    }  # fmt: skip
    probe.emit(
        LossColumns(
            name=update.name, version=update.step, aggregation=config.aggregation,
            constant=config.aggregation_constant or 1.0, ids=tuple(item.id for item in update.rollouts),
            groups=tuple(item.group for item in update.rollouts), lengths=tuple(map(len, update.rollouts)),
        ),
        arrays,
    )  # fmt: skip


def record_given(probe: Probe, config: TrainConfig, batch: PolicyBatch, layers: Sequence[int]) -> None:
    """Record the routes of each mini-batch, as the engine reported them, by global layers."""
    scored = [SCORED["current"], *([SCORED["reference"]] if config.grpo.has_reference else [])]
    for file, part in zip(batch.files, batch.parts, strict=True):
        rollouts = [batch.scored.rollouts[at] for at in part]
        passes = (*scored, *(item.name for item in batch.updates if item.file == file))
        record = GivenRoutes(
            name=file.stem, version=batch.step, rollouts=tuple(item.id for item in rollouts), passes=passes
        )
        probe.emit(record, route_rows(rollouts, layers))


def record_held_out_read(
    probe: Probe, step: int, config: TrainConfig, train: Sequence[Example], held_out: Sequence[Example]
) -> bool:
    """Record the problems of the evaluation as they were read, and which are trained on; False for none."""
    places = {_digest(example): at for at, example in reversed([*enumerate(train)])} if held_out else {}
    trained = [places.get(_digest(example), -1) for example in held_out]
    source, ids = config.data.held_out or config.data.source, tuple(example.id for example in held_out)
    if ids:
        record = HeldOutRead(name="held-out", version=step, source=source, ids=ids)
        probe.emit(record, np.array(trained, np.int64))
    return bool(ids)


def _digest(example: Example) -> int:
    return xxhash.xxh3_64_intdigest(example.question.encode())


_second = lru_cache(maxsize=1)(SecondTokenizer)


def rendered(example: Example, tokenizer: Tokenizer) -> str:
    """Text of all that an engine is given for an example, made apart from its tokens."""
    if example.messages:
        return tokenizer.chat_text(example.messages, to_answer=True)
    return tokenizer.decode(tokenizer.begin_ids) + example.prompt


def texts_of(step: int, tokenizer: Tokenizer, rollouts: Sequence[Rollout]) -> RolloutTexts:
    """Record of what the tokens of a step's rollouts say."""
    return RolloutTexts(
        name="texts", version=step, begin=tokenizer.decode(tokenizer.begin_ids),
        ids=tuple(item.id for item in rollouts), groups=tuple(item.group for item in rollouts),
        prompts=tuple(tokenizer.decode(item.tokens[: item.prompt_length].tolist()) for item in rollouts),
        answers=tuple(tokenizer.decode(_last_turn(item, tokenizer.eos_id)) for item in rollouts),
    )  # fmt: skip


def record_tokens(
    probe: Probe, step: int, tokenizer: Tokenizer, files: Path, rollouts: Sequence[Rollout],
    example_of: Callable[[int], Example], *, whole: bool, chat: ChatTemplate = AS_SHIPPED,
) -> None:  # fmt: skip
    """Record the tokens of a step's rollouts beside a second reading of their examples, if the tokenizer has one.

    Args:
        probe: of the step.
        step: from 1.
        tokenizer: that made and ended the rollouts.
        files: folder of the checkpoint, whose tokenizer a second reader reads; not what the tokenizer says of itself.
        rollouts: of the step.
        example_of: example of a rollout, by its place.
        whole: they are examples of fine-tuning, whose tokens are known to the last.
        chat: template that the run asks for.
    """
    if why_unread(files):
        return
    reader = _second(files, chat)
    keys = [item.id if whole else item.group for item in rollouts]
    known: dict[str, ReadRow] = {}
    for place, key in enumerate(keys):
        if key not in known:
            example = example_of(place)
            known[key] = reader.row(example) if whole else ReadRow(reader.prompt(example))
    given = [item.tokens if whole else item.tokens[: item.prompt_length] for item in rollouts]
    read = [known[key] for key in keys]
    texts = () if whole else tuple(reader.decode(_last_turn(item, tokenizer.eos_id)) for item in rollouts)
    arrays = {
        "tokens": np.concatenate([*given]).astype(np.int64),
        "read": np.array([token for row in read for token in (*row.prompt, *row.rest)], np.int64),
    }
    if whole:
        arrays["mask"] = np.concatenate([item.mask for item in rollouts]).astype(bool)
        marks = [mark for row in read for mark in (*(False for _ in row.prompt), *row.trained)]
        arrays["read_mask"] = np.array(marks, bool)
    probe.emit(
        TokensRead(
            name="tokens", version=step, ids=tuple(item.id for item in rollouts), whole=whole,
            prompt_lengths=tuple(item.prompt_length for item in rollouts), lengths=tuple(map(len, given)),
            read_prompt_lengths=tuple(len(row.prompt) for row in read),
            read_lengths=tuple(len(row.prompt) + len(row.rest) for row in read), texts=texts,
            end=tokenizer.eos_id, read_end=reader.end,
        ),
        arrays,
    )  # fmt: skip


def _last_turn(rollout: Rollout, end: int) -> list[int]:
    """Tokens from the last that was not sampled to the end of the rollout, without an end token."""
    others = np.flatnonzero(~rollout.sampled)
    tokens: list[int] = rollout.tokens[others[-1] + 1 if len(others) else 0 :].tolist()
    return tokens[:-1] if tokens and tokens[-1] == end else tokens

"""Examples of a run, to train on and held out, from what its config says of its data; loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from verifier.config.training import TrainConfig
from verifier.data.encode import split_turns
from verifier.data.examples import Example, KeyMap
from verifier.data.text_dataset import HELD_OUT, Split, Task, count_rows, load_examples, require_disjoint, splits_of
from verifier.data.tokenizer import ChatTemplate, Tokenizer, chat_template_of
from verifier.errors import UsageError

MOST_PROBLEMS = 512
"""Held-out problems by default, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """Examples of a run as they were read, and what writes their tokens."""

    task: Task
    tokenizer: Tokenizer
    files: Path
    """Folder of the checkpoint whose tokenizer it is."""
    chat: ChatTemplate
    """Template that the run asks for."""
    train: Sequence[Example]
    """Examples to train on, in order."""
    held_out: Sequence[Example]
    """Problems of the evaluation."""


def key_map(config: TrainConfig) -> KeyMap:
    """Columns that a run's examples are read from."""
    data = config.data
    return KeyMap(
        id=data.id_key, prompt=data.prompt_key, messages=data.messages_key, response=data.response_key,
        answer=data.answer_key, apply_chat_template=data.apply_chat_template,
    )  # fmt: skip


def open_chat_template(config: TrainConfig) -> ChatTemplate:
    """Chat template that a run asks for.

    Raises:
        UsageError: see `chat_template_of`.
    """
    return chat_template_of(config.data.chat_template, config.data.chat_template_kwargs)


def load_train(config: TrainConfig, task: Task, tokenizer: Tokenizer | None = None) -> tuple[Example, ...]:
    """Read and check the examples to train on.

    The template of `tokenizer` divides conversations of fine-tuning, see `split_turns`; None leaves them whole.

    Raises:
        UsageError: a bad row, too few examples for a step, or plain prompts where an environment answers turns.
    """
    data = config.data
    train = load_examples(
        data.source, task, split=data.split, count=data.num_examples, seed=config.seed, keys=key_map(config),
        divide=_divide(task, tokenizer), options=data.options,
    )  # fmt: skip
    if data.batch_size > len(train):
        raise UsageError(
            f"data.batch_size is {data.batch_size}, more than the {len(train):,} examples of `{data.source}`"
        )
    _refuse_plain(config, task, train, data.source)
    return train


def options_of_source(config: TrainConfig, source: str) -> tuple[str, ...]:
    """Options of a source: those of the config are of `data.source` alone."""
    return config.data.options if source == config.data.source else ()


def held_out_split(config: TrainConfig) -> str | None:
    """Split that the evaluation reads; None where there is none.

    Raises:
        UsageError: a source that cannot be read, or whose split is to be named.
    """
    data = config.data
    there = splits_of(data.held_out or data.source)
    if data.held_out is not None and not there:
        return data.split  # of a source that has no splits
    found = data.held_out_split or next((name for name in HELD_OUT if name in there), None)
    if data.held_out is not None and found is None:
        raise UsageError(f"data.held_out, `{data.held_out}`, has splits {', '.join(there)}: give data.held_out_split")
    return found


def with_evaluation(config: TrainConfig) -> TrainConfig:
    """Config with the number of held-out problems that there are, up to 512, where none is given.

    Raises:
        UsageError: a source that cannot be read.
    """
    if config.evaluation.num_problems is not None:
        return config
    split = None if config.data.rollouts is not None else held_out_split(config)
    source, number = config.data.held_out or config.data.source, 0
    if split is not None:
        number = count_rows(source, split, MOST_PROBLEMS, seed=config.seed, options=options_of_source(config, source))
    return replace(config, evaluation=replace(config.evaluation, num_problems=number))


def load_held_out(
    config: TrainConfig, train: Sequence[Example], task: Task, tokenizer: Tokenizer | None = None
) -> tuple[Example, ...]:  # fmt: skip
    """Read and check the problems of the evaluation; none where there is no evaluation.

    They have the fields that `task` asks for, and none is of `train`; for `tokenizer` see `load_train`.

    Raises:
        UsageError: a bad row, too few problems, or problems that are trained on.
    """
    data, num_problems = config.data, with_evaluation(config).evaluation.num_problems
    if not num_problems:
        return ()
    source, split = data.held_out or data.source, held_out_split(config)
    if split is None:
        raise UsageError(
            f"evaluation.num_problems is {num_problems} and data.held_out is not given, but `{source}` has no held-out "
            "split: give data.held_out or data.held_out_split, or leave evaluation.num_problems out"
        )
    if data.held_out is None and split == data.split:
        raise UsageError(f"data.split and data.held_out_split are both `{split}`: hold out another")
    try:
        held_out = load_examples(
            source, task, split=split, count=num_problems, seed=config.seed, keys=key_map(config),
            divide=_divide(task, tokenizer), options=options_of_source(config, source),
        )  # fmt: skip
    except UsageError as problem:
        raise UsageError(f"evaluation.num_problems is {num_problems}: {problem}") from problem
    require_disjoint(train, held_out)
    _refuse_plain(config, task, held_out, source)
    return held_out


def _divide(task: Task, tokenizer: Tokenizer | None) -> Split | None:
    return None if task != "sft" or tokenizer is None else lambda example: split_turns(example, tokenizer)


def _refuse_plain(config: TrainConfig, task: Task, examples: Sequence[Example], source: str) -> None:
    plain = next((example for example in examples if not example.messages), None)
    if task == "grpo" and config.grpo.has_turns and plain is not None:
        raise UsageError(
            f"grpo.environment is {config.grpo.environment} and `{plain.id}` of `{source}` has a prompt: turns "
            "are written by the chat template, give `messages`"
        )

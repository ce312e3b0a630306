"""Sources of examples: generated arithmetic, a JSONL file, or a `datasets` folder on disk; every bad row is refused."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from verifier.data.arithmetic import arithmetic_examples, calculator_examples
from verifier.data.examples import Example, Message, short
from verifier.data.lines import numbered_lines
from verifier.data.problem_sources import SOURCES, problem_examples
from verifier.errors import UsageError

ARITHMETIC, CALCULATOR = "arithmetic", "calculator"
Task = Literal["sft", "grpo"]
"""SFT needs a response in each row, GRPO an answer."""


class _MessageRow(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str


class _Row(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One row of a file, as docs/training-data.md has it."""

    id: str | None = None
    prompt: str | None = None
    messages: list[_MessageRow] | None = None
    response: str | None = None
    answer: str | int | float | None = None


def load_examples(
    source: str, task: Task, *, split: str = "train", count: int | None = None, seed: int = 1,
    options: Sequence[str] = (),
) -> tuple[Example, ...]:  # fmt: skip
    """Read and check examples.

    Args:
        source: "arithmetic", "calculator", "reasoning-gym:TASK", "verifiers:TASKSET", a JSONL file, or a folder that
            `datasets` saved.
        task: "sft" or "grpo": what each row must have.
        split: of arithmetic, or of a folder with several; a file has none.
        count: number of examples, the first ones of a file or folder; all by default.
        seed: of generated examples.
        options: of a task or a task set; see `problem_examples`.

    Raises:
        UsageError: no such source or split, or not so many examples; a row, named by its line, that is no JSON, has an
            unknown key, a wrong type, a repeated id, or lacks what the task needs.
    """
    if source == ARITHMETIC:
        return arithmetic_examples(split, count, seed)
    if source == CALCULATOR:
        return calculator_examples(split, count, seed, solved=task == "sft")
    if source.startswith(SOURCES):
        if task == "sft":
            raise UsageError(f"`{source}` has no responses to learn: give algorithm=grpo, or other data")
        return problem_examples(source, split, count, seed, options)
    if options:
        raise UsageError(f"data.options is given and `{source}` has no options: leave it out")
    path = Path(source)
    if path.is_dir():
        rows = _folder_rows(path, split)
    elif path.is_file():
        rows = _file_rows(path)
    else:
        raise UsageError(
            f"no data at `{source}`: give {ARITHMETIC}, {CALCULATOR}, a JSONL file or a folder that `datasets` saved"
        )
    found: dict[str, Example] = {}
    for number, (where, row) in enumerate(itertools.islice(rows, count), start=1):
        try:
            example = _example(row, f"{path.name}:{number}", task)
            if example.id in found:
                raise UsageError(f"the id `{example.id}` occurs twice")
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from error
        found[example.id] = example
    if not found or len(found) < (count or 0):
        raise UsageError(f"{path} has {len(found):,} examples, {count or 'at least 1'} asked for")
    return tuple(found.values())


def require_disjoint(train: Sequence[Example], held_out: Sequence[Example]) -> None:
    """Refuse examples that are trained on and held out; equal prompts make two examples equal.

    Raises:
        UsageError: names one prompt, and how many there are.
    """
    trained = {example.question for example in train}
    both = [example for example in held_out if example.question in trained]
    if both:
        raise UsageError(
            f"train and held-out data overlap in {len(both):,} of {len(held_out):,} held-out examples: "
            f"`{both[0].id}`, {short(both[0].question)}, is in both"
        )


def _example(read: _Row, default_id: str, task: Task) -> Example:
    if bool(read.prompt) == bool(read.messages):
        what = "both `prompt` and" if read.prompt else "neither `prompt` nor"
        raise UsageError(f"it has {what} `messages`: one is needed")
    messages = tuple(Message(role=item.role, content=item.content) for item in read.messages or ())
    answer = None if read.answer is None else str(read.answer).strip()
    if task == "grpo" and not answer:
        raise UsageError("it has no `answer`, which a reward needs")
    if task == "grpo" and messages and messages[-1].role == "assistant":
        raise UsageError("its last message is an assistant's: there is nothing left to answer")
    labelled = any(item.role == "assistant" and item.content for item in messages)
    if task == "sft" and not (read.response or labelled):
        raise UsageError("it has no label in the loss: neither a `response` nor an assistant's message")
    if task == "sft" and messages and messages[-1].role != "assistant":
        raise UsageError("its last message is not an assistant's, so nothing is learned from it")
    name = read.id or default_id
    return Example(id=name, prompt=read.prompt or "", messages=messages, response=read.response, answer=answer)


def _file_rows(path: Path) -> Iterator[tuple[str, _Row]]:
    for where, line in numbered_lines(path):
        try:
            yield where, msgspec.json.decode(line, type=_Row)
        except (msgspec.DecodeError, RecursionError) as error:
            raise UsageError(f"{where}: {error}") from error


def _folder_rows(path: Path, split: str) -> Iterator[tuple[str, _Row]]:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is no folder that `datasets` saved: {str(error).splitlines()[0]}") from error
    if isinstance(loaded, Mapping):
        if split not in loaded:
            raise UsageError(f"{path} has no split `{split}`: there are {', '.join(map(str, loaded))}")
        loaded = loaded[split]
    for number, row in enumerate(loaded, start=1):
        where = f"{path}, row {number}"
        try:
            yield where, msgspec.convert(row, _Row)
        except msgspec.ValidationError as error:
            raise UsageError(f"{where}: {error}") from error

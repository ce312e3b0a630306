"""A second reading of a run's data, by no code that the trainer reads them with: plain JSON, Arrow, a closed form.

Of each row it keeps 8-byte digests of its parts, so that a step's examples can be compared with the rows of the source.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import xxhash

from verifier.data.examples import Message
from verifier.data.problem_sources import (
    _MOST_REPEATED,
    DEFAULT_COUNT,
    REASONING_GYM,
    SOURCES,
    VERIFIERS,
    gym_problems,
    options_of,
)
from verifier.data.second_tokenizer import SecondTokenizer
from verifier.environments.verifiers_tasks import prompts_of
from verifier.errors import UsageError

DIGITS = frozenset("0123456789")
PARTS = ("id", "question", "prompt", "response", "answer", "metadata")
"""Parts of a row. The question is what held-out data may not share; the prompt has all messages and their roles."""
Said = tuple[str, str, bool]
"""(role, content, an assistant's is in the loss) of a message."""


def digests(
    name: str, question: str, prompt: str, messages: Sequence[Said], response: str | None, answer: str | None,
    metadata: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[int, ...]:  # fmt: skip
    """8-byte digest of each of `PARTS`, a whole number below 2**64."""
    whole = json.dumps([prompt, messages]) if messages else prompt
    further = json.dumps(dict(metadata), sort_keys=True, default=str)
    return (*map(_digest, (name, question, whole, response, answer, further)),)


def _digest(text: str | None) -> int:
    """Digest of a text, or of a byte that no text has."""
    return xxhash.xxh3_64_intdigest(b"\xff" if text is None else text.encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Names of the columns that a row's parts are read from; see `KeyMap`, which the trainer reads with."""

    names: Mapping[str, str | None] = MappingProxyType({})
    """Name of the column by part, where the two differ."""
    as_messages: bool = False
    """A prompt is a user's message."""
    changes: Callable[[Sequence[Said]], bool] = lambda _: False
    """True for a conversation whose earlier turns the chat template changes."""


def read_again(
    source: str, task: str, *, split: str = "train", count: int | None = None, seed: int = 1,
    columns: Columns | None = None, options: Sequence[str] = (),
) -> np.ndarray:  # fmt: skip
    """Digests of the rows of a source, [rows, parts] uint64, in one pass; see `text_dataset.load_examples`.

    Raises:
        UsageError: it cannot be read.
    """
    columns = columns or Columns()
    if source in ("arithmetic", "calculator"):
        rows = _sums(split, seed, source, columns, solved=task == "sft")
    elif source.startswith(SOURCES):
        again = read_problems_again(source, split, count, seed, options)
        rows = (
            digests(name, question, "", [(role, text, True) for role, text in asked], None, answer, further)
            for name, question, asked, answer, further in again
        )
    else:
        path = Path(source)
        rows = _named(path, _stored(path, split), task, columns)
    found = array("Q")
    try:
        for row in islice(rows, count):
            found.extend(row)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise UsageError(f"`{source}` cannot be read a second time: {type(problem).__name__}, {problem}") from problem
    return np.array(found, np.uint64).reshape(-1, len(PARTS))


def rows_of_step(folder: Path, step: int) -> list[dict[str, Any]]:
    """Recorded rollouts of a step, from 1, as plain JSON: those of the file whose name is in this place, 2 before 10.

    Raises:
        UsageError: they cannot be read.
    """
    try:
        name = _by_number([name for name in os.listdir(folder) if name.endswith(".jsonl")])[step - 1]
        return list(_lines(folder / name))
    except (OSError, ValueError, IndexError) as problem:
        raise UsageError(f"`{folder}` cannot be read a second time: {type(problem).__name__}, {problem}") from problem


def _by_number(names: Sequence[str]) -> list[str]:
    """Names in the order of the numbers in them, those of other text apart."""
    runs = {name: [(digit, "".join(own)) for digit, own in groupby(name, DIGITS.__contains__)] for name in names}
    width = max((len(run) for own in runs.values() for digit, run in own if digit), default=0)
    keys = {name: "".join(run.rjust(width, "0") if digit else run for digit, run in own) for name, own in runs.items()}
    return sorted(names, key=lambda name: (keys[name], name))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for line in file:
            yield json.loads(line.decode())


def _stored(path: Path, split: str) -> Iterator[dict[str, Any]]:
    """Rows of a folder that `datasets` saved, from its Arrow files, of Parquet files, or of a file of lines."""
    import pyarrow
    import pyarrow.parquet

    if path.is_file() and path.suffix != ".parquet":
        yield from _lines(path)
        return
    files = [str(path)] if path.is_file() else _of_split(path, split)
    for name in files:
        with pyarrow.parquet.ParquetFile(name) as parquet:
            for batch in parquet.iter_batches():
                yield from batch.to_pylist()
    if files:
        return
    folder = path / split if (path / "dataset_dict.json").exists() else path
    state = json.loads((folder / "state.json").read_text())
    for file in state["_data_files"]:
        with (
            pyarrow.memory_map(str(folder / file["filename"])) as mapped,
            pyarrow.ipc.open_stream(mapped) as batches,
        ):
            for batch in batches:
                chosen = state.get("_format_columns")
                yield from (batch if chosen is None else batch.select(chosen)).to_pylist()


def _of_split(path: Path, split: str) -> list[str]:
    """Parquet files of a split: those called so, up to the numbers at the end; all where none is called otherwise."""
    found = [os.path.join(at, name) for at, _, names in os.walk(path) for name in names if name.endswith(".parquet")]
    here = [name for name in found if os.path.dirname(name) == str(path)] or found

    def own(name: str) -> str:
        stem, *numbers = os.path.basename(name).removesuffix(".parquet").split("-of-")[0].rsplit("-", 1)
        return stem if not numbers or numbers[0].isdigit() else f"{stem}-{numbers[0]}"

    return sorted([name for name in here if own(name) == split] or here)


def _named(
    path: Path, rows: Iterator[dict[str, Any]], task: str, columns: Columns
) -> Iterator[tuple[int, ...]]:  # fmt: skip
    """Digests of rows, which are called by their place where they have no id."""
    own = columns.names
    taken = {word for name in own.values() if name for word in [name, *name.split("+")]}
    for place, row in enumerate(rows):

        def part(what: str, row: dict[str, Any] = row) -> Any:
            return _at(row, own[what]) if what in own else None if what in taken else row.get(what)

        messages = [_said(item) for item in part("messages") or ()]
        prompt, response, answer = part("prompt") or "", part("response"), part("answer")
        if prompt and columns.as_messages:
            messages = [("user", prompt, True)]
            if response and task == "sft":
                messages.append(("assistant", response, True))
            prompt, response = "", None
        read = taken | {what for what in ("id", "prompt", "messages", "response", "answer") if what not in own}
        yield from _parted(
            f"{path.name}:{place + 1}" if part("id") in (None, "") else str(part("id")), prompt, messages, response,
            None if answer is None else str(answer).strip(),
            {name: value for name, value in row.items() if name not in read}, columns,
        )  # fmt: skip


def _at(row: dict[str, Any], name: str | None) -> Any:
    """Value by the name of a column, by names joined by +, or by a path of names."""
    if name is None or name in row:
        return None if name is None else row[name]
    if "+" in name:
        return "\n".join(text for word in name.split("+") if (text := _at(row, word)))
    outer, _, inner = name.partition(".")
    return _at(row[outer], inner)


def _said(item: dict[str, Any]) -> Said:
    """A message; those of ShareGPT have other names."""
    if item.get("from") is not None:
        who = item["from"]
        return {"human": "user", "gpt": "assistant"}.get(who, who), item["value"], item.get("weight") != 0
    return item["role"], item["content"], item.get("weight") != 0


def _parted(
    name: str, prompt: str, messages: list[Said], response: str | None, answer: str | None,
    metadata: dict[str, Any], columns: Columns,
) -> Iterator[tuple[int, ...]]:  # fmt: skip
    """Digests of a row, or of each answer of a conversation whose earlier turns the template changes."""
    question = prompt or _asked(messages)
    answers = [at for at, (role, _, learned) in enumerate(messages) if role == "assistant" and learned]
    if len(answers) < 2 or not columns.changes(messages):
        yield digests(name, question, prompt, messages, response, answer, metadata)
        return
    for number, at in enumerate(answers, start=1):
        before = [(role, content, False) for role, content, _ in messages[:at]]
        yield digests(
            f"{name}/{number}", question, "", [*before, messages[at]], None, answer, metadata
        )  # fmt: skip


def _asked(messages: list[Said]) -> str:
    """All messages, or those before the first answer where the last is one."""
    roles = [role for role, _, _ in messages]
    end = roles.index("assistant") if roles and roles[-1] == "assistant" else len(roles)
    return json.dumps([(role, content) for role, content, _ in messages[:end]])


def _sums(split: str, seed: int, source: str, columns: Columns, *, solved: bool) -> Iterator[tuple[int, ...]]:
    """Digests of generated sums of two numbers of two digits, sorted by BLAKE2b of seed and prompt."""
    numbers = [(left, right) for left in range(10, 100) for right in range(10, 100)]
    keyed = sorted(
        (hashlib.blake2b(f"{seed}/{left}+{right}=".encode(), digest_size=16).digest(), left, right)
        for left, right in numbers
        if (zlib.crc32(f"{left}+{right}=".encode()) % 10 == 0) == (split == "held-out")
    )
    for _, left, right in keyed:
        prompt, total = f"{left}+{right}=", left + right
        if source == "arithmetic":
            yield digests(f"arithmetic/{prompt}", prompt, prompt, (), f"####{total:03}", str(total))
            continue
        messages = [("user", prompt, True)]
        if solved:
            messages += [("assistant", prompt, True), ("tool", str(total), True), ("assistant", f"####{total}", True)]
        yield from _parted(f"calculator/{prompt}", "", messages, None, str(total), {}, columns)


def read_problems_again(
    source: str, split: str, count: int | None, seed: int, options: Sequence[str]
) -> Iterator[tuple[str, str, list[tuple[str, str]], str | None, dict[str, Any]]]:
    """Id, question, messages, answer and further columns of each problem, drawn and divided for a second reading."""
    given, seen = options_of(options), set[int]()
    if source.startswith(REASONING_GYM):
        rows = gym_problems(source, given, seed)
    else:
        rows = prompts_of(source.removeprefix(VERIFIERS), given)
    repeated, most = 0, count or DEFAULT_COUNT
    for name, asked, answer, further in rows:
        question = json.dumps(asked)
        key = hash(question)
        if (zlib.crc32(question.encode()) % 10 == 0) is (split == "held-out") and key not in seen:
            seen.add(key)
            repeated = 0
            yield name, question, asked, answer, further
        else:
            repeated += 1
        if len(seen) == most or repeated == _MOST_REPEATED:
            return


def changes(second: SecondTokenizer, said: Sequence[Said]) -> bool:
    """Test whether the text up to an answer is another than it was when an earlier answer had been given."""
    talk = [Message(role=role, content=content) for role, content, _ in said]
    done = ""
    for at, (role, _, learned) in enumerate(said):
        if role == "assistant" and learned:
            if not second._render(talk[:at], to_answer=True).startswith(done):
                return True
            done = second._render(talk[: at + 1], to_answer=False)
    return False

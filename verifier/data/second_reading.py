"""A second reading of a run's data, by no code that the trainer reads them with: plain JSON, Arrow, a closed form.

Of each row it keeps 8-byte digests of its parts, so that a step's examples can be compared with the rows of the source.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from array import array
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from verifier.data.problem_sources import SOURCES, read_problems_again
from verifier.errors import UsageError

DIGITS = frozenset("0123456789")
PARTS = ("id", "question", "prompt", "response", "answer")
"""Parts of a row. The question is what held-out data may not share; the prompt has all messages and their roles."""


def digests(
    name: str, question: str, prompt: str, messages: Sequence[tuple[str, str]], response: str | None, answer: str | None
) -> tuple[int, ...]:
    """8-byte digest of each of `PARTS`, a whole number below 2**64."""
    whole = json.dumps([prompt, messages]) if messages else prompt
    return _digest(name), _digest(question), _digest(whole), _digest(response), _digest(answer)


def _digest(text: str | None) -> int:
    """Digest of a text, or of a byte that no text has."""
    return xxhash.xxh3_64_intdigest(b"\xff" if text is None else text.encode())


def read_again(
    source: str, task: str, *, split: str = "train", count: int | None = None, seed: int = 1,
    options: Sequence[str] = (),
) -> np.ndarray:  # fmt: skip
    """Digests of the rows of a source, [rows, parts] uint64, in one pass; see `text_dataset.load_examples`.

    Raises:
        UsageError: it cannot be read.
    """
    if source in ("arithmetic", "calculator"):
        rows = _sums(split, seed, source, solved=task == "sft")
    elif source.startswith(SOURCES):
        again = read_problems_again(source, split, count, seed, options)
        rows = (digests(name, question, "", asked, None, answer) for name, question, asked, answer in again)
    else:
        path = Path(source)
        rows = _named(path, _stored(path, split) if path.is_dir() else _lines(path))
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
    """Rows of a folder that `datasets` saved, from its Arrow files."""
    import pyarrow

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


def _named(path: Path, rows: Iterator[dict[str, Any]]) -> Iterator[tuple[int, ...]]:
    """Digests of rows, which are called by their place where they have no id."""
    for place, row in enumerate(rows):
        messages = [(item["role"], item["content"]) for item in row.get("messages") or ()]
        prompt, answer = row.get("prompt") or "", row.get("answer")
        yield digests(
            row.get("id") or f"{path.name}:{place + 1}", prompt or _asked(messages), prompt, messages,
            row.get("response"), None if answer is None else str(answer).strip(),
        )  # fmt: skip


def _asked(messages: list[tuple[str, str]]) -> str:
    """All messages, or those before the first answer where the last is one."""
    roles = [role for role, _ in messages]
    end = roles.index("assistant") if roles and roles[-1] == "assistant" else len(roles)
    return json.dumps(messages[:end])


def _sums(split: str, seed: int, source: str, *, solved: bool) -> Iterator[tuple[int, ...]]:
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
        messages = [("user", prompt)]
        question = json.dumps(messages)
        if solved:
            messages += [("assistant", prompt), ("tool", str(total)), ("assistant", f"####{total}")]
        yield digests(f"calculator/{prompt}", question, "", messages, None, str(total))

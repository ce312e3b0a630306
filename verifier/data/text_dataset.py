"""Sources of examples: generated arithmetic, JSONL, Parquet, or a folder on disk; every bad row is refused."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from verifier.data.arithmetic import SPLITS, arithmetic_examples, calculator_examples
from verifier.data.examples import Example, KeyMap, Message, messages_of, short, unread
from verifier.data.problem_sources import SOURCES, problem_examples
from verifier.data.recorded import numbered_lines
from verifier.errors import UsageError

ARITHMETIC, CALCULATOR = "arithmetic", "calculator"
Task = Literal["sft", "grpo"]
"""SFT needs a response in each row, GRPO an answer."""


HELD_OUT = ("held-out", "validation", "test")
"""Splits that an evaluation takes by default: the first of them that there is."""
Split = Callable[[Example], Sequence[Example]]
_SHARD = re.compile(r"[-_.]?\d+(-of-\d+.*)?$")
"""End of a Parquet file's name that numbers the files of one split."""


class _MessageRow(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str
    weight: Literal[0, 1] = 1


class _Row(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Parts of a row, as docs/training-data.md has them."""

    id: str | int | None = None
    prompt: str | None = None
    messages: list[_MessageRow] | None = None
    response: str | None = None
    answer: str | int | float | None = None


def load_examples(
    source: str, task: Task, *, split: str = "train", count: int | None = None, seed: int = 1,
    keys: KeyMap | None = None, divide: Split | None = None, options: Sequence[str] = (),
) -> tuple[Example, ...]:  # fmt: skip
    """Read and check examples.

    Args:
        source: "arithmetic", "calculator", "reasoning-gym:TASK", "verifiers:TASKSET", a file of JSON lines, a Parquet
            file, a folder of Parquet files or one that
            `datasets` saved.
        task: "sft" or "grpo": what each row must have.
        split: of arithmetic, or of a folder with several; a file has none.
        count: number of examples, the first ones of a file or folder; all by default.
        seed: of generated examples.
        keys: columns of a row's parts.
        divide: makes several examples of one, as `split_turns` does.
        options: of a task or a task set; see `problem_examples`.

    Raises:
        UsageError: no such source or split, or not so many examples; a row, named by its line, that is no JSON, has a
            wrong type, a repeated id, or lacks what the task needs; a key that names no column.
    """
    if source == ARITHMETIC:
        return arithmetic_examples(split, count, seed)
    if source == CALCULATOR:
        examples = calculator_examples(split, count, seed, solved=task == "sft")
        if divide is None:
            return examples
        return tuple(itertools.islice(itertools.chain.from_iterable(map(divide, examples)), count))
    if source.startswith(SOURCES):
        if task == "sft":
            raise UsageError(f"`{source}` has no responses to learn: give algorithm=grpo, or other data")
        return problem_examples(source, split, count, seed, options)
    if options:
        raise UsageError(f"data.options is given and `{source}` has no options: leave it out")
    keys, path = keys or KeyMap(), Path(source)
    found: dict[str, Example] = {}
    for number, (where, row) in enumerate(_rows(path, split), start=1):
        if count is not None and len(found) >= count:
            break
        try:
            example = _example(row, f"{path.name}:{number}", task, keys)
            for item in [example] if divide is None else divide(example):
                if item.id in found:
                    raise UsageError(f"the id `{item.id}` occurs twice")
                found[item.id] = item
        except msgspec.ValidationError as error:
            raise UsageError(f"{where}: {error}: give another column by its key of data, or null") from error
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from error
    if not found or len(found) < (count or 0):
        raise UsageError(f"{path} has {len(found):,} examples, {count or 'at least 1'} asked for")
    return tuple(itertools.islice(found.values(), count))


def count_rows(source: str, split: str, most: int, *, seed: int = 1, options: Sequence[str] = ()) -> int:
    """Rows of a split, up to a number, of a seed and options where they are generated.

    Raises:
        UsageError: no such source or split, or one that cannot be read.
    """
    if source in (ARITHMETIC, CALCULATOR):
        return min(most, len(arithmetic_examples(split)))
    if source.startswith(SOURCES):
        return len(problem_examples(source, split, None, seed, options, most=most))
    return sum(1 for _ in itertools.islice(_rows(Path(source), split), most))


def splits_of(source: str) -> tuple[str, ...]:
    """Names of the splits of a source; none for a file, and for a folder that is not divided.

    Raises:
        UsageError: a folder that cannot be read.
    """
    path = Path(source)
    if source in (ARITHMETIC, CALCULATOR) or source.startswith(SOURCES):
        return SPLITS
    if not path.is_dir():
        return ()
    if files := _parquet_files(path):
        return tuple(name for name in files if name)
    loaded = _saved(path)
    return tuple(map(str, loaded)) if isinstance(loaded, Mapping) else ()


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


def _example(row: Mapping[str, Any], default_id: str, task: Task, keys: KeyMap) -> Example:
    parts, metadata = keys.parts(row)
    if isinstance(parts.get("prompt"), list):
        raise UsageError(f"`{keys.prompt}` is a list: if it has messages, give data.messages_key={keys.prompt}")
    read = msgspec.convert({**parts, "messages": messages_of(parts.get("messages"))}, _Row)
    if read.prompt and read.messages:
        raise UsageError(
            "it has both `prompt` and `messages`: one is needed, give data.prompt_key=null or data.messages_key=null"
        )
    if not read.prompt and not read.messages:
        raise UsageError(unread(row))
    messages = tuple(
        Message(role=item.role, content=item.content, in_loss=bool(item.weight)) for item in read.messages or ()
    )
    prompt, response = read.prompt or "", read.response
    if prompt and keys.apply_chat_template:
        messages, prompt = (Message(role="user", content=prompt),), ""
        if response and task == "sft":
            messages = (*messages, Message(role="assistant", content=response))
        response = None
    for at, message in enumerate(messages, start=1):
        if message.role == "assistant" and not message.content:
            raise UsageError(f"message {at}, an assistant's, is empty")
    answer = None if read.answer is None else str(read.answer).strip()
    if task == "grpo" and not answer:
        raise UsageError("it has no `answer`, which a reward needs: give data.answer_key if another column has it")
    if task == "grpo" and messages and messages[-1].role == "assistant":
        raise UsageError("its last message is an assistant's: there is nothing left to answer")
    if task == "sft" and not (response or any(item.is_learned for item in messages)):
        raise UsageError("it has no label in the loss: neither a `response` nor an assistant's message")
    if task == "sft" and messages and messages[-1].role != "assistant":
        raise UsageError("its last message is not an assistant's, so nothing is learned from it")
    return Example(
        id=default_id if read.id in (None, "") else str(read.id), prompt=prompt, messages=messages, response=response,
        answer=answer, metadata=metadata,
    )  # fmt: skip


def _rows(path: Path, split: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if path.is_dir():
        return _tables(path, _of_split(path, split))
    if not path.is_file():
        raise UsageError(_absent(str(path)))
    return _tables(path, _opened([path])) if path.suffix == ".parquet" else _lines(path)


def _absent(source: str) -> str:
    if re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        name = source.rpartition("/")[2]
        return (
            f"no data at `{source}`: if that is a data set of a hub, download it first, by `hf download {source} "
            f"--repo-type dataset --local-dir {name}`, and give the folder of its Parquet files"
        )
    return (
        f"no data at `{source}`: give {ARITHMETIC}, {CALCULATOR}, a JSONL file, a Parquet file, or a folder of Parquet "
        "files or one that `datasets` saved"
    )


def _lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for where, line in numbered_lines(path):
        try:
            yield where, msgspec.json.decode(line, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            way = "; rows of a list are read if each has a line of its own" if line.lstrip().startswith("[") else ""
            raise UsageError(f"{where}: {error}{way}") from error


def _parquet_files(folder: Path) -> dict[str, list[Path]]:
    """Parquet files of a folder by split; by an empty name where they are of none, and none for a folder without."""
    files = sorted(folder.glob("*.parquet"))
    below = sorted({file.parent.name for file in folder.glob("*/*.parquet")})
    if not files and len(below) == 1:
        files = sorted(folder.glob("*/*.parquet"))
    elif not files and below:
        raise UsageError(f"{folder} has Parquet files in {', '.join(below)}: give one of these folders")
    found: dict[str, list[Path]] = {}
    for file in files:
        found.setdefault(_SHARD.sub("", file.stem), []).append(file)
    if len(found) == 1 and not found.keys() & {"train", *HELD_OUT}:
        return {"": files}
    return found


def _of_split(folder: Path, split: str) -> Any:
    if files := _parquet_files(folder):
        _require_split(folder, split, files)
        return _opened(files.get(split) or files[""])
    loaded = _saved(folder)
    if isinstance(loaded, Mapping):
        _require_split(folder, split, loaded)
        return loaded[split]
    return loaded


def _require_split(folder: Path, split: str, there: Mapping[Any, Any]) -> None:
    if split not in there and "" not in there:
        raise UsageError(
            f"{folder} has no split `{split}`: there are {', '.join(map(str, there))}; give data.split or "
            "data.held_out_split"
        )


def _saved(folder: Path) -> Any:
    import datasets

    try:
        return datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{folder} is no folder that `datasets` saved, nor has it Parquet files: {str(error).splitlines()[0]}"
        ) from error


def _opened(files: Sequence[Path]) -> Any:
    import datasets
    import pyarrow.parquet

    schemas = []
    for file in files:
        try:
            schemas.append(pyarrow.parquet.read_schema(file))
        except (OSError, ValueError) as error:
            raise UsageError(f"{file} is no Parquet file: {str(error).splitlines()[0]}") from error
        if not schemas[-1].equals(schemas[0]):
            ours, theirs = (", ".join(f"{item.name} {item.type}" for item in schemas[at]) for at in (-1, 0))
            raise UsageError(f"{file} has the columns {ours}, and {files[0].name} beside it {theirs}: make them alike")
    return datasets.load_dataset("parquet", data_files=[*map(str, files)], split="train", streaming=True)


def _tables(path: Path, rows: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Rows of a data set of `datasets`, as Arrow has them: no image or audio is decoded."""
    from datasets.exceptions import DatasetsError
    from datasets.table import CastError

    try:
        shown = {"columns": rows.format["columns"]} if hasattr(rows, "format") else {}
        tables = (table.to_pylist() for table in rows.with_format("arrow", **shown).iter(batch_size=1000))
        for number, row in enumerate(itertools.chain.from_iterable(tables), start=1):
            yield f"{path}, row {number}", row
    except (CastError, DatasetsError, OSError, ValueError, TypeError) as error:
        raise UsageError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error

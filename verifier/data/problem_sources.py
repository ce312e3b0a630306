"""Problems of the packages reasoning-gym and verifiers as sources of examples; both are optional."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import count as numbers
from typing import Any

from verifier.data.arithmetic import HELD_OUT, is_held_out
from verifier.data.examples import Example, Message, short
from verifier.environments.verifiers_tasks import prompts_of
from verifier.errors import UsageError

REASONING_GYM, VERIFIERS = "reasoning-gym:", "verifiers:"
SOURCES = (REASONING_GYM, VERIFIERS)
"""Prefixes of such a source's name, before its task or its task set."""
ANSWER_TAG, LAST_NUMBER = EXTRACT = ("answer_tag", "last_number")
"""Parts of a completion that a task of reasoning-gym may score; by default an `<answer>`, or else all of it."""
CHUNK = 500
"""Problems of one seed of reasoning-gym, whose generators make problem i by the seed plus i."""
SEED_STRIDE = 1_000_003
"""Seeds of a run begin at a multiple of it."""
DEFAULT_COUNT = 1_000
_MOST_REPEATED = 10_000
"""Problems in a row that were there before, after which a generator has no more."""


def options_of(texts: Sequence[str]) -> dict[str, Any]:
    """Options `name=value` as a mapping, nested at dots; a value is JSON, or else text.

    Raises:
        UsageError: one is not spelled so.
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not all(name.split(".")):
            raise UsageError(f"data.options has `{text}`: give NAME=VALUE, such as max_terms=3")
        *path, last = name.split(".")
        inside = found
        for part in path:
            inside = inside.setdefault(part, {})
        try:
            inside[last] = json.loads(value)
        except ValueError:
            inside[last] = value
    return found


def problem_examples(
    source: str, split: str, count: int | None, seed: int, options: Sequence[str], *, most: int = DEFAULT_COUNT
) -> tuple[Example, ...]:
    """Examples of a task of reasoning-gym, or of a task set of verifiers, no two of one question.

    Args:
        source: "reasoning-gym:TASK" or "verifiers:TASKSET".
        split: "train" or "held-out": those whose question has a CRC-32 that is a multiple of 10.
        count: number of examples; by default all that there are, up to `most`.
        seed: of the run.
        options: `name=value` of the task or task set; "system_prompt" of reasoning-gym is a text, or the name of one of
            its own, which comes first in each conversation, and "extract" one of `EXTRACT`.
        most: examples where no count is given.

    Raises:
        UsageError: no such package, task or option, or not so many problems.
    """
    given = options_of(options)
    gym = source.startswith(REASONING_GYM)
    made = gym_problems(source, given, seed) if gym else prompts_of(source.removeprefix(VERIFIERS), given)
    most = most if count is None else count
    found: dict[str, Example] = {}
    repeated = 0
    for name, messages, answer, metadata in made:
        example = Example(
            id=name, messages=tuple(Message(role=role, content=text) for role, text in messages), answer=answer,
            metadata=metadata,
        )  # fmt: skip
        if is_held_out(example.question) == (split == HELD_OUT) and example.question not in found:
            found[example.question], repeated = example, 0
        else:
            repeated += 1
        if len(found) == most or repeated == _MOST_REPEATED:
            break
    if not found or len(found) < (count or 0):
        raise UsageError(f"{source} has {len(found):,} problems in its split `{split}`, {count or 1:,} asked for")
    return tuple(found.values())


def gym_problems(
    source: str, options: Mapping[str, Any], seed: int
) -> Iterator[tuple[str, list[tuple[str, str]], str | None, dict[str, Any]]]:
    """Id, messages, answer and further columns of each problem of a task of reasoning-gym, without an end.

    Raises:
        UsageError: no such package, task or option, or the task fails on a problem; names it.
    """
    try:
        import reasoning_gym
        from reasoning_gym.utils import SYSTEM_PROMPTS
    except ImportError as absent:
        raise UsageError("the package reasoning-gym is not installed: install ci/locks/environments.txt") from absent
    task, options = source.removeprefix(REASONING_GYM), dict(options)
    system = str(options.pop("system_prompt", ""))
    before = [("system", str(SYSTEM_PROMPTS.get(system, system)))] if system else []
    extract = options.pop("extract", None)
    if extract not in (None, *EXTRACT):
        raise UsageError(f"data.options has `extract={extract}`: give {' or '.join(EXTRACT)}, or leave it out")
    further = {} if extract is None else {"extract": extract}
    for chunk in numbers():
        first = seed * SEED_STRIDE + chunk * CHUNK
        try:
            data = reasoning_gym.create_dataset(task, **{"size": CHUNK, **options, "seed": first})
            for index in range(CHUNK):
                entry = data[index]
                about = {"task": task, "options": options, "seed": first, "index": index, **further}
                answer = None if entry["answer"] is None else str(entry["answer"])
                yield (
                    f"{task}/{first + index}", [*before, ("user", str(entry["question"]))], answer,
                    {"reasoning_gym": about},
                )  # fmt: skip
        except Exception as problem:  # its generators assert, and raise whatever
            raise UsageError(f"`{source}` fails: {type(problem).__name__}: {short(str(problem))}") from problem

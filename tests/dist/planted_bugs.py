"""Bugs that are planted in other people's trainers, and scripts that run a loop with each."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

Plant = Callable[[pytest.MonkeyPatch], None]


def run_planted(
    train: Callable[..., None], bugs: Mapping[str, Plant], checkpoint: str, folder: str, settings: str, *names: str
) -> None:  # fmt: skip
    """What such a script does: a loop for each name, in one process group; names that are no bug's run as they are."""
    for name in names:
        with pytest.MonkeyPatch.context() as patch:
            bugs.get(name, lambda _: None)(patch)
            train(Path(checkpoint), Path(folder) / name, **json.loads(settings)[name])


def replaced(module: str, name: str, made: Callable[[Any], Any]) -> Plant:
    """A bug in one function of a trainer: `made` of the right one."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        owner = importlib.import_module(module)
        *parts, last = name.split(".")
        for part in parts:
            owner = getattr(owner, part)
        patch.setattr(owner, last, made(getattr(owner, last)))

    return plant


def argument(at: int | str, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function that gets another value of one argument, by place or name."""

    def made(real: Any) -> Any:
        def wrong(*args: Any, **told: Any) -> Any:
            if isinstance(at, str):
                return real(*args, **{**told, at: change(told[at])})
            return real(*args[:at], change(args[at]), *args[at + 1 :], **told)

        return wrong

    return made

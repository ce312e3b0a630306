"""A second reading of the words of `verifier train` and of its YAML file, by no code that makes a config of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verifier.knob import KnobEntry, entries

PROGRAMS = ("verifier", "__main__.py")
ALONE = ("--print-config", "--dry-run")
"""Options without a value, of a run whose config is that of its words; `--replay` and `--preflight` change it."""
YAML = (".yaml", ".yml")
"""Ends of the names of files with knobs."""
HANDED_ON = ("dtype", "verify.steps")
"""Keys whose value a run hands on to the one that it begins with, whatever the file of that says."""
TRUE, FALSE = ("true", "yes", "on", "y", "1"), ("false", "no", "off", "n", "0")
MAX_RUNS = 16
"""Runs in a row whose words are kept; a file that names itself as `first` would never end."""
_NOTED: list[dict[str, str]] = []
"""Values that this process was asked for: of its run, then of the one that this begins with, and so on."""


def note(kind: type, argv: Sequence[str]) -> None:
    """Keep what a command line asks of a config, before the config is made; files may change after that."""
    _NOTED.clear()
    given = asked(kind, argv)
    while given and len(_NOTED) < MAX_RUNS:
        _NOTED.append(given)
        given = asked_of_first(kind, given)


def noted(begins: int = 0) -> Mapping[str, str]:
    """Key -> value as text that this process was asked for; empty where it was started otherwise.

    Args:
        begins: number of runs that begin, one after another, with the one that is asked about.
    """
    return dict(_NOTED[begins]) if begins < len(_NOTED) else {}


def asked(kind: type, argv: Sequence[str]) -> dict[str, str]:
    """Values that a command line asks for, by key, as text.

    Left out are keys whose value names others, `${...}`, those that a switch sets, lists of options, and values that
    the config computes where they are null.

    Args:
        kind: type of the config.
        argv: program and words.

    Returns:
        Nothing where the words are not those of `verifier train`, ask for another run than that of their config, or
        cannot be read, which the config's own reader refuses.
    """
    if len(argv) < 2 or Path(argv[0]).name not in PROGRAMS or argv[1] != "train":
        return {}
    known = {entry.key: entry for entry in entries(kind)}
    try:
        words, files = _words(known, argv[2:])
        given = {**dict(pair for file in files for pair in _of_file(known, file)), **words}
    except (LookupError, OSError, ValueError, RecursionError):
        return {}
    texts = _texts(known, given)
    is_read = given.get("first") in (None, "null") or texts.get("first", "").endswith(YAML)
    return texts if is_read else {}


def asked_of_first(kind: type, given: Mapping[str, str]) -> dict[str, str]:
    """Values that are asked of the run that another begins with, by key, as text.

    Args:
        kind: type of the config.
        given: what is asked of the other run, which decides on the dtype, the folder and whether steps are judged.

    Returns:
        Nothing where the other run begins with none, or the file cannot be read.
    """
    if given.get("first", "null") == "null":
        return {}
    known = {entry.key: entry for entry in entries(kind)}
    try:
        own = _texts(known, dict(_of_file(known, Path(given["first"]))))
    except (OSError, ValueError, RecursionError):
        return {}
    kept = {key: text for key, text in own.items() if key not in (*HANDED_ON, "run")}
    folder = {"run": f"{given['run']}/first"} if "run" in given else {}
    return {**kept, **{key: given[key] for key in HANDED_ON if key in given}, **folder}


def kept(kind: type, file: Path) -> dict[str, str]:
    """Values of the file in which a run keeps its config, by key, as text; nothing where it cannot be read."""
    known = {entry.key: entry for entry in entries(kind)}
    try:
        return _texts(known, dict(_of_file(known, file)))
    except (OSError, ValueError, RecursionError):
        return {}


def _texts(known: Mapping[str, KnobEntry], given: Mapping[str, Any]) -> dict[str, str]:
    """Text of each value that is judged; nothing where a key is unknown."""
    if not given.keys() <= known.keys():
        return {}
    texts = {key: _text(known[key], value) for key, value in given.items()}
    return {key: text for key, text in texts.items() if text is not None}


def _words(known: Mapping[str, KnobEntry], words: Sequence[str]) -> tuple[dict[str, Any], list[Path]]:
    """Keys with the text that is given for each, and files.

    A key whose option is a switch, or a list, has an empty tuple: it is given, and not read.

    Raises:
        LookupError: an option is unknown, asks for another run, or has no value.
    """
    flags = {name: entry for entry in known.values() if entry.knob.flag for name in entry.knob.flag.split("/")}
    found, files, left = dict[str, Any](), list[Path](), iter(words)
    for word in left:
        name, equals, value = word.partition("=")
        if not word.startswith("--"):
            if equals:
                found[name] = value
            else:
                files.append(Path(word))
        elif name in flags and flags[name].kind is bool:
            found[flags[name].key] = ()
        elif name in flags or name == "--config":
            value = value if equals else next(left, "")
            if name == "--config":
                files.append(Path(value))
            else:
                found[flags[name].key] = () if flags[name].kind is tuple else value
        elif name not in ALONE:
            raise LookupError(name)
    return found, files


def _of_file(known: Mapping[str, KnobEntry], file: Path) -> Iterator[tuple[str, Any]]:
    """Keys and values of a YAML file.

    Raises:
        ValueError: it is none.
    """
    import yaml

    if not file.is_file():  # reading a pipe would take what is in it from the config's own reader
        raise ValueError(f"`{file}` is no file")
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as problem:
        raise ValueError(f"`{file}` is no YAML") from problem
    left = [("", content if isinstance(content, dict) else {})]
    while left:
        prefix, values = left.pop()
        for name, value in values.items():
            key = f"{prefix}{name}"
            if isinstance(value, dict) and key not in known:
                left.append((f"{key}.", value))
            else:
                yield key, value


def _text(entry: KnobEntry, value: Any) -> str | None:
    """Text of a value, as `CFG002` compares it; None for one that is not judged."""
    if value is None or value == "null":
        return None if entry.computed else "null"
    if value == () or not isinstance(value, str | int | float | list) or "${" in str(value):
        return None
    if entry.kind is tuple:
        parts = value if isinstance(value, list) else [part.strip() for part in str(value).strip("[]").split(",")]
        return json.dumps([part for part in parts if part]) if all(isinstance(part, str) for part in parts) else None
    if isinstance(value, list):
        return None
    if entry.kind is bool:
        word = str(value).lower()
        return "true" if word in TRUE else "false" if word in FALSE else None
    return str(entry.knob.choices.get(value, value))

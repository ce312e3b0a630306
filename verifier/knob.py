"""Knobs: fields of a config's dataclass that carry their help, flag, allowed values and unit.

The command line, the reader of YAML and `key=value`, the checks of values and docs/config.md are all made from them.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field
from typing import Any

from verifier.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """Metadata of a field besides its name, type and default."""

    help: str
    """One sentence for the help page and docs/config.md."""
    flag: str | None = None
    """Option of the command line, such as "--tp" or "--cuda-graphs/--enforce-eager"; None: file and key=value only."""
    choices: Mapping[Any, Any] = field(default_factory=dict)
    """Spelling -> value; empty where every value of the type is taken."""
    least: float | None = None
    """Smallest value."""
    most: float = math.inf
    """Greatest value; infinity itself is none."""
    above: float | None = None
    """Values are greater than this."""
    below: float = math.inf
    """Values are smaller than this."""
    metavar: str | None = None
    """Placeholder of the value in the help page."""
    unit: str | None = None
    """Unit of the value, such as "seconds"."""
    derived: bool = False
    """The default follows from other knobs, so a field that was not given is left to its group's constructor."""
    last: bool = False
    """Listed after the knobs that are a command's own."""
    record: type | None = None
    """Dataclass of texts that each item of a list is; such a list is given in a file alone."""

    @property
    def bounds(self) -> str:
        """Bounds of a number in words, such as "above 0 and finite"; empty where it has none."""
        words = [f"at least {self.least:g}"] if self.least is not None else []
        words += [f"above {self.above:g}"] if self.above is not None else []
        words += [f"at most {self.most:g}"] if self.most < math.inf else []
        words += [f"below {self.below:g}"] if self.below < math.inf else []
        return " and ".join(words)

    def holds(self, value: float) -> bool:
        """Test a number for the bounds."""
        low = (self.least is None or value >= self.least) and (self.above is None or value > self.above)
        return low and value <= self.most and value < self.below


def knob(
    help: str,  # noqa: A002 - typer's name for it
    default: Any = MISSING,
    *,
    factory: Callable[[], Any] | None = None,
    choices: Iterable[Any] = (),
    **meaning: Any,
) -> Any:
    """Make a field that is a knob; without `default` and `factory`, which makes one, it is required.

    `choices` are the allowed values, or a mapping of spelling -> value where users spell them differently. The rest are
    fields of `Knob`.
    """
    spelled = choices if isinstance(choices, Mapping) else {value: value for value in choices}
    metadata = {"knob": Knob(help=help, choices=spelled, **meaning)}
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def group(kind: type, *, make: Callable[..., Any] | None = None) -> Any:
    """Make a field that holds a group of knobs: a dataclass, built by `make` from those that were given."""
    return field(default_factory=kind, metadata={"make": make or kind})


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobEntry:
    """One knob of a config, with its place in it."""

    key: str
    """Dotted path, such as "engine.tp"."""
    knob: Knob
    kind: type
    """Type of the value, of None apart: str, int, float, bool, Path, or tuple for a tuple of texts."""
    required: bool
    computed: bool
    """The default is made anew for each config, by a factory or from other knobs."""
    default: Any
    """None where it is required or computed."""

    @property
    def option(self) -> str:
        """The flag that turns it on, or its key where it has none."""
        return self.knob.flag.partition("/")[0] if self.knob.flag else self.key

    def spelled(self, value: Any) -> Any:
        """A value as users spell it."""
        return next((name for name, item in self.knob.choices.items() if item == value), value)

    def checked(self, value: Any, name: str) -> Any:
        """The value, with its spelling replaced by what it stands for.

        Raises:
            UsageError: it is not among the choices, or too small; calls the knob by `name`.
        """
        if value is None:
            return None
        if self.knob.choices and value not in self.knob.choices.values():
            if value not in self.knob.choices:
                raise UsageError(f"{name} is `{value}`, it must be one of {', '.join(map(str, self.knob.choices))}")
            value = self.knob.choices[value]
        is_left = self.knob.derived and value != value  # NaN: the command's config, which knows the model, makes it
        if (bounds := self.knob.bounds) and not self.knob.holds(value) and not is_left:
            finite = " and finite" if self.kind is float and " and " not in bounds else ""
            shown, unit = f"{value:g}" if self.kind is float else value, f" {self.knob.unit}" if self.knob.unit else ""
            raise UsageError(f"{name} is {shown}{unit}, it must be {bounds}{finite}")
        return value


def entries(kind: type) -> tuple[KnobEntry, ...]:
    """Return every knob of a config in the order of its fields; those of a group where the group stands."""
    if kind not in _ENTRIES:
        _ENTRIES[kind] = tuple(sorted(_entries(kind, ""), key=lambda entry: entry.knob.last))
    return _ENTRIES[kind]


_ENTRIES: dict[type, tuple[KnobEntry, ...]] = {}
"""Config -> its knobs, looked up once: a `Mesh` checks itself whenever one is made."""


def _entries(kind: type, prefix: str) -> Iterator[KnobEntry]:
    hints = typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):
        hint = hints[item.name]
        if "make" in item.metadata:
            yield from _entries(hint, f"{prefix}{item.name}.")
        elif "knob" in item.metadata:
            meaning, is_made = item.metadata["knob"], item.default_factory is not MISSING
            if isinstance(hint, types.UnionType):
                (hint,) = (part for part in typing.get_args(hint) if part is not types.NoneType)
            yield KnobEntry(
                key=prefix + item.name, knob=meaning, kind=typing.get_origin(hint) or hint,
                required=item.default is MISSING and not is_made, computed=meaning.derived or is_made,
                default=None if item.default is MISSING or meaning.derived else item.default,
            )  # fmt: skip


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a config's nested values, as a manifest records them, under dotted keys."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def check(config: Any, group: str = "") -> None:
    """Check each knob of a config that was just made; its groups have checked theirs.

    Args:
        config: just made.
        group: its place in the config of a command, such as "grpo."; empty where it has more than one.

    Raises:
        UsageError: a value that its knob does not allow; names the flag or the key.
    """
    for entry in entries(type(config)):
        if "." not in entry.key:
            value, name = getattr(config, entry.key), entry.option if entry.knob.flag else group + entry.key
            if (meant := entry.checked(value, name)) != value and value == value:
                raise UsageError(f"{name} is `{value}`: write `{meant}`")


def refuse(config: Any, rows: Mapping[str, object], *, group: str = "", **words: object) -> None:
    """Refuse a config by the first sentence whose condition is true.

    In a sentence `{key}` stands for "key is value", `{=key}` for the value alone, and `{word}` for one of `words`.

    Args:
        config: object of all knobs, or one of its groups.
        rows: sentence -> condition.
        group: key of the group with its dot, such as "grpo.", which all keys begin with then.
        words: texts of the sentences that are no knobs.

    Raises:
        UsageError: the sentence.
    """

    def said(place: re.Match[str]) -> str:
        key = place[2]
        if key in words:
            return str(words[key])
        value = _written(config, key.removeprefix(group))
        return value if place[1] else f"{key} is {value}"

    for sentence, wrong in rows.items():
        if wrong:
            raise UsageError(_PLACE.sub(said, sentence))


_PLACE = re.compile(r"\{(=?)([a-z0-9_.]+)\}")


def _written(config: Any, key: str) -> str:
    """Value of a knob as a user writes it."""
    above, _, name = key.rpartition(".")
    value = getattr(operator.attrgetter(above)(config) if above else config, name)
    spelled = next((item.spelled(value) for item in entries(type(config)) if item.key == key), value)
    if spelled is None or isinstance(spelled, bool):
        return "null" if spelled is None else str(spelled).lower()
    if isinstance(spelled, tuple):
        return ", ".join(spelled)
    return (
        f"{spelled:g}" if isinstance(spelled, float) else f"{spelled:,}" if isinstance(spelled, int) else str(spelled)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """Knobs of a command, or a group of them, checked where it is made.

    Raises:
        UsageError: a value that its knob does not allow, or knobs that contradict each other; names the flags or keys.
    """

    place = ""
    """Place of a group in the config of its command, such as "grpo."; empty where it has more than one."""

    def __post_init__(self) -> None:
        self._fill()
        check(self, self.place)
        refuse(self, self._contradictions(), group=self.place)

    def _fill(self) -> None:
        """Give knobs that nobody gave the values that follow from others; overridden where there are any."""

    def _contradictions(self) -> Mapping[str, object]:
        """Sentence -> condition, of knobs that are right alone and wrong together."""
        return {}


def build(kind: type, values: Mapping[str, Any], make: Callable[..., Any] | None = None) -> Any:
    """Make a config from dotted keys and values, by `make` in place of `kind`; what is not given takes its default.

    Raises:
        UsageError: values that the config or one of its groups refuses.
    """
    arguments: dict[str, Any] = {}
    hints = typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):
        if "make" in item.metadata:
            prefix = f"{item.name}."
            inside = {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
            arguments[item.name] = build(hints[item.name], inside, item.metadata["make"])
        elif item.name in values:
            arguments[item.name] = values[item.name]
    return (make or kind)(**arguments)

"""Commands made from configs: the flags, the help page, `--config` and `key=value` of a config's dataclass."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from verifier.cli.results import show
from verifier.config import claim_trace
from verifier.config.load import default, load, resolved
from verifier.core.finding import ExitCode
from verifier.errors import UsageError
from verifier.knob import KnobEntry, entries

_CONFIG = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="YAML file with any of the knobs; see docs/config.md.")
]
_PRINT = Annotated[
    bool, typer.Option("--print-config", help="Print every knob with its value, owner and default, and stop.")
]


class KnobCommand(TyperCommand):
    """Command whose help page ends with the knobs that have a key and no flag."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write them as a list of keys, types, help and defaults."""
        knobs = [entry for entry in getattr(self.callback, "knobs", ()) if not entry.knob.flag]
        if knobs:
            with formatter.section("Keys without a flag, given as KEY=VALUE or in --config"):
                formatter.write_dl([(_keyed(entry), _described(entry)) for entry in knobs])


def _keyed(entry: KnobEntry) -> str:
    words = "|".join(map(str, entry.knob.choices)) or entry.kind.__name__.lower()
    return f"{entry.key} <{words}>"


def _described(entry: KnobEntry) -> str:
    return entry.knob.help + ("" if entry.computed or entry.default is None else f"  [default: {default(entry)}]")


def _overrides(knobs: Sequence[KnobEntry]) -> Any:
    """Type of the arguments that are KEY=VALUE, which a shell completes."""

    def completed(incomplete: str) -> list[str]:
        return [f"{entry.key}=" for entry in knobs if entry.key.startswith(incomplete)]

    told = "Any knob by its key, such as mesh.tp=2; or the file of --config."
    return Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help=told, autocompletion=completed)]


def configured(
    function: Callable[..., int], *, file_of: Callable[..., Path | None] = lambda **_: None
) -> Callable[..., int]:
    """Make a command of a function whose first parameter is a config; what follows it are options of the command alone.

    Args:
        function: takes the config, which is loaded, checked and typed; returns the exit code. A parameter `owners` gets
            key -> who gave its value. A parameter `traces` gets the arguments that are no KEY=VALUE; if there are any,
            nothing is run, and the config is None.
        file_of: takes the command's own options, and returns the file of the config where the user named none.
    """
    first, *own = inspect.signature(function, eval_str=True).parameters.values()
    takes_owners, takes_traces = (any(item.name == name for item in own) for name in ("owners", "traces"))
    own = [item for item in own if item.name not in ("owners", "traces")]
    knobs = entries(first.annotation)
    flags = {entry.key.replace(".", "_"): entry for entry in knobs if entry.knob.flag}

    @functools.wraps(function)
    def command(
        context: typer.Context, overrides: list[str] | None, config: Path | None, print_config: bool, **options: Any
    ) -> int:
        flagged = {
            entry.key: options[name] for name, entry in flags.items()
            if (source := context.get_parameter_source(name)) is not None and source.name == "COMMANDLINE"
        }  # fmt: skip
        files = [text for text in overrides or () if text.endswith((".yaml", ".yml")) and "=" not in text]
        if len(files) + (config is not None) > 1:
            raise UsageError(f"two files of knobs are given, `{config or files[1]}` and `{files[0]}`: give one")
        if takes_traces and (traces := [text for text in overrides or () if "=" not in text and text not in files]):
            if flagged or config or len(traces) < len(overrides or ()):
                raise UsageError(f"`{traces[0]}` is a trace of a run that has been made: leave the knobs of a run out")
            return function(
                None, traces=[Path(text) for text in traces], **{item.name: options[item.name] for item in own}
            )
        loaded, owners = load(
            first.annotation, file=Path(files[0]) if files else config or file_of(**options), flags=flagged,
            overrides=[text for text in overrides or () if text not in files],
        )  # fmt: skip
        if print_config:
            show(resolved(loaded, owners))
            return ExitCode.HOLDS
        also = {"owners": owners} if takes_owners else {}
        with _trace_claimed(loaded, "trace" in owners) as ours:
            return function(ours, **also, **{item.name: options[item.name] for item in own})

    named = inspect.Parameter.KEYWORD_ONLY
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter("context", named, annotation=typer.Context),
            inspect.Parameter("overrides", named, default=None, annotation=_overrides(knobs)),
            *(
                inspect.Parameter(name, named, default=_default(entry), annotation=_annotation(entry))
                for name, entry in flags.items()
            ),
            *(item.replace(kind=named) for item in own),
            inspect.Parameter("config", named, default=None, annotation=_CONFIG),
            inspect.Parameter("print_config", named, default=False, annotation=_PRINT),
        ]
    )
    command.__annotations__ = {}
    command.knobs = knobs  # type: ignore[attr-defined]  # for `KnobCommand`
    return command


@contextlib.contextmanager
def _trace_claimed(config: Any, named: bool) -> Iterator[Any]:
    """The config; where no trace was named, with one that no other run takes. A folder that stays empty is gone."""
    trace = None if named else getattr(config, "trace", None)
    if trace is None:
        yield config
        return
    above_is_new = not trace.parent.exists()
    trace = claim_trace(trace)
    try:
        yield dataclasses.replace(config, trace=trace)
    finally:
        with contextlib.suppress(OSError):
            trace.rmdir()
        if above_is_new:
            with contextlib.suppress(OSError):
                trace.parent.rmdir()


def _default(entry: KnobEntry) -> Any:
    return None if entry.default in (None, ()) else entry.spelled(entry.default)


def _annotation(entry: KnobEntry) -> Any:
    kind: Any = entry.kind
    if kind is tuple:
        kind = list[str]
    elif entry.knob.choices and kind is str:
        kind = Literal[tuple(entry.knob.choices)]
    option = typer.Option(
        entry.knob.flag, metavar=entry.knob.metavar, help=entry.knob.help + ("  [required]" if entry.required else "")
    )
    return Annotated[kind | None if _default(entry) is None else kind, option]

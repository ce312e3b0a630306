"""The command line: what each command takes, and the frame that turns every end into one of the exit codes.

Commands import what they need when they run, so that `--help`, `explain` and `replay` start at once.
"""

from __future__ import annotations

import errno
import functools
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from verifier.cli import faults as cli_faults
from verifier.cli import pages as cli_pages
from verifier.cli.bisect import bisect
from verifier.cli.command import KnobCommand, configured
from verifier.cli.gate_command import file_of_resume, gate
from verifier.cli.results import (
    STDOUT,
    HtmlOption,
    JsonOption,
    JunitOption,
    QuietOption,
    VerboseOption,
    complain,
    detail_of,
    judge_trace,
    require_results,
    run_and_judge,
    save_traceback,
    show,
)
from verifier.cli.watched_options import WatchOption, WatchPathOption, in_rounds, watched
from verifier.config import (
    GoldenConfig,
    NoiseConfig,
    PlanConfig,
    RoundtripConfig,
    SweepConfig,
    TrainConfig,
)
from verifier.core.finding import ExitCode
from verifier.core.outputs import write_whole
from verifier.errors import Stopped, UsageError, VerifierError

_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a command to end."""
_MACHINE = (
    errno.EACCES, errno.EDQUOT, errno.ELOOP, errno.EMFILE, errno.ENAMETOOLONG, errno.ENFILE, errno.ENOMEM, errno.ENOSPC,
    errno.ENOTDIR, errno.EPERM, errno.EROFS,
)  # fmt: skip
"""Errors that the user or the machine's owner can mend: rights, names, room."""

app = typer.Typer(
    name="verifier",
    help="Judge every hand-over of an RL post-training stack: Megatron trains, Bridge exports, vLLM samples.",
    epilog="Exit codes: 0 holds, 1 violated, 2 inconclusive, 3 internal error, 4 usage.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(cli_faults.app, name="faults")
app.add_typer(cli_pages.app, name="report")


def _show_version(asked: bool) -> None:
    if asked:
        from verifier import __version__
        from verifier.platform.provenance import this_code

        commit = this_code().commit
        show(f"verifier {__version__}" + (f", commit {commit}\n" if commit else "\n"))
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Options of the command line as a whole."""


@app.command(cls=KnobCommand)
@configured
def golden(
    config: GoldenConfig,
    json: JsonOption = None,
    junit: JunitOption = None,
    html: HtmlOption = None,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    watch: WatchOption = False,
    watch_path: WatchPathOption = None,
) -> int:
    """Load on a mesh, export, compare with the source bit by bit."""
    require_results(json, junit, html)
    detail = detail_of(quiet, verbose)
    if watched(watch, watch_path):
        return in_rounds(config, watch_path, (json, junit, html))
    from verifier.runs.golden import write_manifest
    from verifier.runs.runner import Runner, run_once

    run = functools.partial(run_once, Runner.golden, config)
    code = run_and_judge("golden", run, config.trace, json=json, junit=junit, html=html, detail=detail)
    if config.record:
        held = code == ExitCode.HOLDS
        said = f"\nrecorded {write_manifest(config)}\n" if held else "\nnot recorded: not every check holds\n"
        if STDOUT not in (json, junit, html):
            show(said)
    return code


@app.command(cls=KnobCommand)
@configured
def roundtrip(
    config: RoundtripConfig,
    json: JsonOption = None,
    junit: JunitOption = None,
    html: HtmlOption = None,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    watch: WatchOption = False,
    watch_path: WatchPathOption = None,
) -> int:
    """Train, export, sync a live engine, compare; several times."""
    require_results(json, junit, html)
    detail = detail_of(quiet, verbose)
    if watched(watch, watch_path):
        return in_rounds(config, watch_path, (json, junit, html))
    from verifier.runs.runner import Runner, run_once

    run = functools.partial(run_once, Runner.roundtrip, config)
    return run_and_judge("roundtrip", run, config.trace, json=json, junit=junit, html=html, detail=detail)


def _file_of_replay(*, replay: Path | None, **_: object) -> Path | None:
    from verifier.cli.replay_step import config_of

    return None if replay is None else config_of(replay)


@app.command(cls=KnobCommand)
@functools.partial(configured, file_of=_file_of_replay)
def train(
    config: TrainConfig,
    owners: dict[str, str],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check config, model sizes and data, print the plan, and stop.")
    ] = False,
    replay: Annotated[
        Path | None,
        typer.Option(
            "--replay", metavar="RUN", help="Train --step of this run again; compare its gradients, and stop."
        ),
    ] = None,
    step: Annotated[int | None, typer.Option("--step", metavar="K", help="Step of --replay.")] = None,
    preflight: Annotated[
        bool, typer.Option("--preflight", help="One step of the longest samples, a sync, all checks, and stop.")
    ] = False,
    html: HtmlOption = None,
) -> int:
    """Train from text or recorded rollouts; judge every step while it trains."""
    from verifier.cli.replay_step import replay_step, require_replay

    require_replay(owners, replay, step, {"--dry-run": dry_run, "--preflight": preflight})
    if html is not None and (dry_run or preflight or replay is not None):
        raise UsageError("--html is the page of a run that trains: leave out --dry-run, --preflight and --replay")
    require_results(html)
    if dry_run:
        from verifier.trainer import fitting

        show(fitting.dry_run(config, owners))
        return ExitCode.HOLDS
    from verifier.cli import train as cli_train
    from verifier.report.live_view import live_view
    from verifier.report.progress import shown_progress

    if replay is None and not preflight:
        with cli_pages.page_of_training(config.run, html), live_view("train") as (progress, view):
            return cli_train.train(config, progress, view)
    with shown_progress("train") as progress:
        if replay is not None and step is not None:
            return replay_step(config, replay, step, progress)
        return cli_train.preflight(config, progress)


@app.command(cls=KnobCommand)
@configured
def sweep(
    config: SweepConfig,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the layouts, and the invalid ones with reasons, and stop.")
    ] = False,
) -> int:
    """Find the largest token budget and the fastest layout by steps that are run."""
    from verifier.cli import swept

    if dry_run:
        return swept.dry_run(config)
    from verifier.report.progress import shown_progress

    with shown_progress("sweep") as progress:
        return swept.sweep(config, progress)


app.command(cls=KnobCommand)(functools.partial(configured, file_of=file_of_resume)(gate))
app.command(cls=KnobCommand)(configured(bisect))


@app.command(cls=KnobCommand)
@configured
def noise(config: NoiseConfig) -> int:
    """Measure what bf16 alone does to a model's log-probabilities."""
    from verifier.report.progress import shown_progress
    from verifier.runs.noise import table
    from verifier.runs.runner import Runner, run_once

    with shown_progress("noise") as progress:
        floor = run_once(Runner.noise, config, progress)
    show(table(floor))
    return ExitCode.HOLDS


@app.command(cls=KnobCommand)
@configured
def plan(config: PlanConfig, json: JsonOption = None) -> int:
    """Plan a model on any number of ranks from its config.json: shards, chunks, memory, sync time."""
    require_results(json)
    from verifier.cli import planned

    return planned.plan(config, json)


@app.command()
def replay(
    trace: Annotated[Path, typer.Argument(help="A saved trace directory.")],
    check: Annotated[
        list[str] | None, typer.Option("--check", metavar="CODE", help="Only this check; repeatable.")
    ] = None,
    only: Annotated[str, typer.Option("--only", metavar="NAME", help="Only subjects whose name contains this.")] = "",
    json: JsonOption = None,
    junit: JunitOption = None,
    html: HtmlOption = None,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> int:
    """Judge a saved trace again, on any machine."""
    from verifier.cli.explain import find_check

    require_results(json, junit, html)
    detail = detail_of(quiet, verbose)
    codes = [find_check(code).code for code in check or ()]
    return judge_trace(trace, json=json, junit=junit, html=html, codes=codes, names=only, detail=detail)


@app.command()
def judge(
    trace: Annotated[Path, typer.Argument(help="A trace directory that `verifier.probe` recorded.")],
    oracle: Annotated[bool, typer.Option("--oracle", help="Score by transformers what the loop recorded.")] = False,
    model: Annotated[
        Path | None, typer.Option("--model", metavar="DIR", help="Checkpoint that the loop began with; by default its.")
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", metavar="S", help="For each request of the oracle.")] = 600.0,
    json: JsonOption = None,
    junit: JunitOption = None,
    html: HtmlOption = None,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> int:
    """Judge what another trainer's loop recorded."""
    require_results(json, junit, html)
    detail = detail_of(quiet, verbose)
    from verifier.cli.judged import complete_trace

    complete_trace(trace, oracle=oracle, model=model, timeout_s=timeout)
    return judge_trace(trace, json=json, junit=junit, html=html, detail=detail)


@app.command()
def explain(
    check: Annotated[
        str | None, typer.Argument(help="Code or name of a check, or id of a fault; without it, the list of checks.")
    ] = None,
) -> int:
    """Print what a check sees, why, and what it cannot see."""
    from verifier.cli.explain import list_of_checks, page_of

    show(list_of_checks() if check is None else page_of(check))
    return ExitCode.HOLDS


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
    contracts: Annotated[
        bool, typer.Option("--contracts", help="Also look at what checks take from upstream; exit 1 if any moved.")
    ] = False,
) -> int:
    """Print what is installed and which tier runs here."""
    from verifier.cli.doctor import examine, render_json, render_text, with_contracts
    from verifier.report.progress import shown_progress

    findings = examine()
    if contracts:
        with shown_progress("doctor") as progress:
            findings = with_contracts(findings, progress)
    show(render_json(findings) if as_json else render_text(findings))
    if any(item.moved for item in findings.contracts or ()):
        return ExitCode.VIOLATED
    return ExitCode.HOLDS if findings.tier else ExitCode.USAGE


@app.command()
def upgrade(
    asked: Annotated[list[str], typer.Option("--with", metavar="PACKAGE==VERSION", help="Version to try; repeatable.")],
    model: Annotated[str, typer.Option("--model", metavar="MODEL", help="Model of the gate.")] = "tiny:qwen3-moe",
    json: JsonOption = None,
) -> int:
    """Try other upstream versions beside those that run here; report what changes."""
    require_results(json)
    from verifier.report.progress import shown_progress
    from verifier.upgrade import compared
    from verifier.upgrade.environments import require_versions

    require_versions(asked)
    with shown_progress("upgrade") as progress:
        change = compared.compare(asked, model, progress)
    if json != STDOUT:
        show(compared.render_text(change))
    if json is not None:
        said = compared.render_json(change)
        show(said) if json == STDOUT else write_whole(json, said)
    return ExitCode.VIOLATED if change.worse else ExitCode.HOLDS


def main(arguments: list[str] | None = None) -> None:
    """Run one command and leave with its exit code; nothing but `SystemExit` comes out.

    A signal that asks for the end is obeyed by way of every `with`; a second one ends the process there and then.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:  # stderr, the last of the standard ones
        pass  # what was closed before the start would become somebody's socket
    os.close(fd)
    asked = [signum for signum in _ENDS if signal.getsignal(signum) is not signal.SIG_IGN]

    def stop(signum: int, frame: object) -> None:
        for item in asked:
            signal.signal(item, signal.SIG_DFL)
        raise Stopped(signum)

    for item in asked:
        signal.signal(item, stop)
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """One command, from its arguments to its exit code. The outermost frame: every error ends here, as one sentence."""
    try:
        _require_current_directory()
        return int(app(arguments, prog_name="verifier", standalone_mode=False) or 0)
    except typer.TyperException as problem:
        message = " ".join(problem.format_message().split()).rstrip(".?")
        message = message.replace("Value error, ", "").replace(". Did you", ": did you")
        context = getattr(problem, "ctx", None)
        command = context.command_path if context is not None else "verifier"
        return _refuse(f"{message[:1].lower()}{message[1:]}; see `{command} --help`", ExitCode.USAGE)
    except UsageError as problem:
        return _refuse(" ".join(str(problem).splitlines()), problem.exit_code)
    except (VerifierError, Stopped) as problem:
        return _refuse(str(problem), problem.exit_code)
    except Exception as problem:
        if isinstance(problem, OSError) and problem.errno in _MACHINE:
            where = f"`{str(problem.filename)[:200]}`: " if problem.filename else ""
            return _refuse(f"this machine refused: {where}{problem.strerror}", ExitCode.USAGE)
        return _refuse(f"internal error: {type(problem).__name__}: {problem}{save_traceback()}", ExitCode.INTERNAL)


def _require_current_directory() -> None:
    """Refuse to run in a deleted folder: later imports die in it, with exit codes of their own."""
    try:
        os.getcwd()
    except FileNotFoundError as problem:
        raise UsageError("the current directory does not exist any more: change to one that does") from problem


def _refuse(sentence: str, code: int) -> int:
    complain(sentence)
    return int(code)

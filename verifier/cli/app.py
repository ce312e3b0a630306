"""The command line: what each command takes, and the frame that turns every end into one of the exit codes.

Commands import what they need when they run, so that `--help`, `explain` and `replay` start at once.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from verifier.cli import faults as cli_faults
from verifier.cli import report as cli_report
from verifier.cli.command import KnobCommand, configured
from verifier.cli.results import (
    HtmlOption,
    JsonOption,
    Results,
    complain,
    judge_trace,
    reported,
    require_results,
    run_and_judge,
    save_traceback,
    show,
    show_results,
)
from verifier.config import (
    BisectConfig,
    GateConfig,
    GoldenConfig,
    NoiseConfig,
    PlanConfig,
    RoundtripConfig,
    SweepConfig,
    TrainConfig,
)
from verifier.config.gate import GATE_FILE
from verifier.core.finding import ExitCode
from verifier.errors import Stopped, UsageError, VerifierError
from verifier.launch.stopping import stop_at

_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a command to end."""
_MACHINE = (
    errno.EACCES, errno.EDQUOT, errno.ELOOP, errno.EMFILE, errno.ENAMETOOLONG, errno.ENFILE, errno.ENOMEM, errno.ENOSPC,
    errno.ENOTDIR, errno.EPERM, errno.EROFS,
)  # fmt: skip
"""Errors that the user or the machine's owner can mend: rights, names, room."""

WatchOption = Annotated[
    bool, typer.Option("--watch", help="Judge again whenever a row, a mapping or the checkpoint changes; Ctrl-C ends.")
]
WatchPathOption = Annotated[
    list[Path] | None,
    typer.Option("--watch-path", metavar="PATH", help="With --watch: also watch this file or folder; repeatable."),
]

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
app.add_typer(cli_report.app, name="report")


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
@reported
def golden(
    config: GoldenConfig, results: Results, watch: WatchOption = False, watch_path: WatchPathOption = None
) -> int:
    """Load on a mesh, export, compare with the source bit by bit."""
    code = _run("golden", config, results, watch, watch_path)
    if config.record:
        from verifier.runs.golden import write_manifest

        held = code == ExitCode.HOLDS
        said = f"\nrecorded {write_manifest(config)}\n" if held else "\nnot recorded: not every check holds\n"
        if not results.takes_stdout:
            show(said)
    return code


@app.command(cls=KnobCommand)
@configured
@reported
def roundtrip(
    config: RoundtripConfig, results: Results, watch: WatchOption = False, watch_path: WatchPathOption = None
) -> int:
    """Train, export, sync a live engine, compare; several times."""
    return _run("roundtrip", config, results, watch, watch_path)


def _run(
    command: str, config: GoldenConfig | RoundtripConfig, results: Results, watch: bool, paths: list[Path] | None
) -> int:
    if paths and not watch:
        raise UsageError("--watch-path goes with --watch: give both, or neither")
    if watch:
        from verifier.cli.watch import loop

        return loop(config, paths, results)
    from verifier.runs.runner import Runner, run_once

    run = functools.partial(run_once, getattr(Runner, command), config)
    return run_and_judge(command, run, config.trace, results)


def _file_of(folder: Path | None, name: str, absent: str) -> Path | None:
    """File of the config of an earlier run, which is taken where none is given."""
    if folder is not None and not (folder / name).is_file():
        raise UsageError(absent.format(folder))
    return folder and folder / name


_NO_RUN = "--replay `{}` is no folder of a run: it has no config.yaml"
_NO_GATE = "there is no gate in `{}` to resume: give the folder that a gate made"


@app.command(cls=KnobCommand)
@functools.partial(configured, file_of=lambda replay, **_: _file_of(replay, "config.yaml", _NO_RUN))
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
    from verifier.cli import train as cli_train

    cli_train.require_replay(owners, replay, step, {"--dry-run": dry_run, "--preflight": preflight})
    if html is not None and (dry_run or preflight or replay is not None):
        raise UsageError("--html is the page of a run that trains: leave out --dry-run, --preflight and --replay")
    require_results(html)
    if dry_run:
        from verifier.trainer import fitting

        show(fitting.dry_run(config, owners))
        return ExitCode.HOLDS
    from verifier.report.progress import live_view, shown_progress

    if replay is None and not preflight:
        with cli_report.page_of_training(config.run, html), live_view("train") as (progress, view):
            return cli_train.train(config, progress, view)
    with shown_progress("train") as progress:
        if replay is not None and step is not None:
            return cli_train.replay_step(config, replay, step, progress)
        return cli_train.preflight(config, progress)


@app.command(cls=KnobCommand)
@configured
def sweep(
    config: SweepConfig,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the layouts with their memory, others with reasons, and stop.")
    ] = False,
) -> int:
    """Find the largest token budget and the fastest layout by steps that are run."""
    from verifier.cli import sweep as cli_sweep

    if dry_run:
        return cli_sweep.dry_run(config)
    from verifier.report.progress import shown_progress

    with shown_progress("sweep") as progress:
        return cli_sweep.sweep(config, progress)


@app.command(cls=KnobCommand)
@functools.partial(configured, file_of=lambda resume, **_: _file_of(resume, GATE_FILE, _NO_GATE))
def gate(
    config: GateConfig,
    owners: dict[str, str],
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="DIR", help="Go on with the gate of this folder, by its config.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the cells in their order, and what is left out, and stop.")
    ] = False,
    card: Annotated[
        Path | None,
        typer.Option("--check-card", metavar="CARD", help="Say if this card still holds for --model here, and stop."),
    ] = None,
    json: JsonOption = None,
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="Also write JUnit XML, one case per cell.")
    ] = None,
    html: HtmlOption = None,
) -> int:
    """Decide on a release: a matrix of judged runs, and PASS, FAIL or INCONCLUSIVE."""
    from verifier.cli import gate as cli_gate

    if resume is not None:
        if owners.get("folder", "--config").startswith(("--folder", "folder=")):
            raise UsageError("--resume and --folder both name the folder of the gate: leave one of the two out")
        config = replace(config, folder=resume)
    if card is not None:
        if dry_run or resume or json or junit or html:
            raise UsageError("--check-card runs nothing: leave out --dry-run, --resume, --json, --junit and --html")
        return cli_gate.check_card(card, config)
    require_results(json, junit, html)
    if dry_run:
        return cli_gate.dry_run(config)
    from verifier.report.progress import shown_progress

    with shown_progress("gate") as progress:
        return cli_gate.gate(config, progress, Results(json=json, junit=junit, html=html))


@app.command(cls=KnobCommand)
@configured
def bisect(
    config: BisectConfig,
    traces: list[Path] | None = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print every point, not those around the first difference alone.")
    ] = False,
) -> int:
    """Name the first layer and module whose output or gradient differs from transformers', or between two TRACES."""
    from verifier.cli import bisect as cli_bisect

    return cli_bisect.judge(traces, verbose=verbose) if traces else cli_bisect.run(config, verbose=verbose)


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
    from verifier.cli import plan as cli_plan

    return cli_plan.plan(config, json)


@app.command()
@reported
def replay(
    trace: Annotated[Path, typer.Argument(help="A saved trace directory.")],
    check: Annotated[
        list[str] | None, typer.Option("--check", metavar="CODE", help="Only this check; repeatable.")
    ] = None,
    only: Annotated[str, typer.Option("--only", metavar="NAME", help="Only subjects whose name contains this.")] = "",
    *,
    results: Results,
) -> int:
    """Judge a saved trace again, on any machine."""
    from verifier.cli.explain import find_check

    codes = [find_check(code).code for code in check or ()]
    return judge_trace(trace, results, codes=codes, names=only)


@app.command()
@reported
def judge(
    trace: Annotated[Path, typer.Argument(help="A trace directory that `verifier.probe` recorded.")],
    oracle: Annotated[bool, typer.Option("--oracle", help="Score by transformers what the loop recorded.")] = False,
    model: Annotated[
        Path | None, typer.Option("--model", metavar="DIR", help="Checkpoint that the loop began with; by default its.")
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", metavar="S", help="For each request of the oracle.")] = 600.0,
    *,
    results: Results,
) -> int:
    """Judge what another trainer's loop recorded."""
    from verifier.cli.judge import complete_trace

    complete_trace(trace, oracle=oracle, model=model, timeout_s=timeout)
    return judge_trace(trace, results)


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
    from verifier.campaign import upgrade as upgrades
    from verifier.report.progress import shown_progress

    upgrades.require_versions(asked)
    with shown_progress("upgrade") as progress:
        change = upgrades.compare(asked, model, progress)
    show_results(lambda: upgrades.render_text(change), (json, lambda: upgrades.render_json(change)))
    return ExitCode.VIOLATED if change.worse else ExitCode.HOLDS


def main(arguments: list[str] | None = None) -> None:
    """Run one command and leave with its exit code; nothing but `SystemExit` comes out.

    A signal that asks for the end is obeyed by way of every `with`; a second one ends the process there and then.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:  # stderr, the last of the standard ones
        pass  # what was closed before the start would become somebody's socket
    os.close(fd)
    stop_at(*(signum for signum in _ENDS if signal.getsignal(signum) is not signal.SIG_IGN))
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """One command, from its arguments to its exit code. The outermost frame: every error ends here, as one sentence."""
    try:
        os.getcwd()
    except FileNotFoundError:  # later imports would die in a deleted folder, with exit codes of their own
        return _refuse("the current directory does not exist any more: change to one that does", ExitCode.USAGE)
    try:
        return int(app(arguments, prog_name="verifier", standalone_mode=False) or 0)
    except typer.TyperException as problem:
        message = " ".join(problem.format_message().split()).rstrip(".?")
        message = message.replace("Value error, ", "").replace(". Did you", ": did you")
        context = getattr(problem, "ctx", None)
        command = context.command_path if context is not None else "verifier"
        return _refuse(f"{message[:1].lower()}{message[1:]}; see `{command} --help`", ExitCode.USAGE)
    except UsageError as problem:
        sentence = re.sub(r"`([^`]{200})[^`]+`", r"`\1...`", str(problem))
        return _refuse(" ".join(sentence.splitlines()), problem.exit_code)
    except (VerifierError, Stopped) as problem:
        return _refuse(str(problem), problem.exit_code)
    except SystemExit as problem:  # the commands return: a plugin asked for it
        sentence = f"code that the command called asked for the end, SystemExit({problem.code!r})"
        return _refuse(f"{sentence}{save_traceback()}", ExitCode.INTERNAL)
    except Exception as problem:
        if isinstance(problem, OSError) and problem.errno in _MACHINE:
            where = f"`{str(problem.filename)[:200]}`: " if problem.filename else ""
            return _refuse(f"this machine refused: {where}{problem.strerror}", ExitCode.USAGE)
        return _refuse(f"internal error: {type(problem).__name__}: {problem}{save_traceback()}", ExitCode.INTERNAL)


def _refuse(sentence: str, code: int) -> int:
    complain(sentence)
    return int(code)

"""`verifier train --replay RUN --step K`: the line that it prints and its exit code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from verifier.cli.results import show
from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.core.finding import ExitCode
from verifier.errors import UsageError
from verifier.report.progress import Progress


def config_of(run: Path) -> Path:
    """File of a run's config, which a replay takes where none is given.

    Raises:
        UsageError: there is none.
    """
    file = run / "config.yaml"
    if not file.is_file():
        raise UsageError(f"--replay `{run}` is no folder of a run: it has no config.yaml")
    return file


def require_replay(owners: Mapping[str, str], run: Path | None, step: int | None, others: Mapping[str, bool]) -> None:
    """Refuse options that contradict each other.

    Args:
        owners: key -> who gave its value.
        run: of --replay.
        step: of --step.
        others: other ways to end before a run -> asked for.

    Raises:
        UsageError: names the two.
    """
    asked = [*(["--replay"] if run is not None else []), *(name for name, is_asked in others.items() if is_asked)]
    if run is not None and owners.get("run") == "--run":
        asked.append("--run")
    if len(asked) > 1:
        raise UsageError(f"{asked[0]} and {asked[1]} do not go together: leave one of the two out")
    if run is None and step is not None:
        raise UsageError(f"--step is {step} and --replay is not given: name the run to replay")
    if run is not None and step is None:
        raise UsageError(f"--replay is `{run}` and --step is not given: name the step to replay")


def replay_step(config: TrainConfig, run: Path, step: int, progress: Progress) -> int:
    """Replay a step, print what was found, and return the exit code."""
    from verifier.trainer import replay

    if config.first is not None and (before := run / "first").is_dir():
        begin, _ = load(TrainConfig, file=config.first, overrides=[f"run={before}"])
        replay.require_same_knobs(begin, before)
    found = replay.replay_step(config, run, step, progress)
    begun = f"from the checkpoint of step {found.begun_at}" if found.begun_at else "from the initial weights"
    if found.difference is None:
        show(f"gradients of step {step}: {found.num_tensors:,} tensors, bitwise as recorded ({begun})\n")
        return ExitCode.HOLDS
    at, on_the_way = found.difference, ""
    if at.step != step:
        on_the_way = f", on the way to step {step}"
    more = f", and {at.count - 1:,} more tensors of update {at.number}" if at.count > 1 else f" of update {at.number}"
    losses, norms = (" -> ".join(f"{value:.9g}" for value in pair) for pair in (at.losses, at.grad_norms))
    show(
        f"gradients of step {at.step}{on_the_way}: not as recorded ({begun}): first `{at.name}` on rank {at.rank}"
        f"{more}; loss {losses}, gradient norm {norms} (recorded -> replayed; of gradients a run keeps digests alone)\n"
    )
    return ExitCode.VIOLATED

"""The folder of a training run: its config, batches, traces of steps, metrics, and who has it open.

config.yaml            every knob, as `--config` takes it again
effective.json         settings that Megatron ran with
layouts/0f3a.json      layout that was derived of a model without a row, see `with_run_layout`
batches/000001-00.safetensors   rollouts and loss inputs of a step's mini-batch
steps/000001/          trace of a step, with --verify; once it holds packed with its batches, see `store.pack`
export/                trace of the last export, with --verify
failure/               trace of the failure of the stack that ended the run
ranks/0000.jsonl       updates as a rank reports them, see `update_log`
profiles/step-3-rank-0.json.gz   chrome trace of torch.profiler, with profile.steps
oracle/000003/         what the oracle computes a step from, while it does
metrics.jsonl          one line a step
samples.jsonl          some sampled texts of each step, with their rewards
resumes.log            how it was continued, and the checkpoints that were passed over
checkpoints/000020/    state after a step, see `checkpoint_folder`
hf_model/              the trained weights and the tokenizer
knobs.json             values that the command must share to continue it
finished.json          how the run ended
suspected.json         suspicions, open and dropped, see `verdicts`
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from verifier.config.load import load, resolved
from verifier.config.training import TrainConfig
from verifier.core.archive import OF_BATCHES, members
from verifier.core.ledger import append_rows
from verifier.core.outputs import locked_folder, remove, write_whole
from verifier.core.reader import ARCHIVE, BATCHES, has_evidence
from verifier.errors import UsageError
from verifier.knob import entries, flat
from verifier.trainer import update_log

FREE = ("steps", "timeout_s", "run", "mesh.", "verify.", "evaluation.", "checkpoint.", "profile.", "wandb", "ray.")
"""Knobs, and groups of them, in which a run may be continued with another value."""
_OF_FILES = {".json", ".jsonl", ".yaml", ".log", ".stack", ".safetensors", ".xz", ".gz"}
"""Suffixes of what is a file wherever it lies in a run's folder."""
_PIECE = 16 << 20
"""Bytes that are read at a time."""
FINISHED, KNOBS, CONFIG, SAMPLES = "finished.json", "knobs.json", "config.yaml", "samples.jsonl"
_LOGS, _FOLDERS = {"metrics.jsonl", SAMPLES, "resumes.log"}, {"batches", "export", "failure", "logs", "ranks", "steps"}
_WRITTEN = _LOGS | _FOLDERS | {"profiles", "tensorboard"}
"""Files that a run appends to, and folders in which it writes files and removes some."""


class RunFolder:
    """Paths within the folder of a run, and what is appended to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.held_out = path / "batches" / "held-out.safetensors"
        """Held-out problems with their responses, as ranks read them."""
        self.export_trace, self.failure_trace = path / "export", path / "failure"
        self.suspicions, self.exported = path / "suspected.json", path / "hf_model"

    def batch(self, step: int, number: int = 0) -> Path:
        """File of the rollouts and loss inputs of one of a step's mini-batches."""
        return self.path / "batches" / f"{step:06d}-{number:02d}.safetensors"

    def trace(self, step: int) -> Path:
        """Trace directory of a step."""
        return self.path / "steps" / f"{step:06d}"

    def traces(self) -> list[Path]:
        """Trace directories of steps that are whole, in order."""
        return sorted(path for path in (self.path / "steps").glob("*") if has_evidence(path))

    def batch_files(self, step: int, name: str) -> Iterator[Path]:
        """The file of a batch, and archives that it lies in: those of them that are there."""
        files = (self.path / "batches" / name, *(self.trace(step) / archive for archive in (ARCHIVE, BATCHES)))
        return (file for file in files if file.is_file())

    def read_batch(self, step: int, name: str) -> bytes:
        """Contents of the file of a batch, packed or not.

        Raises:
            UsageError: it is gone, or its archive is damaged.
        """
        for file in self.batch_files(step, name):
            with contextlib.suppress(FileNotFoundError, KeyError):  # packed meanwhile
                return file.read_bytes() if file.name == name else members(file)[f"{OF_BATCHES}{name}"]()
        raise UsageError(f"the batch `{self.path / 'batches' / name}` of step {step} is gone")

    def oracle(self, step: int) -> Path:
        """Folder for the oracle in a step; what was left there by a run that was stopped is no longer needed."""
        return self.path / "oracle" / f"{step:06d}"

    def profile(self, step: int, number: int | None, rank: int) -> Path:
        """File of the profile of a step, or of one of its updates where steps have several."""
        update = "" if number is None else f"-update-{number}"
        return self.path / "profiles" / f"step-{step}{update}-rank-{rank}.json.gz"

    def write_config(self, config: TrainConfig) -> None:
        """Write every knob, and those that a run which continues this one must share."""
        self.write(KNOBS, json.dumps(shared_knobs(config), indent=1) + "\n")
        made = {entry.key: "this run" for entry in entries(TrainConfig) if entry.computed and entry.key != "run"}
        self.write(CONFIG, resolved(config, made))

    def write(self, name: str, text: str) -> None:
        """Write a file whole."""
        write_whole(self.path / name, text)

    def add_metrics(self, values: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl; a UsageError says that it cannot be written."""
        append_rows(self.path / "metrics.jsonl", [values])

    def add_samples(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """Append sampled texts to samples.jsonl, a line each, likewise."""
        if samples:
            append_rows(self.path / SAMPLES, samples)

    def last_metrics(self, count: int) -> list[dict[str, Any]]:
        """Metrics of the last steps, so many at most, the newest last."""
        file = self.path / "metrics.jsonl"
        return [_object(line, file) for line in _text(file).splitlines()[-count:]] if file.exists() else []

    def finish(self, asked: int, **ended: float | None) -> None:
        """Write how the run ended, for how many steps it was asked, and a digest of each file of its model."""
        found = sorted(file for file in self.exported.rglob("*") if file.is_file())
        files = {str(file.relative_to(self.exported)): digest_of_file(file, settle=True) for file in found}
        self.write(FINISHED, json.dumps({"asked": asked, **ended, "files": files}) + "\n")

    def finished(self, asked: int) -> dict[str, Any] | None:
        """Return how the run ended, or None if it has not, or is asked for more steps now.

        Raises:
            UsageError: the file is damaged, or a file of the model is not what the run wrote.
        """
        if not (file := self.path / FINISHED).exists():
            return None
        found = _object(_text(file), file)
        try:
            ended = msgspec.convert(found, _Finished)
        except msgspec.ValidationError as problem:
            raise UsageError(f"`{file}` is damaged: {problem}") from problem
        if ended.asked != asked:
            return None
        files = {self.exported / name: digest for name, digest in ended.files.items()}
        for part in (file for file in files if not file.is_file() or digest_of_file(file) != files[file]):
            raise UsageError(
                f"`{part}` is not what the finished run wrote: put it back, or remove `{file}`, and "
                "the run goes on from its last checkpoint and exports its model again"
            )
        return {name: found[name] for name in ("steps", "loss", "accuracy")}

    def rewind(self, step: int) -> dict[str, Any]:
        """Remove what the run did after a step; return the metrics of that step, empty for step 0."""
        for left in (self.path / FINISHED, self.held_out, self.export_trace, self.path / "oracle"):
            remove(left)  # what the oracle has is of a step that was cut off
        for folder in ("batches", "steps"):
            for item in (self.path / folder).iterdir():
                found = re.match(r"\.?(\d{6,})", item.name)  # one that begins with a dot was cut off
                if found and int(found[1]) > step:
                    remove(item)
        update_log.rewind(self.path, step)
        self._cut(SAMPLES, step)
        kept = self._cut("metrics.jsonl", step)
        return json.loads(kept[-1]) if kept else {}

    def _cut(self, name: str, step: int) -> list[str]:
        """Remove the lines of later steps from a file of JSON lines; return those that stay.

        Raises:
            UsageError: a line before the last is damaged. The last may be cut: it is of a step after the checkpoint.
        """
        file, kept = self.path / name, []
        lines = _text(file).splitlines() if file.exists() else []
        for number, line in enumerate(lines, 1):
            with contextlib.suppress(UsageError) if number == len(lines) else contextlib.nullcontext():
                if _step_of(line, file, number) <= step:
                    kept.append(line)
        if file.exists():
            write_whole(file, "".join(f"{line}\n" for line in kept))
        return kept


class _Finished(msgspec.Struct):
    asked: int
    steps: int
    loss: float | None
    accuracy: float | None
    files: dict[str, str] = {}
    """File of the exported model -> digest; empty in runs of version 0.2.0."""


def digest_of_file(file: Path, *, settle: bool = False) -> str:
    """Digest of a file's contents, which are first written to the device if asked to."""
    digest = xxhash.xxh3_128()
    with file.open("rb") as stream:
        if settle:
            os.fsync(stream.fileno())
        while piece := stream.read(_PIECE):
            digest.update(piece)
    return "xxh3:" + digest.hexdigest()


def _text(file: Path) -> str:
    if not file.is_file():
        raise UsageError(f"`{file}` is no regular file")
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise UsageError(f"`{file}` cannot be read: {problem}") from problem


def _object(text: str, file: Path) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(found := json.loads(text), dict):
            return found
    raise UsageError(f"`{file}` is damaged: it has no JSON object where the run wrote one")


def _step_of(line: str, file: Path, number: int) -> int:
    found = _object(line, file).get("step")
    if not isinstance(found, int):
        raise UsageError(f"`{file}` is damaged: line {number} names no step")
    return found


def shared_knobs(config: TrainConfig) -> dict[str, Any]:
    """Values of the knobs in which a resumed run must agree with the one that it continues."""
    return {key: value for key, value in flat(config.to_dict()).items() if not key.startswith(FREE)}


@contextlib.contextmanager
def opened(config: TrainConfig) -> Iterator[RunFolder]:
    """Open the folder of a run, new or to be continued, and keep others out of it until exit.

    Raises:
        UsageError: it holds a run of another config, is in use, or cannot be written.
    """
    path = config.run
    folder = RunFolder(path)
    with locked_folder(path, "lock", "run folder", "run"):
        for file in path.rglob("*"):
            if file.is_dir() and file.suffix in _OF_FILES:
                raise UsageError(f"`{file}` is a folder where a run keeps a file: remove it")
            if file.is_symlink() and file.relative_to(path).parts[0] in _WRITTEN:
                raise UsageError(f"`{file}` is a link, and a run would write or remove what is there: remove the link")
            if not (file.is_file() or file.is_symlink() or file.is_dir()):
                raise UsageError(f"`{file}` is a pipe, a socket or a device, whose reader would wait: remove it")
        _require_same_run(config)
        for name in ("batches", "steps"):
            (path / name).mkdir(exist_ok=True)
        yield folder


def _require_same_run(config: TrainConfig) -> None:
    if not (config.run / KNOBS).exists():
        if (config.run / CONFIG).exists():
            raise UsageError(f"the run folder `{config.run}` holds a run of another version: choose another --run")
        return
    for other in other_knobs(config.run, config):
        way_out = "give the same value to continue it, or choose" if other.can_agree else "choose"
        raise UsageError(f"the run folder `{config.run}` holds {other.text}: {way_out} another --run")


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherKnob:
    """A knob in which a run and a config differ and must not."""

    key: str
    found: Any
    """Value of the run; None where it has none."""
    text: str
    """Sentence about the run's folder; begins with "a run"."""
    can_agree: bool
    """There is a value by which they would not differ."""


def other_knobs(run: Path, config: TrainConfig) -> Iterator[OtherKnob]:
    """Knobs in which a run and a config differ and must not. One that the run's version lacked has its default."""
    file = run / KNOBS
    found, asked, defaults = _object(_text(file), file), shared_knobs(config), _defaults()
    for key in sorted(found.keys() | asked.keys()):
        can_agree, wanted = True, f"and {key}={_shown(asked.get(key))} is asked for"
        if key in found and key in asked:
            same, text = found[key] == asked[key], f"a run with {key}={_shown(found[key])}, {wanted}"
        elif key in asked and key in defaults:
            same = defaults[key] == asked[key]
            text = f"a run of a version without the knob {key}, whose default is {_shown(defaults[key])}, {wanted}"
        elif key in asked:
            same, can_agree = False, False
            text = f"a run of a version without the knob {key}, which has no default, {wanted}"
        else:
            same, can_agree = False, False
            text = f"a run with {key}={_shown(found[key])}, a knob that this version does not have"
        if not same:
            yield OtherKnob(key=key, found=found.get(key), text=text, can_agree=can_agree)


def _defaults() -> dict[str, Any]:
    """Default of each knob that has one whatever the others are, as knobs.json writes it."""
    known = [entry for entry in entries(TrainConfig) if not (entry.required or entry.computed)]
    return {entry.key: json.loads(json.dumps(entry.default, default=str)) for entry in known}


def _shown(value: Any) -> Any:
    return "null" if value is None else value


def first_of(config: TrainConfig) -> TrainConfig:
    """Config of the run that `first` names, in the folder `first` of the run that it begins.

    Raises:
        UsageError: it trains another model, or what its file says is refused.
    """
    words = [f"run={config.run / 'first'}", f"verify.steps={config.verify.steps}"]
    begin, _ = load(TrainConfig, file=config.first, overrides=words)
    if begin.model != config.model:
        raise UsageError(f"`{config.first}` trains {begin.model} and this run {config.model}: name the same model")
    return replace(begin, dtype=config.dtype)


def going_on(config: TrainConfig, begin: TrainConfig) -> TrainConfig:
    """Config of a run that goes on with the weights that the run before it has left."""
    return replace(config, model=str(begin.run / "hf_model"), first=None)

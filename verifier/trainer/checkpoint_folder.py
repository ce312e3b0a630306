"""Checkpoints of a run on disk: each is whole, with a manifest that was written last, or does not exist.

000020/megatron/       model, optimizer, scheduler and random states, by megatron-core
000020/saved/          digests of what each rank held, and the last step that it had trained
000020/state.json      step, position in the data, weight version, seed, config, rollouts not yet trained on
000020/manifest.json   digest of every file, and of itself
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from verifier.config.training import TrainConfig
from verifier.core.outputs import remove
from verifier.core.reader import digest_of
from verifier.errors import UsageError
from verifier.trainer.ahead import AheadRollouts
from verifier.trainer.observer import SILENT, Observer
from verifier.trainer.run_folder import RunFolder, digest_of_file, shared_knobs

MANIFEST, STATE = "manifest.json", "state.json"


class RunState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The controller's part of a checkpoint."""

    step: int
    """Steps taken."""
    updates: int
    """Optimizer steps taken: fewer than the config says where a mini-batch had no token in the loss."""
    data_position: int
    """Batches taken from the data."""
    weight_version: int
    seed: int
    config: str
    """Digest of the knobs that a resumed run must share."""
    mesh: str
    rollouts: list[list[dict[str, Any]]] = []
    """Rollouts of the next steps that were sampled ahead, by step, round and group; see `SampledBatch.saved`."""


class _Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    files: dict[str, str]
    digest: str = ""


class Checkpoints:
    """The last `keep` checkpoints of one run, in a folder that is made if it is absent."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder, self._keep = folder, keep
        folder.mkdir(exist_ok=True)

    def path(self, step: int) -> Path:
        """Folder of a whole checkpoint."""
        return self._folder / f"{step:06d}"

    def partial(self, step: int) -> Path:
        """Folder of a checkpoint that is not whole yet."""
        return self._folder / f"{step:06d}.partial"

    def begin(self, step: int) -> Path:
        """Make the folder of a checkpoint anew, for the ranks to write into."""
        folder = self.partial(step)
        shutil.rmtree(folder, ignore_errors=True)
        for name in ("megatron", "saved"):
            (folder / name).mkdir(parents=True)
        return folder

    def finish(self, state: RunState) -> Path:
        """Declare a checkpoint whole, once all of it is on the device, and remove those before the last ones."""
        aside, folder = self.partial(state.step), self.path(state.step)
        (aside / STATE).write_bytes(msgspec.json.format(msgspec.json.encode(state), indent=1) + b"\n")
        files = {name: digest_of_file(aside / name, settle=True) for name in _listed(aside)}
        manifest = aside / MANIFEST
        manifest.write_bytes(_sealed(files))
        for settled in (manifest, *(item for item in aside.rglob("*") if item.is_dir()), aside):
            _settle(settled)
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
        _settle(self._folder)
        for step in self._steps()[: -self._keep]:
            remove(self.path(step))
        return folder

    def last_whole(self, before: int | None = None) -> tuple[RunState | None, dict[int, str]]:
        """Return the state of the last whole checkpoint, or of the last before a step, and why later ones are none."""
        refused: dict[int, str] = {}
        for step in reversed(self._steps()):
            if before is not None and step >= before:
                continue
            try:
                return read_state(self.path(step)), refused
            except UsageError as problem:
                refused[step] = str(problem)
        return None, refused

    def remove_after(self, step: int) -> None:
        """Remove what was begun and never finished, and all checkpoints after a step."""
        for folder in self._folder.iterdir():
            if folder.suffix == ".partial" or (folder.name.isdigit() and int(folder.name) > step):
                remove(folder)

    def _steps(self) -> list[int]:
        return sorted(int(item.name) for item in self._folder.iterdir() if re.fullmatch(r"\d{6,}", item.name))


def read_state(folder: Path) -> RunState:
    """Read a checkpoint's state after a look at every byte of it.

    Raises:
        UsageError: it is not whole: a file is missing, extra, cut or changed.
    """
    try:
        written = (folder / MANIFEST).read_bytes()
        manifest = msgspec.json.decode(written, type=_Manifest)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as problem:
        raise UsageError(f"the checkpoint `{folder}` is not whole: it has no readable {MANIFEST}") from problem
    if written != _sealed(manifest.files):
        raise UsageError(f"the checkpoint `{folder}` is damaged: `{MANIFEST}` is not what the run wrote")
    for name in sorted(manifest.files.keys() ^ set(_listed(folder))):
        how = "is missing" if name in manifest.files else "is no file of it"
        raise UsageError(f"the checkpoint `{folder}` is not whole: `{name}` {how}")
    for name, digest in manifest.files.items():
        if digest_of_file(folder / name) != digest:
            raise UsageError(f"the checkpoint `{folder}` is damaged: `{name}` is not what the run wrote")
    try:
        return msgspec.json.decode((folder / STATE).read_bytes(), type=RunState)
    except msgspec.MsgspecError as problem:
        raise UsageError(f"the checkpoint `{folder}` is of another version: {problem}") from problem


def digest_of_values(values: Any) -> str:
    """Digest of JSON-able values."""
    return digest_of(msgspec.json.encode(values, order="deterministic"))


def _sealed(files: dict[str, str]) -> bytes:
    manifest = _Manifest(files=files, digest=digest_of_values(files))
    return msgspec.json.format(msgspec.json.encode(manifest, order="deterministic"), indent=1) + b"\n"


def _listed(folder: Path) -> list[str]:
    found = (str(item.relative_to(folder)) for item in folder.rglob("*") if not item.is_dir())
    return sorted(name for name in found if name != MANIFEST)


def _settle(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


RESUMES = "resumes.log"
"""File in a run's folder with a line for each time that it went on, and for each checkpoint that it passed over."""
Call = Callable[..., list[Any]]
"""Calls a method of all ranks by its name and arguments."""


class Continuation:
    """The checkpoints of a run, from the one that it continues to the last that it writes."""

    def __init__(
        self, config: TrainConfig, folder: RunFolder, progress: Callable[[str], None], observer: Observer = SILENT
    ) -> None:
        self._observer = observer
        self._config, self._folder, self._progress = config, folder, progress
        self._checkpoints = Checkpoints(folder.path / "checkpoints", config.checkpoint.keep)
        self._digest = digest_of_values(shared_knobs(config))
        self._at: RunState | None = None
        self._writing: RunState | None = None

    def rewind(self) -> tuple[int, dict[str, Any]]:
        """Find the last whole checkpoint, and remove all that came after it.

        Returns the number of steps that are done, and the metrics of the last.

        Raises:
            UsageError: the checkpoint is of other knobs, or of a later step than is asked for; or there are some and
                none is whole.
        """
        at, refused = self._checkpoints.last_whole()
        for reason in refused.values():
            self._tell(reason)
        if at is None and refused:
            raise UsageError(
                f"no checkpoint of `{self._folder.path}` is whole ({refused[max(refused)]}): choose another --run, or "
                f"move `{self._checkpoints.path(0).parent}` away to begin anew"
            )
        step = 0 if at is None else at.step
        path = self._checkpoints.path(step)
        if at is not None and at.config != self._digest:
            raise UsageError(
                f"the checkpoint `{path}` is of a run with other knobs: remove it, or choose another --run"
            )
        if step > self._config.steps:
            raise UsageError(
                f"`{self._folder.path}` has trained {step} steps, --steps is {self._config.steps}: give more"
            )
        self._checkpoints.remove_after(step)
        metrics = self._folder.rewind(step)
        if at is not None:
            self._tell(f"continuing from the checkpoint `{path}`: {step} steps are done")
        elif (self._folder.path / "config.yaml").exists():
            self._tell("the run has no whole checkpoint: it begins anew")
        self._at = at
        return step, metrics

    def _tell(self, text: str) -> None:
        """Say how the run goes on, and leave the line in its folder."""
        self._progress(text)
        with (self._folder.path / RESUMES).open("a", encoding="utf-8") as stream:
            stream.write(f"{text}\n")

    @property
    def updates(self) -> int:
        """Optimizer steps that the checkpoint has taken; 0 without one."""
        return 0 if self._at is None else self._at.updates

    def restore(self, ahead: AheadRollouts | None) -> None:
        """Give back the batches that were sampled ahead of the checkpoint."""
        if self._at is not None and ahead is not None:
            ahead.restore(self._at.step + 1, self._at.rollouts)

    def load(self, call: Call) -> dict[str, Any]:
        """Have the ranks load the checkpoint, or begin without one; returns rank 0's effective settings."""
        arguments: dict[str, Any] = {}
        if self._at is not None:
            same_mesh = self._at.mesh == self._config.mesh.label()
            arguments = {"resume": str(self._checkpoints.path(self._at.step)), "same_mesh": same_mesh}
            self._observer.on_resume(self._at.step)
        settings: dict[str, Any] = call("load", **arguments)[0]
        return settings

    def is_due(self, step: int) -> bool:
        """Tell whether a checkpoint is to be written after a step."""
        every = self._config.checkpoint.every
        return every > 0 and step % every == 0

    def begin(self, call: Call, step: int, updates: int, rollouts: Sequence[Any] = ()) -> None:
        """Have the ranks begin a checkpoint of a step, its updates and what was sampled ahead, unless there is one."""
        self.finish(call, wait=True)
        if self._checkpoints.path(step).exists():
            return
        call("save", folder=str(self._checkpoints.begin(step)))
        self._writing = RunState(
            step=step, updates=updates, data_position=step, weight_version=step, seed=self._config.seed,
            config=self._digest, mesh=self._config.mesh.label(), rollouts=list(rollouts),
        )  # fmt: skip

    def finish(self, call: Call, *, wait: bool) -> None:
        """Declare whole the checkpoint that was begun, once the ranks have written it; waits for that if asked to."""
        if self._writing is None:
            return
        folder = self._checkpoints.partial(self._writing.step)
        found = call("saved", folder=str(folder), wait=wait)
        if all(item is not None for item in found):
            self._checkpoints.finish(self._writing)
            self._observer.on_checkpoint(self._writing.step, found)
            self._writing = None

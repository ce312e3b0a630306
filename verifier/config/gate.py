"""Config of `verifier gate`: the axes of its matrix, its budget, and what it waives."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

from verifier.config.cluster import RayOptions
from verifier.config.commands import (
    DTYPES,
    MAX_TIMEOUT_S,
    SPELLED,
    TimedConfig,
    fixes_knob,
    folder_name,
    next_trace,
    seed_knob,
    timeout_knob,
)
from verifier.errors import UsageError
from verifier.knob import group, knob
from verifier.platform.upstream_fixes import require_known

GATES = Path("gates")
GATE_FILE = "gate.yaml"
"""File of every knob in a gate's folder, as `--config` takes it again."""
KINDS = ("golden", "roundtrip", "train", "faults")
"""Kinds of cells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiver:
    """A violation that is known and accepted until a day.

    Raises:
        UsageError: a field that is left out, or a date that is none.
    """

    check: str = ""
    """Code of the check that may be violated."""
    family: str = ""
    """Family of the models, or their model_type; of this and `model` one."""
    model: str = ""
    """Model as `models` has it."""
    issue: str = ""
    """Address or number of the upstream issue."""
    owner: str = ""
    reason: str = ""
    until: str = ""
    """Last day on which it waives, as in ISO 8601."""

    def __post_init__(self) -> None:
        where = f"the waiver of {self.check}" if self.check else "a waiver"
        for name in ("check", "issue", "owner", "reason", "until"):
            if not getattr(self, name).strip():
                raise UsageError(f"{where} has no `{name}`: a waiver has check, family or model, issue, owner, reason "
                                 "and until")  # fmt: skip
        if bool(self.family) == bool(self.model):
            given = "both family and model" if self.family else "neither family nor model"
            raise UsageError(f"{where} has {given}: give one of the two")
        try:
            datetime.date.fromisoformat(self.until)
        except ValueError:
            raise UsageError(f"{where} has until `{self.until}`: write a day, such as 2027-01-31") from None

    def expired(self, today: datetime.date) -> bool:
        """True once its last day has passed."""
        return today > datetime.date.fromisoformat(self.until)


@dataclass(frozen=True, slots=True, kw_only=True)
class GateConfig(TimedConfig):
    """Config of `verifier gate`."""

    timeout_s: float = timeout_knob("Deadline of the whole gate; what has not begun by then is not run.", 86_400.0)
    models: tuple[str, ...] = knob(
        "Generated, tiny:NAME or wide:NAME, or a local HF directory; repeatable.", flag="--model", metavar="MODEL"
    )
    kinds: tuple[str, ...] = knob(
        f"Kind of cells, of {', '.join(KINDS)}; by default all; repeatable.", KINDS, flag="--kind", metavar="KIND"
    )
    meshes: tuple[str, ...] = knob(
        "Mesh, such as tp=2,dp=2, in place of the default ones; repeatable.", (), flag="--mesh", metavar="AXES"
    )
    dtypes: tuple[str, ...] = knob(
        "Type of the weights, fp32 or bf16; by default the stored one, and both of tiny:NAME; repeatable.", (),
        flag="--dtype", metavar="DTYPE",
    )  # fmt: skip
    transports: tuple[str, ...] = knob(
        "Transport to the engine: gloo, nccl or ipc; by default chosen by the free GPUs; repeatable.", (),
        flag="--transport", metavar="TRANSPORT",
    )  # fmt: skip
    engines: tuple[str, ...] = knob(
        "Engine and its options, such as vllm or vllm,tp=2; by default those that run here; repeatable.", (),
        flag="--engine", metavar="ENGINE",
    )  # fmt: skip
    faults: tuple[str, ...] = knob(
        "Fault that must be caught, to show that the checks are alive here; by default five; repeatable.", (),
        flag="--fault", metavar="FAULT",
    )  # fmt: skip
    cycles: int = knob("Updates of each round trip.", 2, flag="--cycles", least=1)
    train_steps: int = knob("Steps of each training run.", 3, flag="--steps", least=1)
    seed: int = seed_knob("Seed of tokens, data and noise.")
    fixes: tuple[str, ...] = fixes_knob()
    budget_minutes: float | None = knob(
        "Minutes for all cells; those that do not fit are not run, and the gate is inconclusive.", None,
        flag="--budget", metavar="MINUTES", unit="minutes", above=0,
    )  # fmt: skip
    cell_timeout_s: float = knob(
        "Deadline of one cell, which then counts as failed.", 900.0, flag="--cell-timeout", metavar="SECONDS",
        unit="seconds", above=0, most=MAX_TIMEOUT_S, last=True,
    )  # fmt: skip
    folder: Path = knob(
        "Folder of the gate, which the same command continues; by default the next free gates/NAME-NNNN.", Path(),
        flag="--folder", metavar="DIR", derived=True, last=True,
    )  # fmt: skip
    waivers: tuple[Waiver, ...] = knob(
        "Violations that are waived: check, family or model, issue, owner, reason, until (a day).", (), record=Waiver,
        last=True,
    )  # fmt: skip
    ray: RayOptions = group(RayOptions)

    def _fill(self) -> None:
        require_known(self.fixes)
        object.__setattr__(self, "dtypes", tuple(SPELLED.get(name, name) for name in self.dtypes))
        if self.folder == Path() and self.models:
            object.__setattr__(self, "folder", next_trace(folder_name(self.models[0]), GATES))

    def _contradictions(self) -> dict[str, object]:
        axes = {
            "--model": self.models,
            "--kind": self.kinds,
            "--mesh": self.meshes,
            "--dtype": self.dtypes,
            "--engine": self.engines,
            "--transport": self.transports,
            "--fault": self.faults,
        }
        known = {"--kind": KINDS, "--dtype": tuple(DTYPES), "--transport": ("gloo", "nccl", "ipc")}
        unknown = {
            f"{option} is `{name}`, it must be one of {', '.join(names)}": name not in names
            for option, names in known.items()
            for name in axes[option]
        }
        twice = {
            f"{option} {name} is given twice: leave one out": values.count(name) > 1
            for option, values in axes.items()
            for name in values
        }
        return {
            "models is empty: name one or more, by --model": not self.models,
            **unknown,
            f"kinds is empty: name one or more of {', '.join(KINDS)}": not self.kinds,
            **twice,
        }

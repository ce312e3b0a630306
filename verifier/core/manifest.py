"""The manifest of a trace: which run it was, on which machine, and what it undertook to show."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from verifier.core.record import Count

FORMAT: Literal[2] = 2
Scope = Literal[
    "adapter", "audited", "balance", "batch", "begun", "choices", "cold", "config", "cut",
    "draws", "dropped", "emptied", "ends", "engine", "entropy", "estimator", "evaluated", "examined",
    "export", "exported", "final", "forced", "formula", "frozen", "gradient", "handed", "held", "joined",
    "layout", "lengths", "logprob", "merged", "mismatch", "order", "passes", "penalty", "plan",
    "planned", "policy", "products", "prompts", "reference", "replay", "replicas", "reread",
    "restarted", "resume", "reward", "rollout", "routers", "routes", "sampled", "saved", "scaled",
    "schedule", "scored", "sent", "served", "settings", "spot", "stack", "stated", "step", "stored",
    "summed", "text", "tokens", "transport", "turns", "untouched", "update",
]  # fmt: skip
"""Part of a run's declaration; every check belongs to one."""
Ranks = Annotated[int, Meta(ge=0, le=1 << 16)]
"""More than any run has; each is looked for."""


class MeshSizes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Parallel sizes of the trainer, as `verifier.mesh.Mesh` takes them."""

    tp: Annotated[int, Meta(ge=1)] = 1
    pp: Annotated[int, Meta(ge=1)] = 1
    ep: Annotated[int, Meta(ge=1)] = 1
    etp: Annotated[int, Meta(ge=1)] = 1
    cp: Annotated[int, Meta(ge=1)] = 1
    dp: Annotated[int, Meta(ge=1)] = 1
    vpp: Annotated[int, Meta(ge=1)] = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None


class UpstreamBug(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A known bug of the stack under test that this run may show."""

    id: str
    """Name that ``--fix`` takes, such as "vllm-44371"."""
    issue: str
    """Upstream's own number, such as "vllm #44371"."""
    summary: str
    checks: tuple[str, ...] = ()
    """Codes of the checks that it violates."""
    names: str = ""
    """Regular expression of the tensors or modules that it touches; empty for any."""
    fixed: bool = False
    """The fix was switched on in this run."""


class MovedContract(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A thing that upstream does in the verified versions and not in the installed ones; checks or a fix rest on it."""

    name: str
    package: str
    """Distribution that kept it."""
    why: str
    """Place and message of what was seen instead."""
    checks: tuple[str, ...]
    """Codes of the checks that rest on it: none of them holds in this run. None rests on a contract of a fix."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Identity of a run."""

    format: Literal[2] = FORMAT
    command: str = "run"
    command_line: str = ""
    """The command as it was typed."""
    verifier: str = ""
    """Version of this package."""
    commit: str = ""
    """Short commit of this package; ends in ``+`` where its files differ from it, empty outside of a checkout."""
    began: str = ""
    """Time at which the run began, in UTC, as in ISO 8601; `ended` likewise."""
    ended: str = ""
    gpus: tuple[str, ...] = ()
    """Name of each GPU that the run saw."""
    transport: str = ""
    """Transport of weights to the engine; empty where nothing was sent."""
    host: str = ""
    """The machine in a few words: system and processors."""
    model: str = ""
    dtype: str = ""
    """Dtype that the checkpoint is stored in."""
    tier: str = ""
    """"cpu" or "cuda"."""
    mesh: MeshSizes | None = None
    world_size: Ranks = 0
    """Trainer ranks."""
    num_gpus: Ranks = 0
    """GPUs that the trainer's ranks share; 0 on a host without."""
    engine: str = ""
    """"vllm", "hf", or empty where no engine took part."""
    engine_ranks: Ranks = 0
    scopes: tuple[Scope, ...] = ()
    """Checks that have a subject in this run."""
    synced_versions: tuple[Count, ...] = ()
    """Weight versions that the engine was to receive."""
    untouched_versions: tuple[Count, ...] = (0,)
    """Weight versions whose exported base must be the source's."""
    versions: dict[str, str] = {}
    """Upstream packages and their versions."""
    verified_set: str = ""
    """Name of the verified set that ran; empty where a package runs at another version."""
    verified: dict[str, str] = {}
    """Verified version of each package that runs at another one."""
    moved_contracts: tuple[MovedContract, ...] = ()
    """Contracts that do not hold in these versions; looked at only where a package runs at another version."""
    config: dict[
        str, bool | int | float | str | list[str] | dict[str, bool | int | float | str | list[str] | None] | None
    ] = {}
    """Settings of the command, JSON values."""
    layout: str = ""
    """Kind of layout, which says where checkpoint tensors live in the trainer; empty where the run has none."""
    stand_ins: tuple[str, ...] = ()
    """Stand-ins for upstream's code on this tier, one sentence each."""
    not_judged: tuple[str, ...] = ()
    """Stages of the run that no check has the means to judge, and why, a clause each."""
    notes: tuple[str, ...] = ()
    """Sentences on what the model's config.json and tensors become in the trainer; no check judges them."""
    upstream_bugs: tuple[UpstreamBug, ...] | None = None
    """Known bugs that reach this run; None where the run does not say."""
    complete: bool = False
    """The run finished writing. A trace without it can be judged but never holds."""
    failure: str = ""
    """Error that ended a run that did not finish."""
    files: dict[str, str] = {}
    """Digest of every other file of the trace, by its path within; of a complete trace only."""
    digest: str = ""
    """Digest of this manifest without this field."""

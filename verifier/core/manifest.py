"""The manifest of a trace: which run it was, on which machine, and what it undertook to show."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from verifier.core.record import Count

FORMAT: Literal[3] = 3
"""Changes where an older version would misread a trace; optional fields and kinds are added without (docs/api.md)."""
Ranks = Annotated[int, Meta(ge=0, le=1 << 16)]
"""More than any run has; each is looked for."""


class MeshSizes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
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


class UpstreamBug(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
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


class MovedContract(msgspec.Struct, frozen=True, kw_only=True):
    """A thing that upstream does in the verified versions and not in the installed ones; checks or a fix rest on it."""

    name: str
    package: str
    """Distribution that kept it."""
    why: str
    """Place and message of what was seen instead."""
    checks: tuple[str, ...]
    """Codes of the checks that rest on it: none of them holds in this run. None rests on a contract of a fix."""


class Facts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Facts of a run that its config does not tell; by them a check says whether it judges the run."""

    part: Literal["step", "export", "load", "answers", "failure"] = "step"
    """Part of a training run that the trace is of; "answers" ended for a lost log-probability."""
    expert_stages: tuple[Count, ...] = ()
    """Pipeline stages that have layers with routed experts."""
    score_bias: bool = False
    """Routers add a bias to the scores by which they choose."""
    replicas: bool = False
    """Some shard is held by two ranks of the mesh."""
    saved: bool = False
    """Megatron-bridge writes the last export of a round trip to files too."""
    cut: bool = False
    """Ranks compare their exports with their shards at every sync."""
    why_no_layout: str = ""
    """Why none could be derived, where that was tried."""
    why_unread: str = ""
    """Why the tokenizer has no second reader; empty where it has."""
    why_unsampled: str = ""
    """Why transformers computes no step of the run too; empty where it does."""
    why_no_spot: str = ""
    """Why no rollout is scored by itself in any step; empty where one is."""
    judges_gradients: bool = False
    """Transformers can compute the gradients of the run's steps."""
    has_reference: bool = False
    has_turns: bool = False
    """An environment answers turns."""
    frozen_base: bool = False
    """Adapters are trained."""
    adapters_sent: bool = False
    """The engine gets adapters; otherwise whole weights."""
    step: Count = 0
    """Step of a training run, from 1."""
    updates: tuple[Count, ...] = ()
    """Numbers of the optimizer steps in it; none where no token was left in the loss."""
    sampled: bool = False
    """Transformers computes the step too."""
    loaded: bool = False
    """The first step after the ranks loaded the model's checkpoint."""
    sent: bool = False
    """The weights that sample the step were sent to the engine, and that is recorded."""
    resumed: bool = False
    """The first step after a resume."""
    restarted: bool = False
    """Engines that sampled the step had been started again."""
    stored: bool = False
    """A checkpoint was written since the step before, and some of it was read back."""
    evaluated: bool = False
    """The problems of the evaluation are recorded."""
    examined: bool = False
    """Answers of an evaluation are recorded."""
    spot: bool = False
    """A rollout is scored by itself, where the run does that."""
    fresh: bool = True
    """A token in the loss was sampled by the weights that it trains."""
    noise: bool = False
    """The noise of a log-probability in the run's dtype was measured; float32 needs none."""
    rewarded: bool = True
    """A second reader can tell the reward of some rollout."""
    recorded: dict[str, dict[str, tuple[Count, ...]]] = {}
    """Kind of records that a recorded loop has, or undertook to have -> role and rank -> versions of those records."""
    exported: tuple[Count, ...] = ()
    """Versions that a recorded loop exported."""
    told: tuple[str, ...] = ()
    """Parts of records that a recorded loop need not fill in, and did."""
    unbounded: dict[str, str] = {}
    """Kind of records that a recorded loop has and that nothing bounds -> why."""
    estimators: tuple[str, ...] = ()
    """Estimators of advantages."""
    lost_logprobs: bool = False
    """An engine gave a sampled token of a recorded loop no finite log-probability."""
    stack_failed: bool = False
    """A failure of the stack under test ended the run."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of a run."""

    format: Literal[3] = FORMAT
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
    facts: Facts = Facts()
    """Facts beyond the config; each check says by them whether it judges the run."""
    synced_versions: tuple[Count, ...] = ()
    """Weight versions that the engine was to receive."""
    untouched_versions: tuple[Count, ...] = (0,)
    """Weight versions whose exported base must be the source's."""
    versions: dict[str, str] = {}
    """Upstream packages and their versions."""
    plugins: dict[str, str] = {}
    """Distributions with checks of their own that were installed, and their versions."""
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

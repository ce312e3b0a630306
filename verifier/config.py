"""What a run is asked to do: frozen, keyword-only, validated where it is made."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verifier.errors import UsageError
from verifier.mesh import Mesh
from verifier.platform.upstream_fixes import require_known

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""Spelling on the command line -> spelling everywhere else."""
ENGINES = ("vllm", "hf")
UPDATES = ("step", "noise")
TRANSPORTS = ("gloo", "nccl", "ipc")
QUANTIZATIONS = ("fp8",)
SLEEP_LEVELS = (0, 1, 2)
MAX_TIMEOUT_S = 7 * 24 * 3600
LORA_RANKS = (0, 8, 16, 32, 64)


def make_mesh(
    *,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    etp: int = 1,
    cp: int = 1,
    dp: int | None = None,
    vpp: int = 1,
    first_stage_layers: int | None = None,
    last_stage_layers: int | None = None,
) -> Mesh:
    """A mesh from command-line sizes; without `dp`, the smallest for which ep * etp divides tp * cp * dp.

    Raises:
        UsageError: a size below 1, or sizes that do not fit together.
    """
    for axis, size in (("tp", tp), ("pp", pp), ("ep", ep), ("etp", etp), ("cp", cp), ("vpp", vpp)):
        _at_least_one(f"--{axis}", size)
    return Mesh(
        tp=tp,
        pp=pp,
        ep=ep,
        etp=etp,
        cp=cp,
        dp=Mesh.smallest_dp(tp, cp, ep, etp) if dp is None else dp,
        vpp=vpp,
        first_stage_layers=first_stage_layers,
        last_stage_layers=last_stage_layers,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundtripConfig:
    """One `verifier roundtrip`.

    Raises:
        UsageError: a value outside of what the command accepts.
    """

    model: str
    """"tiny:NAME", "wide:NAME" or a local checkpoint directory."""
    trace: Path
    """Trace directory to write; must not exist or be empty."""
    mesh: Mesh = field(default_factory=Mesh)
    dtype: str = "float32"
    engine: str = "vllm"
    engine_tp: int = 1
    """Tensor parallel size of the engine."""
    cycles: int = 3
    """Updates that are synced, each followed by logprobs."""
    update: str = "step"
    """"step": a real optimizer step. "noise": seeded noise on every weight, which touches every tensor."""
    seed: int = 1
    transport: str | None = None
    """How weights reach the engine; None chooses by tier and by the GPUs that are free."""
    cuda_graphs: bool = False
    """vLLM captures CUDA graphs and replays them; without, it runs eagerly."""
    sleep_level: int = 0
    """How deep the engine sleeps while the trainer steps: 1, weights go to the host; 2, they are dropped; 0, awake."""
    engine_quantization: str | None = None
    """"fp8": vLLM quantises the weights as it loads them, at the start and at every sync."""
    engine_lora_rank: int = 0
    """Above 0: the base is frozen, an adapter of this rank is trained, and the adapter is what is synced."""
    fixes: tuple[str, ...] = ()
    """Ids of the upstream fixes to install, or "all"; none judges the stack as it is shipped."""
    timeout_s: float = 1800.0
    """Deadline of the whole run, seconds."""

    def __post_init__(self) -> None:
        _common(self.dtype, self.timeout_s)
        require_known(self.fixes)
        _one_of("--engine", self.engine, ENGINES)
        if self.transport is not None:
            _one_of("--transport", self.transport, TRANSPORTS)
        _one_of("--update", self.update, UPDATES)
        _at_least_one("--engine-tp", self.engine_tp)
        _at_least_one("--cycles", self.cycles)
        if self.engine == "hf" and self.engine_tp != 1:
            raise UsageError(
                f"--engine hf has one rank, --engine-tp is {self.engine_tp}: leave it out, or use --engine vllm"
            )
        if self.sleep_level not in SLEEP_LEVELS:
            raise UsageError(
                f"--sleep-level is {self.sleep_level}, it must be 1 or 2; without it the engine stays awake"
            )
        if self.engine_quantization is not None:
            _one_of("--engine-quantization", self.engine_quantization, QUANTIZATIONS)
        if self.engine_lora_rank not in LORA_RANKS:
            allowed = ", ".join(map(str, LORA_RANKS[1:]))
            raise UsageError(f"--engine-lora-rank is {self.engine_lora_rank}, it must be one of {allowed}")
        if self.engine_lora_rank:
            self._check_adapter_options()
        if self.engine != "vllm" and (asked := self.vllm_options()):
            raise UsageError(f"{asked[0]} is an option of vLLM, --engine is {self.engine}: leave one of the two out")

    def _check_adapter_options(self) -> None:
        for name, asked in (
            ("--engine hf", self.engine != "vllm"),
            ("--engine-tp", self.engine_tp != 1),
            ("--sleep-level", self.sleep_level),
            ("--engine-quantization", self.engine_quantization),
            ("--update noise", self.update != "step"),
        ):
            if asked:
                raise UsageError(f"--engine-lora-rank and {name} do not go together: leave one of the two out")

    def vllm_options(self) -> list[str]:
        """The options asked for that only vLLM on a GPU has, as spelled on the command line."""
        spelled = {
            "--cuda-graphs": self.cuda_graphs,
            "--sleep-level": self.sleep_level,
            "--engine-quantization": self.engine_quantization,
        }
        return [name for name, asked in spelled.items() if asked]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able values, as the trace's manifest records them under "config"."""
        return _to_dict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenConfig:
    """One `verifier golden`.

    Raises:
        UsageError: a value outside of what the command accepts, or options that contradict each other.
    """

    model: str
    trace: Path
    mesh: Mesh = field(default_factory=Mesh)
    dtype: str = "float32"
    record: bool = False
    """Write the manifest of this model's export under ``golden/``."""
    why: str | None = None
    """Why the manifest is (re)recorded; it lands in the manifest."""
    against: Path | None = None
    """Compare with this recorded manifest, not with source weights."""
    fixes: tuple[str, ...] = ()
    """As of a round trip."""
    timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        _common(self.dtype, self.timeout_s)
        require_known(self.fixes)
        if self.record and self.against is not None:
            raise UsageError("--record writes a manifest and --against compares with one: give one of the two")
        _require_reason(self.record, self.why)
        if self.against is not None and not self.against.is_file():
            raise UsageError(f"there is no manifest `{self.against}`: give the path of a file that `--record` wrote")

    def to_dict(self) -> dict[str, Any]:
        """JSON-able values, as the trace's manifest records them under "config"."""
        return _to_dict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseConfig:
    """One `verifier noise`.

    Raises:
        UsageError: a recording without a reason, a reason without a recording, or a deadline that is none.
    """

    model: str
    record: bool = False
    """Store the noise as a tolerance under ``golden/noise``."""
    why: str | None = None
    """Why it is (re)recorded; kept with it."""
    timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        _common("bfloat16", self.timeout_s)
        _require_reason(self.record, self.why)


def next_trace(command: str, under: Path = Path("traces")) -> Path:
    """The first free ``<under>/<command>-<number>``; the name of a trace that was not named by the user."""
    number = 1
    while (path := under / f"{command}-{number:04d}").exists():
        number += 1
    return path


def _common(dtype: str, timeout_s: float) -> None:
    _one_of("dtype", dtype, tuple(DTYPES.values()))
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise UsageError(f"--timeout is {timeout_s:g} s, it must be above 0 and at most {MAX_TIMEOUT_S:,} s, a week")


def _require_reason(record: bool, why: str | None) -> None:
    if record and not (why or "").strip():
        raise UsageError('--record needs --why "...": the reason is kept in the manifest')
    if why is not None and not record:
        raise UsageError("--why is the reason of a --record: give both or neither")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{name} is `{value}`, it must be one of {', '.join(allowed)}")


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise UsageError(f"{name} is {value}, it must be at least 1")


def _to_dict(config: RoundtripConfig | GoldenConfig) -> dict[str, Any]:
    values = {item.name: getattr(config, item.name) for item in dataclasses.fields(config) if item.name != "trace"}
    values |= {"mesh": config.mesh.to_dict(), "fixes": list(config.fixes)}
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}

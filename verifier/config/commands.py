"""Config of each command: frozen, keyword-only, validated where it is made.

Every knob is declared here or in `Mesh`, once.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from verifier.config.cluster import RayOptions
from verifier.config_json import quantization, stated_dtype
from verifier.errors import UsageError
from verifier.knob import Knobs, group, knob
from verifier.mesh import Mesh
from verifier.platform.upstream_fixes import MEGATRON_DECAY, require_known, selected

C = TypeVar("C", bound="CommandConfig")

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""Spelling in a config and on the command line -> spelling everywhere else."""
SPELLED = {value: name for name, value in DTYPES.items()}
MAX_TIMEOUT_S = 7 * 24 * 3600
GPU_GIB = 80.0
"""Memory of a GPU where a plan is not told another."""


def next_trace(command: str, under: Path = Path("traces"), suffix: str = "") -> Path:
    """Return the first free ``<under>/<command>-<number><suffix>``, such as a trace that the user did not name."""
    paths = (under / f"{command}-{number:04d}{suffix}" for number in itertools.count(1))
    return next(path for path in paths if not path.exists())


def folder_name(model: str) -> str:
    """Name of a folder for what is done with a model."""
    return re.sub(r"[^\w.-]", "-", model.strip("/"))


def claim_trace(trace: Path) -> Path:
    """Make the folder of a trace that `next_trace` named, or the next free one where another run was faster.

    Raises:
        UsageError: it cannot be made.
    """
    while True:
        try:
            trace.mkdir(parents=True)
            return trace
        except FileExistsError:
            trace = next_trace(trace.name.rpartition("-")[0], trace.parent)
        except OSError as problem:
            raise UsageError(f"the trace at `{trace}` cannot be written: {problem.strerror}") from problem


def _trace(command: str) -> Any:
    return knob(
        "Where to save the trace; by default the next free traces/NAME-NNNN.",
        factory=partial(next_trace, command), flag="--trace", metavar="DIR", last=True,
    )  # fmt: skip


def dtype_knob() -> Any:
    """Make the knob of the weights' type."""
    return knob(
        "Type of the weights; by default the one that the checkpoint's config.json names, or fp32.", "", flag="--dtype",
        choices=DTYPES, derived=True,
    )  # fmt: skip


def timeout_knob(whole: str, default: float) -> Any:
    """Make the knob of a deadline in seconds, a week at most; `whole` is its help."""
    return knob(
        whole, default, flag="--timeout", metavar="SECONDS", unit="seconds", above=0, most=MAX_TIMEOUT_S, last=True
    )


def seed_knob(whole: str) -> Any:
    """Make the knob of a seed; `whole` is its help. Those of requests are a million times as large, in 63 bits."""
    return knob(whole, 1, flag="--seed", least=0, most=4_000_000_000)


def fixes_knob() -> Any:
    """Make the knob of upstream fixes."""
    return knob("Install the fix of an upstream bug, or `all`; repeatable.", (), flag="--fix", metavar="ID", last=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandConfig(Knobs):
    """Config of a command, as JSON there and back."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able values that the manifest of a trace records under "config"; the trace is not named."""
        values: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self, enc_hook=str))
        return {name: value for name, value in values.items() if name != "trace"}

    @classmethod
    def from_dict(cls: type[C], record: Mapping[str, Any]) -> C:
        """Make the config that `to_dict` gave; a trace may be added to it.

        Raises:
            UsageError: values that contradict each other.
            msgspec.ValidationError: values of other types.
        """
        return msgspec.convert(record, cls, dec_hook=lambda kind, value: kind(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedConfig(CommandConfig):
    """Knobs of every command that starts processes."""

    timeout_s: float = timeout_knob("Deadline of the whole run.", 1800.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(TimedConfig):
    """Knobs of every command that computes with one model."""

    model: str = knob("Generated, tiny:NAME or wide:NAME, or a local HF directory.", flag="--model", metavar="MODEL")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(ModelConfig):
    """Knobs of a run on the ranks of a trainer."""

    mesh: Mesh = group(Mesh, make=Mesh.fitting)
    dtype: str = dtype_knob()
    fixes: tuple[str, ...] = fixes_knob()

    def _fill(self) -> None:
        require_known(self.fixes)
        if not self.dtype:
            object.__setattr__(self, "dtype", stored_dtype(self.model))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions(Knobs):
    """Engine that receives the weights."""

    place = "engine."
    kind: str = knob("Where the weights go: vLLM, or transformers.", "vllm", flag="--engine", choices=("vllm", "hf"))
    tp: int = knob("Tensor parallel size of the engine.", 1, flag="--engine-tp", least=1)
    pp: int = knob("Pipeline parallel size of the engine.", 1, flag="--engine-pp", least=1)
    ep: int = knob(
        "Expert parallel size of the engine: its tensor parallel size, or 1 for a part of each expert on each rank.", 1,
        flag="--engine-ep", least=1,
    )  # fmt: skip
    cuda_graphs: bool | None = knob(
        "vLLM replays captured CUDA graphs, or runs eagerly; by default it does in training on a GPU.", None,
        flag="--cuda-graphs/--enforce-eager",
    )  # fmt: skip
    sleep_level: int = knob(
        "vLLM sleeps while the trainer steps: 1 keeps its weights on the host, 2 drops them, 0 stays awake.", 0,
        flag="--sleep-level", choices=(0, 1, 2),
    )  # fmt: skip
    quantization: str | None = knob(
        "vLLM quantises the weights as it loads them, at the start and at every sync.", None,
        flag="--engine-quantization", choices=("fp8",),
    )  # fmt: skip
    lora_rank: int = knob(
        "Above 0, train an adapter of this rank on a frozen base, and sync the adapter.", 0,
        flag="--engine-lora-rank", choices=(0, 8, 16, 32, 64),
    )  # fmt: skip

    @property
    def ranks(self) -> int:
        """Number of ranks: those of a stage, which hold its layers in parts, follow each other."""
        return self.tp * self.pp

    def _contradictions(self) -> dict[str, object]:
        other, asked = self.kind != "vllm", self.gpu_options()
        sizes = {"--engine-tp": self.tp, "--engine-pp": self.pp}
        cut = {flag: size for flag, size in sizes.items() if size != 1}
        alone = {"--engine hf": other, "--engine-pp": self.pp > 1, "--sleep-level": self.sleep_level}
        alone["--engine-quantization"] = self.quantization is not None
        return {
            f"--engine-ep {self.ep} and --engine-tp {self.tp}: vLLM divides experts over all ranks or over none, use "
            "the same size, or 1": self.ep not in (1, self.tp),
            **{f"--engine hf has one rank, {flag} is {size}: leave it out, or use --engine vllm": other
               for flag, size in cut.items()},
            **{_beside_an_adapter(flag): self.lora_rank and is_asked for flag, is_asked in alone.items()},
            **{f"{flag} is an option of vLLM, --engine is {self.kind}: leave one of the two out": other
               for flag in asked},
        }  # fmt: skip

    def gpu_options(self) -> list[str]:
        """Return the flags of what was asked for that only vLLM on a GPU has."""
        flags = {"--cuda-graphs": self.cuda_graphs, "--sleep-level": self.sleep_level}
        flags["--engine-quantization"] = self.quantization is not None
        return [flag for flag, is_asked in flags.items() if is_asked]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundtripConfig(RunConfig):
    """Config of `verifier roundtrip`."""

    engine: EngineOptions = group(EngineOptions)
    cycles: int = knob("Updates to sync, each followed by logprobs.", 3, flag="--cycles", least=1)
    update: str = knob(
        "A real optimizer step, or seeded noise on every weight.", "step", flag="--update", choices=("step", "noise")
    )
    transport: str | None = knob(
        "To the engine; nccl needs GPUs of its own, ipc shares the trainer's; by default chosen by the free GPUs.",
        None, flag="--transport", choices=("gloo", "nccl", "ipc"),
    )  # fmt: skip
    seed: int = seed_knob("Seed of tokens and noise.")
    length: int = knob(
        "Tokens of the longest sequence, of trainer and engine; above 1,024 an answer has nearly as many.", 300,
        flag="--length", least=300,
    )  # fmt: skip
    ray: RayOptions = group(RayOptions)
    trace: Path = _trace("roundtrip")

    def _contradictions(self) -> dict[str, object]:
        return {_beside_an_adapter("--update noise"): self.engine.lora_rank and self.update != "step"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenConfig(RunConfig):
    """Config of `verifier golden`."""

    record: bool = knob("Write the manifest of the export under golden/.", False, flag="--record")
    why: str | None = knob("Why it is recorded; kept with it.", None, flag="--why", metavar="TEXT")
    against: Path | None = knob(
        "Compare with a recorded manifest, not with source weights.", None, flag="--against", metavar="MANIFEST"
    )
    ray: RayOptions = group(RayOptions)
    trace: Path = _trace("golden")

    def _contradictions(self) -> dict[str, object]:
        both = "--record writes a manifest and --against compares with one: give one of the two"
        absent = "there is no manifest `{=against}`: give the path of a file that `--record` wrote"
        rows = {both: self.record and self.against is not None, **_reason(self.record, self.why)}
        return rows | {absent: self.against is not None and not self.against.is_file()}


@dataclass(frozen=True, slots=True, kw_only=True)
class BisectConfig(RunConfig):
    """Config of `verifier bisect`."""

    fault: str | None = knob(
        "Inject this fault of the catalogue first, to see it found.", None, flag="--fault", metavar="ID"
    )
    seed: int = seed_knob("Seed of the tokens.")
    trace: Path = _trace("bisect")

    def _contradictions(self) -> dict[str, object]:
        sentence = (
            f"bisect compares in fp32, where sides differ by rounding alone, and the dtype is {self.dtype}: give a "
            "checkpoint that is stored in fp32"
        )
        return {sentence: self.dtype != "float32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseConfig(ModelConfig):
    """Config of `verifier noise`."""

    record: bool = knob("Store the noise as a tolerance under golden/noise/.", False, flag="--record")
    why: str | None = knob("Why it is recorded; kept with it.", None, flag="--why", metavar="TEXT")

    def _contradictions(self) -> dict[str, object]:
        return _reason(self.record, self.why)


def _reason(record: bool, why: str | None) -> dict[str, object]:
    return {
        '--record needs --why "...": the reason is kept in the manifest': record and not (why or "").strip(),
        "--why is the reason of a --record: give both or neither": why is not None and not record,
    }


def _beside_an_adapter(flag: str) -> str:
    return f"--engine-lora-rank and {flag} do not go together: leave one of the two out"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig(CommandConfig):
    """Config of `verifier plan`."""

    model: str = knob(
        "A config.json, the directory that has it, tiny:NAME or wide:NAME; no weights are read.", flag="--model",
        metavar="MODEL",
    )  # fmt: skip
    mesh: Mesh = group(Mesh, make=Mesh.fitting)
    dtype: str = dtype_knob()
    fixes: tuple[str, ...] = fixes_knob()
    gpu_gib: float = knob("Memory of a GPU.", GPU_GIB, flag="--gpu-gib", metavar="GIB", unit="GiB", above=0)
    tokens: int = knob(
        "Tokens of a micro-batch of one data-parallel rank.", 4096, flag="--tokens", least=1, unit="tokens"
    )
    recompute: str = knob(
        "Recompute activations in the backward pass.", "none", flag="--recompute", choices=("none", "full")
    )
    distributed_optimizer: bool = knob(
        "Shard masters and moments over data-parallel ranks.", True,
        flag="--distributed-optimizer/--no-distributed-optimizer",
    )  # fmt: skip
    grad_reduce_in_fp32: bool = knob("Gradients are kept in fp32, or in the weights' type.", True)
    optimizer_offload: float = knob(
        "Share of masters and moments on the host.", 0.0, flag="--optimizer-offload", least=0, most=1
    )
    busiest: float = knob(
        "Routed tokens of the rank whose experts get most, over an even share.", 1.0, flag="--busiest", least=1
    )
    transport: str = knob("From rank 0 to the engine.", "nccl", flag="--transport", choices=("nccl", "ipc"))
    max_chunk_mib: int = knob(
        "Largest chunk: 1024 in a round trip on GPUs, 64 in training and on a CPU.", 1024, flag="--max-chunk", least=1,
        metavar="MIB", unit="MiB",
    )  # fmt: skip
    transfer_gb_s: float | None = knob(
        "Bandwidth from rank 0 to the engine; by default the one measured for --transport.", None,
        flag="--transfer-gb-s", metavar="GB_S", unit="GB/s", above=0,
    )  # fmt: skip
    gather_gb_s: float | None = knob(
        "Bandwidth from the other ranks to one; by default the one measured for NCCL within a host.", None,
        flag="--gather-gb-s", metavar="GB_S", unit="GB/s", above=0,
    )  # fmt: skip

    _fill = RunConfig._fill

    @property
    def rounds_decay(self) -> bool:
        """True if decay rates of state-space layers have the weights' dtype in the trainer, as shipped."""
        return MEGATRON_DECAY not in selected(self.fixes)


DEFAULT = "float32"
"""Dtype of a generated model, and of a config.json without weights that names none."""
_OF_WEIGHTS = {"F32": "float32", "BF16": "bfloat16"}
"""The safetensors format's name of a dtype -> torch's."""


def stored_dtype(model: str) -> str:
    """Return the dtype that a local Hugging Face directory names, or of its weights; `DEFAULT` for a generated model.

    A quantized model is in bfloat16 once it is converted. A directory whose files cannot be read or name another dtype
    is refused later, by whoever opens its weights. `model` may be the config.json too.
    """
    found = None
    with contextlib.suppress(OSError, RecursionError, ValueError, AttributeError, KeyError, TypeError):
        path = Path(model)
        config = json.loads((path if path.is_file() else path / "config.json").read_text())
        found = stated_dtype(config) or ("bfloat16" if quantization(config) else None)
        if found is None and path.is_dir():
            found = _dtype_of_weights(path)
    return found if found is not None and found in DTYPES.values() else DEFAULT


def _dtype_of_weights(folder: Path) -> str | None:
    """Dtype of most tensors of a directory's shards; None without any."""
    counts = Counter[str]()
    for shard in folder.glob("model*.safetensors"):
        with shard.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        counts.update(entry["dtype"] for name, entry in header.items() if name != "__metadata__")
    return _OF_WEIGHTS.get(counts.most_common(1)[0][0]) if counts else None

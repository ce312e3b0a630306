"""The matrix of a gate: its cells, and what is left out of it with the reason. Loads no torch.

Axes are the mesh, the dtype, the engine with its options, and the transport. Of axes that the config names, every value
meets every other. Of those that it does not name, the default values are tried one at a time, each with the first value
of the others: a cell has at most one axis that differs from the defaults without having been asked for.

There is no cell of its own for packing, gradient parity, optimizer step, checkpoint and route replay: each round trip
judges them, and the cell's `carries` says so.

Order: a cell says things of its axes: its kind, its model, each axis of its mesh, its dtype, engine, transport,
algorithm, the stage of its fault, and each of these together with its kind. The next cell is the one with the most
things that no earlier cell says, divided by the seconds that it is expected to take; of equal ones the first of the
matrix. So the cheap golden runs come first, and one cell of each kind and axis before the second of any. A model and a
kind that nothing was said of count three times. An engine other than the last one costs its start.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import verifier.faults
from verifier.config import GateConfig, GoldenConfig, RoundtripConfig, TrainConfig
from verifier.config.commands import DTYPES, SPELLED, stored_dtype
from verifier.config.load import load
from verifier.engine.api import refuse_unsupported
from verifier.errors import UsageError
from verifier.faults.matrix import chosen
from verifier.launch.fork_launcher import require_ranks
from verifier.mesh import Mesh
from verifier.mesh.mesh import axes_of
from verifier.model.checkpoint import open_checkpoint
from verifier.model.families import family_of, num_experts_of, size_if_any
from verifier.model.mesh_fit import validate
from verifier.model.named import config_of, is_generated, is_named, require_stored
from verifier.model.tiny import PREFIX, TO_TRAIN
from verifier.platform import Tier
from verifier.report.gate_result import Cell, LeftOut, left_out
from verifier.runs.model_under_test import require_buildable, require_roundtrip
from verifier.trainer.fitting import require_fit

_EXPORT = ("load", "export")
_ROUNDTRIP = (
    *_EXPORT, "packing", "gradient parity", "optimizer step", "checkpoint and resume", "chunk plan", "transport",
    "engine weights", "logprobs", "sampling",
)  # fmt: skip
_TRAIN = ("data", "loss", "gradient parity", "optimizer step", "final export")
SMOKE = (
    "expert-left-at-init", "rope-base-default", "step-dropped", "norm-written-by-export", "router-rounded-on-the-wire",
)  # fmt: skip
"""Faults of load, logprob, train, export and transport."""
SMOKE_MODEL = "tiny:qwen3-moe"
ROLLOUTS = Path(verifier.faults.__path__[0]) / "rollouts"
"""Recorded rollouts of `tiny:add`, whose tokens any model trains on that has as many."""
_ROLLOUT_VOCABULARY = 64
"""More than the greatest of their tokens."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """Cells of a gate in the order of its axes, and what is left out."""

    cells: list[Cell] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    families: set[str] = field(default_factory=set)
    """Family of each model, or its model_type."""

    def leave_out(self, what: str, reason: object) -> None:
        """Note what the matrix does not have; each thing once."""
        item = LeftOut(what=what, reason=str(reason))
        if item not in self.left_out:
            self.left_out.append(item)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """Values of the axes."""

    mesh: Mesh
    dtype: str
    engine: str
    transport: str

    @property
    def mesh_words(self) -> list[str]:
        return [f"mesh.{axis}={size}" for axis, size in self.mesh.to_dict().items() if size not in (None, 1)]


def matrix_of(config: GateConfig, tier: Tier, num_gpus: int) -> Matrix:
    """Return the matrix of a gate.

    Raises:
        UsageError: an unknown model, fault, engine option or mesh; a mesh or an engine that was named and fits none of
            the models is left out with its reason.
    """
    meshes = [Mesh.fitting(**axes_of(text)) for text in config.meshes]
    for engine in config.engines:
        load(RoundtripConfig, overrides=["model=any", "dtype=float32", *engine_words(engine)])
    found = Matrix()
    faults = fault_cells(config.faults)
    for model in config.models:
        for dtype in _dtypes(config, model, tier)[:1]:
            sizes = config_of(model, dtype)
        found.families.add(_family(sizes))
        try:
            require_buildable(model, sizes, tier)
        except UsageError as refused:
            found.leave_out(model, refused)
            continue
        for kind in ("golden", "roundtrip"):
            if kind in config.kinds:
                _add_runs(found, config, kind, model, sizes, meshes, tier, num_gpus)
        if "train" in config.kinds:
            _add_training(found, config, model, sizes, meshes, tier, num_gpus)
    if "faults" in config.kinds:
        if tier == "cpu" or config.faults:
            found.cells.extend(faults)
        else:
            found.leave_out("faults", f"trials run {SMOKE_MODEL} on the CPU tier; name some by --fault")
    return found


def engine_words(text: str) -> list[str]:
    """Words of a text such as "vllm,tp=2": engine.kind=vllm engine.tp=2."""
    kind, *options = [part.strip() for part in text.split(",")]
    for option in options:
        if "=" not in option:
            raise UsageError(f"--engine is `{text}`, it must be a kind and options, such as vllm,tp=2")
    return [f"engine.kind={kind}", *(f"engine.{option}" for option in options)]


def _family(sizes: Mapping[str, Any]) -> str:
    row = family_of(sizes)
    return row.name if row is not None else str(sizes.get("model_type") or "unknown")


def _dtypes(config: GateConfig, model: str, tier: Tier) -> list[str]:
    if config.dtypes:
        return [DTYPES[name] for name in config.dtypes]
    if tier == "cuda" and is_generated(model):
        return ["bfloat16"]
    stored = "bfloat16" if model.startswith("wide:") else stored_dtype(model)
    return [stored, *(["bfloat16"] if model.startswith(PREFIX) and stored != "bfloat16" else [])]


def _engines(found: Matrix, model: str, sizes: Mapping[str, Any], tier: Tier) -> list[str]:
    """Engines that are tried where none is named, the first with everything."""
    try:
        refuse_unsupported(sizes, on_cpu=tier == "cpu")
    except UsageError as refused:
        found.leave_out(f"{model}, engine vllm", refused)
        return ["hf"]
    asleep = ["vllm,sleep_level=1", "vllm,cuda_graphs=true"] if tier == "cuda" else []
    return ["vllm", "vllm,tp=2", *asleep]


def _meshes(kind: str, sizes: Mapping[str, Any]) -> list[Mesh]:
    experts = bool(num_experts_of(sizes))
    spread = Mesh.fitting(ep=2) if experts else Mesh(dp=2)
    if kind == "golden":
        largest = Mesh.fitting(tp=2, pp=2, ep=2) if experts else Mesh(tp=2, pp=2)
        return [Mesh(), Mesh(tp=2), Mesh(pp=2), *([spread] if experts else []), largest]
    return [Mesh(), Mesh(tp=2), spread, Mesh(pp=2), Mesh(cp=2)]


def _points(
    config: GateConfig, meshes: Sequence[Mesh], dtypes: Sequence[str], engines: Sequence[str]
) -> Iterator[_Point]:
    axes = (meshes, dtypes, engines, config.transports or ("",))
    named = (config.meshes, config.dtypes, config.engines, config.transports)
    for values in itertools.product(*axes):
        own = [value != axis[0] for value, axis, asked in zip(values, axes, named, strict=True) if not asked]
        if sum(own) <= 1:
            mesh, dtype, engine, transport = values
            yield _Point(mesh=mesh, dtype=dtype, engine=engine, transport=transport)


def _fitting(found: Matrix, model: str, sizes: Mapping[str, Any], meshes: Iterable[Mesh]) -> list[Mesh]:
    """Meshes that divide the model; the others are left out."""
    kept = []
    for mesh in meshes:
        try:
            validate(sizes, mesh)
            require_ranks(mesh.world_size)
            kept.append(mesh)
        except UsageError as refused:
            found.leave_out(f"{model}, mesh {mesh.label()}", refused)
    return kept


def _add_runs(
    found: Matrix, config: GateConfig, kind: str, model: str, sizes: Mapping[str, Any], asked: Sequence[Mesh],
    tier: Tier, num_gpus: int,
) -> None:  # fmt: skip
    trips = kind == "roundtrip"
    engines = (config.engines or _engines(found, model, sizes, tier)) if trips else [""]
    shared = [f"model={model}", *([f"fixes={','.join(config.fixes)}"] if config.fixes else [])]
    checkpoint = None if is_named(model) else open_checkpoint(model)
    meshes = _fitting(found, model, sizes, asked or _meshes(kind, sizes))
    for point in _points(config, meshes, _dtypes(config, model, tier), engines):
        if not trips and point.transport != (config.transports or ("",))[0]:
            continue
        words = [*shared, f"dtype={point.dtype}", *point.mesh_words]
        names = [kind, model, SPELLED[point.dtype], point.mesh.label().replace(" ", "-")]
        transport = point.transport if trips else ""
        if trips:
            words += [*engine_words(point.engine), f"cycles={config.cycles}", f"seed={config.seed}"]
            words += [f"transport={transport}"] if transport else []
            names += [point.engine, *([transport] if transport else [])]
        name = " ".join(names)
        try:
            kept, _ = load(RoundtripConfig if trips else GoldenConfig, overrides=words)
            if checkpoint is not None:
                require_stored(checkpoint, point.dtype)
            ranks = kept.engine.ranks if isinstance(kept, RoundtripConfig) else 1
            if isinstance(kept, RoundtripConfig):
                require_roundtrip(kept, sizes, () if checkpoint is None else checkpoint.names(), tier)
                if tier == "cpu" and transport not in ("", "gloo"):
                    raise UsageError(f"--transport {transport} needs GPUs and this machine has none")
            places = _places(point.mesh, ranks, transport, tier, num_gpus)
        except UsageError as refused:
            found.leave_out(name, refused)
            continue
        routes = ("route replay",) if trips and num_experts_of(sizes) else ()
        found.cells.append(
            Cell(
                id=name, kind="roundtrip" if trips else "golden", model=model, dtype=point.dtype,
                mesh=point.mesh.label(), engine=point.engine, transport=transport, words=tuple(words),
                carries=(*_ROUNDTRIP, *routes) if trips else _EXPORT, num_gpus=places, family=_family(sizes),
            )
        )  # fmt: skip


def _places(mesh: Mesh, engine_ranks: int, transport: str, tier: Tier, num_gpus: int) -> int:
    """GPUs that a cell takes: one a rank as far as there are any, and the engine's own where it shares none."""
    if tier == "cpu":
        return 1
    if transport == "nccl":
        needed = mesh.world_size + engine_ranks
        if needed > num_gpus:
            raise UsageError(f"--transport nccl takes {needed} GPUs here and this machine has {num_gpus}")
        return needed
    if engine_ranks > num_gpus:
        raise UsageError(f"an engine of {engine_ranks} ranks takes as many GPUs and this machine has {num_gpus}")
    return max(engine_ranks, min(mesh.world_size, num_gpus))


def _add_training(
    found: Matrix, config: GateConfig, model: str, sizes: Mapping[str, Any], asked: Sequence[Mesh], tier: Tier,
    num_gpus: int,
) -> None:  # fmt: skip
    dtype = _dtypes(config, model, tier)[0]
    has_tokenizer = model.removeprefix(PREFIX) in TO_TRAIN or (Path(model) / "tokenizer.json").is_file()
    default = {"sft": [Mesh()], "grpo": [Mesh.fitting(ep=2) if num_experts_of(sizes) else Mesh(dp=2)]}
    for algorithm in ("sft", "grpo"):
        name = f"train {algorithm} {model}"
        words, also = _training_words(config, sizes, algorithm, has_tokenizer, tier)
        if not words:
            found.leave_out(name, also)
            continue
        for mesh in _fitting(found, model, sizes, asked or default[algorithm]):
            point = _Point(mesh=mesh, dtype=dtype, engine="", transport="")
            full = [f"model={model}", f"dtype={dtype}", *point.mesh_words, f"algorithm={algorithm}", *words]
            full += [f"fixes={','.join(config.fixes)}"] if config.fixes else []
            cell_id = f"{name} {SPELLED[dtype]} {mesh.label().replace(' ', '-')}"
            try:
                kept, _ = load(TrainConfig, overrides=full)
                require_fit(kept, sizes, tier)
                places = _places(mesh, 1, "", tier, num_gpus)
            except UsageError as refused:
                found.leave_out(cell_id, refused)
                continue
            found.cells.append(
                Cell(
                    id=cell_id, kind="train", model=model, dtype=dtype, mesh=mesh.label(), algorithm=algorithm,
                    engine=kept.engine.kind if kept.samples else "", words=tuple(full),
                    carries=(*_TRAIN, *also.split("; ")) if also else _TRAIN, num_gpus=places, family=_family(sizes),
                )
            )  # fmt: skip


def _training_words(
    config: GateConfig, sizes: Mapping[str, Any], algorithm: str, has_tokenizer: bool, tier: Tier
) -> tuple[list[str], str]:
    """Words of a training run and what it carries besides; no words and the reason where there is no such run."""
    words = [
        f"steps={config.train_steps}", f"seed={config.seed}", "data.batch_size=8", "batch.micro_batch_size=3",
        "evaluation.num_problems=0", "checkpoint.every=0", "verify.steps=true",
    ]  # fmt: skip
    if algorithm == "sft":
        return (words, "") if has_tokenizer else ([], "fine-tuning trains on text, and the model has no tokenizer")
    words += ["grpo.group_size=4"]
    if not has_tokenizer:
        if (size_if_any(sizes, "vocab_size") or 0) < _ROLLOUT_VOCABULARY:
            return [], "the model has no tokenizer, and its vocabulary is smaller than that of the recorded rollouts"
        return [*words, f"data.rollouts={ROLLOUTS}"], "rewards; advantages; recorded rollouts"
    kind, also = "vllm", "rewards; advantages; weight sync; rollouts"
    try:
        refuse_unsupported(sizes, on_cpu=tier == "cpu")
    except UsageError:
        kind = "hf"
    words += ["grpo.max_answer_tokens=8", f"engine.kind={kind}"]
    if kind == "vllm" and num_experts_of(sizes) and family_of(sizes):  # a row tells which layers have routers
        words, also = [*words, "grpo.replay_routes=true"], f"{also}; route replay"
    return words, also


def fault_cells(ids: Sequence[str]) -> list[Cell]:
    """Cell of each fault; those of `SMOKE` where none is named.

    Raises:
        UsageError: an unknown fault, or one that needs a GPU.
    """
    return [
        Cell(
            id=f"faults {fault.id}", kind="faults", model=fault.model, dtype=fault.dtype, mesh=fault.mesh.label(),
            engine=fault.engine if fault.engine in ("hf", "vllm") else "", fault=fault.id, stage=fault.stage.label,
            carries=("the checks are alive here",), words=(fault.id,),
        )
        for fault in chosen(ids or SMOKE)
    ]  # fmt: skip


def listed(matrix: Matrix) -> str:
    """Cells in the order in which they would run, with their expected seconds, and what is left out."""
    lines, last = [], ""
    for cell in matrix.cells:
        seconds = estimate_s(cell, last)
        last = cell.engine or last
        lines.append(f"{seconds:5.0f} s  {cell.id}: {', '.join(cell.carries)}\n")
    return "".join(lines) + f"{len(lines)} cells; seconds of a tiny model on two cores\n" + left_out(matrix.left_out)


FIRST_S = 40.0
"""Seconds of the first imports of a worker."""
ENGINE_S = {"vllm": 20.0, "hf": 3.0}
"""Seconds of an engine's start, by its kind."""
_CELL_S = {"golden": 3.0, "roundtrip": 18.0, "train": 15.0, "faults": 14.0}
_RANK_S = {"golden": 1.5, "roundtrip": 8.0, "train": 5.0, "faults": 0.0}
"""Seconds of a cell of each kind on two cores, and of each further rank, for a tiny model and warm resources."""
_FIRST_OF_ITS_KIND = 3


def ordered(cells: Iterable[Cell]) -> list[Cell]:
    """Cells in the order in which they are run."""
    left, found, said, last = list(cells), list[Cell](), set[str](), ""
    while left:
        best = max(left, key=lambda cell: _worth(cell, said) / estimate_s(cell, last))
        left.remove(best)
        found.append(best)
        said |= _things(best)
        last = best.engine or last
    return found


def estimate_s(cell: Cell, last_engine: str = "") -> float:
    """Seconds that a cell is expected to take on warm resources, after a cell with another engine or none."""
    seconds = _CELL_S[cell.kind] + _RANK_S[cell.kind] * (ranks_of(cell.mesh) - 1)
    if cell.engine and cell.engine != last_engine:
        seconds += ENGINE_S[cell.engine.partition(",")[0]] * (2 if "tp=" in cell.engine else 1)
    return seconds


def ranks_of(mesh: str) -> int:
    """Ranks of the mesh with a label."""
    sizes = _sizes(mesh)
    return math.prod(sizes.get(axis, 1) for axis in ("tp", "pp", "cp", "dp"))


def _sizes(mesh: str) -> dict[str, int]:
    """Axis -> size, of a label such as "tp2 ep2"; those of size 1 are not in it."""
    return {axis: int(size) for axis, size in re.findall(r"\b([a-z]+)(\d+)\b", mesh)}


def _worth(cell: Cell, said: set[str]) -> float:
    new = _things(cell) - said
    weights = [_FIRST_OF_ITS_KIND if thing.startswith(("kind ", "model ")) and "/" not in thing else 1 for thing in new]
    return sum(weights) + 0.01


def _things(cell: Cell) -> set[str]:
    axes = [*(f"axis {name}" for name in _sizes(cell.mesh)), f"dtype {cell.dtype}", f"model {cell.model}"]
    named = (("engine", cell.engine), ("transport", cell.transport), ("algorithm", cell.algorithm))
    axes += [f"{name} {value}" for name, value in (*named, ("stage", cell.stage)) if value]
    kind = f"kind {cell.kind}"
    return {kind, *axes, *(f"{kind}/{axis}" for axis in axes)}

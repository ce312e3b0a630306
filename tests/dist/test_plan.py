"""`verifier plan` against ranks: of tiny models it says what real ranks hold, export and plan.

By default ranks load, export and plan; the slow tests read the trace of a whole round trip.

What this does not exercise: chunks of transfers between GPUs, which are larger; meshes beyond a few ranks.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from verifier.cli.plan import as_json
from verifier.config import EngineOptions, PlanConfig, RoundtripConfig
from verifier.core import store
from verifier.core.record import Record
from verifier.mesh import Mesh
from verifier.model.named import sizes_alone
from verifier.model.tiny import write_tiny
from verifier.plan.run_plan import run_plan
from verifier.runs.runner import Runner
from verifier.stages.load.records import LoadedShard
from verifier.stages.plan.records import PlanDigest, PlannedTensor

Case = tuple[str, Mesh, str, tuple[str, ...]]
CASES: list[Case] = [
    ("qwen3-moe", Mesh(tp=2, ep=2), "float32", ()),
    ("qwen3-moe", Mesh(tp=2, etp=2, ep=2, dp=2), "float32", ()),
    ("qwen3-moe", Mesh(tp=8, ep=2), "float32", ()),
    ("qwen3-tied", Mesh(pp=2, vpp=2), "float32", ()),
    ("deepseek-v3", Mesh(pp=2, ep=2, dp=2, first_stage_layers=1), "bfloat16", ()),
    ("nemotron-h", Mesh(tp=2), "bfloat16", ()),
    ("nemotron-h", Mesh(tp=2, etp=2), "bfloat16", ("miles-975",)),
]
IDS = [f"{name} {mesh.label()} {dtype}".replace(" ", "-") for name, mesh, dtype, _ in CASES]
BYTES = {"float32": 4, "bfloat16": 2}


def compare(case: Case, records: Iterable[Record]) -> None:
    """Assert that the plan of a case is what its ranks recorded."""
    name, mesh, dtype, fixes = case
    asked = PlanConfig(model=f"tiny:{name}", mesh=mesh, dtype=dtype, fixes=fixes, max_chunk_mib=64)
    planned = run_plan(asked, sizes_alone(asked.model, asked.dtype))
    assert planned.contradictions == ()
    said: dict[str, Any] = json.loads(as_json(planned))
    of: dict[type, list[Any]] = defaultdict(list)
    for record in records:
        of[type(record)].append(record)

    (plan,) = said["plans"]
    tensors = [(name, dtype, tuple(shape)) for _, chunk in plan["chunks"] for name, dtype, shape, _ in chunk]
    assert tensors == [(item.name, item.dtype, item.shape) for item in of[PlannedTensor]]
    digests = [item for item in of[PlanDigest] if item.role == "trainer"]
    assert {item.rank: item.digest for item in digests} == {item["rank"]: item["plan"] for item in said["ranks"]}
    assert {item.num_chunks for item in digests} == {len(plan["chunks"])}

    live = defaultdict(list)
    for item in of[LoadedShard]:
        live[item.rank].append((item.name, item.dtype, item.shape, item.replica))
    assert len(live) == said["world_size"] == mesh.world_size
    for rank in said["ranks"]:
        mine, shards = live[rank["rank"]], said["holdings"][rank["holding"]]["shards"]
        held = [(item["name"], item["dtype"], tuple(item["shape"]), item["replica"]) for item in shards]
        assert sorted(held) == sorted(mine)
        assert rank["bytes"]["weights"] == sum(math.prod(shape) * BYTES[dtype] for _, dtype, shape, _ in mine)
        buffers = {item["name"] for item in shards if item["buffer"]}
        trained = sum(math.prod(shape) for name, _, shape, _ in mine if name not in buffers)
        assert rank["parameters"]["dense"] + rank["parameters"]["expert"] == trained


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_the_plan_is_that_of_real_ranks(case: Case, trainer_launcher, checkpoints: Path, tmp_path: Path) -> None:
    name, mesh, dtype, fixes = case
    args = {"checkpoint": str(write_tiny(name, checkpoints, dtype)), "mesh": mesh.to_dict(), "dtype": dtype}
    results = trainer_launcher.run(
        "plan_functions:planned", world_size=mesh.world_size, run_dir=tmp_path, args={**args, "fixes": fixes},
        deadline_s=120,
    )  # fmt: skip
    compare(
        case, msgspec.convert([item for own in results for item in own], list[LoadedShard | PlanDigest | PlannedTensor])
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_the_plan_is_that_of_a_round_trip(case: Case, runner: Runner, tmp_path: Path) -> None:
    name, mesh, dtype, fixes = case
    runner.roundtrip(
        RoundtripConfig(
            model=f"tiny:{name}", mesh=mesh, dtype=dtype, cycles=1, engine=EngineOptions(kind="hf"), update="noise",
            fixes=fixes, trace=tmp_path / "trace",
        )
    )  # fmt: skip
    trace = store.read(tmp_path / "trace")
    compare(case, [*trace.of(LoadedShard), *trace.of(PlanDigest), *trace.of(PlannedTensor)])

"""Evidence of 4,096 ranks, made of that of a recorded golden run: read and judged, and the rank without any is named.

What this does not exercise: all tensors of a model on each of them (docs/measurements.md).
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from msgspec.structs import replace

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.core import reader, store
from verifier.core.finding import Outcome, Verdict
from verifier.core.manifest import Manifest, MeshSizes
from verifier.report.report import report_of

RECORDED = Path(__file__).with_name("golden-trace")
RANKS, ABSENT = 4096, 2999
KEPT = ("decoder.layers.0.self_attention.q_layernorm.weight", "model.layers.0.self_attn.q_norm.weight")
CODES = ("WGT001", "WGT002", "WGT006")
MOST_S = 20.0
"""Ten times what a quiet core takes. Looking at all records for each rank took minutes."""


def judged(trace: Path, manifest: Manifest) -> tuple[dict[str, Outcome], float]:
    """Outcomes of the checks that compare every rank, and their seconds of CPU."""
    store.complete(trace, manifest)
    begin = time.process_time()
    outcomes = report_of(reader.read(trace), str(trace), only_codes=CODES).outcomes
    return {item.code: item for item in outcomes if item.code in CODES}, time.process_time() - begin


def test_the_evidence_of_4096_ranks_is_judged_and_an_absent_rank_named(tmp_path: Path) -> None:
    trace, recorded = tmp_path / "trace", reader.read(RECORDED).manifest
    manifest = replace(recorded, world_size=RANKS, mesh=MeshSizes(tp=2, dp=RANKS // 2))
    store.create(trace, manifest)
    files = [(RECORDED / "evidence" / f"trainer-{tp:04d}.jsonl").read_text().splitlines() for tp in range(2)]
    kept = [[item for item in map(json.loads, lines) if item.get("name") in KEPT] for lines in files]
    for rank in range(RANKS):
        lines = []
        for item in kept[rank % 2]:
            at = {"coordinate": item["coordinate"].replace("dp=0", f"dp={rank // 2}")} if "coordinate" in item else {}
            lines.append(json.dumps(item | {"rank": rank} | at) + "\n")
        (trace / "evidence" / f"trainer-{rank:04d}.jsonl").write_text("".join(lines))
    outcomes, took_s = judged(trace, manifest)
    assert {code: (item.verdict, item.not_recorded) for code, item in outcomes.items()} == dict.fromkeys(
        CODES, (Verdict.HOLDS, ())
    )
    assert outcomes["WGT001"].num_compared == RANKS
    assert took_s < MOST_S
    (trace / "evidence" / f"trainer-{ABSENT:04d}.jsonl").unlink()
    outcomes, _ = judged(trace, manifest)
    assert outcomes["WGT001"].verdict == Verdict.INCONCLUSIVE
    assert outcomes["WGT001"].not_recorded == (
        f"load/expected of trainer rank {ABSENT}", f"load/shard of trainer rank {ABSENT}",
    )  # fmt: skip
    assert outcomes["WGT006"].verdict == Verdict.VIOLATED

"""Evidence of 4,096 ranks, made of that of a recorded golden run: read, judged, and one rank's absence named.

What this does not exercise: all tensors of a model on each of them (docs/measurements.md).
"""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path

from msgspec.structs import replace

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.core import reader, store
from verifier.core.finding import Verdict
from verifier.core.manifest import MeshSizes
from verifier.report.report import report_of

RECORDED = Path(__file__).with_name("golden-trace")
RANKS, ABSENT, KEPT = 4096, 2999, "decoder.layers.0.self_attention.q_layernorm.weight"
MOST_BYTES = 4096
"""Evidence of a rank, of one tensor."""


def test_the_evidence_of_4096_ranks_is_judged_and_an_absent_rank_named(tmp_path: Path) -> None:
    trace, recorded = tmp_path / "trace", reader.read(RECORDED).manifest
    manifest = replace(recorded, world_size=RANKS, mesh=MeshSizes(tp=2, dp=RANKS // 2))
    store.create(trace, manifest)
    sources = [(RECORDED / "evidence" / f"trainer-{tp:04d}.jsonl").read_text().splitlines() for tp in range(2)]
    kept = [[line for line in lines if json.loads(line).get("name") in (KEPT, None)] for lines in sources]
    for rank in range(RANKS):
        lines = sources[rank] if rank < 2 else kept[rank % 2]
        text = "\n".join(lines).replace(f'"rank":{rank % 2}', f'"rank":{rank}').replace(" dp=0", f" dp={rank // 2}")
        (trace / "evidence" / f"trainer-{rank:04d}.jsonl").write_text(text + "\n")
    for absent in (None, ABSENT):
        if absent is not None:
            (trace / "evidence" / f"trainer-{absent:04d}.jsonl").unlink()
        store.complete(trace, manifest)
        begin = time.monotonic()
        outcomes = {item.code: item for item in report_of(reader.read(trace), trace).outcomes}
        took_s = time.monotonic() - begin
        num_bytes = sum(file.stat().st_size for file in (trace / "evidence").iterdir())
        print(f"{took_s:.1f} s, {num_bytes / RANKS:,.0f} bytes a rank, {resource.getrusage(0).ru_maxrss >> 10} MiB")
        print({code: (item.verdict, str(item)[:600]) for code, item in outcomes.items() if "WGT00" in code})

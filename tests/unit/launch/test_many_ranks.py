"""A hang of 4,096 ranks on 512 nodes: recorded, packed on each node, merged, and named by the job's owner.

What this does not exercise: processes, and the wire between nodes (tests/dist/test_train_ray.py).
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

import pytest

from verifier.launch import flight_recorder as flight
from verifier.launch.failures import CollectiveTimeout, Stall
from verifier.launch.fork_launcher import ForkJob
from verifier.launch.rank import JobSpec
from verifier.mesh.mesh import Mesh

RANKS, OF_NODE, ABSENT = 4096, 8, 2999
MESH = Mesh(tp=8, pp=16, dp=32)


class Node:
    """Ranks of one node, whose clock is its own; counts what is asked of it, and the bytes of its slots."""

    def __init__(self, number: int, slots: Any) -> None:
        self.node, self.ranks = f"node {number}", range(number * OF_NODE, (number + 1) * OF_NODE)
        self._slots, self._ahead_s, self.asked, self.num_bytes = slots, 1e6 * number, 0, 0
        for rank in self.ranks:
            if slots[rank].since_s:
                slots[rank].since_s += self._ahead_s if slots[rank].since_s > 0 else -self._ahead_s

    def poll(self, within_s: float) -> tuple[list[Any], float]:
        """Nothing to report but a long wait."""
        self.asked += 1
        return [], 1000.0

    def slots(self) -> tuple[float, list[bytes]]:
        """As `NodeRanks.slots`."""
        self.asked += 1
        found = [flight.packed(flight.read_slot(self._slots[rank])) for rank in self.ranks]
        self.num_bytes += sum(map(len, found))
        return time.monotonic() + self._ahead_s, found

    def stopped(self) -> list[int]:
        """No rank."""
        self.asked += 1
        return []

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """None was written."""
        self.asked += 1
        return {}

    def end(self) -> None:
        """Nothing to end."""
        self.asked += 1


@pytest.fixture(scope="module")
def nodes() -> list[Node]:
    """All ranks had one collective of each group and wait in one of the next, but for one, which computes.

    Its tensor-parallel peers wait for it, and all others in the world's all_reduce, in which those peers are absent.
    """
    slots, stride = flight.slots_for(RANKS), MESH.tp * MESH.dp
    everyone = flight.group_key("world", range(RANKS))
    of_tp = [flight.group_key("tp", range(first, first + MESH.tp)) for first in range(0, RANKS, MESH.tp)]
    of_dp = [
        flight.group_key("dp", range(stage * stride + place, (stage + 1) * stride, MESH.tp))
        for stage in range(MESH.pp) for place in range(MESH.tp)
    ]  # fmt: skip
    of_pp = [flight.group_key("pp", range(place, RANKS, stride)) for place in range(stride)]
    for rank in range(RANKS):
        recorder, stage = flight.FlightRecorder(slots[rank]), rank // stride
        tp = of_tp[rank // MESH.tp]
        for group in (everyone, tp, of_dp[stage * MESH.tp + rank % MESH.tp], of_pp[rank % stride]):
            recorder.wait(recorder.enter(group, "all_gather", "float32", (64, 64)))
            recorder.leave()
        if rank != ABSENT:
            recorder.label = "decoder.layers.0.mlp.linear_fc1.weight"
            recorder.wait(recorder.enter(tp if tp == of_tp[ABSENT // MESH.tp] else everyone, "all_reduce"))
            slots[rank].since_s -= 100
    return [Node(number, slots) for number in range(RANKS // OF_NODE)]


def test_a_rank_of_4096_that_is_absent_is_named_with_its_node(nodes, tmp_path):
    spec = JobSpec(function="a:b", world_size=RANKS, run_dir=tmp_path, mesh=MESH, collective_deadline_s=60.0)
    begin = time.monotonic()
    with pytest.raises(CollectiveTimeout) as raised:
        ForkJob(nodes, spec).wait()
    took_s = time.monotonic() - begin
    group = f"{ABSENT // 8 * 8}-{ABSENT // 8 * 8 + 7}"
    text = str(raised.value)
    assert re.match(r"all_reduce of `\S+fc1.weight` waited 10\d\.\d s in a group of 8 ranks", text)
    assert f"[{group}]" in text
    assert f"[{ABSENT}] did not" in text
    assert f"rank {ABSENT} ({MESH.coordinate(ABSENT)}, node {ABSENT // OF_NODE}): in no collective since" in text
    assert len(text) < 1000
    per_rank = sum(node.num_bytes for node in nodes) / RANKS
    assert per_rank < 2 * 1100, "two reports, of which the mask of 512 bytes is the largest part"
    assert sum(node.asked for node in nodes) <= 7 * len(nodes)
    print(f"{took_s:.1f} s, {per_rank * RANKS / 2**20:.1f} MiB, {sum(node.asked for node in nodes):,} requests")
    assert took_s < 60, "3 s beside other work"


def test_of_many_absent_ranks_the_first_are_named():
    odd, even = tuple(range(1, RANKS, 2)), tuple(range(0, RANKS, 2))
    text = str(Stall(op="barrier", tensor="", group=tuple(range(RANKS)), arrived=even, missing=odd, waited_s=1.0))
    assert text.startswith("barrier waited 1.0 s in a group of 4096 ranks [0-4095]: [0, 2, ")
    assert text.endswith(" 61, 63, ...] did not")

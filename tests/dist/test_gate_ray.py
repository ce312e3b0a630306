"""`verifier gate` over a Ray cluster of two nodes on this host: cells side by side, a worker and an actor that die.

What this does not exercise: nodes on several hosts, GPUs, and a node whose raylet dies.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dist.ray_functions import cluster_of_two_nodes
from tests.processes import arguments

GATE = """\
models: [tiny:qwen3]
kinds: [golden]
meshes: ["tp=1", "tp=2"]
dtypes: [fp32]
ray: {{use: true, address: "{address}", nodes: {nodes}}}
"""


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    with cluster_of_two_nodes(tmp_path_factory.mktemp("ray") / "token") as found:
        yield found


def started(folder: Path, cluster: tuple[str, dict[str, str]], nodes: int = 2) -> subprocess.Popen[str]:
    address, environment = cluster
    (folder.parent / "GATE.yaml").write_text(GATE.format(address=address, nodes=nodes))
    return subprocess.Popen(
        [sys.executable, "-m", "verifier", "gate", "GATE.yaml", "--folder", str(folder)], cwd=folder.parent,
        env={**os.environ, **environment, "CUDA_VISIBLE_DEVICES": ""}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


def workers(folder: Path) -> list[int]:
    """Processes that run cells of a gate."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return [pid for pid in pids if {"verifier.campaign.gate.cell_runs:serve", str(folder)} <= set(arguments(pid))]


def two_working(gate: subprocess.Popen[str], folder: Path) -> list[int]:
    """Wait until both nodes run a cell; their workers."""
    until = time.monotonic() + 300
    while len(found := workers(folder)) < 2:
        assert gate.poll() is None, gate.communicate()
        assert time.monotonic() < until
        time.sleep(0.1)
    return found


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_an_actor_that_dies_fails_its_cell_and_the_other_node_goes_on(tmp_path, cluster):
    folder = tmp_path / "gate"
    gate = started(folder, cluster)
    worker = two_working(gate, folder)[0]
    os.kill(parent(worker), signal.SIGKILL)
    printed, complained = gate.communicate(timeout=300)
    assert gate.returncode == 1, printed + complained
    rows = [json.loads(line)["result"] for line in (folder / "ledger.jsonl").read_text().splitlines()]
    assert sorted(row["status"] for row in rows) == ["failed", "holds"]
    assert "the gate's actor on node " in next(row["reason"] for row in rows if row["status"] == "failed")
    assert not workers(folder)


def test_two_nodes_run_cells_side_by_side_and_one_names_a_worker_that_died(tmp_path, cluster):
    folder = tmp_path / "gate"
    gate = started(folder, cluster)
    os.kill(two_working(gate, folder)[0], signal.SIGKILL)
    printed, complained = gate.communicate(timeout=300)
    assert gate.returncode == 1, printed + complained
    assert {item.name for item in (folder / "logs").iterdir()} >= {"node-0-0001.log", "node-1-0001.log"}
    rows = [json.loads(line)["result"] for line in (folder / "ledger.jsonl").read_text().splitlines()]
    assert sorted(row["status"] for row in rows) == ["failed", "holds"]
    assert "its process ended: killed by SIGKILL" in next(row["reason"] for row in rows if row["status"] == "failed")
    assert not workers(folder)

    again = started(folder, cluster)
    printed, complained = again.communicate(timeout=300)
    assert again.returncode == 0, printed + complained
    assert printed.startswith("PASS: 2 cells")
    assert len((folder / "ledger.jsonl").read_text().splitlines()) == 3
    assert not workers(folder)


def test_a_cluster_with_too_few_nodes_is_refused(tmp_path, cluster):
    gate = started(tmp_path / "gate", cluster, nodes=3)
    printed, complained = gate.communicate(timeout=120)
    assert (gate.returncode, printed) == (4, "")
    assert "ray.nodes is 3, the cluster has 2" in complained

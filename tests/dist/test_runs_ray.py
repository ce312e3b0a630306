"""Golden and round trips whose ranks are on the nodes of a Ray cluster: verdict and counts of one host.

What this does not exercise: nodes on several hosts, and GPUs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dist.ray_functions import cluster_of_two_nodes
from tests.meta.sources import ROOT

pytestmark = pytest.mark.slow
RUN_S = 600


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[tuple[str, ...], dict[str, str]]]:
    """Knobs of a cluster of two nodes on this host, and the environment that its token is in."""
    with cluster_of_two_nodes(tmp_path_factory.mktemp("token") / "token") as (address, environment):
        yield ("ray.use=true", f"ray.address={address}", "ray.nodes=2"), {**os.environ, **environment}


def run(folder: Path, command: str, *words: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    given = (command, *words, "--trace", str(folder / "trace"), "--json", str(folder / "report.json"))
    folder.mkdir()
    return subprocess.run(
        [sys.executable, "-m", "verifier", *given], cwd=ROOT, capture_output=True, text=True, timeout=RUN_S, env=env
    )


def judged(folder: Path, *given: str, env: dict[str, str]) -> dict[str, int]:
    """Things that each check compared in a run that holds."""
    done = run(folder, *given, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(item.name for item in folder.iterdir()) == ["report.json", "trace"]
    outcomes = json.loads((folder / "report.json").read_text())["outcomes"]
    return {item["code"]: item["num_compared"] for item in outcomes}


RUNS = {
    "golden": ("golden", "--model", "tiny:qwen3-moe", "--ep", "2", "--pp", "2"),
    "golden by a derived layout": ("golden", "--model", "tiny:mistral", "--tp", "2"),
    "hf": ("roundtrip", "--model", "tiny:qwen3-moe", "--ep", "2", "--pp", "2", "--engine", "hf", "--cycles", "2"),
    "vllm": ("roundtrip", "--model", "tiny:qwen3", "--tp", "2", "--engine", "vllm", "--cycles", "2"),
}  # fmt: skip


@pytest.mark.timeout(3 * RUN_S)
@pytest.mark.parametrize("name", RUNS)
def test_two_nodes_have_the_counts_of_one_host(name, two_nodes, tmp_path):
    knobs, environment = two_nodes
    there = judged(tmp_path / "nodes", *RUNS[name], *knobs, env=environment)
    assert there == judged(tmp_path / "host", *RUNS[name], env=environment)
    assert sum(there.values()) > 100


def test_a_rank_of_a_round_trip_that_hangs_is_named_with_its_node(two_nodes, tmp_path):
    knobs, environment = two_nodes
    address = knobs[1].partition("=")[2]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/dist/ray_functions.py"), "hang_in_round_trip", address, str(tmp_path)],
        capture_output=True, text=True, timeout=RUN_S, env=environment,
    )  # fmt: skip
    assert "[1] did not" in done.stdout, done.stdout + done.stderr
    assert re.search(r"rank 1 \(.*node 1, ", done.stdout), done.stdout


@pytest.mark.parametrize(
    ("nodes", "mesh", "sentence"),
    [
        (3, 3, "ray.nodes is 3, the cluster has 2: make it smaller"),
        (2, 3, "ray.nodes is 2, which does not divide the 3 ranks of the mesh: choose another"),
    ],
)
def test_nodes_that_do_not_fit_are_refused_and_leave_nothing(nodes, mesh, sentence, two_nodes, tmp_path):
    knobs, environment = two_nodes
    words = ("golden", "--model", "tiny:qwen3", "--dp", str(mesh), *knobs[:2], f"ray.nodes={nodes}")
    done = run(tmp_path / "run", *words, env=environment)
    assert (done.returncode, done.stderr.strip().splitlines()[-1]) == (4, f"verifier: {sentence}")
    assert list((tmp_path / "run").iterdir()) == []

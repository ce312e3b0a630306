"""Rank functions of tests under Ray, and a Ray cluster of two nodes on this host as a program."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.meta.sources import ROOT
from verifier.config import RoundtripConfig
from verifier.config.cluster import RayOptions
from verifier.errors import VerifierError
from verifier.launch.rank import JobSpec, RankContext
from verifier.mesh import Mesh
from verifier.runs.spec import RunSpec


def environment(context: RankContext) -> dict[str, str]:
    """Environment of a rank."""
    return dict(os.environ)


def two_nodes() -> None:
    """Print the address of a cluster of two nodes, and keep it until stdin ends."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    cluster.add_node(**{name: value for name, value in node.items() if name != "include_dashboard"})
    print(f"address {cluster.address}", flush=True)
    sys.stdin.read()
    cluster.shutdown()


@contextlib.contextmanager
def cluster_of_two_nodes(token: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Start `two_nodes` as a program; its address, and the environment by which its token is found.

    Args:
        token: file for the token, which is written.
    """
    token.write_text("5" * 64)
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "PYTHONPATH": path_of(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-m", "tests.dist.ray_functions", "two_nodes"], cwd=ROOT, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, **environment},
    ) as owner:  # fmt: skip
        lines = iter(owner.stdout.readline, "")
        yield next(line.split()[1] for line in lines if line.startswith("address ")), environment
        owner.stdin.close()
        owner.wait(60)


def path_of(first: Path) -> str:
    """PYTHONPATH of this process with a folder before it."""
    given = os.environ.get("PYTHONPATH")
    return str(first) if given is None else f"{first}{os.pathsep}{given}"


def hang(address: str, run: str) -> None:
    """Print the error of a job on two nodes whose last rank does not come."""
    from verifier.runs.join_ray import joined

    options = RayOptions(use=True, address=address, nodes=2)
    with joined(options, Path(run), 4) as cluster:
        cluster.load("", 120.0)
        args = {"how": "all_reduce"}
        spec = JobSpec(
            function="launch_functions:absent", world_size=4, run_dir=Path(run), args=args, collective_deadline_s=2.0
        )
        try:
            cluster.submit(spec).wait()
        except VerifierError as error:
            print(error)


@contextlib.contextmanager
def last_rank_absent(spec: RunSpec, context: RankContext) -> Iterator[None]:
    """Around a session whose last rank does not begin."""
    if context.rank == context.world_size - 1:
        time.sleep(3600)
    yield


def hang_in_round_trip(address: str, folder: str) -> None:
    """Print the error of a round trip on two nodes whose last rank does not begin."""
    from verifier.runs.resources import Resources
    from verifier.runs.runner import Phase, Runner

    config = RoundtripConfig(
        model="tiny:qwen3", trace=Path(folder) / "trace", mesh=Mesh(dp=2),
        ray=RayOptions(use=True, address=address, nodes=2),
    )  # fmt: skip
    phase = Phase(trace=config.trace, within=("tests.dist.ray_functions:last_rank_absent",))
    with Resources(collective_deadline_s=10.0) as resources:
        try:
            Runner(resources, print).roundtrip(config, phases=[phase], tokens_only=True)
        except VerifierError as error:
            print(error)


def sync_of_one_engine(address: str, folder: str) -> None:
    """Print what catches a sync that reaches the first of two engines, and its first bad stage, on two nodes."""
    import verifier.checks  # noqa: F401  (fills the registry)
    from verifier.faults.catalog import CATALOG
    from verifier.faults.training_trial import run_training
    from verifier.runs.resources import Deadline, Resources
    from verifier.trainer.controller import PRELOAD

    (run := Path(folder)).mkdir()
    options, found = RayOptions(use=True, address=address, nodes=2), CATALOG["sync-reaches-one-of-two-engines"]
    knobs = (*found.training, "ray.use=true", f"ray.address={address}", "ray.nodes=2")
    fault = replace(found, mesh=Mesh(dp=2), training=knobs)
    with (
        Resources(preload=PRELOAD) as resources,
        resources.on_nodes(options, run, 2, Deadline(300), print),
    ):
        outcome = run_training(fault, run, resources, print, inject=True)
    stages = sorted({item.stage for item in outcome.bad})
    print(f"caught {' '.join(outcome.caught)}, first {stages[0].name}, fired {outcome.fired > 0}")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])

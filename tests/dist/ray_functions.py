"""Rank functions of tests under Ray, and a Ray cluster of two nodes on this host as a program."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from verifier.config.cluster import RayOptions
from verifier.errors import VerifierError
from verifier.launch.rank import JobSpec, RankContext


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


def hang(address: str, run: str) -> None:
    """Print the error of a job on two nodes whose last rank does not come."""
    from verifier.trainer.cluster_ray import joined

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


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])

"""Servers that a Ray actor runs on a node: one owns the launcher of trainer ranks, one an engine. Imports no ray.

An actor has many threads, so it forks nothing: its children are interpreters of their own, which the kernel ends with
the actor's main thread, on which its methods run.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import verifier
from verifier.core import ragged
from verifier.engine.api import EngineConfig, Sample, Sampling
from verifier.engine.client import EngineClient
from verifier.engine.process import EngineProcess, engine_fork_server
from verifier.errors import UsageError
from verifier.launch.fork_launcher import ForkLauncher
from verifier.launch.node_ranks import NodeRanks
from verifier.launch.rank import JobSpec
from verifier.launch.watchdog import Vigil
from verifier.platform.provenance import PINS, installed

FORWARDED = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTHONHASHSEED", "TMPDIR", "XDG_CACHE_HOME")
FORWARDED_PREFIXES = (
    "CUBLAS_", "GLOO_", "HF_", "MEGATRON_", "MKL_", "NCCL_", "NVTE_", "OPENBLAS_", "PYTORCH_", "TORCH", "TRANSFORMERS_",
    "TRITON_", "VERIFIER_", "VLLM_",
)  # fmt: skip
"""Names, and beginnings of names, of variables that actors and their children take from the driver, absent ones too."""


def forwarded(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of an environment that are forwarded."""
    return {name: value for name, value in environment.items() if _is_forwarded(name)}


def _is_forwarded(name: str) -> bool:
    return name in FORWARDED or name.startswith(FORWARDED_PREFIXES)


def identity() -> dict[str, str]:
    """Versions of Python and of pinned libraries, and a digest of this package's files."""
    root, digest = Path(verifier.__file__).parent, hashlib.blake2b(digest_size=16)
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    versions = {name: installed(name) or "absent" for name in PINS}
    return {"python": platform.python_version(), **versions, "verifier's files": digest.hexdigest()}


def columns_of(answers: Sequence[Sequence[Sample]]) -> dict[str, Any]:
    """Samples as one object of columns.

    Returns:
        ``counts`` int64 [prompts], of samples; ``lengths`` int64 and ``cached`` int64 [samples]; ``ended`` texts;
        ``seeds`` and ``seals`` of any size; ``shaped`` texts; ``weights`` pairs; ``tokens`` int64 and ``logprobs``
        float64 over all tokens, nats; ``updated`` and ``routed`` int64 [samples], numbers of tokens that have updates
        and routes, with ``updates`` int64 and ``routes`` int32 [tokens, layers, experts per token] over these.
    """
    samples = [sample for item in answers for sample in item]
    return {
        "counts": np.array([len(item) for item in answers], np.int64),
        "lengths": np.array([len(sample.tokens) for sample in samples], np.int64),
        "cached": np.array([sample.cached_tokens for sample in samples], np.int64),
        "ended": [sample.ended for sample in samples],
        "seeds": [sample.seed for sample in samples],
        "shaped": [sample.shaped for sample in samples],
        "weights": [sample.weights for sample in samples],
        "updated": np.array([len(sample.updates) for sample in samples], np.int64),
        "updates": np.array([count for sample in samples for count in sample.updates], np.int64),
        "routed": np.array([len(sample.routes) for sample in samples], np.int64),
        "seals": [sample.routes_seal for sample in samples],
        "routes": np.array([token for sample in samples for token in sample.routes], np.int32),
        "tokens": np.array([token for sample in samples for token in sample.tokens], np.int64),
        "logprobs": np.array([nats for sample in samples for nats in sample.logprobs], np.float64),
    }


def samples_of(columns: Mapping[str, Any]) -> list[list[Sample]]:
    """Samples from their columns, see `columns_of`."""
    over_tokens = (
        ragged.split(columns[name], columns[lengths])
        for name, lengths in (
            ("tokens", "lengths"), ("logprobs", "lengths"), ("updates", "updated"), ("routes", "routed")
        )
    )  # fmt: skip
    of_samples = columns["ended"], columns["cached"].tolist(), *(
        columns[name] for name in ("seeds", "shaped", "seals", "weights")
    )  # fmt: skip
    samples = iter(
        Sample(
            tokens=tuple(ids.tolist()), logprobs=tuple(nats.tolist()), updates=tuple(updates.tolist()),
            routes=tuple(tuple(tuple(experts) for experts in layers) for layers in routes.tolist()), ended=end,
            cached_tokens=cached, seed=seed, shaped=shaped, routes_seal=seal, weights=weights,
        )
        for ids, nats, updates, routes, end, cached, seed, shaped, seal, weights in zip(
            *over_tokens, *of_samples, strict=True
        )
    )  # fmt: skip
    return [[next(samples) for _ in range(count)] for count in columns["counts"].tolist()]


class NodeServer:
    """Environment and identity of a node."""

    def adopt(self, environment: Mapping[str, str], path: Sequence[str], folder: str, marked: str) -> dict[str, str]:
        """Take over what the driver's children would inherit; return the node's `identity`.

        Args:
            environment: forwarded variables; others that would be are removed.
            path: of the driver's modules, which comes before this process's own.
            folder: working folder of the driver.
            marked: file that the driver has written into the run's folder.

        Raises:
            UsageError: this node does not see the driver's folders.
        """
        for name in forwarded(os.environ).keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        sys.path[:] = [*path, *(item for item in sys.path if item not in path)]
        if not Path(marked).is_file() or not Path(folder).is_dir():
            raise UsageError(
                f"the node {socket.gethostname()} does not see `{folder}` and `{Path(marked).parent}`: put both on "
                "storage that all nodes share"
            )
        os.chdir(folder)
        return identity()


class TrainerNode(NodeServer):
    """Launcher of a node's trainer ranks."""

    def load(self, preload: str, load_deadline_s: float) -> None:
        """Start the launcher, which imports while the caller goes on."""
        self._launcher = ForkLauncher(preload=preload, load_deadline_s=load_deadline_s)
        self._launcher.start()

    def submit(
        self, spec: JobSpec, ranks: range, address: str, rendezvous: tuple[str, int] | None, on_host: range
    ) -> tuple[str, int] | None:
        """Start this node's ranks of a job; see `NodeRanks`.

        Returns:
            Host and port of the store, if the job has ranks on several nodes.
        """
        self._ranks = NodeRanks(self._launcher, spec, ranks, address, rendezvous, on_host)
        return self._ranks.rendezvous

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the `NodeRanks`."""
        return getattr(self._ranks, method)(*arguments)

    def close(self) -> None:
        """End the launcher and all ranks."""
        self._launcher.close()


class EngineNode(NodeServer):
    """Engine process, and a client of it."""

    def start(
        self, config: EngineConfig, name: str, host: str, deadline_s: float, request_deadline_s: float
    ) -> tuple[str, int]:
        """Start the engine and wait until it has loaded its model.

        Args:
            config: of the engine.
            name: of the engine, for errors.
            host: address of this node, where ranks of other nodes reach the engine; empty on the node of rank 0.
            deadline_s: seconds for the start.
            request_deadline_s: seconds that one request may take.

        Returns:
            `place` of an `EngineClient` on the node of rank 0, and process id.
        """
        self._stack, self._vigil = contextlib.ExitStack(), Vigil()
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(engine_fork_server(deadline_s, self._vigil))
            self._process = stack.enter_context(EngineProcess(config, server, name, self._vigil))
            self._client: EngineClient = stack.enter_context(
                contextlib.closing(self._process.client(request_deadline_s))
            )
            self._client.wait_ready(deadline_s)
            place = self._client.ask("listen", str, host=host) if host else str(self._process.socket_path)
            self._stack = stack.pop_all()
        return place, self._process.pid

    def ended(self, within_s: float) -> bool:
        """See `EngineProcess.ended`."""
        return self._process.ended(within_s)

    def look(self) -> None:
        """Raise the error of an engine that has died."""
        self._vigil.look()

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> dict[str, Any]:
        """Samples of each prompt; see `columns_of`."""
        return columns_of(self._client.generate(prompts, sampling))

    def close(self) -> None:
        """End the engine."""
        self._stack.close()

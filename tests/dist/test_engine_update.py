"""A poisoned engine, updated chunk by chunk three times, equals an engine that was loaded cold.

What this does not exercise: a real trainer as the sender (the roundtrip tests), bf16, and vLLM on a GPU.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet

from tests.dist.engine_case import (
    Case,
    group_members,
    plan_of,
    read,
    sequences,
    slices_that_differ,
    worst_gap,
    write_perturbed,
)
from tests.processes import processor_s
from verifier.engine.api import NO_SEED, EngineConfig, Sampling
from verifier.engine.client import EngineGone
from verifier.engine.process import EngineProcess, engine_fork_server
from verifier.engine.sender import agree, deliver
from verifier.errors import ContractError, VerifierError
from verifier.model.checkpoint import open_checkpoint
from verifier.model.tiny import write_tiny
from verifier.oracle.logprob_hf import score
from verifier.plan.chunk_plan import ChunkPlan, TensorMeta, build_plan
from verifier.plan.digest import digest_tensor

pytestmark = pytest.mark.slow

ALLOWED_NATS = 1e-5  # two float32 implementations of a 4-layer model agree to about 5e-6 (docs/numerics.md)
START_S = 600

KINDS = [("hf", "deepseek-v3", 1), ("vllm", "qwen3-moe", 2), ("vllm", "qwen3-tied", 1)]


def cases(first: str) -> list[ParameterSet]:
    """All kinds of engines; those but one in the slow tier."""
    return [
        pytest.param(kind, id="-".join(map(str, kind)), marks=[] if kind[0] == first and at < 2 else pytest.mark.slow)
        for at, kind in enumerate(KINDS)
    ]


MENDED = pytest.mark.parametrize("pair", cases("hf"), indirect=True)
"""Updates that end midway: what engines do then is the receiver's, the same for all kinds."""


def oracle_logprobs(path: Path, tokens: list[list[int]]) -> list[torch.Tensor]:
    """Log-probabilities of a checkpoint directory by transformers in float32."""
    return [torch.tensor(row) for row in score(None, str(path), tokens, "float32")]


class Pair:
    """An engine that is updated, one that is loaded cold from where the updates end, and the checkpoints between."""

    def __init__(self, kind: str, family: str, tp: int, where: Path) -> None:
        self.kind, self.tp = kind, tp
        self.base = write_tiny(family, where / "tiny")
        self.versions = [write_perturbed(self.base, where / f"version{seed}", seed) for seed in (1, 2, 3)]
        self._fork_server = engine_fork_server()
        self.synced = self._start(self.base)
        self.cold = self._start(self.versions[-1])

    def _start(self, checkpoint: Path) -> EngineProcess:
        return EngineProcess(
            EngineConfig(kind=self.kind, checkpoint=str(checkpoint), tp=self.tp), fork_server=self._fork_server
        )

    def stop(self) -> None:
        self.synced.stop()
        self.cold.stop()
        self._fork_server.__exit__(None, None, None)


@pytest.fixture(scope="module", params=cases("vllm"))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    engines = Pair(*request.param, tmp_path_factory.mktemp("engine"))
    try:
        yield engines
    finally:
        engines.stop()


def test_synced_equals_cold(pair: Pair) -> None:
    tokens = sequences()
    engine = pair.synced.client(START_S)
    assert engine.wait_ready(START_S) == pair.tp
    assert worst_gap(engine.logprobs(tokens), oracle_logprobs(pair.base, tokens)) < ALLOWED_NATS
    assert slices_that_differ(engine, pair.base) == []

    case = Case.open(engine, pair.tp)
    for version in pair.versions:
        done = [item for rank in engine.poison() for item in rank]
        assert all(item.how.startswith(("nan", "left: emptied", "left: int")) for item in done), done
        assert all(math.isnan(value) for row in engine.logprobs(tokens) for value in row)
        deliveries = case.sync(version)
        assert len(deliveries) > 3
        assert engine.reset_prefix_cache()
        assert slices_that_differ(engine, version) == []
        assert worst_gap(engine.logprobs(tokens), oracle_logprobs(version, tokens)) < ALLOWED_NATS

    cold = pair.cold.client(START_S)
    cold.wait_ready(START_S)
    assert engine.state() == cold.state()
    assert engine.checkpoint_view() == cold.checkpoint_view()
    assert engine.logprobs(tokens) == cold.logprobs(tokens)
    case.group.close()


def test_stale_prefix_cache_shows(pair: Pair) -> None:
    """The samples' own logprobs betray keys and values of the weights before; a reset mends them."""
    if pair.kind == "hf":
        return  # it has no prefix cache, as `reset_prefix_cache` says
    engine = pair.synced.client(START_S)
    case = Case.open(engine, pair.tp)
    prompt = sequences()[2]

    def gap(path: Path) -> tuple[float, int]:
        (sample,) = engine.generate([prompt], Sampling(seed=3, max_tokens=8))[0]
        (scored,) = oracle_logprobs(path, [[*prompt, *sample.tokens]])
        return float((torch.tensor(sample.logprobs) - scored[-8:]).abs().max()), sample.cached_tokens

    case.sync(pair.versions[0])
    assert engine.reset_prefix_cache()
    assert gap(pair.versions[0])[0] < ALLOWED_NATS
    case.sync(pair.versions[1])
    stale, cached = gap(pair.versions[1])
    assert cached == 160
    assert stale > 1e-2
    assert engine.reset_prefix_cache()
    mended, cached = gap(pair.versions[1])
    assert (mended < ALLOWED_NATS, cached) == (True, 0)
    case.group.close()


def test_answers_name_their_seeds(pair: Pair) -> None:
    engine = pair.synced.client(START_S)
    answers = engine.generate(sequences()[1:3], Sampling(seed=5, n=2, max_tokens=2))
    assert [[sample.seed for sample in own] for own in answers] == [[10, 11], [12, 13]]
    unseeded = Sampling(seed=5, max_tokens=2, seeded=False)
    assert engine.generate(sequences()[1:2], unseeded)[0][0].seed == NO_SEED - 1 - 5


def test_other_plan_moves_no_byte(pair: Pair) -> None:
    engine = pair.synced.client(START_S)
    case = Case.open(engine, pair.tp)
    case.sync(pair.versions[2])
    before = engine.state()
    checkpoint = open_checkpoint(pair.versions[1])
    plan = plan_of(checkpoint, 60_000)
    turned = ChunkPlan.from_json(plan.to_json()[::-1])
    pending = engine.begin_update(turned)
    agreement = case.group.agree(plan.digest)
    assert agreement.dissenters == tuple(range(1, pair.tp + 1))
    assert all(item == agreement for item in pending())
    assert engine.state() == before
    with pytest.raises(VerifierError, match=r"before a chunk plan was agreed on|start_weight_update must be called"):
        engine.receive(0)()
    case.group.close()


def test_tensor_that_does_not_fit_is_refused(pair: Pair) -> None:
    """The engine says so in the receipt, lives on, and the next update is whole."""
    engine = pair.synced.client(START_S)
    case = Case.open(engine, pair.tp)
    name = "model.layers.0.mlp.down_proj.weight" if pair.kind == "hf" else "model.layers.0.self_attn.o_proj.weight"
    wrong = torch.ones(40, 24)
    plan = build_plan([TensorMeta(name=name, dtype="float32", shape=(40, 24))], chunk_bytes=10_000)
    agree(engine, case.group, plan)
    (delivery,) = deliver(engine, case.group, plan, [(name, wrong)])
    for receipt in delivery.receipts:
        assert receipt.received[0].digest == digest_tensor(wrong)
        assert "while loading" in str(receipt.refused)
        assert receipt.loaded == ()
    case.sync(pair.versions[2])
    cold = pair.cold.client(START_S)
    assert engine.state() == cold.state()
    case.group.close()


@MENDED
def test_update_left_open_is_mended_by_the_next(pair: Pair) -> None:
    engine = pair.synced.client(START_S)
    case = Case.open(engine, pair.tp)
    checkpoint = open_checkpoint(pair.versions[0])
    plan = plan_of(checkpoint, 60_000)
    agree(engine, case.group, plan)
    stream = deliver(engine, case.group, plan, read(checkpoint, plan))
    next(stream)
    stream.close()
    case.sync(pair.versions[2])
    cold = pair.cold.client(START_S)
    assert engine.state() == cold.state()
    case.group.close()


@MENDED
def test_update_refused_midway_can_be_poisoned_and_mended(pair: Pair) -> None:
    """The stream departs from its plan in the fourth chunk: three were loaded, and every rank hears that it is over."""
    engine = pair.synced.client(START_S)
    case = Case.open(engine, pair.tp)
    checkpoint = open_checkpoint(pair.versions[0])
    plan = plan_of(checkpoint, 60_000)
    departing = plan.chunks[3].names[0]
    stream = ((f"{name}.other" if name == departing else name, tensor) for name, tensor in read(checkpoint, plan))
    agree(engine, case.group, plan)
    confirmed = []
    with pytest.raises(ContractError, match=r"the stream brings `.*\.other` where the plan says"):  # noqa: PT012
        for delivery in deliver(engine, case.group, plan, stream):
            assert all(receipt.refused is None and receipt.received for receipt in delivery.receipts)
            confirmed.append(delivery.packed.chunk.index)
    assert confirmed == [0, 1, 2]
    engine.poison()
    case.sync(pair.versions[2])
    cold = pair.cold.client(START_S)
    assert engine.state() == cold.state()
    case.group.close()


def test_workers_are_forked(pair: Pair) -> None:
    """An interpreter of its own imports vLLM again, 13 processor seconds for each worker."""
    kinds = pair.synced.client(START_S).call(f"{__name__}:kind_of_process")
    assert kinds == ["ForkProcess"] * pair.tp


def kind_of_process(_worker: object) -> str:
    """Runs in the engine's workers."""
    return type(multiprocessing.current_process()).__name__


def test_engines_that_wait_leave_the_cores_to_others(pair: Pair) -> None:
    """vLLM's driver and workers looked for the next message for a second after each, on a core of their own."""
    servers = (pair.synced, pair.cold)
    for engine in servers:
        engine.client(START_S).logprobs([[1, 2, 3]])
    members = [pid for engine in servers for pid in group_members(engine.pid)]
    assert len(members) >= len(servers)
    used = [sum(map(processor_s, members))]
    for _ in range(4):  # what the answers leave to be done may be in the first
        time.sleep(0.2)
        used.append(sum(map(processor_s, members)))
    assert min(after - before for before, after in pairwise(used)) < 0.05, used


def test_workers_die_with_a_killed_host(pair: Pair) -> None:
    """The last test of a pair: its cold engine is gone after it."""
    host = pair.cold.pid
    client = pair.cold.client(START_S)
    assert group_members(host)
    os.kill(host, signal.SIGKILL)
    with pytest.raises(EngineGone, match=r"the engine's process ended by itself \(killed by SIGKILL"):
        client.state()
    until = time.monotonic() + 15
    while group_members(host) and time.monotonic() < until:
        time.sleep(0.05)
    assert group_members(host) == []

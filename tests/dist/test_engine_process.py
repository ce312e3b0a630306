"""An engine in its own process: its life ends with its parent's, and every wait has a deadline and a name."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dist.engine_case import group_members
from tests.processes import alive
from verifier.engine.api import EngineConfig
from verifier.engine.client import EngineClient, EngineGone
from verifier.engine.process import EngineProcess
from verifier.engine.sender import connect
from verifier.errors import ContractError, InternalError, UsageError
from verifier.model.tiny import write_tiny
from verifier.plan.chunk_plan import TensorMeta, build_plan
from verifier.transport.gloo import Listener, join
from verifier.transport.wire import TransferFailed

START_S = 200


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("qwen3", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[EngineProcess]:
    with EngineProcess(EngineConfig(kind="hf", checkpoint=str(checkpoint))) as process:
        process.client(START_S).wait_ready(START_S)
        yield process


def test_engine_dies_with_a_killed_parent(checkpoint: Path) -> None:
    code = (
        "import sys, time\n"
        "from verifier.engine.api import EngineConfig\n"
        "from verifier.engine.process import EngineProcess\n"
        "process = EngineProcess(EngineConfig(kind='hf', checkpoint=sys.argv[1]))\n"
        "process.client()\n"
        "print(process.pid, flush=True)\n"
        "time.sleep(300)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(checkpoint)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    host = int(parent.stdout.readline())
    assert alive(host)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until = time.monotonic() + 10
    while group_members(host) and time.monotonic() < until:
        time.sleep(0.05)
    assert group_members(host) == []


def test_stop_leaves_nothing(checkpoint: Path) -> None:
    with EngineProcess(EngineConfig(kind="hf", checkpoint=str(checkpoint))) as process:
        process.client()
        folder = process.socket_path.parent
    assert group_members(process.pid) == []
    assert not folder.exists()


def test_damaged_checkpoint_is_a_usage_error(tmp_path: Path) -> None:
    config = EngineConfig(kind="hf", checkpoint=str(tmp_path / "absent"))
    with EngineProcess(config) as process, pytest.raises(UsageError, match="no checkpoint directory at"):
        process.client(60).wait_ready(60)


def test_latent_attention_on_vllm_is_a_usage_error(tmp_path: Path) -> None:
    config = EngineConfig(kind="vllm", checkpoint=str(write_tiny("deepseek-v3", tmp_path)))
    with EngineProcess(config) as process, pytest.raises(UsageError, match="attention; use --engine hf"):
        process.client(120).wait_ready(120)


def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(EngineGone, match="the engine does not listen at"):
        EngineClient(tmp_path / "socket")


def test_deadline_names_the_request(engine: EngineProcess) -> None:
    client = engine.client()
    with pytest.raises(InternalError, match=r"did not answer `call` within 0.2 s"):
        client.ask("call", deadline_s=0.2, function=f"{__name__}:sleep", arguments=[2])
    with pytest.raises(EngineGone, match="was closed before"):
        client.reset_prefix_cache()
    assert engine.client().reset_prefix_cache()


def test_call_runs_beside_the_model(engine: EngineProcess) -> None:
    held = [item.kind for rank in engine.client().state() for item in rank]
    assert engine.client().call(f"{__name__}:parameter_count") == [held.count("parameter")]


def test_out_of_vocabulary_is_refused_and_the_engine_lives(engine: EngineProcess) -> None:
    client = engine.client()
    with pytest.raises(UsageError, match="sequence 0 has token 512 at position 1"):
        client.logprobs([[1, 512]])
    assert len(client.logprobs([[1, 2, 3]])[0]) == 2


def test_update_before_a_group_is_refused(engine: EngineProcess) -> None:
    client = engine.client()
    plan = build_plan([TensorMeta(name="w", dtype="float32", shape=(2,))], chunk_bytes=64)
    with pytest.raises(ContractError, match="before the engine joined a transfer group"):
        client.begin_update(plan)()


def test_absent_sender_is_named(engine: EngineProcess) -> None:
    listener = Listener(1, deadline_s=1)
    group = connect(engine.client(), listener)
    client = engine.client()
    plan = build_plan([TensorMeta(name="w", dtype="float32", shape=(2,))], chunk_bytes=64)
    with pytest.raises(TransferFailed, match="transfer rank 1 waited up to 1 s with the sender"):
        client.begin_update(plan)()
    group.close()


def test_absent_engine_is_named() -> None:
    with pytest.raises(TransferFailed, match=r"transfer rank 0 waited up to 0.5 s with the engine's ranks"):
        Listener(1, deadline_s=0.5).accept()


def test_nobody_sends() -> None:
    address = Listener(1, deadline_s=0.5).address
    gone = Listener(1, deadline_s=0.5).address
    assert address.store != gone.store
    with pytest.raises(TransferFailed):
        join(gone, 1)


def test_unknown_request_is_refused(engine: EngineProcess) -> None:
    with pytest.raises(InternalError, match="knows no request `dance`"):
        engine.client().ask("dance")


def sleep(_engine: object, seconds: float) -> None:
    """Runs in the engine."""
    time.sleep(seconds)


def parameter_count(engine: object) -> int:
    """Runs in the engine."""
    return sum(1 for module in engine.model.modules() for _ in module.parameters(recurse=False))

"""Engine servers forked from a process that has imported vLLM: like servers of their own, gone with their owner."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.dist.engine_case import group_members
from tests.processes import alive
from verifier.engine.api import EngineConfig
from verifier.engine.client import EngineGone
from verifier.engine.process import EngineProcess, engine_fork_server
from verifier.errors import InternalError, UsageError
from verifier.model.tiny import write_tiny
from verifier.platform.upstream_fixes import VLLM_BUFFERS

START_S = 200


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("qwen3", tmp_path_factory.mktemp("tiny"))


@pytest.mark.slow
def test_engines_of_one_fork_server(checkpoint: Path, tmp_path: Path) -> None:
    scores, servers = [], []
    absent = EngineConfig(kind="vllm", checkpoint=str(tmp_path / "absent"))
    unknown = EngineConfig(kind="vllm", checkpoint=str(tmp_path / "unknown"))
    shutil.copytree(checkpoint, tmp_path / "unknown")
    settings = tmp_path / "unknown" / "config.json"
    settings.write_text(settings.read_text().replace("Qwen3ForCausalLM", "NoSuchModel"))
    with engine_fork_server() as fork_server:
        for tp, fixes in ((2, (VLLM_BUFFERS,)), (1, ())):
            config = EngineConfig(kind="vllm", checkpoint=str(checkpoint), tp=tp, fixes=fixes)
            with EngineProcess(config, fork_server=fork_server) as process:
                client = process.client(START_S)
                scores.append(client.logprobs([[1, 2, 3, 4]])[0])
                assert len(client.state()) == tp
                assert client.call("verifier.platform.upstream_fixes_vllm:installed") == [list(fixes)] * tp
                client.close()
                servers.append(process.pid)
                folder = process.socket_path.parent
            assert group_members(process.pid) == []
            assert not folder.exists()
        with (
            EngineProcess(absent, fork_server=fork_server) as process,
            pytest.raises(UsageError, match="no checkpoint"),
        ):
            process.client(60).wait_ready(60)
        with EngineProcess(unknown, fork_server=fork_server) as process, pytest.raises(EngineGone, match="NoSuchModel"):
            process.client(60).wait_ready(60)
        os.kill(fork_server.pid, signal.SIGKILL)
        with pytest.raises(InternalError, match="the process that forks engines ended by itself"):
            EngineProcess(config, fork_server=fork_server)
    assert scores[0] == pytest.approx(scores[1], abs=1e-5)
    assert not any(alive(server) for server in servers)


@pytest.mark.slow
def test_engine_dies_with_a_killed_owner(checkpoint: Path) -> None:
    code = (
        "import sys, time\n"
        "from verifier.engine.api import EngineConfig\n"
        "from verifier.engine.process import engine_fork_server\n"
        "from verifier.engine.process import EngineProcess\n"
        "with engine_fork_server() as fork_server:\n"
        "    process = EngineProcess(EngineConfig(kind='vllm', checkpoint=sys.argv[1]), fork_server=fork_server)\n"
        "    print(fork_server.pid, process.pid, flush=True)\n"
        "    time.sleep(300)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code, str(checkpoint)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    fork_server, server = map(int, owner.stdout.readline().split())
    assert alive(fork_server)
    assert alive(server)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    until = time.monotonic() + 10
    while (alive(fork_server) or group_members(server)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not alive(fork_server)
    assert group_members(server) == []


def test_a_fork_server_that_does_not_load_in_time_says_so(checkpoint: Path) -> None:
    config = EngineConfig(kind="vllm", checkpoint=str(checkpoint))
    with (
        engine_fork_server(load_deadline_s=0.2) as fork_server,
        pytest.raises(InternalError, match=r"did not load .* within 0.2 s"),
    ):
        EngineProcess(config, fork_server=fork_server)

"""A run under Ray: the bits of one without it, its environment, and its ends, on one node and on two.

What this does not exercise: nodes on several hosts, and GPUs.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from tests.dist.ray_functions import cluster_of_two_nodes
from tests.meta.sources import ROOT
from tests.processes import alive, command_line
from verifier.config.cluster import RayOptions
from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.core import store
from verifier.core.finding import Verdict
from verifier.errors import UsageError
from verifier.faults.training_trial import DeferredJudge
from verifier.launch.child import descendants
from verifier.launch.fork_launcher import ForkLauncher
from verifier.launch.rank import JobSpec
from verifier.probes.training.run_evidence import RunEvidence
from verifier.report.report import report_of
from verifier.runs import join_ray
from verifier.runs.cluster_ray import Cluster
from verifier.runs.join_ray import joined, require_answer
from verifier.runs.node_servers import forwarded
from verifier.runs.resources import Resources
from verifier.stages.engine.records import EngineRestart, SyncedTensor
from verifier.trainer.controller import Launcher, Trainer

CONFIG = ROOT / "configs" / "add-sft.yaml"
KNOBS = ("steps=3", "data.batch_size=16", "evaluation.num_problems=0")
GIVEN = {
    "HOME": "/proc/none", "OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1", "NCCL_DEBUG": "WARN", "VERIFIER_TEST": "ray",
    "HF_HOME": None, "MKL_NUM_THREADS": None,
}  # fmt: skip
"""Environment of the driver; HOME cannot be written, None is absent."""


def trained(launcher: Launcher, run: Path, *knobs: str) -> dict[str, bytes]:
    """Weights of a run."""
    config, _ = load(TrainConfig, file=CONFIG, overrides=[*KNOBS, *knobs, f"run={run}"])
    Trainer(config, print, launcher=launcher).run()
    return weights(run)


def weights(run: Path) -> dict[str, bytes]:
    found = {file.name: file.read_bytes() for file in (run / "hf_model").glob("*.safetensors")}
    assert found
    return found


@pytest.fixture(scope="module")
def local(
    trainer_launcher: ForkLauncher, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SimpleNamespace]:
    """A local Ray whose actor has Megatron loaded, and what it was started with."""
    run = tmp_path_factory.mktemp("ray")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        caches = {"XDG_CACHE_HOME": str(checkpoints), "MEGATRON_CONFIG_LOCK_DIR": str(run)}  # both lie in HOME else
        for name, value in {**GIVEN, **caches}.items():
            if value is None:
                patch.delenv(name, raising=False)
            else:
                patch.setenv(name, value)
        wanted = forwarded(os.environ)
        with joined(RayOptions(use=True), run, 1) as cluster:
            cluster.load("trainer_functions:preload", 300.0)
            yield SimpleNamespace(cluster=cluster, run=run, wanted=wanted, sigterm=before)


@pytest.mark.slow
def test_a_rank_has_the_environment_of_the_driver(local):
    spec = JobSpec(function="ray_functions:environment", world_size=1, run_dir=local.run)
    rank = local.cluster.submit(spec).wait()[0]
    assert local.wanted.items() <= rank.items()
    assert not {name for name, value in GIVEN.items() if value is None} & rank.keys()


@pytest.mark.slow
def test_the_token_lies_in_the_folder_of_the_run_and_signals_are_as_before(local):
    assert (local.run / "ray_token").stat().st_mode & 0o777 == 0o600
    assert signal.getsignal(signal.SIGTERM) is local.sigterm


def test_three_steps_have_the_bits_of_a_run_without_ray(local, trainer_launcher, tmp_path):
    assert trained(local.cluster, tmp_path / "ray") == trained(trainer_launcher, tmp_path / "plain")


GRPO = (
    "model=tiny:add", "algorithm=grpo", "engine.kind=hf", "steps=3", "data.batch_size=4", "grpo.group_size=4",
    "grpo.max_answer_tokens=8", "grpo.entropy_weight=0.05", "evaluation.num_problems=0", "verify.steps=true",
    "verify.every=0",
)  # fmt: skip


def sampled(launcher: Launcher, run: Path, *knobs: str, at: str = "", victim: str = "", **given) -> list[str]:
    """Train on samples of an engine, whose process or actor is killed after a line that begins so; printed lines."""
    lines: list[str] = []

    def progress(text: str) -> None:
        lines.append(text)
        if at and text.startswith(at):
            pids = [pid for pid in pids_of(os.getpid(), [victim]) if "fork" not in command_line(pid)]
            os.kill(pids[-1], signal.SIGKILL)

    config, _ = load(TrainConfig, overrides=[*GRPO, *knobs, f"run={run}"])
    Trainer(config, progress, RunEvidence(DeferredJudge()), launcher=launcher, **given).run()
    for step in range(1, 4):
        trace = store.read(run / "steps" / f"{step:06d}")
        report = report_of(trace, "")
        assert report.verdict is Verdict.HOLDS, [item for item in report.outcomes if item.verdict is not Verdict.HOLDS]
        if any(trace.of(EngineRestart)):
            lines.append(f"looked at in step {step}")
    return lines


@pytest.fixture(scope="module")
def whole(trainer_launcher, tmp_path_factory) -> dict[str, bytes]:
    """Weights of a run with an engine, without Ray and without a death."""
    run = tmp_path_factory.mktemp("whole") / "run"
    with Resources(launcher=trainer_launcher) as resources:
        sampled(trainer_launcher, run, resources=resources)
    return weights(run)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["verifier.engine.server", "ray::EngineNode"])
def test_an_engine_under_ray_that_dies_is_started_again(victim, local, whole, tmp_path):
    lines = sampled(local.cluster, tmp_path / "run", "ray.use=true", at="step 1: loss", victim=victim)
    assert sum("starting it again" in line for line in lines) == 1, lines
    assert "looked at in step 2" in lines
    assert weights(tmp_path / "run") == whole


@pytest.mark.slow
def test_an_engine_under_ray_dies_during_a_sync(local, whole, tmp_path):
    mark = tmp_path / "mark"
    within = ["tests.dist.engine_kills:killed_by_rank_0", "receive", "20", str(mark)]
    lines = sampled(local.cluster, tmp_path / "run", "ray.use=true", within=within)
    assert mark.read_text() == "1"
    assert sum("starting it again" in line for line in lines) == 1, lines
    assert weights(tmp_path / "run") == whole


@pytest.mark.parametrize("speaks", [False, True])
def test_an_address_that_is_silent_is_refused(speaks):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        if not speaks:
            listener.close()
        with pytest.raises(UsageError, match=r"refused|silent for 0\.5 s"):
            require_answer(address, 0.5)


def test_more_nodes_than_the_cluster_has(monkeypatch):
    node = {"NodeID": "a", "Alive": True}
    monkeypatch.setattr(join_ray.ray, "nodes", lambda: [node, {**node, "Alive": False}])
    monkeypatch.setattr(join_ray.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "a"))
    with pytest.raises(UsageError, match=r"ray.nodes is 2, the cluster has 1: make it smaller"):
        join_ray._nodes(RayOptions(use=True, address="h:1", nodes=2))


def test_nodes_of_one_host_share_its_gpus():
    nodes = [{"NodeManagerAddress": host} for host in ("a", "a", "b", "c")]
    cluster = Cluster(nodes, (), contextlib.ExitStack(), 8)
    assert [cluster._on_host(place, 8) for place in range(4)] == [range(4), range(4), range(4, 6), range(6, 8)]
    assert cluster.ranks_here == 4
    assert cluster._on_host(0, 1) == range(1)


def command(run: Path, *knobs: str, of: Sequence[str] = (str(CONFIG), *KNOBS)) -> list[str]:
    given = {text.partition("=")[0] for text in knobs}
    kept = [text for text in of if text.partition("=")[0] not in given]
    return [sys.executable, "-m", "verifier", "train", *kept, "ray.use=true", *knobs, "--run", str(run)]


def pids_of(driver: int, words: Sequence[str]) -> list[int]:
    """Descendants of a driver whose command line has all of these words."""
    found = []
    for pid in descendants(driver):
        if all(word in command_line(pid) for word in words):
            found.append(pid)
    return found


NAMED_S = 15.0
"""Seconds within which a raylet that is killed is named, and the command has ended."""
ENDED = r"verifier: the raylet on node {}, \S+ ended by itself: killed by SIGKILL"
VICTIMS = {
    "driver": (), "raylet": ("/raylet ",), "trainer actor": ("ray::TrainerNode",), "launcher": ("fork_server:serve",),
    "rank": ("fork_server:serve",),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("victim", VICTIMS)
def test_nothing_is_left_when_a_process_is_killed(victim, tmp_path):
    run, short = tmp_path / "run", Path(os.environ.get("TMPDIR", "/tmp"))
    others = set(short.glob("verifier-ray-*"))
    with subprocess.Popen(
        command(run, "steps=100000", "checkpoint.every=2"), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, env={**os.environ, "TMPDIR": str(short)},
    ) as driver:  # fmt: skip
        until = time.monotonic() + 240
        while not (run / "metrics.jsonl").exists():
            assert driver.poll() is None, driver.stdout.read()
            assert time.monotonic() < until
            time.sleep(0.1)
        folders = set(short.glob("verifier-ray-*")) - others
        everything = [driver.pid, *descendants(driver.pid)]
        found = pids_of(driver.pid, VICTIMS[victim]) if victim != "driver" else [driver.pid]
        os.kill(found[-1] if victim == "rank" else found[0], signal.SIGKILL)
        printed = driver.communicate(timeout=NAMED_S if victim == "raylet" else 60)[0]
        assert driver.returncode == (-signal.SIGKILL if victim == "driver" else 3), printed
        until = time.monotonic() + 15
        while (left := [pid for pid in everything if alive(pid)]) and time.monotonic() < until:
            time.sleep(0.1)
        assert not left, {pid: command_line(pid)[:200] for pid in left}
        if victim != "driver":
            assert victim.partition(" ")[0] in printed or "launcher" in victim, printed
        if victim == "raylet":
            assert re.search(ENDED.format(0), printed), printed
    assert not any(folder.exists() for folder in folders)
    again = subprocess.run(
        command(run, "steps=100000", "timeout_s=0.5"), cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert "in use by another run" not in again.stderr


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory) -> Iterator[tuple[str, dict[str, str]]]:
    """Address of a Ray cluster of two nodes on this host, and the environment that its token is in."""
    with cluster_of_two_nodes(tmp_path_factory.mktemp("token") / "token") as (address, environment):
        yield address, {**os.environ, **environment}


@pytest.mark.slow
def test_two_nodes_have_the_bits_of_one(two_nodes, trainer_launcher, tmp_path):
    address, environment = two_nodes
    knobs = ("mesh.dp=2", f"ray.address={address}", "ray.nodes=2")
    done = subprocess.run(
        command(tmp_path / "run", *knobs), cwd=ROOT, capture_output=True, text=True, timeout=400, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert weights(tmp_path / "run") == trained(trainer_launcher, tmp_path / "plain", "mesh.dp=2")


REPLICAS = ("mesh.dp=2", "engine.replicas=2", "checkpoint.every=1")


@pytest.fixture(scope="module")
def whole_of_two(trainer_launcher, tmp_path_factory) -> dict[str, bytes]:
    """Weights of a run with two engines on this host."""
    run = tmp_path_factory.mktemp("two") / "run"
    with Resources(launcher=trainer_launcher) as resources:
        sampled(trainer_launcher, run, *REPLICAS, resources=resources)
    return weights(run)


def killed_midway(
    run: Path, victim: str, cluster: tuple[str, dict[str, str]], *, alone: bool = False, within_s: float = 60
) -> tuple[int, str]:
    """Train with an engine on each of two nodes, and kill a process and its children after the first step.

    Or it `alone`. The command ends within so many seconds after its last word or the kill.

    Returns:
        Exit code and words.
    """
    address, environment = cluster
    knobs = (*REPLICAS, f"ray.address={address}", "ray.nodes=2", "timeout_s=300")
    with subprocess.Popen(
        command(run, *knobs, of=GRPO), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=environment,
    ) as driver:  # fmt: skip
        said, until = [], None
        for line in driver.stdout:
            said.append(line)
            if victim and "step 1: loss" in line:
                pid, victim = pids_of(os.getpid(), [victim])[-1], ""
                until = time.monotonic() + within_s
                for each in (pid, *(() if alone else descendants(pid))):
                    os.kill(each, signal.SIGKILL)
        code = driver.wait(60)
        assert until is None or not alone or time.monotonic() < until, said
        return code, "".join(said)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["", "verifier.engine.server", "ray::EngineNode"])
def test_engines_on_two_nodes_sample_what_two_on_one_host_do(victim, two_nodes, whole_of_two, tmp_path):
    code, said = killed_midway(tmp_path / "run", victim, two_nodes)
    assert (code, said.count("starting it again")) == (0, 1 if victim else 0), said
    assert weights(tmp_path / "run") == whole_of_two
    for step in range(1, 4):
        trace = store.read(tmp_path / "run" / "steps" / f"{step:06d}")
        assert report_of(trace, "").verdict is Verdict.HOLDS
        assert {item.rank for item in trace.of(SyncedTensor)} == {0, 1}
    assert not list((tmp_path / "run").glob("store-*"))


@pytest.mark.slow
def test_a_sync_that_reaches_the_engine_of_one_node_is_caught(two_nodes, tmp_path):
    address, environment = two_nodes
    done = subprocess.run(
        [sys.executable, "-m", "tests.dist.ray_functions", "sync_of_one_engine", address, str(tmp_path / "trial")],
        cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment,
    )  # fmt: skip
    last = done.stdout.splitlines()[-1]
    assert {"ENG001", "TPT002"} <= {*last.split(",")[0].split()}, done.stdout + done.stderr
    assert last.endswith("first TRANSPORT, fired True")


@pytest.mark.slow
@pytest.mark.parametrize("alone", [True, False])
def test_a_node_whose_raylet_dies_ends_the_attempt_and_is_named(alone, whole_of_two, tmp_path):
    with cluster_of_two_nodes(tmp_path / "token") as (address, environment):
        cluster = address, {**os.environ, **environment}
        code, said = killed_midway(tmp_path / "run", "/raylet ", cluster, alone=alone, within_s=NAMED_S)
    assert code == 3, said
    assert re.search(ENDED.format(1) if alone else "on node 1, ", said), said
    with cluster_of_two_nodes(tmp_path / "token") as (address, environment):
        code, said = killed_midway(tmp_path / "run", "", (address, {**os.environ, **environment}))
    assert code == 0, said
    assert weights(tmp_path / "run") == whole_of_two


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_with_its_node(two_nodes, tmp_path):
    address, environment = two_nodes
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/dist/ray_functions.py"), "hang", address, str(tmp_path)],
        capture_output=True, text=True, timeout=200, env=environment,
    )  # fmt: skip
    assert "ranks [0-3]: [0-2] arrived, [3] did not" in done.stdout, done.stdout + done.stderr
    assert "rank 3 (node 1, " in done.stdout


@pytest.mark.slow
def test_more_nodes_than_there_are_is_refused_by_the_command(two_nodes, tmp_path):
    address, environment = two_nodes
    knobs = ("mesh.dp=3", f"ray.address={address}", "ray.nodes=3", "data.batch_size=24")
    done = subprocess.run(
        command(tmp_path / "run", *knobs), cwd=ROOT, capture_output=True, text=True, timeout=200, env=environment
    )
    assert (done.returncode, done.stderr.strip().splitlines()[-1]) == (
        4, "verifier: ray.nodes is 3, the cluster has 2: make it smaller",
    )  # fmt: skip

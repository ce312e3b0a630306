"""The launcher on real processes: results, and every way to end badly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from verifier.errors import InternalError, UsageError
from verifier.launch.failures import CollectiveTimeout, JobTimeout, RankFailed
from verifier.launch.fork_launcher import ForkLauncher
from verifier.launch.rank import JobSpec
from verifier.mesh.mesh import Mesh

HERE = Path(__file__).parent
HANGS_AFTER_S = 2.0
"""Deadline of a collective; one that all ranks enter takes up to a second beside another worker of a suite."""


@pytest.fixture(scope="module")
def functions():
    sys.path.insert(0, str(HERE))
    import launch_functions

    yield launch_functions
    sys.path.remove(str(HERE))


def sleepers(run_dir, seconds=60, **changes):
    fields = {"world_size": 2, "run_dir": run_dir, "args": {"seconds": seconds}, **changes}
    return JobSpec(function="launch_functions:sleep", **fields)


@pytest.fixture(scope="module")
def launcher(functions):
    with ForkLauncher(preload="launch_functions:count_imports") as launcher:
        yield launcher


def test_returns_each_ranks_result_in_order(launcher, tmp_path):
    said = []
    results = launcher.run(
        "launch_functions:sum_of_ranks",
        world_size=4,
        run_dir=tmp_path / "new" / "folder",
        args={"seed": 3},
        on_progress=lambda rank, text: said.append((rank, text)),
    )
    assert [result["rank"] for result in results] == [0, 1, 2, 3]
    assert {result["sum"] for result in results} == {6.0}
    assert results[2]["env"] == ["2", "4", "2", "127.0.0.1"]
    assert all(result["args"] == {"seed": 3} and result["num_threads"] == 1 for result in results)
    assert sorted(said) == [(rank, f"adding {rank}") for rank in range(4)]
    assert (tmp_path / "new" / "folder" / "rank003.log").read_text() == "hello from 3\n"


def test_imports_once_for_many_jobs(launcher, tmp_path):
    for _ in range(3):
        results = launcher.run("launch_functions:sum_of_ranks", world_size=2, run_dir=tmp_path)
        assert [result["num_imports"] for result in results] == [1, 1]


def test_a_result_longer_than_a_pipe(launcher, tmp_path):
    results = launcher.run("launch_functions:long_text", world_size=2, run_dir=tmp_path, args={"length": 3_000_000})
    assert [len(result) for result in results] == [3_000_000] * 2


def test_json_from_every_rank_to_every_rank(launcher, tmp_path):
    results = launcher.run("gather_functions:gather", world_size=3, run_dir=tmp_path, deadline_s=60)
    rows = [{"rank": rank, "text": "x" * 1000 * rank, "third": 1 / 3} for rank in range(3)]
    assert results == [[rows, [[], [], []], True, False]] * 3


def test_no_rank_listens_with_a_store(launcher, tmp_path):
    """Torch's TCPStore answers every user of the machine; ranks and launcher have none."""
    (result,) = launcher.run("launch_functions:stores", world_size=1, run_dir=tmp_path)
    assert result == "FileStore"


def test_a_gloo_group_has_one_worker(launcher, tmp_path):
    """Two, as torch 2.11 gives it, corrupt the heap: 30,000 coalesced gathers, 8 at a time, end by SIGSEGV."""
    assert launcher.run("launch_functions:threads_of_a_group", world_size=2, run_dir=tmp_path) == [1, 1]


def test_backward_runs_in_a_forked_rank(launcher, tmp_path):
    results = launcher.run("launch_functions:backward", world_size=2, run_dir=tmp_path, deadline_s=60)
    assert results == [64 * 64 * 128.0] * 2


def test_two_jobs_alive_at_once(launcher, tmp_path):
    slow = launcher.submit(sleepers(tmp_path / "slow", seconds=2))
    quick = launcher.submit(JobSpec(function="launch_functions:sum_of_ranks", world_size=2, run_dir=tmp_path / "quick"))
    assert quick.wait()[1]["sum"] == 1.0
    assert not slow.done
    assert slow.wait() == [0, 1]


def test_sixty_four_ranks(launcher, tmp_path):
    begin = time.monotonic()
    results = launcher.run("launch_functions:sum_of_ranks", world_size=64, run_dir=tmp_path)
    assert {result["sum"] for result in results} == {2016.0}
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("raise", "ValueError: no such expert"),
        ("exit", "exit status 7"),
        ("return-nothing", "exit status 0"),
        ("kill", "killed by SIGKILL (the kernel does this when memory runs out)"),
        ("unserialisable", "TypeError: Object of type object is not JSON serializable"),
    ],
)
def test_a_bad_end_of_one_rank_ends_the_run_at_once(launcher, tmp_path, how, cause):
    begin = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        launcher.run(
            "launch_functions:end_badly",
            world_size=4,
            run_dir=tmp_path,
            args={"rank": 2, "how": how},
            mesh=Mesh(tp=2, pp=2),
        )
    assert time.monotonic() - begin < 10
    error = caught.value
    assert (error.rank, error.cause, error.exit_code) == (2, cause, 3)
    assert error.place == "tp=0 pp=1 ep=0 etp=0 cp=0 dp=0"
    assert str(error).splitlines()[0] == f"rank 2 ({error.place}) failed: {cause}"
    assert error.log_tail == "about to end badly\n"
    if how == "raise":
        assert 'raise ValueError("no such expert")' in error.traceback
        assert "ValueError: no such expert" in (tmp_path / "rank002.log").read_text()


def test_a_ranks_usage_error_comes_back_as_itself(launcher, tmp_path):
    with pytest.raises(UsageError) as caught:
        launcher.run("launch_functions:end_badly", world_size=2, run_dir=tmp_path, args={"rank": 1, "how": "usage"})
    assert str(caught.value) == "16 experts do not divide over ep = 3"
    assert isinstance(caught.value.__cause__, RankFailed)


@pytest.mark.parametrize(
    ("how", "op", "tensor"),
    [
        ("all_reduce", "all_reduce", "[2, 3] bfloat16"),
        ("async", "all_reduce", "[5] float32"),
        ("gather_object", "all_gather", "[1] int64"),
    ],
)
def test_a_collective_that_hangs_names_who_did_not_come(launcher, tmp_path, how, op, tensor):
    with pytest.raises(CollectiveTimeout) as caught:
        launcher.run(
            "launch_functions:absent",
            world_size=4,
            run_dir=tmp_path,
            args={"how": how},
            collective_deadline_s=HANGS_AFTER_S,
        )
    error = caught.value
    assert (error.stall.op, error.stall.group, error.stall.arrived) == (op, (0, 1, 2, 3), (0, 1, 2))
    assert error.stall.tensor == f"`model.layers.3.mlp.experts.12.down_proj.weight` {tensor}"
    assert [state.rank for state in error.missing] == [3]
    assert error.missing[0].frame.startswith("dist/launch_functions.py:")
    assert error.missing[0].frame.endswith("in absent")
    assert error.missing[0].doing.startswith("in no collective since ")
    assert error.missing[0].doing.endswith("all_reduce of [2, 3] bfloat16 (its collective 2)")


@pytest.mark.parametrize("how", ["recv", "batch"])
def test_a_receive_that_hangs_names_the_sender(launcher, tmp_path, how):
    with pytest.raises(CollectiveTimeout) as caught:
        launcher.run(
            "launch_functions:absent",
            world_size=2,
            run_dir=tmp_path,
            args={"how": how},
            collective_deadline_s=HANGS_AFTER_S,
        )
    error = caught.value
    assert (error.stall.op, error.stall.arrived, error.missing[0].rank) == ("recv", (0,), 1)


def test_making_a_group_that_hangs(launcher, tmp_path):
    with pytest.raises(CollectiveTimeout) as caught:
        launcher.run(
            "launch_functions:absent",
            world_size=3,
            run_dir=tmp_path,
            args={"how": "new_group"},
            collective_deadline_s=HANGS_AFTER_S,
        )
    assert (caught.value.stall.op, caught.value.stall.tensor, caught.value.stall.arrived) == (
        "new_group",
        "`experts`",
        (0,),
    )


def test_of_a_chain_of_waits_the_root_is_named(launcher, tmp_path):
    with pytest.raises(CollectiveTimeout) as caught:
        launcher.run("launch_functions:chain", world_size=3, run_dir=tmp_path, collective_deadline_s=HANGS_AFTER_S)
    error = caught.value
    assert (error.stall.group, error.stall.arrived, error.missing[0].rank) == ((1, 2), (1,), 2)


def test_crossed_groups_say_where_the_other_waits(launcher, tmp_path):
    with pytest.raises(CollectiveTimeout) as caught:
        launcher.run("launch_functions:crossed", world_size=2, run_dir=tmp_path, collective_deadline_s=HANGS_AFTER_S)
    assert caught.value.missing[0].doing.startswith("waits ")


def test_a_job_past_its_deadline_says_where_its_ranks_are(launcher, tmp_path):
    with pytest.raises(JobTimeout) as caught:
        launcher.run("launch_functions:sleep", world_size=2, run_dir=tmp_path, args={"seconds": 60}, deadline_s=2)
    assert all(state.frame.endswith("in sleep") for state in caught.value.states)


def test_ended_on_request_with_grandchildren(launcher, functions, tmp_path):
    job = launcher.submit(sleepers(tmp_path))
    pids = functions.wait_for_pids(tmp_path, 2)
    job.kill()
    assert functions.all_gone(pids)
    assert launcher.run("launch_functions:sum_of_ranks", world_size=1, run_dir=tmp_path)[0]["sum"] == 0.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("launch_functions", "`launch_functions` does not name a function: write package.module:function"),
        ("launch_functions:absentee", "`launch_functions` has no function `absentee`"),
    ],
)
def test_a_function_that_is_not_there(launcher, tmp_path, name, message):
    with pytest.raises(UsageError) as caught:
        launcher.run(name, world_size=2, run_dir=tmp_path)
    assert str(caught.value) == message


def test_a_module_that_is_not_there(launcher, tmp_path):
    with pytest.raises(RankFailed, match="ModuleNotFoundError: No module named 'no_such_module'"):
        launcher.run("no_such_module:f", world_size=2, run_dir=tmp_path)


def test_ranks_that_the_mesh_does_not_have(launcher, tmp_path):
    with pytest.raises(UsageError, match="has 4 ranks, but 2"):
        launcher.submit(sleepers(tmp_path, mesh=Mesh(tp=2, pp=2)))
    with pytest.raises(UsageError, match="holds 1 to"):
        launcher.submit(sleepers(tmp_path, world_size=0))


def test_a_preload_that_refuses(functions):
    with ForkLauncher(preload="launch_functions:refuse_to_load") as launcher, pytest.raises(UsageError) as caught:
        launcher.wait_ready()
    assert str(caught.value) == "megatron-core 0.1 is installed, 0.19.2 is needed"


def test_the_forking_process_dies(functions, tmp_path):
    with ForkLauncher() as launcher:
        job = launcher.submit(sleepers(tmp_path))
        pids = functions.wait_for_pids(tmp_path, 2)
        os.kill(launcher.pid, signal.SIGKILL)
        with pytest.raises(InternalError, match="ended by itself"):
            job.wait()
        assert functions.all_gone(pids[::2])
        for pid in pids[1::2]:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_no_orphan_when_the_parent_ends(functions, tmp_path, signum):
    script = (
        "import signal, sys; sys.path[:0] = sys.argv[1:3]\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell starts background jobs with it ignored
        "from pathlib import Path; from verifier.launch.fork_launcher import ForkLauncher\n"
        "with ForkLauncher() as z:\n"
        "    assert 'torch' not in sys.modules\n"
        "    print(z.pid, flush=True)\n"
        "    z.run('launch_functions:sleep', world_size=3, run_dir=Path(sys.argv[3]), args={'seconds': 60})\n"
    )
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", script, str(root), str(HERE), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as parent:
        pids = [int(parent.stdout.readline()), *functions.wait_for_pids(tmp_path, 3)]
        parent.send_signal(signum)
        parent.wait(20)
        assert functions.all_gone(pids)


def test_no_orphan_when_the_parent_is_killed_while_it_loads(functions):
    script = (
        "import sys, time; sys.path.insert(0, sys.argv[1])\n"
        "from verifier.launch.fork_launcher import ForkLauncher\n"
        "with ForkLauncher(preload='time:sleep') as z:\n"
        "    print(z.pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    command = [sys.executable, "-c", script, str(Path(__file__).parents[2])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        parent.kill()
        parent.wait(20)
        assert functions.all_gone([pid])


def test_recording_costs_few_calls(launcher, tmp_path):
    recorded, bare = launcher.run("launch_functions:count_calls", world_size=1, run_dir=tmp_path)[0]
    print(f"recording adds {recorded - bare} calls to the {bare} of an all_reduce")
    assert 0 < recorded - bare <= 25, "23 are enough"


@pytest.fixture
def served(launcher, tmp_path):
    spec = JobSpec(function="launch_functions:serve", world_size=2, run_dir=tmp_path, deadline_s=10)
    job = launcher.submit(spec)
    yield job
    job.kill()


def test_ranks_serve_calls_until_they_are_asked_for_the_end(served):
    assert served.call("add", number=1) == [1, 2]
    assert served.call("add", number=5) == [5, 6]
    assert served.finish() == ["done", "done"]


def test_a_late_answer_names_the_rank(served):
    with pytest.raises(JobTimeout, match=r"(?s)launch_functions:serve, wait.*rank 1"):
        served.call("wait", rank=1, seconds=60)


def test_a_rank_that_dies_in_a_call_is_named(served):
    with pytest.raises(RankFailed, match=r"rank 1.*SIGKILL"):
        served.call("die", rank=1)

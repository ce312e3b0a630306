"""What test_launch_*.py runs on ranks, and what they need to start a launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.processes import alive
from verifier.errors import UsageError
from verifier.launch.flight_recorder import label
from verifier.launch.rank import RankContext


def sum_of_ranks(context: RankContext) -> dict:
    """All-reduce the rank number."""
    import torch
    import torch.distributed as dist

    print(f"hello from {context.rank}")
    context.progress(f"adding {context.rank}")
    value = torch.tensor([float(context.rank)])
    dist.all_reduce(value)
    return {
        "sum": value.item(),
        "rank": context.rank,
        "args": context.args,
        "env": [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")],
        "num_threads": torch.get_num_threads(),
        "num_imports": int(os.environ.get("VERIFIER_TEST_IMPORTS", "0")),
    }


def stores(context: RankContext) -> str:
    """Kind of the store that ranks find each other by."""
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return type(store).__name__


def threads_of_a_group(context: RankContext) -> int:
    """Number of threads that a new gloo group starts."""
    import torch.distributed as dist

    before = set(os.listdir("/proc/self/task"))
    dist.new_group()
    return len(set(os.listdir("/proc/self/task")) - before)


def count_imports() -> None:
    """A preload: leaves a mark that forked ranks inherit."""
    os.environ["VERIFIER_TEST_IMPORTS"] = str(int(os.environ.get("VERIFIER_TEST_IMPORTS", "0")) + 1)


def refuse_to_load() -> None:
    """A preload that the user can mend."""
    raise UsageError("megatron-core 0.1 is installed, 0.19.2 is needed")


def long_text(context: RankContext) -> str:
    """More than a pipe holds."""
    return str(context.rank) * int(context.args["length"])


def backward(context: RankContext) -> float:
    """Autograd's worker threads must come up in a forked rank."""
    import torch

    weight = torch.ones(64, 64, requires_grad=True)
    (weight @ weight).sum().backward()
    return weight.grad.sum().item()


def end_badly(context: RankContext) -> None:
    """One rank ends as told; the others wait for it in a collective."""
    import torch.distributed as dist

    print("about to end badly", flush=True)
    if context.rank == context.args["rank"]:
        how = context.args["how"]
        if how == "raise":
            raise ValueError("no such expert")
        if how == "usage":
            raise UsageError("16 experts do not divide over ep = 3")
        if how == "exit":
            os._exit(7)
        if how == "return-nothing":
            os._exit(0)
        if how == "unserialisable":
            return object()
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    return None


def absent(context: RankContext) -> None:
    """All ranks but the last enter a labelled collective, in the way that `how` tells; the last one sleeps."""
    import torch
    import torch.distributed as dist

    last = context.rank == context.world_size - 1
    tensor = torch.zeros(2, 3, dtype=torch.bfloat16)
    dist.all_reduce(tensor)
    how = context.args["how"]
    if how == "new_group" and context.rank == 0:
        dist.new_group([0, 2], group_desc="experts")
    if last:
        time.sleep(60)
    with label("model.layers.3.mlp.experts.12.down_proj.weight"):
        if how == "all_reduce":
            dist.all_reduce(tensor)
        elif how == "async":
            first, second = (dist.all_reduce(torch.zeros(n), async_op=True) for n in (4, 5))
            second.wait()
            first.wait()
        elif how == "gather_object":
            dist.all_gather_object([None] * context.world_size, {"rank": context.rank})
        elif how == "recv":
            dist.recv(tensor, src=context.world_size - 1)
        elif how == "batch":
            operation = dist.P2POp(dist.irecv, tensor, context.world_size - 1)
            for work in dist.batch_isend_irecv([operation]):
                work.wait()


def chain(context: RankContext) -> None:
    """0 waits for 1, which waits for 2, which computes: the root is the group of 1 and 2."""
    import torch
    import torch.distributed as dist

    outer, inner = dist.new_group([0, 1]), dist.new_group([1, 2])
    tensor = torch.zeros(1)
    if context.rank == 2:
        time.sleep(60)
    if context.rank == 1:
        dist.all_reduce(tensor, group=inner)
    dist.all_reduce(tensor, group=outer)


def crossed(context: RankContext) -> None:
    """Two ranks enter the same two groups' collectives in opposite orders."""
    import torch
    import torch.distributed as dist

    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    order = groups if context.rank == 0 else groups[::-1]
    for group in order:
        dist.all_reduce(torch.zeros(1), group=group)


def sleep(context: RankContext) -> int:
    """Sleep, with a grandchild asleep beside each rank; its process id goes to a file."""
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(120)"])
    (context.run_dir / f"pids{context.rank}").write_text(f"{os.getpid()} {child.pid}\n")
    time.sleep(float(context.args["seconds"]))
    return context.rank


def count_calls(context: RankContext) -> list[int]:
    """Calls of functions, Python's and C's, in one small all_reduce: [recorded, not recorded]."""
    import torch
    import torch.distributed as dist

    tensor, wrapped = torch.zeros(64), (dist.ProcessGroup.allreduce, dist.Work.wait)
    calls = []
    for methods in (wrapped, [method.__wrapped__ for method in wrapped]):
        dist.ProcessGroup.allreduce, dist.Work.wait = methods
        dist.all_reduce(tensor)
        events: list[str] = []
        sys.setprofile(lambda frame, event, arg, to=events: to.append(event))
        dist.all_reduce(tensor)
        sys.setprofile(None)
        calls.append(sum(event in ("call", "c_call") for event in events))
    dist.ProcessGroup.allreduce, dist.Work.wait = wrapped
    return calls


def wait_for_pids(run_dir: Path, world_size: int) -> list[int]:
    """Process ids of all ranks and grandchildren of `sleep`, once all are up."""
    give_up_at = time.monotonic() + 60
    files = [run_dir / f"pids{rank}" for rank in range(world_size)]
    while not all(file.exists() and file.read_text().endswith("\n") for file in files):
        assert time.monotonic() < give_up_at, "the ranks did not start"
        time.sleep(0.05)
    return [int(pid) for file in files for pid in file.read_text().split()]


def all_gone(pids: list[int]) -> bool:
    """Whether all these processes end within 10 s (a zombie has ended)."""
    give_up_at = time.monotonic() + 10
    while time.monotonic() < give_up_at:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def serve(context: RankContext) -> str:
    """Serve calls until the owner asks for the end."""

    def add(number: int) -> int:
        return context.rank + number

    def wait(rank: int, seconds: float) -> None:
        if context.rank == rank:
            time.sleep(seconds)

    def die(rank: int) -> None:
        if context.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)

    context.serve({"add": add, "wait": wait, "die": die})
    return "done"

"""Which GPU a rank takes, and what NCCL is told where ranks share one.

What this does not exercise: NCCL between such ranks; tests/h100 does, with `ci/gpu --share-gpus`.
"""

from __future__ import annotations

import os

import pytest

from verifier.launch.rank import take_gpu

TOLD = ("NCCL_HOSTID", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE")


@pytest.fixture(autouse=True)
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TOLD:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_a_rank_for_each_gpu_is_told_nothing():
    assert [take_gpu(rank, 4, 4) for rank in range(4)] == [0, 1, 2, 3]
    assert not any(name in os.environ for name in TOLD)


def test_ranks_that_share_take_turns_and_are_hosts_of_their_own():
    hosts = []
    for rank, gpu in enumerate((0, 1, 2, 0)):
        assert take_gpu(rank, 4, 3) == gpu
        hosts.append(os.environ["NCCL_HOSTID"])
    assert len(set(hosts)) == 4
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"

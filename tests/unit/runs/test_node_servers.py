"""Samples as bytes and back, the forwarded environment, and a node that does not see the run's folder.

What this does not exercise: Ray, ranks and engines (tests/dist/test_train_ray.py).
"""

from __future__ import annotations

import os
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from verifier.engine.api import Sample, Sampling
from verifier.errors import UsageError
from verifier.runs.node_servers import EngineNode, NodeServer, forwarded, identity

ANSWERS = [
    [Sample(tokens=(5, 6), logprobs=(-0.25, -1e-7), ended="stop"), Sample(tokens=(), logprobs=(), ended="length")],
    [],
    [Sample(tokens=(2**31,), logprobs=(float("nan"),), ended="", cached_tokens=3, common_tokens=3, seed=2**63)],
    [
        Sample(
            tokens=(5, 6), logprobs=(-0.25, -0.5), ended="stop", cached_tokens=1, common_tokens=1, seed=3,
            updates=(0, 1),
            routes=(((0, 1), (2, 3)), ((1, 3), (0, 2))), shaped="temperature=0.7", routes_seal=7,
            weights=((4, 1), (5, 1)),
        ),
    ],
]  # fmt: skip


def test_samples_come_back_from_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    node = EngineNode()
    monkeypatch.setattr(node, "_client", SimpleNamespace(generate=lambda *_: ANSWERS), raising=False)
    found = node.generate([], Sampling(seed=0, max_tokens=1))
    assert repr(msgspec.msgpack.decode(found, type=list[list[Sample]])) == repr(ANSWERS)


def test_the_last_answer_has_no_field_at_its_default() -> None:
    whole, *_ = ANSWERS[-1]
    assert [item.name for item in fields(Sample) if getattr(whole, item.name) == item.default] == []


def test_forwarded_variables_are_taken_over_and_absent_ones_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", ["theirs"])
    for name in (*forwarded(os.environ), "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as Ray sets it
    monkeypatch.chdir(tmp_path)
    (tmp_path / "seen").touch()
    told = {"HF_HUB_OFFLINE": "1", "VERIFIER_X": "y"}
    found = NodeServer().adopt(told, ["ours"], str(tmp_path), str(tmp_path / "seen"))
    assert forwarded(os.environ) == told
    assert sys.path == ["ours", "theirs"]
    assert found == identity()
    for name in told:
        del os.environ[name]


def test_a_node_that_does_not_see_the_folder_of_the_run_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(UsageError, match=r"does not see .* put both on storage that all nodes share"):
        NodeServer().adopt(forwarded(os.environ), [], str(tmp_path), str(tmp_path / "absent"))

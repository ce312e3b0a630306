"""What the oracle was asked of the same weights before, it answers again; anything else it computes.

What this does not exercise: the process that computes; tests/dist does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from verifier.errors import InternalError, UsageError
from verifier.oracle import oracle as module
from verifier.oracle.logprob_hf import is_near
from verifier.oracle.oracle import Oracle


class Client:
    """Answers a question by its number."""

    def __init__(self) -> None:
        self.asked: list[list[Any]] = []

    def call(self, function: str, *arguments: Any) -> list[Any]:
        self.asked.append([function, *arguments])
        return [[[float(len(self.asked))]]]


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def oracle(client: Client) -> Oracle:
    found = Oracle.__new__(Oracle)
    found._client, found.answers = client, {}
    return found


def folder(tmp_path: Path, name: str, content: str) -> Path:
    path = tmp_path / name / "weights-1"
    path.mkdir(parents=True)
    (path / "model.safetensors").write_text(content)
    return path


def test_the_same_question_of_the_same_content_is_computed_once(oracle: Oracle, client: Client, tmp_path: Path) -> None:
    first = oracle.score(folder(tmp_path, "clean", "weights"), [[1, 2]])
    first[0][0] = 7.0  # a caller's own copy
    assert oracle.score(folder(tmp_path, "healed", "weights"), [(1, 2)]) == [[1.0]]
    assert len(client.asked) == 1


def test_other_weights_tokens_or_dtypes_are_computed(oracle: Oracle, client: Client, tmp_path: Path) -> None:
    clean = folder(tmp_path, "clean", "weights")
    found = [
        oracle.score(clean, [[1, 2]]), oracle.score(clean, [[1, 3]]), oracle.score(clean, [[1, 2]], "bfloat16"),
        oracle.score(folder(tmp_path, "faulted", "other"), [[1, 2]]),
        oracle.ask("logprob_hf:next_token", [clean], [1, 2], [[1.0, []]]),
    ]  # fmt: skip
    assert found == [[[number]] for number in (1.0, 2.0, 3.0, 4.0, 5.0)]


def test_steps_are_judged_by_all_that_was_dumped(oracle: Oracle, client: Client, tmp_path: Path) -> None:
    source = folder(tmp_path, "source", "weights")
    for name in ("one", "two"):
        for kind in ("weights", "gradients"):
            (tmp_path / name / f"{kind}-1").mkdir(parents=True)
            (tmp_path / name / f"{kind}-1" / "model.safetensors").write_text(kind)
    (tmp_path / "two" / "gradients-1" / "model.safetensors").write_text("others")
    for name in ("one", "one", "two"):
        read = [source, *sorted((tmp_path / name).iterdir())]
        oracle.ask("policy_hf:judge_updates", [tmp_path / name], {}, {}, [], read=read)
    assert [asked[1] for asked in client.asked] == [str(tmp_path / "one"), str(tmp_path / "two")]


def test_large_weights_are_not_recognised(oracle: Oracle, client: Client, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "REMEMBERED_BYTES", 3)
    for _ in range(2):
        oracle.score(folder(tmp_path, str(len(client.asked)), "weights"), [[1, 2]])
    assert len(client.asked) == 2


EXACT, SCALES = [-1.0, -1.0], [1e-4, 5e-5]


@pytest.mark.parametrize(
    ("reported", "near"),
    [
        ([-1.0, -1.0003], True),
        ([-1.0, -1.0005], False),
        ([-1.0005], False),  # however few of the last tokens
        ([np.nan, -1.0, -1.0], True),  # as many values as tokens
        ([np.nan, -1.0], True),
        ([-9.0, -1.0], True),  # what no rounding explains
        ([-np.inf], True),
    ],
)
def test_a_sequence_with_a_token_far_from_its_scale_is_not_near(reported: list[float], near: bool) -> None:
    assert is_near(EXACT, SCALES, [reported]) is near
    assert is_near(EXACT, SCALES, [[-1.0], reported]) is near  # whoever gave it


@pytest.mark.parametrize(
    ("said", "kind", "shown"),
    [
        (
            "OutOfMemoryError: CUDA out of memory. Tried to allocate 63.98 GiB", UsageError,
            "the fp32 oracle ran out of memory in `logprob_hf:score`: give it fewer or shorter sequences "
            "(verify.rollouts=1 in training), or none (verify.every=0); OutOfMemoryError: CUDA out of memory. "
            "Tried to allocate 63.98 GiB",
        ),
        ("IndexError: index 3 is out of range", InternalError, "IndexError: index 3 is out of range"),
    ],
)  # fmt: skip
def test_want_of_memory_is_refused_and_no_internal_error(
    said: str, kind: type[Exception], shown: str, oracle: Oracle, client: Client, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def call(*_: Any) -> Any:
        raise InternalError(said)

    monkeypatch.setattr(client, "call", call)
    with pytest.raises(kind) as found:
        oracle.score(folder(tmp_path, "large", "weights"), [[1, 2]])
    assert str(found.value) == shown

"""What the oracle was asked of the same weights before, it answers again; anything else it computes.

What this does not exercise: the process that computes; tests/dist does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from verifier.oracle import oracle as module
from verifier.oracle.oracle import DRAWS, Oracle


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
        oracle.ask("logprob_hf:next_token", [clean], [1, 2], "cpu", 1.0),
    ]  # fmt: skip
    assert found == [[[number]] for number in (1.0, 2.0, 3.0, 4.0, 5.0)]


def test_steps_are_judged_by_all_that_was_dumped(oracle: Oracle, client: Client, tmp_path: Path) -> None:
    source = folder(tmp_path, "source", "weights")
    for name in ("one", "two"):
        for kind in ("live", "gradients"):
            (tmp_path / name / f"{kind}-1").mkdir(parents=True)
            (tmp_path / name / f"{kind}-1" / "model.safetensors").write_text(kind)
    (tmp_path / "two" / "gradients-1" / "model.safetensors").write_text("others")
    for name in ("one", "one", "two"):
        read = [source, *sorted((tmp_path / name).iterdir())]
        oracle.ask("step_hf:judge_steps", [source, tmp_path / name], [], {}, [], read=read)
    assert [asked[2] for asked in client.asked] == [str(tmp_path / "one"), str(tmp_path / "two")]


def test_large_weights_are_not_recognised(oracle: Oracle, client: Client, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "REMEMBERED_BYTES", 3)
    for _ in range(2):
        oracle.score(folder(tmp_path, str(len(client.asked)), "weights"), [[1, 2]])
    assert len(client.asked) == 2


class TwoSides:
    """Answers log-probabilities of -1 nats with a scale of 1e-4, of 1e-3 once it is drawn more often."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[list[int]], Any, int]] = []

    def call(self, _: str, path: str, tokens: Any, dtype: str, device: str, temperature: Any, *rest: Any) -> list[Any]:
        *_, draws = rest
        self.asked.append((tokens, temperature, draws))
        rows = [[-1.0] * (len(row) - 1) for row in tokens]
        scale = 1e-4 if draws == 1 else 1e-3
        return [[[rows, rows, [[scale] * len(row) for row in rows]]]]


def scales_of(rows: list[list[np.ndarray]], tmp_path: Path, **told: Any) -> tuple[list[list[float]], TwoSides]:
    client, oracle = TwoSides(), Oracle.__new__(Oracle)
    oracle._client, oracle.answers = client, {}
    sequences = [[1, 2, 3], [4, 5, 6], [7, 8]][: len(rows) or 3]
    found = oracle.score_twice(folder(tmp_path, "any", "weights"), sequences, "float32", reported=rows, **told)
    return found.scales, client


def near(*nats: float) -> list[np.ndarray]:
    return [np.array(nats, np.float32)]


def test_a_sequence_with_a_token_far_from_one_pass_gets_the_scale_of_all(tmp_path: Path) -> None:
    rows = [near(-1.0, -1.0001), near(-1.0, -1.0005), near(-1.00001)]
    scales, client = scales_of(rows, tmp_path, temperature=[1.0, 0.5, 1.0])
    assert scales == [[1e-4] * 2, [1e-3] * 2, [1e-4]]
    assert client.asked[1:] == [([[4, 5, 6]], [0.5], DRAWS)]


def test_whoever_gave_it_and_however_few_of_its_last_tokens(tmp_path: Path) -> None:
    first = [np.array([np.nan, -1.0, -1.0]), np.array([-1.0005])]  # as many values as tokens; the last one alone
    assert scales_of([first, near(-1.0, -1.0), near(-1.0)], tmp_path)[0][0] == [1e-3] * 2


def test_what_no_rounding_explains_is_not_drawn_again(tmp_path: Path) -> None:
    rows = [near(np.nan, -1.0), near(-9.0, -1.0), near(-np.inf)]
    assert len(scales_of(rows, tmp_path)[1].asked) == 1


def test_all_are_drawn_where_nobody_reported_any(tmp_path: Path) -> None:
    scales, client = scales_of([], tmp_path)
    assert (scales[2], len(client.asked)) == ([1e-3], 1)

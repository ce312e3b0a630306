"""What the GPU tests ask of an engine's worker, through `Engine.call`; and vLLM without any of this project."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch

START_S = 280.0
"""Longest start of a bare vLLM, and longest wait for its answers."""


def count_replays(worker: Any) -> bool:
    """From now on count how often a captured graph is replayed in this process; False if that was done before."""
    if hasattr(worker, "verifier_replays"):
        return False
    worker.verifier_replays = 0
    original = torch.cuda.CUDAGraph.replay

    def replay(graph: torch.cuda.CUDAGraph) -> None:
        worker.verifier_replays += 1
        original(graph)

    torch.cuda.CUDAGraph.replay = replay
    return True


def replays(worker: Any) -> int:
    """How often a graph was replayed since `count_replays`."""
    return int(worker.verifier_replays)


@contextlib.contextmanager
def bare_vllm(path: str, options: Mapping[str, Any]) -> Iterator[Callable[..., float]]:
    """`vllm.LLM` in a process of its own, with its own defaults but for `options`.

    Yields:
        Function of (prompts, n, max_tokens, seeded): sample, and return seconds.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_be_bare, args=(theirs, path, dict(options)))
    process.start()
    theirs.close()  # so that its end is seen here
    try:
        _answer(ours, "start")
        yield lambda *asked, **more: _asked(ours, asked, more)
    finally:
        with contextlib.suppress(OSError):
            ours.send(None)
        process.join(60)
        process.kill()


def _asked(conn: Connection, asked: tuple[Any, ...], more: dict[str, Any]) -> float:
    conn.send((asked, more))
    return float(_answer(conn, "sample"))


def _answer(conn: Connection, what: str) -> Any:
    assert conn.poll(START_S), f"bare vLLM did not {what} within {START_S:g} s"
    try:
        return conn.recv()
    except EOFError:
        raise AssertionError(f"bare vLLM ended before it did {what}, for the reason that it wrote above") from None


def _be_bare(conn: Connection, path: str, options: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(model=path, dtype="bfloat16", skip_tokenizer_init=True, **options)
    conn.send("started")
    while (message := conn.recv()) is not None:
        (prompts, n, max_tokens), more = message
        params = [
            SamplingParams(
                n=n, seed=at * n if more["seeded"] else None, max_tokens=max_tokens, logprobs=0, ignore_eos=True,
                detokenize=False,
            )
            for at in range(len(prompts))
        ]  # fmt: skip
        began = time.perf_counter()
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        conn.send(time.perf_counter() - began)

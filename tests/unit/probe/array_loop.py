"""A loop of docs/probe.md on numpy arrays, without torch, recorded and judged in the interpreter that runs this file.

Usage: array_loop.py FOLDER [TRACE...]: makes FOLDER/clean and FOLDER/moved, of which the second sends a tensor under
another's name, judges them and further traces, and prints a line of JSON: verdicts, coverage and first bad stages.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

import verifier

STEPS, GROUP = 2, 2


def weights(version: int) -> dict[str, np.ndarray]:
    made = np.random.default_rng(version)
    return {f"layers.{at}.weight": made.standard_normal((40, 33), np.float32) for at in range(3)}


def record(path: Path, *, moved: bool) -> None:
    """Two steps of two groups, each answer sampled and scored alike."""
    with verifier.probe.open(path, dtype="float32", keep_every=1) as record:
        record.weights_exported(weights(0), version=0, live=weights(0))
        for step in range(1, STEPS + 1):
            made = np.random.default_rng(100 + step)
            responses = [made.integers(0, 9, 3 + at).tolist() for at in range(2 * GROUP)]
            nats = [-made.random(len(row)).astype(np.float32) for row in responses]
            rewards = np.array([1.0, 0.0, 0.0, 1.0])
            record.rollouts(
                step,
                prompts=[[1, 2], [1, 2], [3], [3]],
                responses=responses,
                loss_mask=[np.ones(len(row), bool) for row in responses],
                engine_logprobs=nats,
                versions=step - 1,
                rewards=rewards.tolist(),
                groups=[0, 0, 1, 1],
            )
            record.trainer_logprobs(step, nats)
            centred = (rewards - 0.5).reshape(-1, GROUP)
            advantages = (centred / (centred.std(1, keepdims=True) + 1e-6)).ravel()
            record.advantages(step, advantages, estimator="grpo", dtype="float64", epsilon=1e-6, ddof=0)
            record.loss(step, "clipped")
            record.gradients(step, weights(10 + step).items())
            record.step(step, loss=0.0, num_tokens=sum(map(len, responses)), grad_norm=1.0)
            sent = weights(step)
            record.weights_exported(iter(sent.items()), version=step, live=sent)
            names = [*sent][1:] + [*sent][:1] if moved and step == 2 else [*sent]
            with verifier.probe.attach(path) as engine:
                engine.weights_received(zip(names, sent.values()), version=step)  # noqa: B905  (both of `sent`)
            record.weights_sent(step)


def judged(path: Path) -> tuple[str, int, str]:
    report = verifier.judge(path)
    return report.verdict.name, report.coverage, report.first_bad_stage.label if report.first_bad_stage else ""


if __name__ == "__main__":
    folder, *traces = map(Path, sys.argv[1:])
    for name in ("clean", "moved"):
        record(folder / name, moved=name == "moved")
    found = [judged(path) for path in (folder / "clean", folder / "moved", *traces)]
    heavy = [name for name in ("torch", "transformers", "megatron", "vllm", "ray") if sys.modules.get(name)]
    version = "{}.{}".format(*sys.version_info[:2])
    print(json.dumps({"python": version, "judged": found, "loaded": heavy}))

"""Rollouts of our engine's process against a bare `vllm.LLM`: tokens/s of the same requests, in turns.

Both have a model of Qwen3-1.7B's sizes, CUDA graphs, the same room for keys and values, and get the same 512 requests
of 128 tokens with a seed and log-probabilities each. Requests without seeds are measured on the bare one, too: vLLM
draws from each seeded generator by itself.
"""

from __future__ import annotations

import contextlib
import statistics
import time

import pytest
import torch

from tests.bench.train_functions import config_of, write_random
from tests.h100.engine_functions import bare_vllm
from tests.h100.test_train_speed import SIZES
from verifier.engine.api import EngineConfig, Sampling
from verifier.runs.resources import Deadline, Resources

pytestmark = [pytest.mark.h100(gpus=1), pytest.mark.timed]

PROMPTS, ANSWERS, TOKENS, ROUNDS = 64, 8, 128, 3
CACHE_BYTES = 24 << 30
LEAST_SHARE = 0.9


def test_rollouts_cost_little_more_than_bare_vllm(request, measured, tmp_path):
    config = config_of({**SIZES, "max_position_embeddings": 1024}, "bfloat16")
    path = str(write_random(tmp_path / "model", config, torch.device("cpu")))
    room = {"max_model_len": 512, "max_num_seqs": PROMPTS * ANSWERS}
    prompts = [[1 + (17 * at + place) % 1000 for place in range(16 + at % 16)] for at in range(PROMPTS)]
    sampling = Sampling(seed=1, max_tokens=TOKENS, n=ANSWERS, ignore_end=True)
    asked = EngineConfig(
        kind="vllm", checkpoint=path, dtype="bfloat16", cuda_graphs=True, kv_cache_bytes=CACHE_BYTES, **room
    )
    ours, bare, unseeded = [], [], []
    request.getfixturevalue("its_turn")  # after the model, which takes a minute to write
    with Resources() as resources, bare_vllm(path, {**room, "kv_cache_memory_bytes": CACHE_BYTES}) as generate:
        engine = resources.engine(asked, Deadline(280))
        with contextlib.closing(engine.process.client(280)) as client:
            for _ in range(ROUNDS + 1):
                began = time.perf_counter()
                found = client.generate(prompts, sampling)
                ours.append(time.perf_counter() - began)
                assert {len(sample.tokens) for samples in found for sample in samples} == {TOKENS}
                bare.append(generate(prompts, ANSWERS, TOKENS, seeded=True))
                unseeded.append(generate(prompts, ANSWERS, TOKENS, seeded=False))
    share = statistics.median(one / other for one, other in zip(bare[1:], ours[1:], strict=True))
    measured(
        model="Qwen3-1.7B sizes, tied", requests=PROMPTS * ANSWERS, tokens=TOKENS, share=round(share, 3),
        **{
            name: round(PROMPTS * ANSWERS * TOKENS / statistics.median(seconds[1:]))
            for name, seconds in (("tokens_per_s", ours), ("bare", bare), ("bare_unseeded", unseeded))
        },
    )  # fmt: skip
    assert share >= LEAST_SHARE

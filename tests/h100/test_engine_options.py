"""vLLM with CUDA graphs, asleep while the trainer steps: after each sync it is what a cold one is."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.dist.clean_case import judge
from tests.h100.models import MENDED, fixes, model
from tests.h100.test_faults import verdicts
from tests.h100.test_roundtrip_gpu import distance
from verifier.config import EngineOptions, RoundtripConfig
from verifier.core import store
from verifier.faults.catalog import CATALOG
from verifier.stages.logprob.records import DtypeNoise, OracleLogprobs, TrainerLogprobs
from verifier.stages.rollout.records import EngineLogprobs

CYCLES = 2
FUNCTIONS = "tests.h100.engine_functions"


def config_of(folder, family="qwen3", **options):
    """Other tests share the GPU, so an engine that sleeps asks for the fix of vllm #45620."""
    asked = MENDED if options.get("sleep_level") else fixes(family)
    return RoundtripConfig(
        model=model(family), trace=folder, dtype="bfloat16", cycles=CYCLES, transport="ipc", fixes=asked,
        engine=EngineOptions(**options),
    )  # fmt: skip


def client_of(runner, config):
    """A connection of the test's own to the engine that a run will use."""
    return runner.engine(config).process.client()


def run(runner, measured, config, **said):
    began = time.monotonic()
    trace = runner.roundtrip(config)
    found = store.read(trace)
    measured(
        **said, family=Path(config.model).name, seconds=round(time.monotonic() - began, 1),
        engine=distance(found, EngineLogprobs, OracleLogprobs),
        mismatch=distance(found, EngineLogprobs, TrainerLogprobs),
        noise_mean=max(float(item.mean) for item in found.of(DtypeNoise, name="scored")),
    )  # fmt: skip
    judge(trace)
    return found


@pytest.mark.h100(gpus=1)
@pytest.mark.parametrize("level", [1, 2])
def test_graphs_are_replayed_after_sleep_and_sync(level, runner, measured, tmp_path):
    config = config_of(tmp_path / "trace", cuda_graphs=True, sleep_level=level)
    client = client_of(runner, config)
    client.call(f"{FUNCTIONS}:count_replays")
    before = client.call(f"{FUNCTIONS}:replays")[0]
    run(runner, measured, config, cuda_graphs=True, sleep_level=level)
    replays = client.call(f"{FUNCTIONS}:replays")[0] - before
    client.close()
    measured(replays=replays)
    assert replays >= 2 * (CYCLES + 1), "scoring and sampling did not go through captured graphs"


@pytest.mark.h100(gpus=1)
@pytest.mark.parametrize("fault", [fault for fault in CATALOG.values() if fault.gpus], ids=lambda fault: fault.id)
def test_fault_is_caught_where_it_sits(fault, runner, measured, tmp_path):
    options = {"cuda_graphs": True, "sleep_level": 2}
    config = config_of(tmp_path / "faulted", fault.model.removeprefix("tiny:"), **options)
    client = client_of(runner, config)
    client.call("verifier.faults.injection:inject", fault.id)
    try:
        trace = runner.roundtrip(config)
    finally:
        fired = sum(client.call("verifier.faults.injection:heal"))
        client.close()
    caught, first = verdicts(trace)
    measured(fault=fault.id, fired=fired, caught=caught, first_bad_stage=first)
    assert fired
    assert set(fault.caught_by) <= set(caught)
    assert first == fault.stage.label
    judge(runner.roundtrip(config_of(tmp_path / "healed", fault.model.removeprefix("tiny:"), **options)))


@pytest.mark.h100(gpus=1)
def test_latent_attention_with_graphs_and_sleep(runner, measured, tmp_path):
    config = config_of(tmp_path / "trace", "deepseek-v3", cuda_graphs=True, sleep_level=2)
    run(runner, measured, config, cuda_graphs=True, sleep_level=2)

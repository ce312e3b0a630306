"""Rounding of log-probabilities by float32, measured before the first step of a run that samples none."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from verifier.config import TrainConfig
from verifier.model.families import size_if_any
from verifier.oracle.oracle import Oracle
from verifier.oracle.recording import sampled_noise
from verifier.probes.training.sampled_step import unsampled_because
from verifier.runs.model_under_test import ModelUnderTest
from verifier.runs.resources import Deadline
from verifier.stages.logprob.records import SampledNoise

NUM_SEQUENCES, LENGTH = 4, 64
"""Sequences of random tokens, and tokens of each."""


def measures_rounding(config: TrainConfig, model: ModelUnderTest) -> bool:
    """Tell whether a judged run in float32 has no step that measures what float32 rounds of its model."""
    judged = config.verify.steps and model.dtype == "float32" and not config.model.startswith("tiny:")
    return judged and bool(unsampled_because(config, model))


def first_rounding(model: ModelUnderTest, until: Deadline) -> SampledNoise:
    """Measure what float32 rounds of the checkpoint, by transformers in float32 and in float64 on the host.

    The oracle's process ends with the measurement, so that its two models are gone before ranks and engines start.
    """
    vocabulary = size_if_any(model.checkpoint.config, "vocab_size") or 1
    tokens = np.random.default_rng(0).integers(vocabulary, size=(NUM_SEQUENCES, LENGTH)).tolist()
    path = model.checkpoint.path
    with Oracle(path, until.left("float32's rounding was measured")) as oracle:
        (sides,) = oracle.sides(path, tokens, "float32")
    return replace(sampled_noise(1, 0, sides), drawn=True)

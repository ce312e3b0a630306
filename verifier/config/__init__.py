"""One typed config per command, and the ways that lead to it: YAML, key=value, flags, Python."""

from verifier.config.commands import (
    CommandConfig,
    EngineOptions,
    GoldenConfig,
    NoiseConfig,
    RoundtripConfig,
    claim_trace,
    next_trace,
)
from verifier.config.sweep import SweepConfig
from verifier.config.training import TrainConfig

__all__ = [
    "CONFIGS", "EngineOptions", "GoldenConfig", "NoiseConfig", "RoundtripConfig", "SweepConfig", "TrainConfig",
    "claim_trace", "next_trace",
]  # fmt: skip

CONFIGS: dict[str, type[CommandConfig]] = {
    "golden": GoldenConfig, "roundtrip": RoundtripConfig, "train": TrainConfig, "sweep": SweepConfig,
    "noise": NoiseConfig,
}  # fmt: skip
"""Command -> type of its config."""

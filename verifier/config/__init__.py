"""One typed config per command, and the ways that lead to it: YAML, key=value, flags, Python."""

from verifier.config.commands import (
    EngineOptions,
    GoldenConfig,
    ModelConfig,
    NoiseConfig,
    RoundtripConfig,
    claim_trace,
    next_trace,
)
from verifier.config.plan import PlanConfig
from verifier.config.sweep import SweepConfig
from verifier.config.training import TrainConfig

__all__ = [
    "CONFIGS", "EngineOptions", "GoldenConfig", "NoiseConfig", "PlanConfig", "RoundtripConfig", "SweepConfig",
    "TrainConfig", "claim_trace", "next_trace",
]  # fmt: skip

CONFIGS: dict[str, type[ModelConfig]] = {
    "golden": GoldenConfig, "roundtrip": RoundtripConfig, "train": TrainConfig, "sweep": SweepConfig,
    "noise": NoiseConfig, "plan": PlanConfig,
}  # fmt: skip
"""Command -> type of its config."""

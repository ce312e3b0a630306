"""One typed config per command, and the ways that lead to it: YAML, key=value, flags, Python."""

from verifier.config.commands import (
    BisectConfig,
    CommandConfig,
    EngineOptions,
    GoldenConfig,
    NoiseConfig,
    PlanConfig,
    RoundtripConfig,
    claim_trace,
    next_trace,
)
from verifier.config.gate import GateConfig, Waiver
from verifier.config.sweep import SweepConfig
from verifier.config.training import TrainConfig

__all__ = [
    "CONFIGS", "BisectConfig", "EngineOptions", "GateConfig", "GoldenConfig", "NoiseConfig", "PlanConfig",
    "RoundtripConfig", "SweepConfig", "TrainConfig", "Waiver", "claim_trace", "next_trace",
]  # fmt: skip

CONFIGS: dict[str, type[CommandConfig]] = {
    "golden": GoldenConfig, "roundtrip": RoundtripConfig, "train": TrainConfig, "sweep": SweepConfig,
    "gate": GateConfig, "bisect": BisectConfig, "noise": NoiseConfig, "plan": PlanConfig,
}  # fmt: skip
"""Command -> type of its config."""

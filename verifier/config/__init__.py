"""One typed config per command, and the ways that lead to it: YAML, key=value, flags, Python."""

from verifier.config.commands import EngineOptions, GoldenConfig, NoiseConfig, RoundtripConfig, next_trace

__all__ = ["EngineOptions", "GoldenConfig", "NoiseConfig", "RoundtripConfig", "next_trace"]

"""Records of configurations: what a checkpoint's config.json says, and what the trainer computes with."""

from __future__ import annotations

from verifier.core.record import Record


class ConfigRecord(Record, frozen=True, kw_only=True):
    """Values of a configuration."""

    values: dict[str, str]
    """JSON of each value, by key."""


class SourceConfig(ConfigRecord, frozen=True, kw_only=True, tag="load/config"):
    """The source's config.json as transformers reads it."""


class StatedConfig(ConfigRecord, frozen=True, kw_only=True, tag="load/stated-config"):
    """The source's config.json as it stands, with transformers' defaults for keys that it does not have."""


class ProviderFields(ConfigRecord, frozen=True, kw_only=True, tag="logprob/provider"):
    """Plain fields of megatron-bridge's provider, which is Megatron's TransformerConfig; functions by their name."""


class ExportedConfig(ConfigRecord, frozen=True, kw_only=True, tag="export/config"):
    """The config.json that megatron-bridge wrote with an export, as transformers reads it."""

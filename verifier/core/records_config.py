"""Records of configurations: config.json, what the trainer is built from, and what its passes are told."""

from __future__ import annotations

from verifier.core.owed import Owed, anyone, every_rank, once, per_export, per_pass, provider_rank
from verifier.core.record import Count, Digest, Record

LAYER_WINDOWS = "windows of layers"
"""Key of `ProviderFields`: number of each layer that a rank has -> rows before its own that a row attends to."""
NORM_EPSILONS = "epsilons of norms"
"""Key of `ProviderFields`: path of the decoder's norms, with * for the number of the layer -> their epsilons."""
ROTARY_FREQUENCIES = "frequencies of rotary embeddings"
"""Key of `ProviderFields`: path of a module -> the frequencies of its pairs, radians a position; not of YaRN's."""


class ConfigRecord(Record, frozen=True, kw_only=True):
    """Values of a configuration."""

    values: dict[str, str]
    """JSON of each value, by key."""


class SourceConfig(ConfigRecord, frozen=True, kw_only=True, tag="load/config"):
    """The source's config.json as transformers reads it."""

    owed = (Owed(anyone, per_export),)


class StatedConfig(ConfigRecord, frozen=True, kw_only=True, tag="load/stated-config"):
    """The source's config.json as it stands, with transformers' defaults for keys that it does not have."""


class ProviderFields(ConfigRecord, frozen=True, kw_only=True, tag="logprob/provider"):
    """Plain fields of megatron-bridge's provider, which is Megatron's TransformerConfig; functions by their name."""

    owed = (Owed(provider_rank, once),)


class FilesRecord(Record, frozen=True, kw_only=True):
    """The files beside a checkpoint's weights and config.json: tokenizer, generation settings, code."""

    digests: dict[str, Digest]
    """Digest of each file's bytes, by its name."""


class SourceFiles(FilesRecord, frozen=True, kw_only=True, tag="load/files"):
    """Files of the source, but for weights in other forms than safetensors."""


class SavedFiles(FilesRecord, frozen=True, kw_only=True, tag="export/files"):
    """Files of a saved checkpoint."""


class GivenArguments(Record, frozen=True, kw_only=True, tag="logprob/arguments"):
    """Arguments of one model chunk's forward pass over one packed micro-batch: fields of PackedSeqParams."""

    owed = (Owed(every_rank, per_pass),)

    chunk: Count
    """Virtual pipeline stage."""
    num_rows: Count
    """Rows of the tokens that it is given."""
    cu_seqlens_q: tuple[int, ...] | None = None
    cu_seqlens_kv: tuple[int, ...] | None = None
    cu_seqlens_q_padded: tuple[int, ...] | None = None
    cu_seqlens_kv_padded: tuple[int, ...] | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    total_tokens: int | None = None
    pad_between_seqs: int | None = None
    """0 or 1."""
    lacks: tuple[str, ...] = ()
    """Names of those that the installed Megatron does not take."""


class ExportedConfig(ConfigRecord, frozen=True, kw_only=True, tag="export/config"):
    """The config.json that megatron-bridge wrote with an export, as transformers reads it."""

    owed = (Owed(anyone, per_export),)

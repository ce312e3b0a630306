"""Configurations of the small run of `check_traces`, and what its one forward pass is told."""

from __future__ import annotations

from typing import Any

from verifier.core.record import Record
from verifier.stages.export.records import ExportedConfig, SavedFiles
from verifier.stages.load.records import SourceConfig, SourceFiles, StatedConfig
from verifier.stages.logprob.records import GivenArguments, ProviderFields

STATED = {"hidden_size": "8", "num_attention_heads": "2", "rms_norm_eps": "1e-06", "sliding_window": "2048"}
PROVIDER = {
    "hidden_size": "8", "num_attention_heads": "2", "layernorm_epsilon": "1e-06", "window_size": "[2047, 0]",
    "kv_channels": "4", "softmax_scale": "null", "position_embedding_type": '"rope"', "num_moe_experts": "null",
}  # fmt: skip
FILES = {"generation_config.json": f"xxh3:{1:032x}", "tokenizer.json": f"xxh3:{2:032x}"}
ENDS = {f"cu_seqlens_{of}{end}": at for of in ("q", "kv") for end, at in (("", (0, 3, 5)), ("_padded", (0, 4, 6)))}
TOLD: Any = {**ENDS, "chunk": 0, "num_rows": 6, "max_seqlen_q": 4, "max_seqlen_kv": 4, "pad_between_seqs": 1}


def configs() -> list[Record]:
    """The checkpoint's, the export's and the trainer's, and arguments of a forward pass."""
    config = {"num_experts_per_tok": "4", "transformers_version": '"5.12.1"'}
    return [
        *(kind(name="config.json", version=1, values=config) for kind in (SourceConfig, ExportedConfig)),
        *(kind(name="files", version=1, digests=FILES) for kind in (SourceFiles, SavedFiles)),
        StatedConfig(name="config.json", values=STATED),
        *(ProviderFields(name="provider", rank=rank, values=PROVIDER) for rank in range(2)),
        *(GivenArguments(name="trained micro-batch 0", version=1, rank=rank, **TOLD) for rank in range(2)),
    ]

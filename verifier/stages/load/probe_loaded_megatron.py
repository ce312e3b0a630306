"""Weights as one rank of a training run loaded them, beside what the checkpoint says: evidence of the first step."""

from __future__ import annotations

from pathlib import Path

from verifier.megatron.step_megatron import params_synced
from verifier.model.checkpoint import open_checkpoint
from verifier.probes.training.kept_records import Kept
from verifier.stages.load.probe_configs_megatron import record_expected, record_live
from verifier.stages.load.records import LoadedShard
from verifier.stages.train.probe_hand_on_megatron import AdapterEvidence
from verifier.trainer.observer import RankParts


def record_loaded_weights(kept: Kept, parts: RankParts, adapters: AdapterEvidence | None, resume: Path | None) -> None:
    """Digests of every live tensor and of the slice that the layout cuts from the checkpoint for it. A collective.

    A model that the config names by its folder is read there, whatever checkpoint the rank was told. Of a resumed run
    that samples it is what its checkpoint brought, which the engine gets before the first step. The base of adapters
    goes to every trace already.

    Args:
        kept: for the first judged step; gets nothing without a layout.
        parts: of the rank.
        adapters: of the rank; None for a trainer of all weights.
        resume: checkpoint of the run that was loaded after the model's, whose weights are others.
    """
    config, live = parts.config, parts.live if parts.adapters is None else parts.adapters.base
    if not live.places:
        return
    if resume is None:
        named = Path(config.model)
        record_expected(kept, live, open_checkpoint(named) if named.is_dir() else parts.source)
    version = 0 if resume is None else int(resume.name)
    if adapters is None and (resume is None or config.samples):
        with params_synced(parts.trainer):
            record_live(kept, live, version, LoadedShard)
    if adapters is not None and resume is not None and config.samples and config.lora.sync == "adapter":
        adapters.record_matrices(kept, version)

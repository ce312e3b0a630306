"""Weights as one rank of a training run loaded them, beside what the checkpoint says: evidence of the first step."""

from __future__ import annotations

from verifier.config.training import TrainConfig
from verifier.core.records_weights import LoadedShard
from verifier.model.checkpoint import Checkpoint
from verifier.model.provider_megatron import TrainerModel
from verifier.probes.weights_megatron import LiveWeights
from verifier.train.step_megatron import params_synced
from verifier.trainer.adapters_megatron import Adapters, Kept


def loaded_weights(
    config: TrainConfig, trainer: TrainerModel, held: LiveWeights | Adapters, source: Checkpoint, resume: str | None
) -> Kept:
    """Digests of every live tensor and of the slice that the layout cuts from the checkpoint for it. A collective.

    Args:
        config: of the run.
        trainer: built and loaded, with its optimizer.
        held: live weights, or adapters, whose base goes to every trace already.
        source: checkpoint that was loaded.
        resume: checkpoint of the run that is loaded next, whose weights are others.

    Returns:
        Records for the first judged step; none of a run that is not judged, that is resumed, or without a layout.
    """
    kept = Kept()
    live = held.base if isinstance(held, Adapters) else held
    if resume is None and config.verify.steps and live.places:
        live.record_expected(kept, source)
        if live is held:
            with params_synced(trainer):
                live.record(kept, 0, LoadedShard)
    return kept

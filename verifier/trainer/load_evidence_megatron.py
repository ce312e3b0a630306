"""Weights as one rank of a training run loaded them, beside what the checkpoint says: evidence of the first step."""

from __future__ import annotations

from pathlib import Path

from verifier.config.training import TrainConfig
from verifier.core.records_weights import LoadedShard
from verifier.model.checkpoint import Checkpoint, open_checkpoint
from verifier.model.provider_megatron import TrainerModel
from verifier.probes.weights_megatron import LiveWeights
from verifier.train.step_megatron import params_synced
from verifier.trainer.adapters_megatron import Adapters, Kept


def loaded_weights(
    config: TrainConfig, trainer: TrainerModel, held: LiveWeights | Adapters, source: Checkpoint, resume: str | None
) -> Kept:
    """Digests of every live tensor and of the slice that the layout cuts from the checkpoint for it. A collective.

    A model that the config names by its folder is read there, whatever checkpoint the rank was told.

    Args:
        config: of the run.
        trainer: built and loaded, with its optimizer.
        held: live weights, or adapters, whose base goes to every trace already.
        source: checkpoint that the rank was told to load.
        resume: checkpoint of the run that was loaded after it, whose weights are others.

    Returns:
        Records for the first judged step; none of a run that is not judged, or without a layout. Of a resumed run that
        samples, what its checkpoint brought, which the engine gets before that step.
    """
    kept = Kept()
    live = held.base if isinstance(held, Adapters) else held
    if not config.verify.steps or not live.places:
        return kept
    if resume is None:
        named = Path(config.model)
        live.record_expected(kept, open_checkpoint(named) if named.is_dir() else source)
    version = 0 if resume is None else int(Path(resume).name)
    if live is held and (resume is None or config.samples):
        with params_synced(trainer):
            live.record(kept, version, LoadedShard)
    if isinstance(held, Adapters) and resume is not None and config.samples and config.lora.sync == "adapter":
        held.record_matrices(kept, version)
    return kept

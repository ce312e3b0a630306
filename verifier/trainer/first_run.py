"""The run that another begins with: its config, and the config of the run that goes on with its weights."""

from __future__ import annotations

from dataclasses import replace

from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.errors import UsageError


def first_of(config: TrainConfig) -> TrainConfig:
    """Config of the run that `first` names, in the folder `first` of the run that it begins.

    Raises:
        UsageError: it trains another model, or what its file says is refused.
    """
    words = [f"run={config.run / 'first'}", f"verify.steps={config.verify.steps}"]
    begin, _ = load(TrainConfig, file=config.first, overrides=words)
    if begin.model != config.model:
        raise UsageError(f"`{config.first}` trains {begin.model} and this run {config.model}: name the same model")
    return replace(begin, dtype=config.dtype)


def going_on(config: TrainConfig, begin: TrainConfig) -> TrainConfig:
    """Config of a run that goes on with the weights that the run before it has left."""
    return replace(config, model=str(begin.run / "hf_model"), first=None)

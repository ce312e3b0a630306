"""Metrics of a run as an offline run of wandb, where the config asks for it; nothing is sent."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping

from verifier.config.training import TrainConfig
from verifier.errors import UsageError
from verifier.knob import flat

Log = Callable[[int, Mapping[str, float]], None]
"""Takes a step and its numbers."""


def require_wandb(config: TrainConfig) -> None:
    """Refuse a run that asks for wandb where it is not installed.

    Raises:
        UsageError: see above.
    """
    if config.wandb and importlib.util.find_spec("wandb") is None:
        raise UsageError("wandb is true and the package wandb is not installed: install it, or leave it out")


@contextlib.contextmanager
def wandb_log(config: TrainConfig) -> Iterator[Log | None]:
    """Open an offline run of wandb until exit, None unless the config asks for it; a resumed run opens a further one.

    Source:
        https://docs.wandb.ai/ref/python/init: mode "offline" writes to `dir` alone; `wandb sync` sends it later.
    """
    if not config.wandb:
        yield None
        return
    import wandb

    run = wandb.init(
        project="verifier", name=config.run.name, dir=str(config.run), mode="offline", config=flat(config.to_dict())
    )
    try:
        yield lambda step, values: run.log(dict(values), step=step)
    finally:
        run.finish()

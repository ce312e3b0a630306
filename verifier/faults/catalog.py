"""All faults by id. Importing this module imports every file of faults, which fills the catalogue."""

from verifier.faults import (  # noqa: F401
    batch_faults,
    checkpoint_faults,
    conversion_faults,
    engine_faults,
    knob_faults,
    logprob_faults,
    loss_faults,
    pack_faults,
    rollout_faults,
    train_faults,
    transport_faults,
)
from verifier.faults.fault import CATALOG

__all__ = ["CATALOG"]

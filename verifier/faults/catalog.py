"""All faults by id. Importing this module imports every file of faults, which fills the catalogue."""

from verifier.faults import (  # noqa: F401
    adam_faults,
    advantage_faults,
    answer_faults,
    checkpoint_faults,
    column_faults,
    conversion_faults,
    data_faults,
    draw_faults,
    engine_faults,
    evaluation_faults,
    export_faults,
    gradient_faults,
    knob_faults,
    live_engine_faults,
    load_faults,
    logprob_faults,
    loss_faults,
    metric_faults,
    mode_faults,
    pack_faults,
    policy_faults,
    reading_faults,
    replica_faults,
    reward_faults,
    rollout_faults,
    route_faults,
    router_faults,
    score_faults,
    size_faults,
    train_faults,
    transport_faults,
    turn_faults,
)
from verifier.faults.fault import CATALOG

__all__ = ["CATALOG"]

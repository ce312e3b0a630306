"""The table of all faults, by id."""

from __future__ import annotations

from verifier.faults import (
    bugs_adapter,
    bugs_engine,
    bugs_engine_gpu,
    bugs_engine_part,
    bugs_export,
    bugs_load,
    bugs_logprob,
    bugs_loss,
    bugs_pack,
    bugs_plan,
    bugs_replay,
    bugs_requests,
    bugs_rollout,
    bugs_train,
    bugs_transport,
)
from verifier.faults.fault import Fault

CATALOG: dict[str, Fault] = {
    fault.id: fault
    for faults in (
        bugs_load.FAULTS,
        bugs_pack.FAULTS,
        bugs_replay.FAULTS,
        bugs_logprob.FAULTS,
        bugs_loss.FAULTS,
        bugs_train.FAULTS,
        bugs_export.FAULTS,
        bugs_plan.FAULTS,
        bugs_transport.FAULTS,
        bugs_engine.FAULTS,
        bugs_engine_part.FAULTS,
        bugs_engine_gpu.FAULTS,
        bugs_adapter.FAULTS,
        bugs_rollout.FAULTS,
        bugs_requests.FAULTS,
    )
    for fault in faults
}

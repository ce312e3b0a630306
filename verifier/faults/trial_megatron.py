"""Rank functions of a fault trial: the same session clean, faulted and healed, in one process and on one engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifier.core.store import Recorder
from verifier.engine.client import EngineClient
from verifier.faults.catalog import CATALOG
from verifier.faults.engine_side import begin, end
from verifier.faults.fault import Fault, FireCounter, Side
from verifier.model import provider_megatron
from verifier.runs.lora_session_megatron import AdapterSession
from verifier.runs.session_megatron import Session
from verifier.runs.spec import RunSpec
from verifier.runs.sync import open_engine, open_share

if TYPE_CHECKING:
    from verifier.launch.rank import RankContext


def phases(context: RankContext) -> dict[str, int]:
    """Run the session once per phase; what the fault did is counted here and kept out of the trace that checks read.

    Args (in the context): "spec"; "fault": id; "phases": list of [name, trace, work] to run in order.

    Returns:
        How often the injected code ran on this rank.
    """
    fault = CATALOG[str(context.args["fault"])]
    fire = FireCounter()
    for name, trace, work in context.args["phases"]:
        spec = RunSpec.from_json({**context.args["spec"], "trace": trace, "work": work})
        with _injected(fault, fire, spec, context.rank) if name == "faulted" else contextlib.nullcontext():
            _run(spec, context)
    return {"fired": fire.count}


@contextlib.contextmanager
def _injected(fault: Fault, fire: FireCounter, spec: RunSpec, rank: int) -> Iterator[None]:
    """The fault in the process where it lives: in this rank, or in the engine's workers at rank 0's request."""
    fire.mark = Path(spec.work) / f"fired-{rank:04d}"
    if fault.side is Side.TRAINER:
        with fault.inject(fire):
            yield
        return
    if rank != 0:
        yield
        return
    client = EngineClient(str(spec.engine_socket), deadline_s=spec.deadline_s)
    begin(client, fault)
    try:
        yield
    finally:
        fire.count += end(client, fault)
        client.close()


def _run(spec: RunSpec, context: RankContext) -> None:
    probe = Recorder(Path(spec.trace), "trainer", context.rank)
    engine: Any = None
    group: Any = None
    share = open_share(spec)
    if spec.engine_socket is not None and context.rank == 0:
        engine, group = open_engine(spec, probe, share)
    try:
        session = (AdapterSession if spec.lora_rank else Session)(spec, context, probe, engine, share)
        session.run_tokens() if spec.engine_socket is None else session.run()
    finally:
        probe.close()
        if engine is not None:
            engine.close()
            group.close()
            engine.client.close()
    provider_megatron.teardown()

"""The rank's side of a trial: a fault entered around a session, in the process where the bug lives."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from verifier.engine.client import EngineClient
from verifier.faults.catalog import CATALOG
from verifier.faults.engine_side import begin, end
from verifier.faults.fault import FireCounter, Side
from verifier.runs.spec import RunSpec

if TYPE_CHECKING:
    from verifier.launch.rank import RankContext


@contextlib.contextmanager
def injected(spec: RunSpec, context: RankContext, fault_id: str, folder: str) -> Iterator[None]:
    """Inject a fault into this rank, or, at rank 0's request, into the engine's workers.

    The file ``fired-<rank>`` appears when the injected code runs for the first time, and says how often it has run in
    the end. It lies outside of the trace that checks read.

    Args:
        spec: of the session.
        context: of this rank.
        fault_id: of the catalogue.
        folder: for that file.
    """
    fault = CATALOG[fault_id]
    mark = Path(folder) / f"fired-{context.rank:04d}"
    fired = FireCounter(mark=mark)
    try:
        if fault.side is Side.TRAINER:
            with fault.inject(fired):
                yield
        elif context.rank == 0:
            client = EngineClient(str(spec.engine_socket), deadline_s=spec.deadline_s)
            begin(client, fault)
            try:
                yield
            finally:
                fired.count += end(client, fault)
                client.close()
        else:
            yield
    finally:
        if fired.count:
            mark.write_text(str(fired.count))

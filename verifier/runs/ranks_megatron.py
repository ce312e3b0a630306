"""The rank function of every run: its sessions one after another, and what is imported before ranks are forked."""

from __future__ import annotations

import contextlib
import importlib
import math
import resource
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from verifier.core.store import Recorder
from verifier.model import provider_megatron
from verifier.plan.digest import digest_tensor
from verifier.runs.engine_link_megatron import engine_link
from verifier.runs.rank_run_megatron import RankRun
from verifier.runs.session_megatron import Session
from verifier.runs.spec import RunSpec

if TYPE_CHECKING:
    from verifier.launch.rank import RankContext


def preload_cpu() -> None:
    """Import everything for the CPU tier, before ranks are forked; the digest's compiled path too."""
    provider_megatron.preload("cpu")
    digest_tensor(torch.zeros(1))


def preload_cuda() -> None:
    """Import everything for the GPU tier, before ranks are forked."""
    from verifier.platform.cuda import require_not_started

    provider_megatron.preload("cuda")
    require_not_started()


def run(context: RankContext) -> dict[str, float]:
    """Rank function of every run: its sessions, one after another."""
    for number, record in enumerate(context.args["sessions"]):
        spec = RunSpec.from_json(record)
        if number:
            provider_megatron.teardown()
        with _entered(spec, context):
            _run_session(spec, context)
    return {"peak_gib": math.ceil(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20 * 100) / 100}


def _entered(spec: RunSpec, context: RankContext) -> contextlib.AbstractContextManager[Any]:
    if not spec.within:
        return contextlib.nullcontext()
    path, *arguments = spec.within
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)(spec, context, *arguments)


def _run_session(spec: RunSpec, context: RankContext) -> None:
    with contextlib.ExitStack() as stack:
        probe = stack.enter_context(contextlib.closing(Recorder(Path(spec.trace), "trainer", context.rank)))
        link = stack.enter_context(engine_link(spec, context.rank))
        session = Session(RankRun(spec=spec, context=context, probe=probe, link=link))
        getattr(session, spec.program)()

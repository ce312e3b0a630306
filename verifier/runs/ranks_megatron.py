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
from verifier.runs.lora_session_megatron import AdapterSession
from verifier.runs.session_megatron import Session
from verifier.runs.spec import RunSpec
from verifier.runs.sync import open_engine, open_share

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
        share, engine = open_share(spec), None
        if spec.engine_socket is not None and context.rank == 0:
            engine, group = open_engine(spec, probe, share)
            for item in (engine.client, group, engine):
                stack.enter_context(contextlib.closing(item))
        session = (AdapterSession if spec.lora_rank else Session)(spec, context, probe, engine, share)
        getattr(session, spec.program)()

"""Bugs of the export: live parameters to checkpoint tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import Fault, Fired
from verifier.faults.inject import replaced
from verifier.mesh import Mesh

MAPPING = "megatron.bridge.models.conversion.param_mapping"


@contextlib.contextmanager
def _experts_swapped(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def gather(self: Any, megatron_weights: Any, megatron_module: Any, hf_param_name: Any) -> Any:
            found = original(self, megatron_weights, megatron_module, hf_param_name)
            if ".layers.1.mlp.experts.0.down_proj" in str(hf_param_name):
                fired()
                names = list(found)
                found = dict(zip(names, [found[name] for name in reversed(names)], strict=True))
            return found

        return gather

    with replaced(
        f"{MAPPING}:MegatronParamMapping.gather_from_ep_ranks",
        "self, megatron_weights, megatron_module, hf_param_name",
        make,
    ):
        yield


@contextlib.contextmanager
def _param_gather_skipped(fired: Fired) -> Iterator[None]:
    @contextlib.contextmanager
    def nothing(trainer: Any) -> Iterator[None]:
        fired()
        yield

    with replaced("verifier.export.gather_megatron:params_synced", "trainer", lambda original: nothing):
        yield


FAULTS = (
    Fault(
        id="ep-rank-experts-swapped",
        stage=Stage.EXPORT,
        reproduces="NVIDIA-NeMo/Megatron-Bridge#1716",
        summary="the experts that an all-gather over ep brings are named in the wrong rank order, for one local expert",
        caught_by=("WGT004", "WGT005"),
        inject=_experts_swapped,
        mesh=Mesh(ep=2, dp=2),
    ),
    Fault(
        id="export-before-param-gather",
        stage=Stage.EXPORT,
        reproduces="megatron-core 0.19.2, overlap_param_gather without disable_forward_pre_hook before an export",
        summary="the export reads parameters that the distributed optimizer has not yet gathered after its step",
        caught_by=("WGT005",),
        inject=_param_gather_skipped,
        model="tiny:qwen3",
        mesh=Mesh(dp=2),
    ),
)

"""What test_megatron_fixes.py runs on a rank."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

from verifier.launch.rank import RankContext


def _build(args: Mapping[str, Any]) -> Any:
    from verifier.mesh import Mesh
    from verifier.model.provider_megatron import DataParallel, build

    sharded = DataParallel(distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True)
    return build(
        args["checkpoint"], Mesh(), dtype="bfloat16", tier="cpu", data_parallel=sharded, fixes=args["fixes"]
    )  # fmt: skip


def misplaced_states(context: RankContext) -> list[str]:
    """Parameters whose place in their group is said to be another's."""
    from verifier.megatron.optimizer_megatron import make_optimizer

    built = _build(context.args)
    optimizer = make_optimizer(built, learning_rate=1e-3)
    names = {parameter: name for chunk in built.chunks for name, parameter in chunk.named_parameters()}
    found = []
    for part in optimizer.chained_optimizers:
        for parameter, (group, order) in part.model_param_group_index_map.items():
            held = part.optimizer.param_groups[group]["params"][order]
            whole = parameter.detach().float().view(-1)
            if held.shape != whole.shape or not held.equal(whole):
                found.append(names[parameter])
    return found


def failure_of_a_save(context: RankContext) -> str:
    """Traceback with which writing the optimizer ends after a step; nothing if it does not fail."""
    from trainer_functions import rollouts

    from verifier.runs.scenario import MICRO_BATCH, RULE
    from verifier.runs.steps_megatron import Steps

    steps = Steps(_build(context.args), RULE, MICRO_BATCH)
    steps.take(rollouts())
    folder = context.run_dir / "stopped"
    folder.mkdir(exist_ok=True)
    try:
        steps.resume(folder)
    except RuntimeError:
        return traceback.format_exc()
    return ""


def decay_dtypes(context: RankContext) -> dict[str, str]:
    """Dtype of every parameter of state-space layers that the checkpoint stores in float32."""
    from verifier.model.checkpoint import open_checkpoint

    metas = open_checkpoint(context.args["checkpoint"]).metas
    stored = {name.rpartition(".")[2] for name, meta in metas.items() if meta.dtype == "float32"}
    named = [pair for chunk in _build(context.args).chunks for pair in chunk.named_parameters()]
    return {
        name: str(tensor.dtype) for name, tensor in named if name.rpartition(".")[2] in stored and ".mixer." in name
    }


def sinks_in_norm(context: RankContext) -> list[bool]:
    """Whether this rank counts the sinks of each layer in the norm of gradients."""
    from verifier.megatron.optimizer_megatron import in_norm
    from verifier.mesh import Mesh
    from verifier.model.provider_megatron import DataParallel, build

    args = context.args
    built = build(
        args["checkpoint"], Mesh(tp=2), dtype="float32", tier="cpu", data_parallel=DataParallel(), fixes=args["fixes"]
    )
    named = [item for chunk in built.chunks for item in chunk.named_parameters()]
    return [in_norm(parameter) for name, parameter in named if name.endswith(".softmax_offset")]

"""What test_replay_megatron.py runs on ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verifier.launch.rank import RankContext
from verifier.mesh import Mesh

if TYPE_CHECKING:
    import torch


def replay(context: RankContext) -> dict[str, Any]:
    """Made-up routes, natural ones replayed, and what is left behind, recorded as a run does."""
    from pathlib import Path

    from trainer_functions import rollouts

    from verifier.core.store import Recorder
    from verifier.megatron.router_replay_megatron import PROVIDER_FIELDS, routers_of
    from verifier.model.provider_megatron import build
    from verifier.stages.replay.probe_megatron import record_replay

    args = context.args
    built = build(args["checkpoint"], Mesh(**args["mesh"]), dtype=args["dtype"], tier="cpu", overrides=PROVIDER_FIELDS)
    probe = Recorder(Path(args["trace"]), "trainer", context.rank)
    found = [router for chunk in built.chunks for router in routers_of(chunk).values()]
    maps: list[list[torch.Tensor]] = [[] for _ in found]
    for router, seen in zip(found, maps, strict=True):
        router.register_forward_hook(lambda module, _, output, seen=seen: seen.append(output[1].clone()))
    record_replay(probe, built, rollouts())
    probe.close()
    routers = [router.router_replay for router in found]
    return {
        "alike": all(_passes_are_alike(seen) for seen in maps),
        "layers": [layer for chunk in built.chunks for layer in routers_of(chunk)],
        "idle": all(
            item.router_replay_action is None and item.target_topk_idx is None and not item.replay_backward_list
            for item in routers
        ),
    }


def update(context: RankContext) -> list[int]:
    """An update by the routers' own choice, twice: as it is, and with activations that are computed again.

    Returns:
        Global layers of this rank's routers.
    """
    from pathlib import Path

    from trainer_functions import rollouts

    from verifier.core.store import Recorder
    from verifier.megatron.router_replay_megatron import PROVIDER_FIELDS, routers_of
    from verifier.megatron.step_megatron import backward, recomputed
    from verifier.model.provider_megatron import DataParallel, build
    from verifier.stages.replay.probe_megatron import replaying

    args = context.args
    built = build(
        args["checkpoint"], Mesh(**args["mesh"]), dtype=args["dtype"], tier="cpu", overrides=PROVIDER_FIELDS,
        data_parallel=DataParallel(),
    )  # fmt: skip
    probe = Recorder(Path(args["trace"]), "trainer", context.rank)
    for version in (0, 1):
        watched = replaying(probe, built, rollouts(), version, lambda shards: None, on=False)
        with recomputed(built, on=version == 1), watched as (trained, follow):
            backward(built, trained, micro_batch_size=2, on_shards=follow)
    probe.close()
    return [layer for chunk in built.chunks for layer in routers_of(chunk)]


def _passes_are_alike(maps: list[torch.Tensor]) -> bool:
    """Of the four passes over a router, all but the third, by made-up routes, send every row to the same experts."""
    import torch

    size = len(maps) // 4
    natural, replayed, made_up, released = (maps[at : at + size] for at in range(0, len(maps), size))
    return (
        all(torch.equal(*pair) for pair in zip(natural, replayed, strict=True))
        and all(torch.equal(*pair) for pair in zip(natural, released, strict=True))
        and not any(torch.equal(*pair) for pair in zip(natural, made_up, strict=True))
    )

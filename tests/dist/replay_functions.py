"""What test_replay_megatron.py runs on ranks."""

from __future__ import annotations

from typing import Any

from verifier.launch.rank import RankContext
from verifier.mesh import Mesh


def replay(context: RankContext) -> dict[str, Any]:
    """Made-up routes, natural ones replayed, and what is left behind, recorded as a run does."""
    from pathlib import Path

    from trainer_functions import rollouts

    from verifier.core.store import Recorder
    from verifier.model.provider_megatron import build
    from verifier.program.routes_megatron import record_replay
    from verifier.train.replay_megatron import PROVIDER_FIELDS, routers_of

    args = context.args
    built = build(args["checkpoint"], Mesh(**args["mesh"]), dtype=args["dtype"], tier="cpu", overrides=PROVIDER_FIELDS)
    probe = Recorder(Path(args["trace"]), "trainer", context.rank)
    record_replay(probe, built, rollouts())
    probe.close()
    routers = [router.router_replay for chunk in built.chunks for router in routers_of(chunk).values()]
    return {
        "layers": [layer for chunk in built.chunks for layer in routers_of(chunk)],
        "idle": all(
            item.router_replay_action is None and item.target_topk_idx is None and not item.replay_backward_list
            for item in routers
        ),
    }

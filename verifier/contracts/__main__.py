"""`python -m verifier.contracts MODULE TIER`: look at a module's contracts; ends in {name: place of its failure}."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict
from typing import Any, cast

from verifier.contracts.table import by_module, contracts_of
from verifier.launch.failures import place_of
from verifier.platform import Tier, install_for

ON_A_TIER = ("platform_megatron",)
"""Modules whose process is one of the tier, and the only rank of a group."""


def failures(module: str, tier: Tier) -> dict[str, dict[str, Any] | None]:
    """Place where each contract fails, None for one that holds; the same for all if none can be seen."""
    contracts = by_module(contracts_of(tier))[module]
    try:
        if module in ON_A_TIER:
            _become_a_rank(tier)
        functions = importlib.import_module(f"verifier.contracts.{module}")
        getattr(functions, "prepare", lambda: None)()
    except Exception as error:  # whatever upstream raises is the answer
        return dict.fromkeys((item.name for item in contracts), asdict(place_of(error)))
    found: dict[str, dict[str, Any] | None] = {}
    for item in contracts:
        try:
            getattr(functions, item.name)()
        except Exception as error:  # whatever upstream raises is the answer
            found[item.name] = asdict(place_of(error))
        else:
            found[item.name] = None
    return found


def _become_a_rank(tier: Tier) -> None:
    import torch

    install_for(tier)
    group = torch.distributed
    group.init_process_group("gloo", store=group.HashStore(), rank=0, world_size=1)


if __name__ == "__main__":
    print(json.dumps(failures(sys.argv[1], cast("Tier", sys.argv[2]))))

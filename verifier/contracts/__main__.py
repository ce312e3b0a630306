"""`python -m verifier.contracts MODULE TIER`: look at the contracts of a module; ends in {name: traceback}."""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from typing import cast

from verifier.contracts.table import by_module, contracts_of
from verifier.platform import Tier, install_for

ON_A_TIER = ("platform_megatron",)
"""Modules whose process is one of the tier, and the only rank of a group."""


def failures(module: str, tier: Tier) -> dict[str, str]:
    """Traceback of each contract that does not hold, empty for one that does; the same for all if none can be seen."""
    contracts = by_module(contracts_of(tier))[module]
    try:
        if module in ON_A_TIER:
            _become_a_rank(tier)
        functions = importlib.import_module(f"verifier.contracts.{module}")
        getattr(functions, "prepare", lambda: None)()
    except Exception:  # whatever upstream raises is the answer
        return dict.fromkeys((item.name for item in contracts), traceback.format_exc())
    found = {}
    for item in contracts:
        try:
            getattr(functions, item.name)()
        except Exception:  # whatever upstream raises is the answer
            found[item.name] = traceback.format_exc()
        else:
            found[item.name] = ""
    return found


def _become_a_rank(tier: Tier) -> None:
    import torch

    install_for(tier)
    group = torch.distributed
    group.init_process_group("gloo", store=group.HashStore(), rank=0, world_size=1)


if __name__ == "__main__":
    print(json.dumps(failures(sys.argv[1], cast("Tier", sys.argv[2]))))

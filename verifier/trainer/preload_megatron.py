"""Import of all that ranks of a trainer need, before they are forked."""

from __future__ import annotations

import torch

from verifier.model import provider_megatron
from verifier.plan.digest import digest_tensor
from verifier.platform import Tier, select
from verifier.platform.cuda import require_not_started


def preload(tier: Tier | None = None) -> None:
    """Import everything before ranks are forked, by default for this machine's tier; the digest's compiled path too."""
    tier = tier or select()
    provider_megatron.preload(tier)
    if tier == "cpu":
        digest_tensor(torch.zeros(1))
    else:
        require_not_started()

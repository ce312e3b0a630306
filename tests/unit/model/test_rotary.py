"""Models that the kernel for rotary embeddings fits, and the refusal of the others."""

from __future__ import annotations

import pytest

from verifier.errors import UsageError
from verifier.model.rotary import misfit, require_fit

PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
SCALED = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
LATENT = {**PLAIN, "kv_lora_rank": 512}


def test_plain_embeddings_are_fused():
    assert not misfit(PLAIN)
    assert not misfit({"rope_scaling": None})
    assert not misfit({"rope_scaling": {"rope_type": "llama3"}})
    require_fit(True, PLAIN)
    require_fit(False, LATENT)


@pytest.mark.parametrize(("model", "reason"), [(SCALED, "type yarn"), (LATENT, "latent attention")])
def test_what_the_kernel_would_embed_wrongly_is_refused(model, reason):
    with pytest.raises(UsageError, match=f"megatron.rope_fusion is true and the model has .*{reason}"):
        require_fit(True, model)

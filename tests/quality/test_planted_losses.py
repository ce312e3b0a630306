"""Every planted bug of advantages, weights and losses is found within the CI profile's budget.

Each replaces one function by a small wrong one, most of them shipped by a trainer; the step then differs from the
textbook's by more than 1e-6 in its loss or in a gradient.
"""

import numpy as np
import pytest
from hypothesis import Phase, find, settings
from hypothesis import strategies as st

from tests import laid_out_step
from tests.laid_out_step import layouts, trained
from tests.textbook_step import batches, recipes, textbook
from verifier.algorithms import advantages, losses, off_policy
from verifier.algorithms.aggregation import token_weights
from verifier.algorithms.kl import bounded

SEARCH = settings(derandomize=True, database=None, deadline=None, max_examples=100, phases=[Phase.generate])


@st.composite
def cases(draw):
    batch = draw(batches())
    return batch, draw(recipes()), draw(layouts(batch))


def differs(case) -> bool:
    batch, recipe, layout = case
    (loss, gradients), (expected, others) = trained(batch, recipe, layout), textbook(batch, recipe)
    far = [abs(loss - expected)]
    far += [np.abs(own - other).max(initial=0) for a, b in zip(gradients, others, strict=True)
            for own, other in zip(a, b, strict=True)]  # fmt: skip
    return max(far) > 1e-6


def own_shard_only(inputs):
    """verl, GSPO: the mean over the rows at hand, which are a part of the sequence."""
    log_T = losses.token_log_ratio(inputs)
    mean_T = log_T.detach()[inputs.mask_T].mean() if inputs.mask_T.any() else 0.0
    return mean_T + (log_T - log_T.detach())


def of_all_tokens(masks, *rest):
    """Divided by the tokens in the mask and the others too."""
    weights = token_weights(masks, *rest)
    return [own * mask.mean() if len(mask) else own for own, mask in zip(weights, masks, strict=True)]


def empty_sequences_counted(masks, prompts, how, constant):
    weights = token_weights(masks, prompts, how, constant)
    share = sum(mask.any() for mask in masks) / len(masks)
    return [own * share for own in weights] if how == "sequence_mean" else weights


def one_sided(ratio_T, options):
    """clip_high for both sides: the decoupled clip never applied."""
    return ratio_T.clip(max(0.0, 1 - options.clip_high), 1 + options.clip_high)


PLANTED = {
    "gspo-mean-of-one-shard": (losses, "sequence_log_ratio", own_shard_only),
    "weights-of-all-tokens": (laid_out_step, "token_weights", of_all_tokens),
    "empty-sequences-counted": (laid_out_step, "token_weights", empty_sequences_counted),
    "clip-high-on-both-sides": (losses, "_clip", one_sided),
    "clip-dropped": (losses, "_clip", lambda ratio_T, options: ratio_T),
    "baseline-dropped": (advantages, "_centred", lambda own: own),
    "importance-ratio-upside-down": (off_policy, "log_ratio", lambda own, other: other - own),
    "kl-of-other-direction": (losses, "kl_estimate", lambda own, other, kind: bounded(other - own)),
    "kl-without-gradient": (losses, "kl_estimate", lambda own, other, kind: (own - other).detach()),
    "ratio-detached": (losses, "_exp", lambda log_T: log_T.detach().exp() + 0 * log_T),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug, monkeypatch):
    module, name, wrong = PLANTED[bug]
    monkeypatch.setattr(module, name, wrong)
    assert differs(find(cases(), differs, settings=SEARCH))

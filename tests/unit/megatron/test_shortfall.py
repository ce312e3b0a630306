"""Distances of labels to the greatest logit, by `shortfall`, beside `is_greedy`.

What this does not exercise: vocabularies that ranks share (tests/dist/test_train_clean.py).
"""

from __future__ import annotations

import torch

from verifier.megatron.pack import IGNORE_LABEL
from verifier.megatron.vocab_logprob import is_greedy, shortfall

LOGITS = torch.tensor([[0.5, 2.0, -1.0], [3.0, 3.0, 1.0], [0.0, 1.0, 2.0]])


def test_a_label_is_as_far_below_the_greatest_logit_as_it_is_and_none_is_0():
    labels = torch.tensor([0, 1, IGNORE_LABEL])
    assert shortfall(LOGITS, labels).tolist() == [1.5, 0.0, 0.0]
    assert is_greedy(LOGITS, labels).tolist() == [0.0, 1.0, 0.0]

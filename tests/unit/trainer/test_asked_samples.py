"""Notes of answers on their way through a checkpoint, with the weights that engines held.

What this does not exercise: engines and checkpoints (tests/dist/test_train_modes.py).
"""

from __future__ import annotations

import json

from verifier.engine.api import Sample, weights_of
from verifier.trainer.evaluation import noted_of
from verifier.trainer.sampled_batch import read_round

HELD = weights_of([3, 3, 4])


def test_the_weights_of_each_token_are_joined_in_order() -> None:
    assert HELD == ((3, 2), (4, 1))
    assert weights_of([4, 3, 4]) == ((4, 1), (3, 1), (4, 1))
    assert weights_of([]) == ()


def test_notes_come_back_from_a_checkpoint_with_their_weights_and_older_ones_without() -> None:
    noted = noted_of([[Sample(tokens=(5, 6, 7), logprobs=(-1.0, -2.0, -3.0), seed=2**70, weights=HELD)]])
    assert noted[0].weights == HELD
    kept = json.loads(json.dumps([[*note] for note in noted]))
    assert read_round({"groups": [], "turns": None, "noted": [kept]})[2] == (noted,)
    older = [note[:5] for note in kept]
    assert read_round({"groups": [], "turns": None, "noted": [older]})[2] == ((noted[0]._replace(weights=()),),)

"""The first difference among recorded points: order of the parts, ranks, missing tokens, experts."""

import numpy as np
import pytest

from verifier.core.manifest import Manifest
from verifier.core.record import Measurement
from verifier.core.trace import Trace
from verifier.runs.first_difference import first_difference
from verifier.stages.logprob.records import Activation
from verifier.stages.loss.records import ActivationGradient, GradientRecord

ROUTER, EXPERTS = "layers.0.mlp.router", "layers.0.mlp.experts"
ORDER = {"embedding": 0, ROUTER: 117, EXPERTS: 123, "output_layer": 901, "logprob": 902}


class Recorded:
    """Records and arrays of one run of two ranks and its oracle, on two tokens of one sequence and three columns."""

    def __init__(self):
        self.records, self.arrays = [], {}

    def add(self, kind, name, values, *, step="train", role="trainer", rank=0, position=(0, 1), columns=(0, 1, 2)):
        key = f"{role}-{rank:04d}-{len(self.records):06d}"
        self.arrays[key] = {
            "values": np.array(values, np.float32),
            "sequence": np.zeros(len(position), np.int32),
            "position": np.array(position, np.int32),
            "columns": np.array(columns, np.int32),
        }
        self.records.append(
            kind(name=name, step=step, role=role, rank=rank, array=key, order=ORDER[name], coordinate=f"tp={rank} pp=0")
        )

    def both(self, kind, name, actual, expected, *, score=None):
        self.add(kind, name, expected, role="oracle")
        self.add(kind, name, actual)
        if kind is Activation:
            self.add(kind, name, actual if score is None else score, step="score")

    def found(self):
        return first_difference(Trace(Manifest(), self.records, self.arrays.__getitem__))


RIGHT = [[1.0, 2.0, 4.0], [3.0, 1.0, 2.0]]
WRONG = [[1.0, 2.0, 4.0], [3.0, 1.5, 2.0]]


@pytest.fixture
def run():
    return Recorded()


def test_what_comes_first_in_the_data_flow_is_named(run):
    run.both(Activation, "output_layer", WRONG, RIGHT)
    run.both(Activation, "embedding", RIGHT, RIGHT)
    run.both(Activation, EXPERTS, WRONG, RIGHT)
    first = run.found().first
    assert (first.name, first.part, first.off, first.tokens) == (EXPERTS, "score", 1, 2)
    place = first.place
    assert (place.sequence, place.position, place.channel, place.value, place.expected) == (0, 1, 1, 1.5, 1.0)


def test_rounding_is_no_difference(run):
    run.both(Activation, "embedding", [[1.0, 2.0, 4.0001], [3.0, 1.0, 2.0]], RIGHT)
    assert run.found().first is None
    run.both(Activation, "output_layer", [[1.0, 2.0, 4.0002], [3.0, 1.0, 2.0]], RIGHT)
    assert run.found().first.name == "output_layer"


def test_a_difference_in_training_alone_is_of_that_pass(run):
    run.both(Activation, "embedding", WRONG, RIGHT, score=RIGHT)
    assert run.found().first.part == "train"


def test_gradients_are_read_from_the_loss_back(run):
    for name in ("embedding", "output_layer"):
        run.both(Activation, name, RIGHT, RIGHT)
    run.both(ActivationGradient, "embedding", WRONG, RIGHT)
    run.both(ActivationGradient, "output_layer", RIGHT, RIGHT)
    found = run.found()
    assert (found.first.name, found.first.part, found.reader.name) == ("embedding", "backward", "output_layer")


def test_a_rank_is_compared_on_its_own_columns(run):
    run.add(Activation, "embedding", RIGHT, role="oracle")
    run.add(Activation, "embedding", [[1.0, 2.0], [3.0, 1.0]], columns=(0, 1), step="score")
    run.add(Activation, "embedding", [[7.0], [2.0]], columns=(2,), rank=1, step="score")
    place = run.found().first.place
    assert (place.rank, place.coordinate, place.channel, place.position) == (1, "tp=1 pp=0", 2, 0)


def test_a_token_that_no_rank_has_is_missing(run):
    run.add(Activation, "embedding", RIGHT, role="oracle")
    run.add(Activation, "embedding", RIGHT[:1], position=(0,), step="score")
    first = run.found().first
    assert (first.differs, first.missing, first.place) == (True, 1, None)


def test_what_is_not_finite_differs(run):
    run.both(Activation, "embedding", [[np.nan, 2.0, 4.0], RIGHT[1]], RIGHT)
    assert run.found().first.off == 1


def test_a_point_of_one_side_is_left_out(run):
    run.both(Activation, "embedding", RIGHT, RIGHT)
    run.add(Activation, "output_layer", RIGHT, role="oracle")
    assert run.found().left_out == ("output_layer",)


def test_the_expert_of_all_wrong_tokens_is_named(run):
    run.both(Activation, ROUTER, [[0.5, 0.5, 0.0], [0.5, 0.0, 0.5]], [[0.5, 0.5, 0.0], [0.5, 0.0, 0.5]])
    run.both(Activation, EXPERTS, WRONG, RIGHT)
    assert run.found().experts == (2,)


def weight(name, gap, length):
    gradient = Measurement(value=gap, scale=1.0, index=(0,), how="")
    return GradientRecord(
        name=name, role="oracle", gradient_scale=1.0, gradient=gradient, gradient_norm=1.0, group_length=length,
        loss=1.0, loss_scale=1.0, num_tokens=1,
    )  # fmt: skip


def test_one_factor_of_all_weights_is_told(run):
    run.both(Activation, "embedding", RIGHT, RIGHT)
    run.records += [weight("model.embed_tokens.weight", 0.5, 0.5), weight("lm_head.weight", 0.4, 0.5)]
    found = run.found()
    assert (found.first.name, found.same_factor) == ("model.embed_tokens.weight", 0.5)
    assert all(item.differs for item in found.same_part)


def test_nothing_in_common_is_nothing_compared(run):
    run.add(Activation, "embedding", RIGHT, role="oracle")
    assert run.found().points == ()


def test_a_token_that_rounding_moves_further_is_allowed_as_much(run):
    run.both(Activation, EXPERTS, WRONG, RIGHT)
    run.add(Activation, EXPERTS, [[0.0], [0.4]], step="moved", role="oracle", columns=(0,))
    assert run.found().first.off == 1
    run.records.pop()
    run.add(Activation, EXPERTS, [[0.0], [0.6]], step="moved", role="oracle", columns=(0,))
    assert run.found().first is None
    run.both(Activation, "output_layer", WRONG, RIGHT)
    assert run.found().first.name == "output_layer"

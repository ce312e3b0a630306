"""What a rank records of its gradients: sums of what backward passes gave, what the optimizer is given, squares."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from verifier.mesh import Mesh
from verifier.stages.train import probe_gradient_sums_megatron as gradient_sums_megatron
from verifier.stages.train.probe_gradient_sums_megatron import ELEMENTS, Sums

MESH = Mesh(tp=2, dp=2)
PROVIDER = SimpleNamespace(layernorm_zero_centered_gamma=False)


def place(name, *axes):
    return SimpleNamespace(global_name=name, group=f"{name} of tp 0", replicated_over=axes)


class Case:
    """A linear whose gradients are added up by hand, as megatron-core's buffers are."""

    def __init__(self, rank=0, places=None):
        torch.manual_seed(1)
        self.model = torch.nn.Linear(80, 20)
        for parameter in self.model.parameters():
            parameter.main_grad = torch.zeros_like(parameter)
            parameter.in_norm = parameter.ndim > 1 or rank % 2 == 0
        default = {(0, "weight"): place("weight", "cp", "dp"), (0, "bias"): place("bias", "tp", "cp", "dp")}
        trainer = SimpleNamespace(chunks=[self.model], mesh=MESH, data_parallel=None, provider=PROVIDER, tier="cpu")
        self.sums = Sums(trainer, default if places is None else places, rank)

    def update(self, monkeypatch, *, passes=3, number=1):
        found = []
        parts = [(item, 0, item.main_grad.view(-1)) for item in self.model.parameters()]
        monkeypatch.setattr(gradient_sums_megatron, "owned_parts", lambda chunk, *, sharded: parts)
        monkeypatch.setattr(gradient_sums_megatron, "in_norm", lambda parameter: parameter.in_norm)
        audit = self.sums.of(number)
        audit.begin()
        for _ in range(passes):
            self.model(torch.randn(6, 80)).square().sum().backward()
            for parameter in self.model.parameters():
                parameter.main_grad.add_(parameter.grad)
                parameter.grad = None
        audit.end()
        audit.record(SimpleNamespace(emit=lambda *given: found.append(given)), "update 1", 1, "tp=0")
        return found[0]


def test_what_passes_give_is_added_up_as_the_buffer_adds_it(monkeypatch):
    record, arrays = Case().update(monkeypatch)
    assert {item.name: (item.elements, item.owned, item.copies) for item in record.tensors} == {
        "weight": (ELEMENTS, ELEMENTS, 2), "bias": (20, 20, 4)
    }  # fmt: skip
    assert np.abs(arrays["added"]).min() > 0
    np.testing.assert_array_equal(arrays["added"], arrays["reduced"])


def test_elements_take_turns(monkeypatch):
    begins = {
        item.begin
        for number in range(1, 9)
        for item in Case().update(monkeypatch, number=number)[0].tensors
        if item.name == "weight"
    }
    assert begins == set(range(0, 1600, ELEMENTS))


def test_the_squares_are_those_of_whole_gradients(monkeypatch):
    case = Case()
    record, _ = case.update(monkeypatch)
    whole = sum(float(item.main_grad.double().square().sum()) for item in case.model.parameters())
    assert float(record.squares) == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize(("rank", "counted"), [(1, ["weight"]), (2, []), (3, [])])
def test_copies_are_counted_once(monkeypatch, rank, counted):
    case = Case(rank)
    record, _ = case.update(monkeypatch)
    whole = sum(float(getattr(case.model, name).main_grad.double().square().sum()) for name in counted)
    assert float(record.squares) == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize(("rank", "counts", "miscounted"), [(0, True, ()), (1, False, ("weight",)), (1, True, ())])
def test_a_divided_tensor_has_to_be_in_the_norm_of_every_rank(monkeypatch, rank, counts, miscounted):
    case = Case(rank)
    case.model.weight.in_norm = counts
    assert case.update(monkeypatch)[0].miscounted == miscounted


def test_a_parameter_without_a_place_leaves_the_norm_unknown(monkeypatch):
    record, _ = Case(places={(0, "weight"): place("weight", "cp", "dp")}).update(monkeypatch)
    assert record.squares is None
    assert [item.name for item in record.tensors] == ["weight"]


def test_a_gradient_that_a_fused_kernel_added_is_not_audited(monkeypatch):
    case = Case()
    case.model.weight.grad_added_to_main_grad = True
    record, arrays = case.update(monkeypatch)
    assert [item.name for item in record.tensors] == ["bias"]
    assert arrays["added"].shape == (20,)


@pytest.mark.parametrize(("gathers", "owned"), [(True, [("weight", 128, 128), ("bias", 0, 20)]), (False, [])])
def test_weights_that_passes_gather_are_those_that_this_rank_steps(monkeypatch, gathers, owned):
    """Of 1,600 elements the rank steps all from the 129th on, of which the first turn has 128."""
    case = Case()
    case.sums.trainer.data_parallel = SimpleNamespace(
        fsdp=None, overlap_param_gather=gathers, distributed_optimizer=True
    )
    weight, bias = case.model.parameters()
    parts = [(weight, 128, weight.main_grad.view(-1)[128:]), (bias, 0, bias.main_grad)]
    monkeypatch.setattr(gradient_sums_megatron, "owned_parts", lambda chunk, *, sharded: parts)
    number = next(at for at in range(1, 9) if case.sums.part_of(at, weight, case.sums.places[weight]).begin == 0)
    found = list(case.sums.own_weights(number))
    assert [(item.local, item.begin, len(item.states[0])) for item in found] == owned
    if gathers:
        assert torch.equal(found[0].states[0], weight.detach().view(-1)[128:ELEMENTS])

"""Samples of updates of torch's AdamW: right steps hold, and what moved between two updates is told."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from verifier.core import ragged
from verifier.megatron.optimizer_megatron import StepSettings
from verifier.stages.train.checks_adam_audit import compared_with_adam, rounded
from verifier.stages.train.probe_adam_audit_megatron import Audits, groups_of
from verifier.stages.train.probe_adam_elements import ELEMENTS, TENSORS

RATE, DECAY = 1e-2, 0.1
SETTINGS = StepSettings(
    schedule="constant", learning_rate=RATE, least_learning_rate=0.0, warmup_steps=0, decay_steps=9,
    weight_decay=DECAY, clip_grad=1.0, beta_1=0.9, beta_2=0.95, epsilon=1e-8,
)  # fmt: skip


class Case:
    def __init__(self):
        torch.manual_seed(1)
        self.model = torch.nn.Linear(80, 20)
        weight, bias = self.model.parameters()
        groups = [{"params": [weight], "weight_decay": DECAY}, {"params": [bias], "weight_decay": 0.0}]
        self.adam = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
        self.optimizer = SimpleNamespace(
            chained_optimizers=[SimpleNamespace(optimizer=self.adam)], param_groups=self.adam.param_groups
        )
        self.audits = Audits(SimpleNamespace(chunks=[self.model]), self.optimizer, SETTINGS)

    def step(self, gradients):
        for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        self.adam.step()

    def update(self, number, *, clips=True, left=0.0, spoil=lambda moment: None):
        for parameter in self.model.parameters():
            parameter.main_grad = torch.full(parameter.shape, left)
        audit = self.audits.of(number, f"update {number}")
        audit.begin()
        for parameter in self.model.parameters():
            parameter.main_grad = torch.randn(parameter.shape)
        audit.gradients()
        norm = float(sum(parameter.main_grad.square().sum() for parameter in self.model.parameters()).sqrt())
        factor = norm + 1e-6 if clips else 1.0
        self.step([parameter.main_grad / factor for parameter in self.model.parameters()])
        for state in self.adam.state.values():
            spoil(state["exp_avg"])
            spoil(state["exp_avg_sq"])
        found = []
        audit.record(SimpleNamespace(emit=lambda *taken: found.append(taken)), number, norm, "tp=0")
        (self.sample, arrays), sizes = found[0], [item.elements for item in found[0][0].tensors]
        parts = {name: ragged.split(values.double().numpy(), sizes) for name, values in arrays.items()}
        self.arrays = [{name: own[at] for name, own in parts.items()} for at in range(len(sizes))]
        return self.sample

    def off(self):
        """Greatest distances of masters and of moments from Adam in the last update, tensor by tensor."""
        pairs = zip(self.sample.tensors, self.arrays, strict=True)
        masters, moments = zip(*(compared_with_adam(self.sample, *pair) for pair in pairs), strict=True)
        return masters, moments

    def holds(self):
        """Tell whether the last update is Adam's, and its weights are its masters."""
        masters, moments = self.off()
        tensors = zip(self.sample.tensors, self.arrays, strict=True)
        copied = [np.array_equal(rounded(own["master"], item.dtype), own["weight"]) for item, own in tensors]
        return max(masters) < 1e-5 and max(moments) < 0.3 and all(copied)


class HostCase(Case):
    """Weights in bf16, and masters as megatron-core's HybridDeviceOptimizer keeps them: under the weights."""

    def __init__(self):
        super().__init__()
        self.model.bfloat16()
        held = list(self.model.parameters())
        self.masters = [item.detach().float().requires_grad_() for item in held]
        groups = [
            {"params": [self.masters[0]], "weight_decay": DECAY},
            {"params": [self.masters[1]], "weight_decay": 0},
        ]
        self.adam = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
        self.hybrid = SimpleNamespace(
            param_groups=[
                {**group, "params": [item]} for group, item in zip(self.adam.param_groups, held, strict=True)
            ],
            state={}, param_to_inner_param=dict(zip(held, self.masters, strict=True)),
        )  # fmt: skip
        self.optimizer.chained_optimizers[0].optimizer = self.hybrid

    def step(self, gradients):
        held = list(self.model.parameters())
        for own, gradient in zip(self.masters, gradients, strict=True):
            own.grad = gradient
        self.adam.step()
        for own, item in zip(self.masters, held, strict=True):
            item.data.copy_(own.data)
        self.hybrid.state = {item: self.adam.state[own] for own, item in zip(self.masters, held, strict=True)}


def test_masters_that_are_kept_under_the_weights_are_audited():
    case = HostCase()
    found = []
    for number in (1, 2):
        found.append(case.update(number))
        assert case.holds()
        assert {item.dtype for item in found[-1].tensors} == {"bfloat16"}
    assert [item.moved for item in found] == [item.strays for item in found] == [(), ()]
    case.masters[1].data.mul_(2)
    assert case.update(3).strays == ("bias",)


def test_before_the_first_update_all_masters_are_those_of_the_weights():
    case = HostCase()
    case.masters[0].data[-1] = 0
    assert case.update(1).strays == ("weight",)


def test_right_updates_hold_and_slices_take_turns():
    case = Case()
    found = []
    for number in (1, 2, 3):
        found.append(case.update(number))
        assert case.holds()
    assert {float(tensor.left) for item in found for tensor in item.tensors} == {0}
    assert [item.moved for item in found] == [(), (), ()]
    assert [item.remembered for item in found] == [0, 2, 2]
    begins = {tensor.begin for item in found for tensor in item.tensors if tensor.name == "weight"}
    assert begins == {0, ELEMENTS, 2 * ELEMENTS}


def test_a_step_without_its_clip_is_off():
    case = Case()
    case.update(1)
    case.update(2, clips=False)
    assert max(case.off()[0]) > 0.1


@pytest.mark.parametrize("spoil", [torch.Tensor.zero_, lambda moment: moment.copy_(moment.bfloat16())])
def test_moments_that_a_step_leaves_otherwise_are_off(spoil):
    case = Case()
    case.update(1)
    case.update(2, spoil=spoil)
    masters, moments = case.off()
    assert min(moments) > 100
    assert max(masters) < 1e-5


def test_a_sample_is_32_kib_at_most():
    case = Case()
    case.update(1)
    assert TENSORS * ELEMENTS * len(case.arrays[0]) * 4 == 32 * 1024
    assert {len(own) for arrays in case.arrays for own in arrays.values()} <= {20, ELEMENTS}


def test_a_gradient_that_was_left_is_told():
    assert {float(tensor.left) for tensor in Case().update(1, left=0.5).tensors} == {0.5}


def test_what_moves_between_updates_is_named():
    case = Case()
    case.update(1)
    case.adam.state[case.model.bias]["exp_avg"].zero_()
    assert case.update(2).moved == ("bias",)


def test_groups_are_counted_by_dimension():
    found = groups_of(Case().optimizer, known=True)
    assert [(item.vectors, item.others, float(item.weight_decay)) for item in found] == [(0, 1, DECAY), (1, 0, 0.0)]


def test_frozen_parameters_are_named():
    case = Case()
    case.model.bias.requires_grad = False
    assert case.update(1).frozen == ("bias",)


def test_of_an_adapted_model_the_adapter_alone_is_to_be_trained():
    case = Case()
    case.model.adapter = torch.nn.Linear(2, 2)
    case.model.wrapped = torch.nn.Module()
    case.model.wrapped.adapter = torch.nn.Linear(2, 2, bias=False)
    for parameter in case.model.parameters():
        parameter.requires_grad = False
    case.model.wrapped.adapter.weight.requires_grad = True
    assert case.audits.frozen() == ()
    case.model.wrapped.adapter.weight.requires_grad = False
    assert case.audits.frozen() == ("wrapped.adapter.weight",)


def test_what_the_last_update_left_is_told_and_that_of_no_other():
    case = Case()
    case.update(1)
    found = {item.local: item for item in case.audits.stepped(1)}
    weight = case.model.weight.detach().view(-1)
    assert (found["weight"].begin, found["bias"].begin) == (0, 0)
    masters, first, _, weights = found["weight"].states
    assert torch.equal(weights, weight[:ELEMENTS])
    assert torch.equal(masters, weights)
    assert torch.equal(first, case.adam.state[case.model.weight]["exp_avg"].view(-1)[:ELEMENTS])
    assert case.audits.stepped(2) == []  # an update that nobody audited

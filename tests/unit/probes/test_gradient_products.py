"""Products of weights and gradients: what scaling each weight, or some of its rows, changes a loss by."""

from types import SimpleNamespace

import pytest
import torch

from verifier.stages.train import probe_gradient_products_megatron as gradient_products_megatron
from verifier.stages.train.probe_gradient_products_megatron import READS_STREAM, Damped, Products

PROVIDER = SimpleNamespace(
    layernorm_zero_centered_gamma=False, gated_linear_unit=True, multi_latent_attention=False, kv_channels=2,
    num_attention_heads=4, num_query_groups=2, tensor_model_parallel_size=1,
)  # fmt: skip
MLP = "decoder.layers.0.mlp"
QKV = "decoder.layers.0.self_attention.linear_qkv.weight"


def products(provider, *parts):
    found = Products(provider)
    for name, parameter, begin, end in parts:
        found.take(name, parameter, begin, parameter.grad.reshape(-1)[begin:end])
    return {item.name: item.product for item in found.found()}


def gated():
    """Norm, gated linear and the linear behind it, with gradients of some loss."""
    torch.manual_seed(3)
    norm, first, second = torch.randn(8), torch.randn(12, 8), torch.randn(8, 6)
    weights = [item.requires_grad_() for item in (norm, first, second)]
    gate, up = (torch.nn.functional.rms_norm(torch.randn(5, 8), (8,)) * norm @ first.T).chunk(2, dim=-1)
    (torch.nn.functional.silu(gate) * up @ second.T).sin().sum().backward()
    return weights


def test_norm_and_linear_and_both_sides_of_a_gate_have_one_product(monkeypatch):
    monkeypatch.setattr(gradient_products_megatron, "ELEMENTS", 7)
    norm, first, second = gated()
    found = products(
        PROVIDER, (f"{MLP}.linear_fc1.layer_norm_weight", norm, 0, 8), (f"{MLP}.linear_fc1.weight", first, 0, 50),
        (f"{MLP}.linear_fc1.weight", first, 50, 96), (f"{MLP}.linear_fc2.weight", second, 0, 48),
    )  # fmt: skip
    of_norm, of_first, of_up, of_second = found.values()
    assert list(found)[2] == f"{MLP}.linear_fc1.weight#up"
    assert of_norm == pytest.approx(of_first, rel=1e-5)
    assert of_up == pytest.approx(of_second, rel=1e-5)
    assert abs(of_first - of_up) > 1e-3


def test_rows_of_values_lie_behind_queries_and_keys_of_their_group():
    weight = torch.ones(16, 3, requires_grad=True)
    weight.grad = torch.arange(16.0)[:, None].expand(16, 3).clone()
    assert products(PROVIDER, (QKV, weight, 0, 48)) == {QKV: 360.0, f"{QKV}#value": 3 * (6 + 7 + 14 + 15)}


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        (QKV, {"multi_latent_attention": True}), (QKV, {"attention_output_gate": True}),
        (QKV, {"tensor_model_parallel_size": 4}), (f"{MLP}.linear_fc1.weight", {"gated_linear_unit": False}),
        (f"{MLP}.linear_fc1.weight", {"glu_linear_offset": 1.0}),
    ],
)  # fmt: skip
def test_rows_of_other_layers_are_not_told_apart(name, changed):
    weight = torch.ones(16, 3, requires_grad=True)
    weight.grad = torch.ones(16, 3)
    assert list(products(SimpleNamespace(**{**vars(PROVIDER), **changed}), (name, weight, 0, 48))) == [name]


def test_a_norm_whose_factor_is_one_more_is_scaled_with_it():
    weight = torch.zeros(4, requires_grad=True)
    weight.grad = torch.ones(4)
    provider = SimpleNamespace(**{**vars(PROVIDER), "layernorm_zero_centered_gamma": True})
    assert products(provider, ("decoder.final_layernorm.weight", weight, 0, 4)) == {
        "decoder.final_layernorm.weight": 4.0
    }


def test_logits_that_are_bent_are_told():
    assert Products(SimpleNamespace(final_logit_softcapping=30.0)).bent
    assert not Products(PROVIDER).bent


@pytest.mark.parametrize(("chosen", "silent"), [(1, []), (2, ["decoder.layers.0.mlp.router.weight"])])
def test_tensors_without_a_gradient_are_named_but_for_routers_of_one_expert(chosen, silent):
    provider = SimpleNamespace(**{**vars(PROVIDER), "moe_router_topk": chosen})
    found, weight = Products(provider), torch.ones(4, 2, requires_grad=True)
    found.take("decoder.layers.0.mlp.router.weight", weight, 0, torch.zeros(8))
    found.take(f"{MLP}.linear_fc2.weight", weight, 0, torch.zeros(4))
    found.take(f"{MLP}.linear_fc2.weight", weight, 4, torch.ones(4))
    assert list(found.silent) == silent


def test_both_matrices_of_an_adapter_have_one_product():
    torch.manual_seed(4)
    inward, outward = (torch.randn(size, requires_grad=True) for size in ((3, 8), (6, 3)))
    (torch.randn(5, 8) @ inward.T @ outward.T).sin().sum().backward()
    of_inward, of_outward = products(
        PROVIDER, (f"{MLP}.linear_fc2.adapter.linear_in.weight", inward, 0, 24),
        (f"{MLP}.linear_fc2.adapter.linear_out.weight", outward, 0, 18),
    ).values()  # fmt: skip
    assert of_inward == pytest.approx(of_outward, rel=1e-4)


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_what_epsilon_takes_is_all_that_a_scale_of_the_residual_stream_leaves(kind):
    """One token, whose terms at two norms and the last one are taken apart by their signs."""
    from verifier.platform import cpu_modules

    torch.manual_seed(5)
    config = SimpleNamespace(normalization=kind, layernorm_zero_centered_gamma=False)
    embedding, out, second = (torch.nn.Parameter(torch.randn(*shape)) for shape in ((1, 8), (8, 8), (8, 8)))
    norms = [torch.nn.Parameter(torch.randn(8)) for _ in range(3)]
    biases = [torch.nn.Parameter(torch.randn(8)) if kind == "LayerNorm" else None for _ in range(3)]
    own = [Damped([norm]) for norm in norms]
    every, none = Damped(norms), Damped([])
    terms = []

    def signed(weight, bias, x, normed, eps):
        centred = x if bias is None else x - x.mean(-1, keepdim=True)
        kept = (normed if bias is None else normed - bias).detach()
        share = eps / (centred.detach().square().mean() + eps)
        normed.register_hook(lambda gradient: terms.append(float(share * (kept * gradient).sum())))

    cpu_modules.WATCHERS[:] = [item.watch for item in (*own, every, none)] + [signed]
    try:
        states = embedding
        for norm, bias, write in zip(norms, biases, (out, second, None), strict=True):
            read = cpu_modules.normalize(states, norm, bias, config, 0.3)
            states = read if write is None else states + read.tanh() @ write
        (states * torch.randn(1, 8)).sin().sum().backward()
    finally:
        cpu_modules.WATCHERS.clear()
    left = sum(float((item.detach() * item.grad).sum()) for item in (embedding, out, second))
    assert left == pytest.approx(sum(terms), rel=1e-4)
    assert abs(left) > 1e-2
    assert [float(item.total) for item in own] == pytest.approx([abs(term) for term in reversed(terms)], rel=1e-4)
    assert float(every.total) == pytest.approx(sum(map(abs, terms)), rel=1e-4)
    assert float(none.total) == 0


@pytest.mark.parametrize(
    ("name", "reads"),
    [
        ("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", True), ("decoder.final_layernorm.weight", True),
        ("decoder.layers.0.pre_mlp_layernorm.weight", True), ("decoder.final_norm.weight", True),
        ("decoder.layers.0.self_attention.q_layernorm.weight", False), ("decoder.layers.0.mixer.norm.weight", False),
    ],
)  # fmt: skip
def test_norms_of_the_residual_stream_are_told_from_those_within_a_layer(name, reads):
    assert bool(READS_STREAM.search(name)) == reads

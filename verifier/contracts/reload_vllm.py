"""Contracts of vLLM's weight reload and sleep: what they do to modules made for it, as shipped and with the fixes.

In a process of its own, in which fresh memory is filled with NaN, so that what a reload leaves unwritten shows.
"""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import torch
from torch import nn
from vllm.device_allocator import cumem
from vllm.model_executor.layers.attention import mla_attention
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.utils.quant_utils import get_and_maybe_dequant_weights
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.weight_utils import composed_weight_loader, default_weight_loader
from vllm.model_executor.utils import set_weight_attrs
from vllm.v1.worker import gpu_worker

from verifier.platform.upstream_fixes import VLLM_BUFFERS, VLLM_HEADS, VLLM_LATENT, VLLM_SLEEP
from verifier.platform.upstream_fixes_vllm import install

HEADS, WIDTH = 4, 24


class Convolution(nn.Module):
    """A child that owns a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, 4), requires_grad=False)


class Mixer(nn.Module):
    """Shaped as vLLM's MambaMixer2: own parameters, one of them transformed by its loader, and a view of a child's."""

    def __init__(self, alias: bool, transform: bool) -> None:
        super().__init__()
        self.conv1d = Convolution()
        if alias:
            self.register_buffer("conv_weights", self.conv1d.weight.view(WIDTH, 4), persistent=False)
        self.A = nn.Parameter(torch.ones(HEADS), requires_grad=False)
        self.D = nn.Parameter(torch.ones(HEADS), requires_grad=False)
        self.dt_bias = nn.Parameter(torch.ones(HEADS), requires_grad=False)
        if transform:
            set_weight_attrs(
                self.A, {"weight_loader": composed_weight_loader(default_weight_loader, lambda x: -torch.exp(x))}
            )


class Router(nn.Module):
    """A weight, and a number that no checkpoint carries."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.register_buffer("root_size", torch.tensor(0.25), persistent=False)


def reloaded(model: nn.Module, names: list[str]) -> dict[str, torch.Tensor]:
    """Reload a model as the engine's worker does, in this order of names; what was sent."""
    layerwise.record_metadata_for_reloading(model)
    sent = {name: torch.randn_like(model.get_parameter(name)) for name in names}
    reload(model, sent)
    return sent


def reload(model: nn.Module, sent: dict[str, torch.Tensor]) -> None:
    """One update in one chunk; like vLLM's models, look the parameters up before the first is loaded."""
    layerwise.initialize_layerwise_reload(model)
    parameters = dict(model.named_parameters())
    for name, tensor in sent.items():
        getattr(parameters[name], "weight_loader", default_weight_loader)(parameters[name], tensor)
    layerwise.finalize_layerwise_reload(model, None)


def latent(weight: torch.Tensor) -> SimpleNamespace:
    """Module that latent attention derives its matrices from."""
    return SimpleNamespace(
        kv_b_proj=SimpleNamespace(weight=weight, quant_method=None), kv_lora_rank=WIDTH, num_heads=HEADS,
        qk_nope_head_dim=4, v_head_dim=3, is_aiter_triton_fp4_bmm_enabled=False, is_aiter_triton_fp8_bmm_enabled=False,
        quant_config=None, _k_scale=torch.ones(()), _v_scale=torch.ones(()), _q_scale=torch.ones(()),
        _prob_scale=torch.ones(()),
    )  # fmt: skip


def reload_spoils_an_alias_of_a_childs_weight() -> None:
    """Bug of vllm #42481."""
    model = Mixer(alias=True, transform=False)
    sent = reloaded(model, ["conv1d.weight", "A", "D", "dt_bias"])
    assert not torch.equal(model.conv1d.weight, sent["conv1d.weight"])


def reload_spoils_a_buffer_that_nobody_loads() -> None:
    """Bug of vllm #44371."""
    model = Router()
    reloaded(model, ["weight"])
    assert model.root_size != 0.25


def fix_keeps_buffers_and_aliases() -> None:
    """The fix of both."""
    install([VLLM_BUFFERS])
    model = Mixer(alias=True, transform=True)
    for order in (["conv1d.weight", "A", "D", "dt_bias"], ["A", "D", "dt_bias", "conv1d.weight"]):
        sent = reloaded(model, order)
        sent["A"] = -torch.exp(sent["A"])
        for name, tensor in sent.items():
            assert torch.equal(model.get_parameter(name), tensor), (order, name)
        assert model.conv_weights.data_ptr() == model.conv1d.weight.data_ptr(), order
    router = Router()
    sent = reloaded(router, ["weight"])
    assert torch.equal(router.weight, sent["weight"])
    assert router.root_size == 0.25


def transforming_loader_is_counted_twice() -> None:
    """prime-rl #2714: what is loaded last is dropped, as the layer counts as whole before it came.

    Out of reach in MambaMixer2 for as long as its alias, which is larger than all the rest, is counted too; upstream's
    mend of vllm #42481 ends that.
    """
    model = Mixer(alias=False, transform=True)
    sent = reloaded(model, ["conv1d.weight", "A", "dt_bias", "D"])
    assert not torch.equal(model.D, sent["D"])


class PackedMethod(QuantizeMethodBase):
    """Packs a weight for CPUs as vLLM's `UnquantizedEmbeddingMethod` does: a closure multiplies by a copy."""

    def create_weights(self, layer: nn.Module, *sizes: object, **attributes: object) -> None:
        """Nothing: layers make their own."""

    def apply(self, layer: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
        """Multiply by the copy."""
        return layer.cpu_linear(*inputs)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Pack."""
        packed = layer.weight.detach().clone()
        layer.cpu_linear = lambda x: x @ packed.t()


class PackedLayer(nn.Module):
    """A weight that is packed."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.quant_method = weight, PackedMethod()
        self.quant_method.process_weights_after_loading(self)


class TiedModel(nn.Module):
    """An embedding, and a head that shares its weight as `ParallelLMHead.tie_weights` makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = PackedLayer(nn.Parameter(torch.ones(WIDTH, WIDTH), requires_grad=False))
        self.lm_head = PackedLayer(self.embed_tokens.weight)


def head_after_reload() -> tuple[bool, bool]:
    """Test, after a reload of the embedding, the weight of the head, and then what it multiplies by."""
    model = TiedModel()
    sent = reloaded(model, ["embed_tokens.weight"])["embed_tokens.weight"]
    head = model.lm_head
    return torch.equal(head.weight, sent), torch.equal(head.cpu_linear(torch.eye(WIDTH)), sent.t())


def reload_leaves_the_packed_copy_of_a_tied_head() -> None:
    """A head that shares the embedding's weight multiplies by the old one."""
    assert head_after_reload() == (True, False)


def fix_packs_a_tied_head_again() -> None:
    """The fix of that."""
    install([VLLM_HEADS])
    assert head_after_reload() == (True, True)


def derived_matrices_are_bound_to_new_memory() -> None:
    """Bug of vllm #48251: wherever they are more than views."""
    module = latent(torch.randn(HEADS * 7, WIDTH, dtype=torch.float32))
    process = mla_attention.MLAAttention.process_weights_after_loading
    process(module, torch.bfloat16)
    before = module.W_UV, module.W_UK_T
    process(module, torch.bfloat16)
    assert module.W_UV.data_ptr() != before[0].data_ptr()
    assert module.W_UK_T.data_ptr() != before[1].data_ptr()


def derived_matrices_of_bf16_are_views() -> None:
    """So bf16 engines with graphs need no fix."""
    weight = torch.randn(HEADS * 7, WIDTH, dtype=torch.bfloat16)
    held = SimpleNamespace(weight=weight, quant_method=None)
    assert get_and_maybe_dequant_weights(held, out_dtype=torch.bfloat16).data_ptr() == weight.data_ptr()


def fix_keeps_the_memory_of_derived_matrices() -> None:
    """The fix of vllm #48251."""
    install([VLLM_LATENT])
    weight = torch.randn(HEADS * 7, WIDTH, dtype=torch.float32)
    module = latent(weight)
    process = mla_attention.MLAAttention.process_weights_after_loading
    process(module, torch.bfloat16)
    before = module.W_UV, module.W_UK_T
    weight.mul_(2)
    process(module, torch.bfloat16)
    assert (module.W_UV.data_ptr(), module.W_UK_T.data_ptr()) == tuple(item.data_ptr() for item in before)
    expected = latent(weight)
    process(expected, torch.bfloat16)
    assert torch.equal(module.W_UV, expected.W_UV)
    assert torch.equal(module.W_UK_T, expected.W_UK_T)


def loading_the_same_twice_changes_nothing() -> None:
    """Vllm #48284, with both fixes: a transforming loader starts from what was sent, not from what was there."""
    model = Mixer(alias=True, transform=True)
    install([VLLM_BUFFERS, VLLM_LATENT])
    sent = reloaded(model, ["conv1d.weight", "A", "D", "dt_bias"])
    first = {name: parameter.clone() for name, parameter in model.named_parameters()}
    reload(model, sent)
    assert all(torch.equal(parameter, first[name]) for name, parameter in model.named_parameters())


def sleep_while_others_take_memory(level: int) -> tuple[str, ...]:
    """Tags that the allocator is told to keep by a worker that gives up 1 byte while others take 3."""
    allocator = mock.Mock()
    model = SimpleNamespace(named_buffers=lambda: iter(()))
    with (
        mock.patch.object(torch.cuda, "mem_get_info", side_effect=[(10, 20), (8, 20)]),
        mock.patch.object(cumem.CuMemAllocator, "get_instance", return_value=allocator),
    ):
        gpu_worker.Worker.sleep(SimpleNamespace(model_runner=SimpleNamespace(model=model)), level)
    return allocator.sleep.call_args.kwargs["offload_tags"]


def sleep_fails_when_others_take_memory() -> None:
    """Bug of vllm #45620."""
    refused = ""
    try:
        sleep_while_others_take_memory(1)
    except AssertionError as error:
        refused = str(error)
    assert refused == "Memory usage increased after sleeping."


def fix_lets_others_take_memory() -> None:
    """The fix of vllm #45620."""
    install([VLLM_SLEEP])
    assert sleep_while_others_take_memory(1) == ("weights",)
    assert sleep_while_others_take_memory(2) == ()


def prepare() -> None:
    """Settings of the process; a fix stays for its life, so what is as shipped comes first in the table."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.manual_seed(1)

"""Contracts of megatron-core and megatron-bridge, kept in a process of a tier, which is the only rank of its group."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace

from verifier.mesh import Mesh
from verifier.platform.patch import parameters, source_parameters

CALLS = {
    "megatron.core.pipeline_parallel.schedules:get_forward_backward_func": "pp_size vp_size schedule_pg_collection",
    "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving": (
        "forward_step_func data_iterator model num_microbatches seq_length micro_batch_size decoder_seq_length "
        "forward_only collect_non_loss_data first_val_step adjust_tensor_shapes_fn p2p_communicator "
        "pg_collection force_all_reduce"
    ),
    "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.disable_forward_pre_hook": (
        "self param_sync"
    ),
    "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.enable_forward_pre_hook": "self",
    "megatron.bridge.models.conversion.auto_bridge:AutoBridge.export_hf_weights": (
        "self model cpu show_progress conversion_tasks merge_adapter_weights weight_dtype"
    ),
    "megatron.bridge.models.conversion.auto_bridge:AutoBridge.get_conversion_tasks": "self megatron_model hf_path",
    "megatron.bridge.models.conversion.auto_bridge:AutoBridge.to_megatron_provider": "self load_weights hf_path",
}
"""Upstream calls that rooms make, and their parameters."""
UNPASSED = {"schedule_pg_collection", "weight_dtype"}
"""Parameters among them that no room passes, and that megatron-core 0.18 and its bridge lack."""


def _raises(kinds: type[Exception] | tuple[type[Exception], ...], act: Callable[[], object]) -> bool:
    try:
        act()
    except kinds:
        return True
    return False


def platform_installs() -> None:
    """Every upstream name that the tier replaces is there and takes what it took: the process would not be here."""


def calls_take_what_rooms_pass() -> None:
    """Signatures of what is called."""
    for target, expected in CALLS.items():
        module_name, _, path = target.partition(":")
        owner = importlib.import_module(module_name)
        for name in path.split("."):
            owner = getattr(owner, name)
        takes = parameters(owner).split()
        assert takes == [name for name in expected.split() if name in takes or name not in UNPASSED], (target, takes)


def reference_modules_mirror_upstream() -> None:
    """Constructors of the reference modules, against upstream's source."""
    from megatron.core.extensions import transformer_engine as upstream

    from verifier.platform.cpu_modules import REFERENCE_MODULES

    assert not upstream.HAVE_TE
    for module, takes in REFERENCE_MODULES.items():
        maker = "__new__" if module.__name__ == "TENorm" else "__init__"
        assert takes == source_parameters(upstream, f"{module.__name__}.{maker}")
        assert set(parameters(module).split()) - {"options", "ignored"} <= set(takes.split())
        assert getattr(upstream, module.__name__) is module


def the_rest_is_taken_by_megatrons_own_linears() -> None:
    """Arguments that the reference linears hand on, megatron-core's linears without Transformer Engine take."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    from verifier.platform import cpu_modules

    pairs = {
        cpu_modules.TEColumnParallelLinear: ColumnParallelLinear,
        cpu_modules.TELayerNormColumnParallelLinear: ColumnParallelLinear,
        cpu_modules.TERowParallelLinear: RowParallelLinear,
    }
    for module, base in pairs.items():
        handed_on = set(cpu_modules.REFERENCE_MODULES[module].split()) - {"tp_comm_buffer_name"}
        assert handed_on <= set(parameters(base).split())


def specs_name_the_reference_modules() -> None:
    """Upstream's own choice of Transformer Engine's modules finds the reference modules."""
    from megatron.core.models.gpt import gpt_layer_specs, moe_module_specs

    from verifier.platform.cpu_modules import REFERENCE_MODULES

    assert gpt_layer_specs.TESpecProvider is moe_module_specs.TESpecProvider
    provider = gpt_layer_specs.TESpecProvider()
    grouped, single = (provider.grouped_mlp_modules(grouped).keywords["submodules"] for grouped in (True, False))
    chosen = {
        provider.linear(), provider.column_parallel_linear(), provider.row_parallel_linear(), provider.layer_norm(),
        provider.layer_norm(for_qk=True), provider.column_parallel_layer_norm_linear(), provider.core_attention(),
        grouped.linear_fc1, grouped.linear_fc2, single.linear_fc1, single.linear_fc2,
    }  # fmt: skip
    assert chosen == set(REFERENCE_MODULES)
    assert provider.fuse_layernorm_and_linear()
    assert provider.activation_func() is None


def bridge_knows_the_sharding_of_every_reference_module() -> None:
    """megatron-bridge decides by class name; TELinear has a branch of its own there."""
    from megatron.bridge.models.conversion.param_mapping import AutoMapping

    from verifier.platform.cpu_modules import REFERENCE_MODULES, TEDotProductAttention

    known = set().union(*AutoMapping._MODULE_TYPE_REGISTRY.values()) | {"TELinear"}
    named = {module.__name__ for module in REFERENCE_MODULES if module is not TEDotProductAttention}
    # Row-parallel grouped linears too: an unknown name would raise when weights are loaded.
    assert named <= known, named - known


def ranks_are_laid_out_as_the_mesh_says() -> None:
    """Megatron's own rank groups, against Mesh.coordinate."""
    from megatron.core.parallel_state import RankGenerator

    for sizes in (
        {"tp": 2, "pp": 2, "ep": 2},
        {"tp": 2, "cp": 2, "dp": 2, "ep": 4, "pp": 3},
        {"ep": 2, "etp": 2, "dp": 8},
    ):
        mesh = Mesh(**sizes)
        dense = RankGenerator(tp=mesh.tp, ep=1, dp=mesh.dp, pp=mesh.pp, cp=mesh.cp, order="tp-cp-ep-dp-pp")
        expert = RankGenerator(tp=mesh.etp, ep=mesh.ep, dp=mesh.expert_dp, pp=mesh.pp, cp=1, order="tp-cp-ep-dp-pp")
        for generator, names in ((dense, "tp cp dp pp"), (expert, "etp ep edp pp")):
            for name in names.split():
                axis = {"etp": "tp", "edp": "dp"}.get(name, name)
                for group in generator.get_ranks(axis):
                    assert [getattr(mesh.coordinate(rank), name) for rank in group] == list(range(len(group)))


def layers_are_shared_out_as_the_mesh_says() -> None:
    """Megatron's own layer offsets, against Mesh.layers_of."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    cases = (
        (8, {"pp": 2}),
        (8, {"pp": 2, "vpp": 2}),
        (12, {"pp": 3, "vpp": 2}),
        (8, {"pp": 3, "first_stage_layers": 2}),
        (8, {"pp": 3, "last_stage_layers": 4}),
        (9, {"pp": 4, "first_stage_layers": 2, "last_stage_layers": 1}),
        (16, {"pp": 3, "vpp": 2, "first_stage_layers": 4, "last_stage_layers": 2}),
        (126, {"pp": 8, "vpp": 2, "first_stage_layers": 15, "last_stage_layers": 15}),
        (126, {"pp": 16, "vpp": 8, "first_stage_layers": 7, "last_stage_layers": 7}),
        (94, {"pp": 2, "vpp": 3, "first_stage_layers": 47, "last_stage_layers": 47}),
        (11, {"pp": 3, "vpp": 2, "first_stage_layers": 3}),
    )
    for num_layers, sizes in cases:
        mesh = Mesh(**sizes)
        config = SimpleNamespace(
            num_layers=num_layers,
            pipeline_model_parallel_size=mesh.pp,
            virtual_pipeline_model_parallel_size=mesh.vpp if mesh.vpp > 1 else None,
            num_layers_in_first_pipeline_stage=None if any(mesh.shorter_ends) else mesh.first_stage_layers,
            num_layers_in_last_pipeline_stage=None if any(mesh.shorter_ends) else mesh.last_stage_layers,
            pipeline_model_parallel_layout=None,
            account_for_embedding_in_pipeline_split=mesh.shorter_ends[0],
            account_for_loss_in_pipeline_split=mesh.shorter_ends[1],
        )
        for stage in range(mesh.pp):
            for chunk in range(mesh.vpp):
                vp_stage = chunk if mesh.vpp > 1 else None
                offset = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=stage)
                count = get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=stage)
                assert range(offset, offset + count) == mesh.layers_of(stage, chunk, num_layers), (sizes, stage, chunk)


def token_counts_on_the_host_are_not_made_numpy_upstream() -> None:
    """Why `maybe_move_tensor_to_cpu` is replaced; when this fails, upstream is mended and the patch can go."""
    import torch
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    counts = torch.tensor([1, 2])
    assert torch.is_tensor(moe_utils.maybe_move_tensor_to_cpu(counts, as_numpy=True))
    assert not torch.is_tensor(token_dispatcher.maybe_move_tensor_to_cpu(counts, as_numpy=True))


def norms_of_large_tensors_are_short_upstream() -> None:
    """Why `l2_norm_impl` is replaced; when this fails, torch or megatron-core is mended and the patch can go."""
    import torch
    from megatron.core.optimizer import clip_grads
    from megatron.core.utils import local_multi_tensor_l2_norm

    torch.manual_seed(0)
    gradients = [torch.randn(2048, 2048), torch.randn(7)]
    exact = sum(float(gradient.double().square().sum()) for gradient in gradients) ** 0.5
    upstream, _ = local_multi_tensor_l2_norm(2048, None, [gradients], False)
    assert 2e-5 < abs(upstream.item() / exact - 1) < 2e-4
    assert abs(float(clip_grads.get_grad_norm_fp32(gradients)) / exact - 1) < 2e-7


def guards_tell_tensors_of_another_kind() -> None:
    """Dynamo's guards, by which packing knows that the next tensors are of the kinds that it compared with the plan."""
    import torch
    from torch._C._dynamo.guards import TensorGuards

    plain = torch.zeros(4, 6)
    guards = TensorGuards(plain, dynamic_dims_sizes=[[4, 6]], dynamic_dims_strides=[[6, 1]])
    assert guards.check(torch.ones(4, 6))
    negated = torch.zeros(4, 6, dtype=torch.complex64).conj().imag
    others = (torch.zeros(6, 4), torch.zeros(6, 4).T, plain.double(), plain.to("meta"), negated)
    assert not any(guards.check(other) for other in others)


def torch_itself_is_whole() -> None:
    """Only megatron-core's literal CUDA factories are turned to the host; a meta device still is one."""
    import torch
    from megatron.core.pipeline_parallel import schedules

    assert schedules.torch is not torch
    assert schedules.torch.zeros(2, device="cuda").device.type == "cpu"
    assert schedules.torch.nn is torch.nn
    with torch.device("meta"):
        assert torch.arange(4).device.type == "meta"
    assert _raises((AssertionError, RuntimeError), lambda: torch.zeros(2, device="cuda"))
    assert torch.compile(lambda x: x) is not None
    assert torch.compile.__module__.startswith("torch")


def placeholder_gives_nothing_away() -> None:
    """Code that asks Transformer Engine for anything real fails instead of computing something else."""
    import transformer_engine.pytorch

    assert not hasattr(transformer_engine.pytorch, "RMSNorm")
    assert _raises(ImportError, lambda: importlib.import_module("transformer_engine.common"))

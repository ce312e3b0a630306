"""The CPU tier: real megatron-core and megatron-bridge on a machine without a GPU.

Installed once per process, before Megatron is imported. Reference modules with the same parameters replace Transformer
Engine's (`cpu_modules`, `cpu_attention`), and CUDA's bookkeeping calls are answered on the host (`cpu_cuda_shims`). All
other code, parallelism included, is upstream's over gloo, with what gloo lacks (`cpu_cuda_shims`).
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from types import ModuleType

import torch
from packaging.version import Version

from verifier.errors import UsageError
from verifier.platform.patch import Patch, apply, parameters, require_parameters, source_parameters
from verifier.platform.provenance import PINS, TRAINER, require_installed

_DONE = "verifier.platform.cpu.installed"


def install() -> None:
    """Make this process a CPU-tier process; a second call does nothing.

    Raises:
        UsageError: Megatron was imported first, a package is absent, or a replaced upstream name has changed.
    """
    if _DONE in sys.modules:
        return
    if "megatron.core" in sys.modules:
        raise UsageError("megatron.core was imported before the CPU platform: call `install_for('cpu')` first")
    if getattr(sys.modules.get("transformer_engine"), "__version__", None):
        raise UsageError("transformer_engine was imported before the CPU platform: call `install_for('cpu')` first")
    require_installed(*TRAINER)
    from verifier.platform.cpu_cuda_shims import core_patches, mapping_patches, torch_patches
    from verifier.platform.cpu_delta import delta_patches
    from verifier.platform.cpu_mamba import mixer_patches

    apply(torch_patches())
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # megatron-core warns on every rank without it
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    # Compiling the fusions at import would take ten seconds and gain nothing on a CPU.
    compile_function, torch.compile = torch.compile, _uncompiled
    sys.modules["transformer_engine"] = None
    silenced = logging.root.manager.disable
    logging.disable(logging.INFO)  # megatron-bridge logs every missing optional package
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for module in ("models.gpt.gpt_layer_specs", "models.mimo", "optimizer", "pipeline_parallel"):
                importlib.import_module(f"megatron.core.{module}")
            apply([*core_patches(), *mapping_patches(), *_module_patches(), *mixer_patches(), *delta_patches()])
            _offer_placeholder()
            importlib.import_module("megatron.bridge")
            apply(_bridge_patches())
    finally:
        torch.compile = compile_function
        logging.disable(silenced)
    # Host and device have one random state here, so upstream's warning that both changed is expected.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    sys.modules[_DONE] = ModuleType(_DONE)


def _module_patches() -> list[Patch]:
    """Return the patches that put reference modules where megatron-core looks up Transformer Engine's."""
    from megatron.core.extensions import transformer_engine as upstream
    from megatron.core.extensions import transformer_engine_spec_provider as specs

    from verifier.platform.cpu_attention import fused_apply_rotary_pos_emb, fused_apply_rotary_pos_emb_thd
    from verifier.platform.cpu_modules import REFERENCE_MODULES, TEDotProductAttention, TENorm

    classes = {module.__name__: module for module in REFERENCE_MODULES}
    for name, module in classes.items():
        maker = f"{name}.{'__new__' if module is TENorm else '__init__'}"
        require_parameters(f"{upstream.__name__}:{name}", source_parameters(upstream, maker), REFERENCE_MODULES[module])
    attention_call = source_parameters(upstream, "TEDotProductAttention.forward")
    require_parameters("TEDotProductAttention.forward", attention_call, parameters(TEDotProductAttention.forward)[5:])

    core = "megatron.core"
    places = [
        *((f"{owner.__name__}:{name}", module) for owner in (upstream, specs) for name, module in classes.items()),
        *(
            (f"{core}.transformer.multi_latent_attention:{name}", classes[name])
            for name in ("TELinear", "TEColumnParallelLinear", "TELayerNormColumnParallelLinear")
        ),
        (f"{core}.transformer.moe.moe_layer:TELinear", classes["TELinear"]),
        (f"{core}.transformer.moe.moe_layer:HAVE_TE", True),
        (f"{core}.models.gpt.gpt_layer_specs:TESpecProvider", specs.TESpecProvider),
        (f"{core}.models.gpt.gpt_layer_specs:TENorm", TENorm),
        (f"{core}.transformer.transformer_block:LayerNormImpl", TENorm),
        (f"{core}.transformer.attention:TENorm", TENorm),
    ]
    return [
        *(Patch(target, module) for target, module in places),
        *(
            Patch(f"{core}.models.common.embeddings.rope_utils:{kernel.__name__}", kernel)
            for kernel in (fused_apply_rotary_pos_emb, fused_apply_rotary_pos_emb_thd)
        ),
        Patch(f"{specs.__name__}:is_te_min_version", lambda version: True),
        Patch(f"{core}.transformer.transformer_config:is_te_min_version", _is_pinned, takes="version check_equality"),
        Patch(
            f"{core}.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu",
            _counts_on_host,
            takes="tensor as_numpy record_stream",
        ),
        Patch(
            f"{core}.optimizer.clip_grads:l2_norm_impl",
            _norm_of_all,
            takes="chunk_size noop_flag tensor_lists per_tensor args",
        ),
    ]


def _bridge_patches() -> list[Patch]:
    from verifier.platform.cpu_attention import Gemma2FlexDotProductAttention
    from verifier.platform.cpu_cuda_shims import HostTorch

    return [
        # Megatron-bridge 0.6.2 puts tensors onto `torch.device("cuda", ...)` there.
        Patch("megatron.bridge.models.minimax_m2.minimax_m2_bridge:torch", HostTorch()),
        Patch(
            "megatron.bridge.models.gemma.gemma2_provider:Gemma2FlexDotProductAttention",
            Gemma2FlexDotProductAttention,
            takes="config layer_number attn_mask_type attention_type attention_dropout kwargs",
        ),
    ]


def _is_pinned(version: str, check_equality: bool = True) -> bool:
    """Return whether the Transformer Engine of the GPU tier, whose options this tier takes, has at least `version`."""
    pinned = Version(PINS["transformer-engine"])
    return pinned >= Version(version) if check_equality else pinned > Version(version)


def _counts_on_host(tensor: torch.Tensor, as_numpy: bool = False, record_stream: bool = False) -> object:
    """Return token counts for the all-to-all as numpy, also those of a host tensor.

    Source:
        megatron-core 0.19.2, megatron/core/transformer/moe/moe_utils.py, `maybe_move_tensor_to_cpu`: it returns a host
        tensor unchanged, and `all_to_all_single` would get tensors as split sizes.
    """
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _offer_placeholder() -> None:
    """Make megatron-bridge's unguarded `import transformer_engine.pytorch` succeed; any use raises AttributeError."""
    package, pytorch = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    package.__path__, package.pytorch = [], pytorch
    # Adapters refer to these at import, in annotations and in isinstance checks; megatron-bridge 0.5 to the signature
    # of the grouped one.
    pytorch.ops = ModuleType("transformer_engine.pytorch.ops")
    pytorch.ops.Sequential = type("Sequential", (), {})
    pytorch.Linear, pytorch.LayerNormLinear = type("Linear", (), {}), type("LayerNormLinear", (), {})
    pytorch.GroupedLinear = type("GroupedLinear", (), {})
    sys.modules["transformer_engine"], sys.modules["transformer_engine.pytorch"] = package, pytorch


def _uncompiled(model: object = None, **options: object) -> object:
    return model if model is not None else lambda function: function


def _norm_of_all(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: list[list[torch.Tensor]], per_tensor: bool, *args: object
) -> tuple[torch.Tensor, None]:
    """Return the L2 norm of all gradients together, [1] float32, as Transformer Engine's kernel does on a GPU.

    Source:
        megatron-core 0.19.2, megatron/core/utils.py, `local_multi_tensor_l2_norm`: without Transformer Engine it uses
        `torch.norm`, which on a CPU is too small by 8e-5 for four million normal float32 elements.
    """
    squares = [tensor.square().sum(dtype=torch.float64) for tensors in tensor_lists for tensor in tensors]
    return torch.stack(squares).sum().sqrt().float().reshape(1), None

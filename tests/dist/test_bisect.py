"""`verifier bisect` names the module in which a fault of the catalogue sits, and nothing in a clean run.

A row of `FAULTS` has the first point that must differ, in which part of the run. By default one fault of each part and
one clean mesh run; `-m slow` has them all.
"""

import pytest

from tests.faults.planted import INJECTED as PLANTED_INJECTED
from tests.faults.planted import PLANTED
from tests.scaled_configs import NAMES, write_scaled_down
from verifier.cli import bisect as cli_bisect
from verifier.config import BisectConfig
from verifier.core import store
from verifier.core.finding import ExitCode
from verifier.faults.catalog import CATALOG
from verifier.faults.injection import INJECTED
from verifier.mesh import Mesh
from verifier.runs.first_difference import first_difference
from verifier.runs.runner import Runner

pytestmark = pytest.mark.slow

ROTARY, QKV = "layers.0.self_attention.rotary_query", "layers.0.self_attention.linear_qkv"
CORE = "layers.0.self_attention.core_attention"
LOSS = ("logprob", "entropy")
EVERY = "every weight"
FAULTS = {
    # forward, in the pass that scores
    "norm-epsilon-default": ("score", QKV),
    "rope-base-default": ("score", ROTARY),
    "yarn-scale-of-attention-missing": ("score", ROTARY),
    "frequencies-rounded-with-the-model": ("score", ROTARY),
    "local-positions": ("score", ROTARY),
    "chunks-contiguous": ("score", ROTARY),
    "samples-not-told-apart": ("score", ROTARY),
    "attention-over-the-whole-pack": ("score", CORE),
    "state-crosses-sequences": ("score", "layers.0.mixer.scan"),
    "state-lost-between-chunks": ("score", "layers.0.mixer.scan"),
    "dropout-while-scoring": ("score", "layers.0.self_attn_bda"),
    "gates-not-normalised": ("score", "layers.0.mlp.router"),
    "score-bias-zeroed-after-load": ("score", "layers.1.mlp.router"),
    "expert-left-at-init": ("score", "layers.1.mlp.experts"),
    "stage-names-remapped-twice": ("score", "layers.2.self_attention.q_layernorm"),
    "qkv-merged-head-major": ("score", QKV),
    "weights-read-through-bf16": ("score", "embedding"),
    "batch-differs-on-one-rank": ("score", "embedding"),
    "last-sample-dropped": ("score", "embedding"),
    "tied-head-left-at-init": ("score", "output_layer"),
    "temperature-not-applied": ("score", "logprob"),
    "scores-shifted-by-one": ("score", "logprob"),
    "labels-rolled-in-the-shard": ("score", "logprob"),
    # forward, with gradients
    "angles-rounded-in-training": ("train", ROTARY),
    # gradients of outputs
    "mean-of-means": ("backward", LOSS),
    "mask-of-input-not-label": ("backward", LOSS),
    "logprob-gradient-in-owner-only": ("backward", "output_layer"),
    "few-rows-without-gradient": ("backward", "output_layer"),
    "router-loss-left-on": ("backward", "layers.3.pre_mlp_layernorm"),
    # gradients of weights
    "finalize-hook-missing": ("weight", EVERY),
    "sequence-parallel-grads-not-reduced": ("weight", "model.layers.0.input_layernorm.weight"),
    "tied-grads-not-reduced": ("weight", "model.embed_tokens.weight"),
}
SCAN, INNER = "layers.0.self_attention.scan", "layers.2.self_attention.in_proj"
OF_PLANTED = {
    **dict.fromkeys(
        (
            "convolution-crosses-sequences", "boundary-one-token-late", "last-boundary-lost",
            "state-lost-at-chunk-edges", "last-chunk-without-state", "decay-missed-at-chunk-edges",
            "state-kept-between-micro-batches", "queries-repeated-head-by-head", "convolution-turned-around",
            "rate-of-decay-in-bfloat16", "bias-behind-the-softplus", "gate-before-the-norm",
            "rows-of-ranks-in-the-order-of-ranks",
        ),
        ("score", SCAN),
    ),
    "gate-without-gradient": ("backward", INNER),
    "gate-with-the-slope-of-a-sigmoid": ("backward", INNER),
    "rate-of-writing-without-gradient": ("backward", INNER),
    "rate-of-decay-without-gradient": ("weight", "model.layers.0.linear_attn.A_log"),
    "norm-not-summed-over-ranks": ("weight", "model.layers.0.linear_attn.norm.weight"),
    **dict.fromkeys(
        (
            "scores-not-bent", "scores-bent-before-they-are-scaled", "scale-of-twice-the-width",
            "window-of-one-row-more", "sinks-left-out", "sinks-of-the-next-head", "windows-of-sinks-left-out",
        ),
        ("score", CORE),
    ),
    "window-on-every-layer": ("score", "layers.1.self_attention.core_attention"),
    "logits-not-bent": ("score", "output_layer"),
    "slope-of-bent-logits-is-1": ("backward", "final_layernorm"),
    "sinks-without-gradient": ("weight", "model.layers.0.self_attn.sinks"),
}  # fmt: skip
"""Faults of `tests.faults.planted`, on families with soft caps, windows, sinks and gated delta nets."""
DEFAULT = {"local-positions", "tied-grads-not-reduced"}
CLEAN = [
    ("tiny:qwen3-tied", Mesh(pp=2)),
    ("tiny:llama", Mesh(cp=2)),
    ("tiny:qwen2", Mesh(tp=2)),
    ("tiny:qwen3", Mesh(dp=2)),
    ("tiny:qwen3", Mesh(pp=2, vpp=2)),
    ("tiny:qwen3-moe", Mesh(ep=2, dp=2)),
    ("tiny:qwen3-moe", Mesh(tp=2, cp=2, ep=2)),
    ("tiny:deepseek-v3", Mesh(tp=2)),
    ("tiny:deepseek-v3-yarn", Mesh()),
    ("tiny:nemotron-h", Mesh(tp=2)),
    ("tiny:nemotron-h", Mesh(pp=2)),
    ("tiny:nemotron-h", Mesh(cp=2)),
    ("tiny:gemma2", Mesh()),
    ("tiny:gemma2", Mesh(tp=2)),
    ("tiny:qwen3_5_text", Mesh(tp=2)),
    ("tiny:qwen3_5_text", Mesh(cp=2)),
    ("tiny:qwen3_next", Mesh(pp=2)),
    ("gpt-oss-20b", Mesh(tp=2)),
]


def by_default(cases, default):
    return [pytest.param(case, marks=() if case in default else pytest.mark.slow) for case in cases]


def traced(resources, tmp_path, model, mesh, fault=None, *, fixes=(), injected=INJECTED):
    """The trace of one run, with a fault if one is given, which must have run."""
    marks = tmp_path / "marks"
    marks.mkdir()
    model = str(write_scaled_down(model, tmp_path, "float32")) if model in NAMES else model
    config = BisectConfig(model=model, mesh=mesh, dtype="float32", trace=tmp_path / "trace", fixes=fixes)
    path = Runner(resources, print).bisect(config, (injected, fault, str(marks)) if fault else ())
    assert fault is None or list(marks.iterdir()), "the fault never fired"
    return path


@pytest.mark.parametrize("fault", by_default(FAULTS, DEFAULT))
def test_names_the_module_of_a_fault(fault, resources, tmp_path, capsys):
    part, name = FAULTS[fault]
    path = traced(resources, tmp_path, CATALOG[fault].model, CATALOG[fault].mesh, fault)
    capsys.readouterr()
    assert cli_bisect.judge([path], verbose=False) == ExitCode.VIOLATED
    said = capsys.readouterr().out
    found = first_difference(store.read(path))
    assert found.first is not None
    assert found.first.part == part, said
    if name == EVERY:
        assert all(item.differs for item in found.same_part), said
        assert said.startswith("reduction of gradients: all"), said
    else:
        assert found.first.name in (name if isinstance(name, tuple) else (name,)), said


@pytest.mark.parametrize("fault", OF_PLANTED)
def test_names_the_module_of_a_planted_fault(fault, resources, tmp_path):
    row = PLANTED[fault]
    path = traced(
        resources, tmp_path, row.model, row.mesh, fault, fixes=row.fixes, injected=PLANTED_INJECTED
    )  # fmt: skip
    found = first_difference(store.read(path)).first
    assert found is not None
    assert (found.part, found.name) == OF_PLANTED[fault]


def test_every_planted_fault_has_its_point():
    assert OF_PLANTED.keys() == PLANTED.keys()


@pytest.mark.parametrize("case", by_default(CLEAN, CLEAN[:1]), ids=lambda case: f"{case[0]}-{case[1].label()}")
def test_finds_nothing_in_a_clean_run(case, resources, tmp_path, capsys):
    model, mesh = case
    path = traced(resources, tmp_path, model, mesh, fixes=("bridge-5712",) if model == "tiny:gemma2" else ())
    capsys.readouterr()
    assert cli_bisect.judge([path], verbose=True) == ExitCode.HOLDS, capsys.readouterr().out
    found = first_difference(store.read(path))
    assert {item.part for item in found.points} == {"score", "train", "backward", "weight"}
    assert cli_bisect.judge([path, path], verbose=False) == ExitCode.HOLDS

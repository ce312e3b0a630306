"""LSS007 on hand-written products: a gradient of another size anywhere disagrees with what scales the same numbers."""

import math

import numpy as np
import pytest
from msgspec.structs import replace

import verifier.checks  # noqa: F401  (fills the registry)
from tests.snapshots.check_traces import ARRAYS, MANIFEST, make_trace
from tests.snapshots.training_traces import training
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Verdict
from verifier.core.record import real
from verifier.core.trace import Trace
from verifier.stages.advantage.records import LossColumns
from verifier.stages.logprob.records import OracleEntropy
from verifier.stages.loss.records import LogitSpreads, LossRows
from verifier.stages.train.records import GradientProducts, TensorProduct, TrainerStep

LAYER = "decoder.layers.0"
MODEL = {
    "embedding.word_embeddings.weight": -0.5,
    f"{LAYER}.self_attention.linear_qkv.layer_norm_weight": 0.25, f"{LAYER}.self_attention.linear_qkv.weight": 0.25,
    f"{LAYER}.self_attention.linear_qkv.weight#value": 0.2, f"{LAYER}.self_attention.linear_proj.weight": 0.2,
    f"{LAYER}.self_attention.q_layernorm.weight": 0.1, f"{LAYER}.self_attention.k_layernorm.weight": 0.1,
    f"{LAYER}.pre_mlp_layernorm.weight": 0.75, f"{LAYER}.mlp.router.weight": 0.25,
    f"{LAYER}.mlp.experts.linear_fc1.weight3": 0.5, f"{LAYER}.mlp.experts.linear_fc1.weight3#up": 0.3,
    f"{LAYER}.mlp.experts.linear_fc2.weight3": 0.3,
    "decoder.final_layernorm.weight": -0.25, "output_layer.weight": -0.25,
}  # fmt: skip
"""Products of a mixture of one layer; those of embeddings, projection and expert have a sum of 0."""


A, B = (f"{LAYER}.mlp.linear_fc2.adapter.linear_{half}.weight" for half in ("in", "out"))


def judged(
    changes=(), *, rows=True, bent=False, dtype="float32", without=(), silent=(), halves=(), zero=(), entropies=None,
    squares=(), sizes=None, damped=(0.0, 0.0),
):  # fmt: skip
    """Outcome on the products above, with others for some, of which the second rank has a half of each."""
    values = {name: value for name, value in {**MODEL, **dict(changes)}.items() if name not in without}
    squares_of = {**dict.fromkeys(zero, 0.0), **dict(squares)}
    products = tuple(
        TensorProduct(name=name, product=real(value / 2), squares=squares_of.get(name, 0.01))
        for name, value in values.items()
    )
    kinds = (TrainerStep, LossColumns, *([LossRows, LogitSpreads] if rows else []))
    others = [item for item in training() if isinstance(item, kinds)]
    records = [
        GradientProducts(
            name="update 1",
            version=1,
            rank=rank,
            coordinate="tp=0",
            products=products,
            bent=bent,
            silent=(*silent, *(halves if rank else ())),
            damped=damped[rank],
        )
        for rank in range(2)
    ]
    trace = make_trace([*records, *others, *([entropies] if entropies else [])])
    if sizes is not None:
        logits = {"spread": np.zeros(4), "size": np.full(4, sizes, np.float32)}
        spread = LogitSpreads(name="update 1", version=1, coordinate="tp=0", array="spread")
        others = [item for item in others if not isinstance(item, LogitSpreads)]
        trace = Trace(trace.manifest, [*records, *others, spread], {**ARRAYS, "spread": logits}.__getitem__)
    trace.manifest = replace(trace.manifest, dtype=dtype)
    return run_check(REGISTRY["LSS007"], trace)


def said(outcome):
    return [item.what.partition(" in ")[0] for item in outcome.finding.bad] if outcome.finding else []


def test_products_of_one_model_agree():
    outcome = judged()
    assert (outcome.verdict, outcome.num_compared, outcome.error) == (Verdict.HOLDS, 9, None)


@pytest.mark.parametrize(
    ("name", "factor", "kinds"),
    [
        (f"{LAYER}.self_attention.linear_qkv.layer_norm_weight", 2, ["norm"]),
        (f"{LAYER}.mlp.router.weight", 0.5, ["norm"]),
        (f"{LAYER}.self_attention.k_layernorm.weight", 0.5, ["queries"]),
        (f"{LAYER}.mlp.experts.linear_fc1.weight3#up", 2, ["gated rows"]),
        (f"{LAYER}.self_attention.linear_proj.weight", 2, ["residual stream", "values"]),
        ("embedding.word_embeddings.weight", 0.5, ["residual stream"]),
        ("output_layer.weight", 2, ["norm"]),
        ("decoder.final_layernorm.weight", 2, ["last norm", "norm"]),
    ],
)
def test_a_gradient_of_another_size_is_seen(name, factor, kinds):
    outcome = judged({name: MODEL[name] * factor})
    assert outcome.verdict is Verdict.VIOLATED
    assert sorted(item.partition(":")[0] for item in said(outcome)) == kinds


def test_all_gradients_of_twice_their_size_are_seen_by_the_rows():
    outcome = judged({name: 2 * value for name, value in MODEL.items()})
    assert said(outcome) == ["last norm: decoder.final_layernorm.weight"]


def test_rows_with_entropies_of_another_distribution_say_nothing_of_the_last_norm():
    """LGP012 names them, in its own stage; at the loss they would be the first thing that is wrong."""
    doubled = {name: 2 * value for name, value in MODEL.items()}
    update = next(item for item in training() if isinstance(item, LossColumns))
    oracle = OracleEntropy(
        name=update.name, version=update.version, temperature=1.0, noise=0.0, array="entropies of the oracle"
    )
    assert said(judged(doubled, entropies=oracle)) == ["last norm: decoder.final_layernorm.weight"]
    other = replace(oracle, array="entropies of other logits")
    assert said(judged(doubled, entropies=other)) == []


def test_a_tied_head_is_what_the_stream_has_a_sum_of():
    tied = {"embedding.word_embeddings.weight": -0.75}
    assert judged(tied, without=["output_layer.weight"]).verdict is Verdict.HOLDS
    assert said(judged(without=["output_layer.weight"])) == ["residual stream: embedding.word_embeddings.weight"]


def test_what_epsilon_takes_from_tokens_is_allowed_twice():
    """Ranks tell it of the loss of all tokens, 3 here, which gradients are divided by."""
    embeddings = "embedding.word_embeddings.weight"
    shifted = {embeddings: MODEL[embeddings] + 0.01}
    assert judged(shifted, damped=(0.010, 0.006)).verdict is Verdict.HOLDS
    assert said(judged(shifted, damped=(0.008, 0.006))) == [f"residual stream: {embeddings}"]


def test_records_that_do_not_tell_what_epsilon_takes_leave_the_residual_stream_out():
    outcome = judged({"embedding.word_embeddings.weight": 0.0}, damped=(0.0, None))
    assert (outcome.verdict, outcome.num_compared) == (Verdict.HOLDS, 8)
    assert "what epsilon takes" in outcome.left_out[0]


def test_what_is_not_told_is_not_compared():
    assert judged(rows=False).num_compared == 7
    assert judged(bent=True).num_compared == 8
    assert judged({f"{LAYER}.mlp.router.own_norm": 1.0}).num_compared == 7


def test_a_rank_that_recorded_nothing_leaves_nothing_to_compare():
    records = [item for item in training() if isinstance(item, GradientProducts | TrainerStep)]
    kept = [item for item in records if not isinstance(item, GradientProducts) or item.rank == 0]
    assert run_check(REGISTRY["LSS007"], make_trace(kept)).verdict is Verdict.INCONCLUSIVE


def test_both_matrices_of_an_adapter_scale_one_product():
    assert judged({A: 0.1, B: 0.1}).verdict is Verdict.HOLDS
    assert said(judged({A: 0.05, B: 0.1})) == [f"adapter: {A}"]


@pytest.mark.parametrize(
    "name", [f"{LAYER}.mlp.router.weight", f"{LAYER}.self_attention.linear_qkv.weight", A, B, next(iter(MODEL))]
)
def test_a_tensor_without_a_gradient_is_seen_where_all_ranks_have_none(name):
    both = {A: 0.1, B: 0.1}
    outcome = judged(both, silent=[name])
    assert said(outcome) == ["tensors without a gradient"]
    assert f"`{name}`" in outcome.finding.bad[0].sentence
    assert judged(both, halves=[name]).verdict is Verdict.HOLDS


def test_a_gradient_of_0_has_its_causes():
    """Experts without tokens, the first matrix of an adapter whose second is 0, and a step without any gradient."""
    assert judged(silent=[f"{LAYER}.mlp.experts.linear_fc1.weight3"]).verdict is Verdict.HOLDS
    assert judged({A: 0.0, B: 0.0}, silent=[A], zero=[A, B]).verdict is Verdict.HOLDS
    assert said(judged({A: 0.0, B: 0.0}, silent=[B], zero=[A, B])) == ["tensors without a gradient"]
    without_rows = judged(rows=False, silent=MODEL)
    assert (without_rows.verdict, without_rows.finding) == (Verdict.INCONCLUSIVE, None)


def test_a_product_that_is_no_number_is_seen():
    assert judged({"output_layer.weight": math.nan}).verdict is Verdict.VIOLATED


def test_bf16_has_a_bound_of_its_own():
    changed = {"output_layer.weight": -0.25 * 1.02}
    assert judged(changed).verdict is Verdict.VIOLATED
    assert judged(changed, dtype="bfloat16").verdict is Verdict.HOLDS


def shifted(shift, *names, **given):
    """What disagrees in bf16 once the products of these are more by so much."""
    found = said(judged({name: MODEL[name] + shift for name in names}, dtype="bfloat16", **given))
    return [what.partition(":")[0] for what in found]


def test_in_bf16_rows_of_queries_and_keys_round_what_their_norms_add_up():
    name, linear = f"{LAYER}.self_attention.q_layernorm.weight", f"{LAYER}.self_attention.linear_qkv.weight"
    assert shifted(0.009, name) == []
    assert shifted(0.02, name) == ["queries"]
    assert shifted(0.02, name, squares={linear: 0.5}) == []
    assert shifted(0.08, name, squares={linear: 0.5}) == ["queries"]


def test_in_bf16_each_module_that_writes_rounds_the_residual_stream():
    """Three tensors with squares of 0.02 each, 13 roundings where two modules write: 0.0195, and 0.0162 by nine."""
    assert shifted(0.018, "embedding.word_embeddings.weight") == []
    assert shifted(0.021, "embedding.word_embeddings.weight") == ["residual stream"]


def test_in_bf16_large_logits_round_the_rows():
    last = "decoder.final_layernorm.weight", "output_layer.weight"
    assert shifted(0.03, *last, sizes=1.0) == []
    assert shifted(0.1, *last, sizes=1.0) == ["last norm"]
    assert shifted(0.1, *last, sizes=40.0) == []
    assert shifted(2.0, *last, sizes=40.0) == ["last norm"]


def with_entropy(spread, product):
    """Whether the last norm agrees where the loss has an entropy, of logits of this spread, with this product of it."""
    rows = {**ARRAYS["loss rows"], "entropy_gradient": np.array([-0.5, -0.5, 0, -0.5], np.float32)}
    arrays = {
        **ARRAYS,
        "loss rows": rows,
        "spread": {"spread": np.full(4, spread), "size": np.full(4, 2.0, np.float32)},
    }
    values = {**MODEL, "decoder.final_layernorm.weight": product, "output_layer.weight": product}
    products = tuple(TensorProduct(name=name, product=real(value / 2), squares=0.01) for name, value in values.items())
    records = [
        GradientProducts(name="update 1", version=1, rank=rank, coordinate="tp=0", products=products)
        for rank in range(2)
    ]  # fmt: skip
    records += [item for item in training() if isinstance(item, TrainerStep | LossColumns | LossRows)]
    if spread is not None:
        records.append(LogitSpreads(name="update 1", version=1, coordinate="tp=0", array="spread"))
    outcome = run_check(REGISTRY["LSS007"], Trace(MANIFEST, records, arrays.__getitem__))
    return not any(what.startswith("last norm: ") for what in said(outcome))


def test_the_gradient_of_an_entropy_is_judged_by_the_spread_of_the_logits():
    right = -0.25 + 3 * 0.5 * 2.0 / 3
    assert with_entropy(2.0, right)
    assert not with_entropy(2.0, -0.25)
    assert with_entropy(None, 0.5)

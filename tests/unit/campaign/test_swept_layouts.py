"""Layouts of a sweep: which are tried, which are refused and with which numbers."""

from pathlib import Path

import pytest

from verifier.campaign.sweep.layouts import layouts_of, longest_of, train_config
from verifier.cli.app import run
from verifier.cli.sweep import fitting
from verifier.config import PlanConfig, SweepConfig
from verifier.config.megatron import MegatronOptions
from verifier.errors import UsageError
from verifier.mesh import Mesh
from verifier.model.named import config_of, sizes_alone
from verifier.plan.run_plan import GIB, run_plan

PUBLISHED = Path(__file__).parents[1] / "plan" / "published"


def found(sizes=None, **knobs):
    config = SweepConfig(**{"model": "tiny:qwen3", "recompute": "none", **knobs})
    valid, invalid = layouts_of(config, {**config_of(config.model, config.dtype), **(sizes or {})}, "cpu")
    return [layout.name for layout in valid], {item.what: item.reason for item in invalid}


def test_every_division_of_two_ranks_is_tried():
    assert found(ranks=2)[0] == ["dp2", "cp2", "pp2", "pp2 vpp2", "tp2"]
    assert found(model="tiny:qwen3-moe", ranks=2)[0] == [
        "dp2", "ep2 dp2", "cp2", "ep2 cp2", "pp2", "pp2 vpp2", "tp2", "tp2 ep2", "tp2 etp2",
    ]  # fmt: skip


def test_both_kinds_of_recomputation_are_tried():
    assert found(recompute="both")[0] == ["1 rank", "1 rank, recompute full"]


def test_eight_stages_do_not_divide_108_layers():
    _, invalid = found({"num_hidden_layers": 108}, ranks=8)
    assert invalid["pp8"].startswith("108 layers do not divide over pp * vpp = 8 * 1 chunks: ")


def test_a_layout_by_name_is_refused_with_its_numbers():
    valid, invalid = found(model="tiny:qwen3-moe", meshes=("tp=2,ep=2", "ep=2,dp=3", "vpp=2"))
    assert valid == ["tp2 ep2"]
    assert invalid == {
        "ep=2,dp=3": "ep * etp = 2 * 1 = 2 does not divide tp * cp * dp = 1 * 1 * 3 = 3: the least --dp that does is 2",
        "vpp=2": "vpp = 2 needs pp > 1: virtual stages interleave pipeline stages",
    }


@pytest.mark.parametrize("text", ["tp2", "tp=2,tp=2", "xp=2", "tp=", ""])
def test_what_is_no_layout_is_refused(text):
    with pytest.raises(UsageError, match=f"--mesh is `{text}`, it must be sizes of tp, pp"):
        found(meshes=(text,))


def test_a_trial_is_a_step_of_a_training_run():
    config = SweepConfig(model="tiny:qwen3", ranks=4, recompute="full")
    valid, _ = layouts_of(config, config_of(config.model, config.dtype), "cpu")
    for layout in valid:
        trained = train_config(config, layout, 4096)
        assert (trained.mesh, trained.batch.max_tokens, trained.megatron.recompute) == (layout.mesh, 4096, "full")


def test_rollouts_are_no_longer_than_the_model_takes():
    sizes = {"max_position_embeddings": 1024}
    assert longest_of(SweepConfig(model="tiny:qwen3"), sizes) == 1024
    with pytest.raises(UsageError, match="--longest is 2,000, above the 1,024 positions of the model"):
        longest_of(SweepConfig(model="tiny:qwen3", longest=2000), sizes)


def test_a_wide_model_has_its_published_dtype():
    config = SweepConfig(model="wide:qwen3-30b-a3b")
    assert (config.dtype, str(config.run)) == ("bfloat16", "runs/sweep-wide-qwen3-30b-a3b")


def needed(model, **knobs):
    config = SweepConfig(**{"model": str(model), "recompute": "none", "dtype": "bfloat16", **knobs})
    sizes = sizes_alone(config.model, config.dtype)
    valid, invalid = layouts_of(config, sizes, "cuda")
    assert invalid == []
    return fitting(config, sizes, valid)


def test_layouts_that_do_not_fit_are_listed_apart():
    """Qwen3-8B: 12 bytes a weight where two ranks share the optimizer, 9 where they share the weights too."""
    fits, others = needed(PUBLISHED / "qwen3-8b", ranks=2)
    assert (fits.keys(), others.keys()) == ({"tp2", "pp2", "pp2 vpp2"}, {"dp2", "cp2"})
    assert others["dp2"].startswith(f"a rank needs {12 * 8_190_735_360 / GIB:.2f} GiB and ")
    assert others["dp2"].endswith(" with 1,024 tokens, above 80 GiB")


def test_memory_of_a_layout_is_that_of_its_plan():
    """Of the rank that needs most, by the plan of all ranks, with what the sweep turns; the largest budget fills it."""
    knobs = {"optimizer_offload": 0.5, "grad_reduce_in_fp32": False}
    model, mesh = str(PUBLISHED / "qwen3-30b-a3b"), Mesh(tp=2, pp=2, ep=2)
    fits, others = needed(model, meshes=("tp=2,pp=2,ep=2",), megatron=MegatronOptions(**knobs), memory_limit=200.0)
    asked = PlanConfig(model=model, dtype="bfloat16", mesh=mesh, tokens=1024, **knobs)
    memory = run_plan(asked, sizes_alone(model)).made.memory
    most = max(memory, key=lambda one: one.total - one.transfer)
    state, activations = (most.certain - most.transfer) / GIB, most.activations / GIB
    ((name, said),) = fits.items()
    assert (name, others) == ("tp2 pp2 ep2", {})
    assert said.startswith(f"{state:,.2f} GiB and {activations:,.2f} GiB of activations with 1,024 tokens; ")
    largest = int(said.split("; ")[1].split()[0].replace(",", ""))
    assert 200 - activations / 100 < state + activations * largest / 1024 <= 200


def test_a_config_json_alone_is_enough_for_a_dry_run(capsys):
    model = Path(__file__).parents[1] / "plan" / "published" / "qwen3-8b" / "config.json"
    assert (
        run(["sweep", "--model", str(model), "--mesh", "dp=1", "--mesh", "tp=4", "--recompute", "full", "--dry-run"])
        == 0
    )
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("1 layouts to try, ")
    assert said[1].startswith("  tp4, recompute full")
    assert said[2] == "1 invalid or too large:"
    assert said[3].startswith("  1 rank, recompute full")

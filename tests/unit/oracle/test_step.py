"""The oracle's Adam: weights that are stored rounded are judged from unrounded ones."""

from __future__ import annotations

import math
from itertools import combinations
from types import SimpleNamespace

import msgspec
import pytest
import torch

from verifier.oracle.gradients_hf import (
    ELEMENTS,
    PASSES,
    Spread,
    apart,
    beside,
    distances,
    groups_of,
    rounded_anew,
    spooled,
)
from verifier.oracle.oracle import DRAWS
from verifier.oracle.step_hf import Adam, half_step, rates_of, rounding_anew
from verifier.runs.scenario import RULE

LEARNING_RATE = 1e-3


def passed(exact, gradients):
    """Distances of a pass's gradients from the exact ones."""
    return distances(exact, lambda take: [take(name, [gradient]) for name, gradient in gradients.items()])[0]


def steps(dtype: torch.dtype, *, lose_low_bits: bool) -> list[float]:
    """What the oracle says of a trainer's two steps from the same gradients, with masters as torch.optim.Adam has."""
    generator = torch.Generator().manual_seed(5)
    live = torch.randn(64, 32, generator=generator).mul(0.05).to(dtype)
    master = torch.nn.Parameter(live.float().clone())
    theirs = torch.optim.Adam([master], lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-8)
    oracle, gaps = Adam(0.9, 0.95, 1e-8), []
    for step in (1, 2):
        old = live
        gradient = torch.randn(64, 32, generator=generator)
        if lose_low_bits:
            master.data.copy_(live.float())
        master.grad = gradient.clone()
        theirs.step()
        live = master.detach().to(dtype).clone()
        gaps.append(oracle.gap("w", old, live, gradient.double(), step, LEARNING_RATE)[0])
    return gaps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_right_steps_leave_no_gap(dtype: torch.dtype) -> None:
    assert max(steps(dtype, lose_low_bits=False)) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_step_of_a_weight_that_is_held_less_1_leaves_no_gap_and_a_lost_one_does(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    held = torch.randn(64, generator=generator).to(dtype)
    master, gradient = held.double(), torch.randn(64, generator=generator).double()
    rate = LEARNING_RATE if dtype == torch.float32 else 0.1  # a move beyond the roundings
    moved = (master - rate * gradient.sign()).to(dtype)

    def gap(live: torch.Tensor, offset: float) -> float:
        adam = Adam(0.9, 0.95, 1e-8)
        adam.begin("w", torch.zeros(64), torch.zeros(64), None if dtype == torch.float32 else held.float() + 1)
        return adam.gap("w", held + 1, live + 1, gradient, 1, rate, offset=offset)[0]

    assert gap(moved, -1.0) < 1e-3
    assert gap(held, -1.0) > 0.5
    if dtype == torch.bfloat16:
        assert gap(moved, 0.0) > 1e-3, "by the roundings of one sum alone"


def test_masters_that_lose_their_low_bits_show_at_the_second_step() -> None:
    first, second = steps(torch.bfloat16, lose_low_bits=True)
    assert first < 1e-4
    assert second > 0.01


def test_half_a_step_is_what_rounding_may_move_a_number_by() -> None:
    values = torch.randn(4096, generator=torch.Generator().manual_seed(7)).double()
    rounded = values.bfloat16().double()
    limit = half_step(torch.maximum(values.abs(), rounded.abs()), torch.bfloat16)
    assert bool(((values - rounded).abs() <= limit).all())
    assert float(((values - rounded).abs() / limit).max()) > 0.99


@pytest.mark.parametrize(
    ("name", "shape", "decays"),
    [("w", (64, 32), True), ("w", (64,), False), ("mlp.experts.down_proj_bias", (64, 32), False)],
)
def test_matrices_decay_and_vectors_do_not(name: str, shape: tuple[int, ...], decays: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    old, gradient = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    gaps = []
    for decay in (0.1, 0.0):
        weight = torch.nn.Parameter(old.clone())
        weight.grad = gradient.clone()
        torch.optim.AdamW([weight], lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=decay).step()
        gaps.append(Adam(0.9, 0.95, 1e-8).gap(name, old, weight.detach(), gradient.double(), 1, LEARNING_RATE, 0.1)[0])
    right, wrong = gaps if decays else reversed(gaps)
    assert right < 1e-3
    assert wrong > 0.1


def test_experts_of_a_layer_are_one_group_and_a_factor_shows_in_its_length() -> None:
    generator = torch.Generator().manual_seed(5)
    names = [f"layers.{layer}.experts.{expert}.up.weight" for layer in (0, 1) for expert in range(8)]
    exact = {name: torch.randn(16, generator=generator) for name in [*names, "norm.weight", "unused.weight"]}
    exact["unused.weight"].zero_()
    noisy = {name: value + 0.1 * torch.randn(16, generator=generator) for name, value in exact.items()}
    doubled = {name: 2 * value if "layers.1" in name else value for name, value in noisy.items()}
    found = groups_of(beside(exact, doubled), passed(exact, noisy))
    assert sorted(found) == ["layers.0.experts.*.up.weight", "layers.1.experts.*.up.weight", "norm.weight"]
    assert found["layers.1.experts.*.up.weight"]["group_length"] == pytest.approx(2, abs=0.1)
    assert found["layers.0.experts.*.up.weight"]["group_length"] == pytest.approx(1, abs=0.05)
    assert all(0.05 < row["group_noise"] < 0.2 for row in found.values())
    assert all(row["group_noise"] == 0 for row in groups_of(beside(exact, noisy), {}).values())


@pytest.mark.parametrize(
    ("past", "learning_rate", "of_embeddings", "decay"),
    [
        (0, 7e-4, 7e-4, 1), (8, 1.1e-3, 9e-4, 2), (12, 1.3e-3, 1e-3, 2.5), (22, 9e-4, 7e-4, 3.75),
        (32, 5e-4, 4e-4, 5), (40, 5e-4, 4e-4, 5),
    ],
)  # fmt: skip
def test_rates_warm_up_fall_and_end(past: int, learning_rate: float, of_embeddings: float, decay: float) -> None:
    rule = msgspec.structs.asdict(RULE)
    found = rates_of(rule, past, "model.layers.0.mlp.up_proj.weight")
    assert found == pytest.approx({"learning_rate": learning_rate, "decay": decay})
    for name in ("model.embed_tokens.weight", "backbone.embeddings.weight", "lm_head.weight"):
        assert rates_of(rule, past, name) == pytest.approx({"learning_rate": of_embeddings, "decay": decay})


@pytest.mark.parametrize("magnitude", [0.05, 4.0, 40.0])
def test_rounding_of_large_weights_at_a_small_rate_is_no_gap_and_a_lost_move_is_one(magnitude: float) -> None:
    generator = torch.Generator().manual_seed(11)
    old = magnitude * (1 + torch.rand(256, 64, generator=generator))
    gradient, rate = torch.randn(256, 64, generator=generator), 1e-4
    master = torch.nn.Parameter(old.clone())
    master.grad = gradient.clone()
    torch.optim.Adam([master], lr=rate, betas=(0.9, 0.95), eps=1e-8).step()
    arguments = "w", old, master.detach(), gradient.double(), 1, rate
    assert Adam(0.9, 0.95, 1e-8).gap(*arguments)[0] < 1e-4
    unmoved = Adam(0.9, 0.95, 1e-8).gap("w", old, old, *arguments[3:])[0]
    assert unmoved > 0.9


@pytest.mark.parametrize(
    ("off", "passes"),
    [(0.9e-5, 0), (3.9e-5, 1), (7.9e-5, 2), (9e-4, 23), (9e-2, DRAWS), (math.nan, DRAWS)],
    ids=["near", "near-one-rounding", "near-two", "near-many", "far", "not-finite"],
)
def test_passes_in_float32_are_made_until_a_gradient_is_near_what_they_are_off_by(off, passes) -> None:
    exact = {"w": torch.tensor([2.0, 1.0], dtype=torch.float64), "unused": torch.zeros(3).double()}
    actual = {"w": exact["w"] + torch.tensor([0.0, 2 * off])}
    asked = []

    def compute(draw: int) -> dict[str, tuple[float, float]]:
        asked.append(draw)
        return passed(exact, {"w": exact["w"] + 2e-5 * draw, "unused": torch.zeros(3)})

    roundings = rounded_anew(beside(exact, actual), {}, compute)
    assert asked == [*range(1, passes + 1)]
    assert roundings == ({"w": pytest.approx(2e-5 * passes, rel=0.01), "unused": 0.0} if passes else {})


def test_no_pass_or_batch_is_rounded_as_another() -> None:
    embedding = torch.nn.Embedding(8, 64, dtype=torch.bfloat16)
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=49_152))
    inner = SimpleNamespace(get_input_embeddings=lambda: embedding)
    model, ids, found = SimpleNamespace(model=inner, config=config, device=torch.device("cpu")), torch.arange(8), []
    for draw in range(1, PASSES):
        for at in (0, 1, 255):
            with rounding_anew(model, draw, at) as noise:
                found.append((embedding(ids), noise(torch.ones(4, 64))))
    for one, other in combinations(found, 2):
        assert not torch.equal(one[0], other[0])
        assert not torch.equal(one[1], other[1])


def test_what_is_in_doubt_counts_as_near() -> None:
    found = beside({"w": torch.tensor([1.0])}, {"w": torch.tensor([1.001])})
    assert rounded_anew(found, {"w": 3e-3}, lambda _: pytest.fail("computed")) == {}


@pytest.mark.parametrize(("length", "passes"), [(1.1, 1), (1.3, 2), (1.9, 5), (9.0, PASSES), (90.0, DRAWS)])
def test_passes_in_less_than_float32_are_made_until_a_gradient_is_as_long_as_they_are(length, passes) -> None:
    """The noise of a pass is 0.1 of the length, of the next one 0.2, and so on."""
    exact = {"layers.0.w": torch.tensor([1.0, 0.0])}
    actual = {"layers.0.w": torch.tensor([length, 0.0])}

    def compute(draw: int) -> dict[str, tuple[float, float]]:
        return passed(exact, {"layers.0.w": torch.tensor([1.0, 0.1 * (draw + 1)])})

    found = Spread.of(beside(exact, actual), compute(0), compute)
    assert found.passes == passes
    assert found.noise == pytest.approx(0.1 * passes)
    assert found.groups["layers.0.w"]["group_noise"] == pytest.approx(0.1 * passes)


def test_no_pass_is_made_of_gradients_in_float32() -> None:
    exact = {"w": torch.tensor([1.0])}
    found = Spread.of(beside(exact, {"w": torch.tensor([2.0])}), {}, lambda _: pytest.fail("computed"))
    assert (found.noise, found.passes) == (0.0, 1)


def test_of_a_tensor_in_slices_the_greatest_gap_has_its_index_and_one_that_is_not_a_number_goes_first() -> None:
    one, other = torch.zeros(3, ELEMENTS["cpu"]), torch.zeros(3, ELEMENTS["cpu"])
    one[1, 5], one[2, 7] = -3.0, 2.0
    assert apart(one, other) == ((3.0, [1, 5]), 13.0)
    one[2, 7] = math.nan
    (value, index), _ = apart(one, other)
    assert math.isnan(value)
    assert index == [2, 7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_spooled_tensor_is_the_one_that_was_given_and_leaves_no_file(tmp_path, dtype) -> None:
    whole = torch.randn(6, 5, generator=torch.Generator().manual_seed(5)).to(dtype)
    found = [spooled(tmp_path, tensor) for tensor in (whole.T, whole[1])]
    assert list(tmp_path.iterdir()) == []
    assert found[0].equal(whole.T)
    assert found[1].equal(whole[1])
    assert found[0].dtype == dtype

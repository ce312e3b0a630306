"""A model whose weights are there one unit at a time, against the whole one: bits of log-probabilities and gradients.

Families differ in what a layer is given and in how tensors are put together. What this does not exercise: losses
(test_policy.py), and what the oracle reports (test_scale.py).
"""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch

from verifier.export.save import save_checkpoint
from verifier.model.adapted import Adapted
from verifier.model.checkpoint import open_checkpoint
from verifier.model.named import resolve_model
from verifier.model.transformers_hf import checkpoint_places, load_model
from verifier.oracle import streaming_hf
from verifier.oracle.routes_hf import choosing, mixtures_of
from verifier.oracle.streaming_hf import A, B, StreamedModel, Tape
from verifier.runs.model_under_test import cache_folder

LENGTHS = (7, 70)
"""The second is beyond the window of `WINDOWED`."""
WINDOWED = "tiny:gemma3_text"
"""Has layers of two kinds, with masks and rotary embeddings of their own."""
NAMES = [
    "tiny:qwen3-tied", "tiny:deepseek-v3", "tiny:nemotron-h",
    *(
        pytest.param(f"tiny:{name}", marks=pytest.mark.slow)
        for name in ("qwen3", "qwen2", "llama", "qwen3-moe", "gemma3_text", "gpt_oss")
    ),
]  # fmt: skip


def sequences():
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 30, (1, length), generator=generator) for length in LENGTHS]


def weighted(every):
    """A number of log-probabilities, and of another kind, with slopes of both signs."""
    slopes = torch.randn(every.shape[-1], generator=torch.Generator().manual_seed(6))
    return (every * slopes).sum(), (every * slopes.flip(0)).sum()


def by_the_whole(path, kind, route=None):
    """Log-probabilities of each sequence, and gradients by checkpoint name: of a sum, or of its magnitudes."""
    model = load_model(path, torch.float32).requires_grad_(True)
    weights, sums, told = list(model.parameters()), [], []
    for ids in sequences():
        with contextlib.nullcontext() if route is None else choosing(model, route(mixtures_of(model), ids.shape[1])):
            every = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0], dim=-1)
        told.append(every.detach())
        found = torch.autograd.grad(weighted(every)[kind], weights, allow_unused=True)
        found = [torch.zeros_like(at) if slope is None else slope for at, slope in zip(weights, found, strict=True)]
        sums.append([slope.abs() if kind else slope for slope in found])
    with torch.no_grad():
        for weight, parts in zip(weights, zip(*sums, strict=True), strict=True):
            weight.copy_(sum(parts))
    held = dict(model.named_parameters())
    return told, {name: part for name, (holder, part) in checkpoint_places(model).items() if holder in held}


def by_parts(path, route=None):
    """The same of both kinds, by one unit after another."""
    model, told, found = StreamedModel(path, torch.float32), [], {}
    tape = Tape(model, magnitudes=[1])
    for ids in sequences():
        given = {} if route is None else route(mixtures_of(model.model), ids.shape[1])

        def within(unit, given=given):
            blocks = mixtures_of(model.model)
            inside = {layer: given[layer] for layer in given if blocks[layer] in set(unit.module.modules())}
            return choosing(model.model, inside)

        with tape.sequence(within):
            hidden = model.hidden(ids)[0]
            every = tape.call(model.head_unit, lambda some: torch.log_softmax(model.logits(some), dim=-1), hidden)
        told.append(every.detach())
        for tape.kind, number in enumerate(weighted(every)):
            number.backward(retain_graph=True)
    tape.backward(2, lambda name, parts: found.update({name: [part.clone() for part in parts]}))
    return told, found


def agree(path, route=None):
    told, found = by_parts(path, route)
    for kind in (0, 1):
        expected, gradients = by_the_whole(path, kind, route)
        assert all(map(torch.equal, told, expected))
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():  # a tied matrix's two parts are added in another order
            assert (found[name][kind] - gradient).abs().max() <= 3e-7 * gradient.abs().max(), name


@pytest.mark.parametrize("name", NAMES)
def test_every_number_is_that_of_the_whole_model(name):
    agree(resolve_model(name, cache_folder(), "float32"))


def test_a_layer_for_a_further_token_has_the_gradients_of_its_definition(tmp_path):
    """Against transformers' layers one by one, of a model with one more, and a slope that only autograd knows."""
    path = resolve_model("tiny:deepseek_v3-mtp", cache_folder(), "float32")
    stored = open_checkpoint(path)
    last = stored.config["num_hidden_layers"]
    own = f"model.layers.{last}."
    apart = {name for name in stored.names() if name.startswith(own) and name.removesuffix(".weight")[len(own) :] in (
        "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head", "embed_tokens",
    )}  # fmt: skip
    parts = ((name, stored.read(name)) for name in stored.names() if name not in apart)
    longer = save_checkpoint(tmp_path, {**stored.config, "num_hidden_layers": last + 1}, parts)
    model = load_model(longer, torch.float32).requires_grad_(True)
    base, weights = model.model, {name: stored.read(name).requires_grad_(True) for name in apart}

    def normed(hidden, leaf):
        scale = torch.rsqrt(hidden.square().mean(-1, keepdim=True) + model.config.rms_norm_eps)
        return weights[f"{own}{leaf}.weight"] * hidden * scale

    streamed, found, told = StreamedModel(path, torch.float32, further=True), {}, []
    tape = Tape(streamed)
    for ids in sequences():
        kept = {}
        hook = base.layers[last].register_forward_pre_hook(
            lambda _, args, given, kept=kept: kept.update(given, before=args[0]), with_kwargs=True
        )
        base(input_ids=ids, use_cache=False)
        hook.remove()
        embedded = normed(base.embed_tokens(ids[:, 1:]), "enorm")
        hidden = normed(base.norm(kept.pop("before")), "hnorm")[:, :-1]
        both = torch.cat([embedded, hidden], dim=-1) @ weights[f"{own}eh_proj.weight"].T
        length = ids.shape[1] - 1
        angles = tuple(part[:, :length] for part in kept["position_embeddings"])
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        ahead = base.layers[last](both, attention_mask=mask, position_embeddings=angles)
        every = torch.log_softmax(model.lm_head(normed(ahead, "shared_head.norm")[0, :-1]), dim=-1)
        weighted(every)[0].backward()
        with tape.sequence():
            whole = streamed.ahead(ids, streamed.hidden(ids))[0, :-2]
            same = tape.call(streamed.head_unit, lambda some: torch.log_softmax(streamed.logits(some), dim=-1), whole)
        weighted(same)[0].backward()
        told.append((every, same))
    tape.backward(1, lambda name, slopes: found.update({name: slopes[0].clone()}))
    for every, same in told:
        torch.testing.assert_close(every, same, rtol=0, atol=1e-5)
    held = {name: _slope(model, *place) for name, place in checkpoint_places(model).items()}
    held |= {name: weight.grad for name, weight in weights.items()}
    for name, gradient in found.items():
        if (expected := held[name]) is not None:
            assert (gradient - expected).abs().max() <= 2e-5 * expected.abs().max(), name
    assert all(held[f"{own}{leaf}.weight"].any() for leaf in ("enorm", "hnorm", "eh_proj", "shared_head.norm"))


def _slope(model, holder, view):
    gradient = dict(model.named_parameters()).get(holder, torch.zeros(0)).grad
    return gradient if gradient is None else gradient.as_strided(view.shape, view.stride(), view.storage_offset())


@pytest.mark.parametrize("how", ["beside", "within"])
def test_adapters_have_the_gradients_of_the_sum_and_the_base_has_none(how, tmp_path):
    """Three linears share one A, as those of a fused one do."""
    base = open_checkpoint(resolve_model(NAMES[0], cache_folder(), "float32"))
    shared = [f"model.layers.1.self_attn.{part}_proj" for part in "qkv"]
    alone, draw = "model.layers.0.mlp.down_proj", torch.Generator().manual_seed(7)
    inward = {linear: f"{(shared[0] if linear in shared else linear)}{A}" for linear in [*shared, alone]}
    drawn = {}
    for linear, first in inward.items():
        rows, columns = base.meta(f"{linear}.weight").shape
        drawn.setdefault(first, torch.randn(4, columns, generator=draw) / 9)
        drawn[linear + B] = torch.randn(rows, 4, generator=draw) / 9
    leaves = {name: tensor.requires_grad_(True) for name, tensor in drawn.items()}
    sums = {f"{linear}.weight": 1.5 * (leaves[linear + B] @ leaves[first]) for linear, first in inward.items()}
    whole = {name: base.read(name) + sums.get(name, 0.0) for name in base.names()}
    parts = ((name, each.detach()) for name, each in whole.items())
    merged = save_checkpoint(tmp_path / "whole", base.config, parts)
    matrices = ((name, each.detach()) for name, each in drawn.items())
    folder = save_checkpoint(tmp_path / "matrices", base.config, matrices)
    names = {shared[0] + A: [linear + A for linear in shared], alone + A: [alone + A]}
    held = merged if how == "within" else base.path
    adapted = Adapted(base=str(held), scaling=1.5, names=names, how=how)
    adapted.save(folder)
    told, found = by_parts(folder)
    expected, gradients = by_the_whole(merged, 0)
    torch.testing.assert_close(told, expected, rtol=0, atol=1e-5)
    torch.autograd.backward([whole[name] for name in sums], [gradients[name] for name in sums])
    assert found.keys() == leaves.keys()
    for name, leaf in leaves.items():
        assert (found[name][0] - leaf.grad).abs().max() < 1e-5 * leaf.grad.abs().max(), name
    if how == "beside":
        with torch.inference_mode():
            sides = [StreamedModel(path, torch.bfloat16) for path in (merged, adapted.merged(folder), folder)]
            whole, sent, beside = (model.hidden(sequences()[0]) for model in sides)
        assert torch.equal(whole, sent)
        assert not torch.equal(whole, beside)


def test_a_model_and_what_it_keeps_are_gone_with_its_last_name():
    gc.disable()
    try:
        with torch.inference_mode():
            model = StreamedModel(resolve_model(NAMES[0], cache_folder()), torch.float64)
            model.hidden(sequences()[0])
            assert model._kept
            left = [weakref.ref(each) for each in (model, *model._kept.values())]
            del model
            assert [ref() for ref in left] == [None] * len(left)
    finally:
        gc.enable()


def test_told_routes_are_told_when_a_layer_is_computed_again():
    def route(blocks, length):
        return {
            layer: torch.tensor([[at % 3, 3 + at % 5] for at in range(length)]) for layer in list(blocks)[:2]
        }  # fmt: skip

    agree(resolve_model("tiny:add-moe", cache_folder(), "float32"), route)


def test_one_unit_has_weights(monkeypatch):
    model, held = StreamedModel(resolve_model("tiny:qwen3", cache_folder(), "float32"), torch.float32), []
    original = StreamedModel.weights_of

    @contextlib.contextmanager
    def watched(self, unit, rows=None):
        with original(self, unit, rows):
            there = {id(weight): weight.numel() for weight in self.model.parameters() if weight.device.type != "meta"}
            assert there.keys() <= {id(getattr(owner, name)) for owner, name, _ in unit.tensors}
            held.append((unit, sum(there.values())))
            yield

    monkeypatch.setattr(StreamedModel, "weights_of", watched)
    tape = Tape(model)
    with tape.sequence():
        every = tape.call(model.head_unit, model.logits, model.hidden(sequences()[0])[0])
    every.sum().backward()
    tape.backward(1, lambda *_: None)
    assert len({unit for unit, _ in held}) == len(model.units) == model.config.num_hidden_layers + 3
    embedding = max(size for unit, size in held if unit.module is model.model.get_input_embeddings())
    assert embedding == len(sequences()[0].unique()) * model.config.hidden_size


def of_the_layer_before(monkeypatch):
    original, last = StreamedModel._read, {}

    def read(self, empty, rows):
        values = original(self, empty, rows)
        if rows is not None:
            return values
        before, last[empty.shape] = last.get(empty.shape, values), values
        return torch.nn.Parameter(before.detach(), requires_grad=values.requires_grad)

    monkeypatch.setattr(StreamedModel, "_read", read)


def without_a_tied_head(monkeypatch):
    original = Tape._again

    def again(self, call, found):
        rows = original(self, call, found)
        if call.unit is self.model.head_unit:
            found.clear()
        return rows

    monkeypatch.setattr(Tape, "_again", again)


def with_the_first_layers_mask(monkeypatch):
    original, masks = streaming_hf._Streamed.__call__, {}

    def call(self, *args, **kwargs):
        if (mask := kwargs.get("attention_mask")) is not None:
            kwargs["attention_mask"] = masks.setdefault(mask.shape, mask)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(streaming_hf._Streamed, "__call__", call)


@pytest.mark.parametrize(
    ("name", "bug"),
    [
        ("tiny:qwen3-tied", of_the_layer_before), ("tiny:qwen3-tied", without_a_tied_head),
        pytest.param(WINDOWED, with_the_first_layers_mask, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_planted_bug_is_seen(name, bug, monkeypatch):
    bug(monkeypatch)
    with pytest.raises(AssertionError):
        agree(resolve_model(name, cache_folder(), "float32"))

"""Values and gradients at `verifier.model.module_points` by transformers in float32, of a step's true loss."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from verifier.errors import ContractError
from verifier.model.module_points import EMBEDDING, LAST_POINTS, LAYER_POINTS, OF_THE_LOSS, OUTPUT_LAYER, ModulePoint
from verifier.model.transformers_hf import load_model
from verifier.oracle.policy_hf import rows_of, token_losses
from verifier.oracle.routes_hf import router_of

_EAGER = "eager_attention_forward"
"""Function of each of transformers' models that attends, by the module's own name for it."""
_BEFORE_MLP = "pre_feedforward_layernorm"
_ROLES = {
    "attention": ("o_proj",), "mamba": ("in_proj", "out_proj"), "delta": ("chunk_gated_delta_rule", "out_proj"),
    "mlp": ("down_proj", "experts"),
}  # fmt: skip
"""Part of a layer -> attributes by which it is known; an MLP has one of them, the others all."""

_CHANGE = 3e-6
"""Share by which a draw changes the inputs of layers: what both sides differ by in front of a scan."""
_DRAWS = 4


class _Watch:
    """Values of each point, pieces to be put beside one another, of the sequence under way."""

    def __init__(self) -> None:
        self.pieces: dict[str, dict[int, torch.Tensor]] = {}
        """Whole name of a point -> number of the piece -> tensor [..., columns] of the graph."""

    def keep(self, name: str, piece: int, tensor: torch.Tensor) -> None:
        """Take a tensor, and have its gradient kept."""
        if tensor.requires_grad:
            tensor.retain_grad()
        self.pieces.setdefault(name, {})[piece] = tensor


def record(_: object, checkpoint: str, folder: str, objective: Mapping[str, Any]) -> None:
    """Compute a step, and write what every point holds; a request of an engine server.

    Args:
        checkpoint: the weights.
        folder: has ``inputs-0`` of the step, and gets ``activations.safetensors`` with "forward POINT" and "backward
            POINT" [N, W] over all tokens of all sequences in order, of log-probabilities and entropies over all but the
            last of each, and "moved POINT" [N, 1], the greatest change of each row where the inputs of layers change
            by 3e-6. Gradients are those of the sum of all tokens' losses.
        objective: see `policy_hf.judge_updates`.
    """
    model = load_model(checkpoint, torch.float32).requires_grad_(True)
    found: dict[str, list[torch.Tensor]] = {}
    for row in rows_of(Path(folder) / "inputs-0.safetensors"):
        ids, kept = row["tokens"][None], row["mask"][1:].bool()
        watch = _forward(model, ids, objective["temperature"])
        logprob, entropy = (watch.pieces[name][0][kept, 0] for name in OF_THE_LOSS)
        columns = {name: row[name][1:][kept].double() for name in ("advantage", "divisor", "reference")}
        token_losses(logprob, entropy, columns, objective, [len(logprob)]).sum().backward()
        moves = [_forward(model, ids, objective["temperature"], draw).pieces for draw in range(_DRAWS)]
        for name, pieces in watch.pieces.items():
            values = _beside(pieces)
            found.setdefault(f"forward {name}", []).append(values)
            slopes = {key: torch.zeros_like(one) if one.grad is None else one.grad for key, one in pieces.items()}
            found.setdefault(f"backward {name}", []).append(_beside(slopes))
            changes = [(_beside(other[name]) - values).abs().amax(dim=1, keepdim=True) for other in moves]
            found.setdefault(f"moved {name}", []).append(torch.stack(changes).amax(dim=0))
    whole = {name: torch.cat(parts).float().contiguous() for name, parts in found.items()}
    save_file(whole, Path(folder) / "activations.safetensors")


def _forward(model: Any, ids: torch.Tensor, temperature: float, draw: int | None = None) -> _Watch:
    """Compute a sequence, watched; with a draw, which has no gradients, each layer's input is changed by `_CHANGE`."""
    watch, noise = _Watch(), torch.Generator()

    def change(_: Any, given: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(
            item * (1 + _CHANGE * torch.randn(item.shape, generator=noise)) if at == 0 else item
            for at, item in enumerate(given)
        )

    with contextlib.ExitStack() as within:
        if draw is not None:
            noise.manual_seed(draw)
            within.enter_context(torch.no_grad())
            for layer in _base_of(model).layers:
                within.callback(layer.register_forward_pre_hook(change).remove)
        within.enter_context(_watched(model, watch))
        logits = model(input_ids=ids, use_cache=False).logits
        watch.keep(OUTPUT_LAYER, 0, logits)  # bounded where the model bounds them, as the trainer's layer does
        every = torch.log_softmax(logits[0, :-1].double() / temperature, dim=-1)
        entropy = -(every.exp() * every).sum(-1, keepdim=True)
        for name, tensor in zip(OF_THE_LOSS, (every.gather(1, ids[0, 1:, None]), entropy), strict=True):
            watch.keep(name, 0, tensor)
    return watch


def _base_of(model: Any) -> Any:
    return getattr(model.base_model, "language_model", model.base_model)


def _beside(pieces: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """[rows, columns] of pieces [1, rows, ...] or [rows, ...], the columns of one after those of another."""
    flat = []
    for number in sorted(pieces):
        value = pieces[number].detach()
        value = value[0] if value.ndim > 2 and value.shape[0] == 1 else value
        flat.append(value.reshape(value.shape[0], -1))
    return torch.cat(flat, dim=1)


@contextlib.contextmanager
def _watched(model: Any, watch: _Watch) -> Iterator[None]:
    with contextlib.ExitStack() as hooks:
        base = _base_of(model)
        if not hasattr(base, "layers"):
            raise ContractError(f"transformers' {type(model).__name__} has no `layers` whose modules could be watched")
        for point in (EMBEDDING, *LAST_POINTS):
            for piece, path in enumerate(point.theirs):
                module = getattr(base, path.removeprefix("model."), None)
                if module is not None:
                    hooks.callback(_hook(module, path, watch, point.name, piece))
        attentions = {}
        for number, layer in enumerate(base.layers):
            roles = {"layer": layer, **_roles_of(layer)}
            for point in LAYER_POINTS:
                name = f"layers.{number}.{point.name}"
                for callback in _of_layer(roles, point, watch, name):
                    hooks.callback(callback)
            if "attention" in roles:
                attentions[id(roles["attention"])] = f"layers.{number}.self_attention.rotary_"
        hooks.enter_context(_attending(base, attentions, watch))
        yield


def _of_layer(roles: Mapping[str, Any], point: ModulePoint, watch: _Watch, name: str) -> Iterator[Callable[[], None]]:
    """Hook the modules of a layer that make up a point, if all are there; yields what removes the hooks."""
    if point.theirs == ("experts:gates",):
        experts = getattr(roles.get("mlp"), "experts", None)
        if experts is not None and router_of(roles["mlp"]) is not None:
            yield _gates(roles["mlp"], experts, watch, name)
        return
    if point.name == "mlp.experts" and not hasattr(roles.get("mlp"), "experts"):
        return
    if point.columns == "split" and point.name == "mlp.linear_fc1" and hasattr(roles.get("mlp"), "gate_proj"):
        return
    paths = point.theirs
    if point.name == "pre_mlp_layernorm" and hasattr(roles["layer"], "norm"):
        paths = ("layer.norm",)
    if hasattr(roles["layer"], _BEFORE_MLP):  # its norms named after attention are of what attention puts out
        paths = tuple(path.replace("post_attention_layernorm", _BEFORE_MLP) for path in paths)
    modules = [_module(roles, path.removesuffix("<")) for path in paths]
    if any(":" in path for path in paths) or None in modules:
        return
    for piece, (path, module) in enumerate(zip(paths, modules, strict=True)):
        yield _hook(module, path, watch, name, piece)


def _module(roles: Mapping[str, Any], path: str) -> nn.Module | None:
    role, _, rest = path.partition(".")
    found = roles.get(role)
    return getattr(found, rest, None) if rest else found


def _roles_of(layer: nn.Module) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for child in layer.children():
        for role, names in _ROLES.items():
            has = [hasattr(child, name) for name in names]
            if any(has) if role == "mlp" else all(has):
                found.setdefault(role, child)
    return found


def _hook(module: Any, path: str, watch: _Watch, name: str, piece: int) -> Callable[[], None]:
    if path.endswith("<"):
        return module.register_forward_pre_hook(
            lambda _, given, named: watch.keep(name, piece, [*given, *named.values()][0]), with_kwargs=True
        ).remove
    return module.register_forward_hook(
        lambda _, __, output: watch.keep(name, piece, output[0] if isinstance(output, tuple) else output)
    ).remove


def _gates(block: Any, experts: Any, watch: _Watch, name: str) -> Callable[[], None]:
    """Hook what a mixture's experts are given: tokens, the chosen ones of each, and their weights."""
    router: Any = router_of(block)
    num_experts = int(router.weight.shape[0])

    def spread(_: Any, given: Sequence[Any], named: Mapping[str, Any]) -> tuple[Any, Any] | None:
        values = [*given, *named.values()]
        if len(values) < 3 or values[1].is_floating_point() or values[1].shape != values[2].shape:
            return None  # another form of experts, whose point is left out
        hidden, chosen, weights, *more = values
        dense = torch.zeros(len(chosen), num_experts, dtype=weights.dtype).scatter(1, chosen, weights)
        watch.keep(name, 0, dense)
        return (hidden, chosen, dense.gather(1, chosen), *more), {}

    return experts.register_forward_pre_hook(spread, with_kwargs=True).remove


@contextlib.contextmanager
def _attending(base: Any, attentions: Mapping[int, str], watch: _Watch) -> Iterator[None]:
    """Within, keep queries and keys as the function that attends is given them, [1, heads, rows, size]."""
    homes = {type(module).__module__ for module in base.modules() if id(module) in attentions}
    with contextlib.ExitStack() as undo:
        for home in (sys.modules[name] for name in sorted(homes) if hasattr(sys.modules[name], _EAGER)):
            original = getattr(home, _EAGER)

            def attend(module: Any, query: Any, key: Any, *rest: Any, original: Any = original, **options: Any) -> Any:
                kept = []
                for name, tensor in (("query", query), ("key", key)):
                    rows = tensor.transpose(1, 2)
                    watch.keep(f"{attentions[id(module)]}{name}", 0, rows)
                    kept.append(rows.transpose(1, 2))
                return original(module, *kept, *rest, **options)

            setattr(home, _EAGER, attend)
            undo.callback(setattr, home, _EAGER, original)
        yield

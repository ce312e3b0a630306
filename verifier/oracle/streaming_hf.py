"""transformers' model with the weights of one unit at a time: an embedding, a layer, a norm, or the head.

The modules are made without weights. A unit's forward reads them from the checkpoint, computes, and lets them go. The
model's own forward runs unchanged: masks, positions and kinds of layers are those of transformers. A `Tape` records
what each unit was given, on the host or on a GPU with room, and computes each again for its gradients, the last unit
first, for all sequences before the unit's weights are let go.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import AutoConfig, AutoModelForCausalLM

from verifier.errors import ContractError
from verifier.model.adapted import Adapted
from verifier.model.attention_hf import attend_in_slices
from verifier.model.checkpoint import Checkpoint, open_checkpoint
from verifier.model.families import copies_of, is_served
from verifier.model.transformers_hf import checkpoint_places, compute_the_definition, load_model

ROOM_BYTES = 2**30
"""Bytes of weights that had to be converted or put together and stay on the host, where no gradient is computed."""
ROOM_SHARE = 0.25
"""Share of a GPU's free memory for weights that stay, and for what else does; see `Room`."""
A, B = ".lora_A.weight", ".lora_B.weight"
"""Ends of the names of an adapter's two matrices, in the place of a checkpoint tensor's ``.weight``."""
Take = Callable[[str, Sequence[torch.Tensor]], None]
"""Gets a checkpoint tensor's name and its gradients, of each kind that was asked for, on the host or where computed."""
Within = Callable[["Unit"], contextlib.AbstractContextManager[Any]]
"""Context of a unit while it is computed, again too."""


class Room:
    """A share of a GPU's free memory for tensors that stay there; a host has none, as they are there already."""

    def __init__(self, device: torch.device) -> None:
        self.left = int(ROOM_SHARE * torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0

    def held(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor where it is, while there is room, else on the host."""
        if tensor.device.type == "cpu" or tensor.nbytes > self.left:
            return tensor.cpu()
        self.left -= tensor.nbytes
        return tensor


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """Modules whose weights are there together."""

    module: nn.Module
    tensors: Sequence[tuple[nn.Module, str, torch.Tensor]]
    """Owner, its name for a weight or buffer, and the tensor that stands there while it has no values."""


class StreamedModel:
    """transformers' causal language model of a checkpoint, for inference, or for gradients on a `Tape`.

    A model whose tensors or layers cannot be told apart is held whole, and is one unit beside its head.

    Args:
        path: checkpoint directory, or one of adapters (`Adapted`): then these alone have gradients.
        dtype: dtype of the weights, except those that the checkpoint stores in float32.
        device: where units are computed.
        further: with the layer behind the last, which predicts a further token (MTP); see `ahead`.

    Raises:
        ContractError: see `load_model`; the weights of the layer for a further token are not those of its kin.
    """

    def __init__(self, path: Path | str, dtype: torch.dtype, device: str = "cpu", *, further: bool = False) -> None:
        self.device = torch.device(device)
        self.tape: Tape | None = None
        self._adapted, self._matrices = Adapted.of(Path(path)), open_checkpoint(Path(path))
        self.checkpoint = self._matrices
        if self._adapted is not None:
            path = self._adapted.base
            self.checkpoint = open_checkpoint(Path(path))
        self.model = _without_weights(path, dtype, device, further=further)
        places = checkpoint_places(self.model, self.checkpoint.names())
        base = getattr(self.model.base_model, "language_model", self.model.base_model)
        unexpected = () if further else self.model._keys_to_ignore_on_load_unexpected or ()
        ignored = [*self.model.all_tied_weights_keys, *unexpected, *copies_of(self.checkpoint.config)]
        held = (name for name in self.checkpoint.names() if further or is_served(name, self.checkpoint.config))
        more = {name for name in held if not any(re.search(each, name) for each in ignored)}
        known = more == set(places)
        self.streams = known and isinstance(getattr(base, "layers", None), nn.ModuleList)
        if further and not self.streams:
            odd = sorted(more ^ set(places))[:1] or ["model.layers"]
            raise ContractError(f"in a layer of {path} for a further token `{odd[0]}` is missing, or has no place")
        if not self.streams:
            self.model = load_model(path, dtype).to(device)
            places = checkpoint_places(self.model, self.checkpoint.names())
        attend_in_slices(self.model.requires_grad_(self._adapted is None))
        self.config: Any = self.model.config
        self.head: nn.Module = self.model.get_output_embeddings()
        self._dtypes = _dtypes(self.model, self.checkpoint, dtype)
        self._parts: dict[int, list[tuple[str, torch.Tensor]]] = {}
        """Tensor without values -> checkpoint names and the views that they are."""
        for name, (holder, view) in places.items():
            self._parts.setdefault(id(_tensor(self.model, holder)), []).append((name, view))
        self._added: dict[str, tuple[str, str]] = {}
        """Tensor that has an adapter added when it is read -> the names of its A and B."""
        self._adapt({name: holder for name, (holder, _) in places.items()}, dtype)
        self._there: set[Unit] = set()
        self._kept: dict[int, torch.Tensor] = {}
        self._room = ROOM_BYTES if torch.is_inference_mode_enabled() else 0
        if self.device.type == "cuda":
            release()
            self._room = Room(self.device).left
        self._kind: Any = None
        self._forward = self.model.base_model.forward
        self.units = [_unit(module) for module in self._modules(base)]
        self.head_unit = next(unit for unit in self.units if unit.module is self.head)
        if further:
            last, self._ahead = self.units[len(base.layers) - 2], self.units[len(base.layers) - 1]
            self._forward_ahead = self._ahead.module.forward
            self._given = given = dict[str, Any]()
            last.module.register_forward_pre_hook(lambda _, args, kwargs: given.update(kwargs), with_kwargs=True)
        for unit in self.units:
            unit.module.forward = _Streamed(self, unit, unit.module.forward)  # type: ignore[method-assign]

    def _adapt(self, places: Mapping[str, str], dtype: torch.dtype) -> None:
        """Give each linear its adapter, see `Adapted`; `places` has where the checkpoint's tensors are in the model."""
        if (adapted := self._adapted) is None:
            return
        made: dict[str, nn.Parameter] = {}
        for first, names in adapted.names.items():
            for inward in names:
                name, outward = (inward.removesuffix(A) + end for end in (".weight", B))
                self._added[name] = (first, outward)
                if adapted.how == "merged":
                    continue
                linear = self.model.get_submodule(places[name].rpartition(".")[0])
                for each in {first, outward} - made.keys():
                    values = self._matrices.read(each).to(self.device, dtype)
                    made[each] = nn.Parameter(values.to("meta") if self.streams else values.clone())
                    self._parts[id(made[each])] = [(each, made[each])]
                linear.register_parameter("inward", made[first])
                linear.register_parameter("outward", made[outward])
                linear.forward = _Adapter(linear, adapted)  # type: ignore[method-assign]

    def _modules(self, base: nn.Module) -> Iterator[nn.Module]:
        """Layers, and what owns weights beside them; or the whole beside the head."""
        if not self.streams:
            yield from (self.model.base_model, self.head)
            return
        layers = list(base.layers)  # type: ignore[arg-type]  # looked at before
        inside = {id(module) for layer in layers for module in layer.modules()}
        yield from layers
        for module in self.model.modules():
            if id(module) not in inside and any(_own(module)):
                yield module

    def hidden(self, ids: torch.Tensor, past: Any = None) -> torch.Tensor:
        """[B, T, H] the head is given after [B, T] ids; `past` has keys and values before them, and takes theirs."""
        asked = {"input_ids": ids.to(self.device), "use_cache": past is not None, "past_key_values": past}
        found = self.model.base_model(**asked)
        self._kind = type(found)
        return found.last_hidden_state

    def ahead(self, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """[B, T, H] the head is given for the tokens but one ahead, on the tape, after `hidden`; of the last two none.

        The layer is given the norm of the token that comes next, and the norm of what the head is given before it.

        Source:
            DeepSeek-V3 (arXiv 2412.19437), section 2.2, equation 21; which half of the projection is whose:
            vLLM 0.21.0, models/deepseek_mtp.py, `DeepSeekMultiTokenPredictorLayer.forward`.
        """
        assert self.tape is not None
        embedded = self.model.get_input_embeddings()(ids.to(self.device).roll(-1, 1))

        def told(hidden: torch.Tensor, embedded: torch.Tensor, **given: Any) -> torch.Tensor:
            layer: Any = self._ahead.module
            both = layer.eh_proj(torch.cat([layer.enorm(embedded), layer.hnorm(hidden)], dim=-1))
            return layer.shared_head["norm"](self._forward_ahead(both, **given))

        return self.tape.call(self._ahead, told, hidden, embedded, **self._given)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, V] logits of [N, H] of `hidden`, in the model's dtype and on its device."""
        base, found = self.model.base_model, self._kind(last_hidden_state=hidden[None])
        forward, base.forward = base.forward, lambda *_, **__: found
        try:
            return self.model(input_ids=None, use_cache=False).logits[0]
        finally:
            base.forward = forward

    @contextlib.contextmanager
    def weights_of(self, unit: Unit, rows: torch.Tensor | None = None) -> Iterator[None]:
        """Within, a unit has its weights; of an embedding, these rows."""
        if unit in self._there or not self.streams:
            yield
            return
        self._there.add(unit)
        try:
            for owner, name, empty in unit.tensors:
                _set(owner, name, self._read(empty, rows))
            yield
        finally:
            for owner, name, empty in unit.tensors:
                _set(owner, name, empty)
            self._there.remove(unit)

    def _read(self, empty: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        """Values of a tensor, or of these rows."""
        if (values := self._kept.get(id(empty))) is not None:
            values = values if rows is None else values[rows]
        else:
            values = self._stored(empty, rows)
        return nn.Parameter(values, requires_grad=torch.is_grad_enabled()) if _trains(empty) else values

    def _stored(self, empty: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        """The same from the checkpoint: of one part if it is, else put together. A copy stays while there is room."""
        parts, dtype = self._parts[id(empty)], self._dtypes.get(id(empty), empty.dtype)
        if len(parts) == 1 and parts[0][1].shape == empty.shape:
            stored = self._of_file(parts[0][0])
            if rows is not None:
                return stored[rows.cpu()].to(self.device, dtype)
            if (values := stored.to(self.device, dtype)) is stored:
                return values
        else:
            values = torch.empty(empty.shape, dtype=dtype, device=self.device)
            for name, view in parts:
                _part(values, view).copy_(self._of_file(name))
        if values.nbytes <= self._room:
            self._room -= values.nbytes
            self._kept[id(empty)] = values
        return values

    def _of_file(self, name: str) -> torch.Tensor:
        """A tensor as it is stored; in float32 with what is added to it where adapters are merged."""
        if self._adapted is None or name not in self.checkpoint.metas:
            return self._matrices.read(name)
        stored = self.checkpoint.read(name)
        if self._adapted.how != "merged" or name not in self._added:
            return stored
        inward, outward = (self._matrices.read(each).to(self.device).float() for each in self._added[name])
        return stored.to(self.device).float() + self._adapted.scaling * (outward @ inward)

    def hand(self, empty: torch.Tensor, gradients: Sequence[torch.Tensor | None], take: Take) -> None:
        """Hand out a tensor's gradients by checkpoint names; None stands for zeros."""
        dtype = self._dtypes.get(id(empty), empty.dtype)
        whole = [torch.zeros(empty.shape, dtype=dtype) if each is None else each for each in gradients]
        for name, view in self._parts[id(empty)]:
            take(name, [_part(each, view) for each in whole])

    def trained(self, unit: Unit) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Tensors without values of a unit that has its weights, and the weights."""
        return [(empty, getattr(owner, name)) for owner, name, empty in unit.tensors if _trains(empty)]


def release(*_: object) -> None:
    """Give the memory of models and tapes that are gone back to the GPU; a request of an engine server too."""
    gc.collect()
    torch.cuda.empty_cache()


class _Adapter:
    """The forward of a linear whose adapter's product is added to its own: each of three products is rounded."""

    def __init__(self, linear: Any, adapted: Adapted) -> None:
        self._linear, self._adapted, self._forward = linear, adapted, linear.forward

    def __call__(self, given: torch.Tensor) -> Any:
        within, own = self._adapted.how == "within", self._forward(given)
        inward = nn.functional.linear(given.detach() if within else given, self._linear.inward)
        product = self._adapted.scaling * nn.functional.linear(inward, self._linear.outward)
        return own + (product - product.detach() if within else product)


class _Streamed:
    """The forward of a unit's module: with its weights, on the tape if there is one. It does not keep the model."""

    def __init__(self, model: StreamedModel, unit: Unit, forward: Callable[..., Any]) -> None:
        self._model, self._unit, self._forward = weakref.proxy(model), unit, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model
        if model.tape is not None:
            return model.tape.call(self._unit, self._forward, *args, **kwargs)
        with model.weights_of(self._unit, rows := _rows(self._unit, args)):
            return self._forward(*_among(rows, args), **kwargs)


def _rows(unit: Unit, args: Sequence[Any]) -> torch.Tensor | None:
    """Ids that an embedding is asked for, sorted; None of other units."""
    embeds = isinstance(unit.module, nn.Embedding) and args
    return args[0].unique() if embeds and unit.tensors[0][2].device.type == "meta" else None


def _among(rows: torch.Tensor | None, args: Sequence[Any]) -> Sequence[Any]:
    """Arguments of a unit, with places among the rows for ids."""
    return args if rows is None else (torch.searchsorted(rows, args[0]), *args[1:])


@dataclass(slots=True, eq=False)
class _Call:
    """A unit's call in the forward of one sequence or batch."""

    unit: Unit
    forward: Callable[..., Any]
    leaves: list[Any]
    """Arguments, flat; tensors on the host, or on a GPU with room."""
    shape: Any
    """Form of the arguments."""
    edges: dict[int, Any]
    """Index of an argument -> where its gradient goes on to."""
    within: Within
    received: dict[int, list[torch.Tensor | None]] = field(default_factory=dict)
    """Kind -> gradients of what the call returned."""


class _Border(torch.autograd.Function):
    """Gives what a call returned as if the tape's anchor made it, and takes its gradients for the call."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tape: Tape, call: _Call, returned: list[torch.Tensor]) -> Any:
        ctx.call, ctx.tape = call, tape
        ctx.set_materialize_grads(False)
        return tuple(returned)  # a list's tensors are none that autograd sees

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        call, kind = ctx.call, ctx.tape.kind
        held = call.received.setdefault(kind, [None] * len(gradients))
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                here = gradient.detach()
                held[index] = here if held[index] is None else held[index] + here
        return None, None, None, None


class _Sums:
    """Gradients of weights, summed over sequences on the device; of some kinds the sums of their magnitudes."""

    def __init__(self, kinds: int, magnitudes: Sequence[int], ids: Mapping[tuple[int, int], torch.Tensor]) -> None:
        self._kinds, self._magnitudes, self._ids = kinds, magnitudes, ids
        self._held: dict[int, list[torch.Tensor | None]] = {}
        self._own: dict[tuple[int, int, int], torch.Tensor] = {}
        """Sequence, tensor and kind -> gradient of a tied head at the rows of the sequence's ids."""

    def add(
        self, place: int, empty: torch.Tensor, kind: int, gradient: torch.Tensor, rows: torch.Tensor | None
    ) -> None:
        """Add what a sequence has for a tensor, or for these rows of it."""
        held = self._held.setdefault(id(empty), [None] * self._kinds)
        if rows is None and kind in self._magnitudes and (ids := self._ids.get((place, id(empty)))) is not None:
            self._own[place, id(empty), kind] = gradient[ids.to(gradient.device)].cpu()
        if held[kind] is None:
            held[kind] = torch.zeros(empty.shape, dtype=gradient.dtype, device=gradient.device)
        into: Any = held[kind]
        gradient, rows = gradient.to(into.device), None if rows is None else rows.to(into.device)
        if rows is None:
            into += gradient.abs_() if kind in self._magnitudes else gradient
        elif kind in self._magnitudes:
            before = self._own.get((place, id(empty), kind), torch.zeros(()))
            into.index_add_(0, rows, (before + gradient).abs_().sub_(before.abs()))
        else:
            into.index_add_(0, rows, gradient)

    def to_host(self) -> None:
        """Bring all to the host, before another unit has its weights."""
        for held in self._held.values():
            held[:] = [each if each is None else each.cpu() for each in held]

    def of(self, empty: torch.Tensor) -> list[torch.Tensor | None]:
        """All kinds of a tensor, which is forgotten."""
        return self._held.pop(id(empty), [None] * self._kinds)


class Tape:
    """Calls of a model's units in some sequences, and the gradients of their weights.

    Args:
        model: whose units record; one tape at a time.
        magnitudes: kinds of gradients of which each sequence's magnitudes are added.
    """

    def __init__(self, model: StreamedModel, magnitudes: Sequence[int] = ()) -> None:
        self.model, self.kind, self._magnitudes = model, 0, magnitudes
        self._calls: list[list[_Call]] = []
        self._within: Within = lambda _: contextlib.nullcontext()
        self._anchor = torch.zeros((), requires_grad=True)
        self._room = Room(model.device)
        self._on_host: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # masks and positions, which all layers share

    @contextlib.contextmanager
    def sequence(self, within: Within | None = None) -> Iterator[None]:
        """Within, what the model computes is one sequence, or one batch, of the tape."""
        self._calls.append([])
        self._within = within or (lambda _: contextlib.nullcontext())
        self.model.tape = self
        try:
            yield
        finally:
            self.model.tape = None
            self._on_host = {}

    def call(self, unit: Unit, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Result of a function of a unit's weights; the call goes on record."""
        leaves, shape = tree_flatten((args, kwargs))
        edges = {
            index: get_gradient_edge(leaf)
            for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        }  # fmt: skip
        kept = [self._hosted(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        call = _Call(unit, forward, kept, shape, edges, self._within)
        rows = _rows(unit, args)
        with torch.no_grad(), _alone(self.model), call.within(unit), self.model.weights_of(unit, rows):
            found = forward(*_among(rows, args), **kwargs)
        given, form = tree_flatten(found)
        floats = [index for index, leaf in enumerate(given) if _floats(leaf)]
        returned = _Border.apply(self._anchor, self, call, [given[index] for index in floats])
        for index, tensor in zip(floats, returned, strict=True):
            given[index] = tensor
        self._calls[-1].append(call)
        return tree_unflatten(given, form)

    def _hosted(self, leaf: torch.Tensor) -> torch.Tensor:
        if leaf.requires_grad:
            return self._room.held(leaf.detach())
        kept = self._on_host[id(leaf)] = self._on_host.get(id(leaf)) or (leaf, self._room.held(leaf))
        return kept[1]

    def backward(self, kinds: int, take: Take) -> None:
        """Compute the gradients of all weights, and hand each out when it is complete.

        Args:
            kinds: number of kinds; `kind` said which one a gradient of what the sequences returned was.
            take: gets each weight's, of all sequences; zeros where nothing depends on it.
        """
        total = _Sums(kinds, self._magnitudes, dict(self._embedded()))
        left = {id(empty): empty for unit in self.model.units for _, _, empty in unit.tensors if _trains(empty)}
        while unit := next((calls[-1].unit for calls in self._calls if calls), None):
            embeds = isinstance(unit.module, nn.Embedding)
            with contextlib.nullcontext() if embeds else self.model.weights_of(unit):
                for place, calls in enumerate(self._calls):
                    found: dict[tuple[int, int], torch.Tensor] = {}
                    rows = None
                    while calls and calls[-1].unit is unit:
                        rows = self._again(calls.pop(), found)
                    for (empty, kind), gradient in found.items():
                        total.add(place, left[empty], kind, gradient, rows)
            needed = {id(empty) for calls in self._calls for call in calls for _, _, empty in call.unit.tensors}
            for empty in [empty for key, empty in left.items() if key not in needed]:
                self.model.hand(left.pop(id(empty)), total.of(empty), take)
            total.to_host()

    def _embedded(self) -> Iterator[tuple[tuple[int, int], torch.Tensor]]:
        """Sequence and embedding that is read by rows, and which rows."""
        for place, calls in enumerate(self._calls):
            for call in calls:
                if (rows := _rows(call.unit, call.leaves)) is not None:
                    yield (place, id(call.unit.tensors[0][2])), rows

    def _again(self, call: _Call, found: dict[tuple[int, int], torch.Tensor]) -> torch.Tensor | None:
        """Compute a call again, add its weights' gradients, and hand on those of its arguments."""
        model, leaves = self.model, list(call.leaves)
        if not call.received:
            return None
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                leaves[index] = leaf.to(model.device).detach().requires_grad_(index in call.edges)
        args, kwargs = tree_unflatten(leaves, call.shape)
        rows = _rows(call.unit, args)
        with torch.enable_grad(), _alone(model), call.within(call.unit), model.weights_of(call.unit, rows):
            trained = model.trained(call.unit)
            returned = [leaf for leaf in tree_flatten(call.forward(*_among(rows, args), **kwargs))[0] if _floats(leaf)]
            inputs = [leaves[index] for index in call.edges]
            if not (asked := [*inputs, *(weight for _, weight in trained)]):
                return None  # an embedding that is frozen
            for kind in sorted(call.received):
                pairs = [
                    (tensor, gradient)
                    for tensor, gradient in zip(returned, call.received[kind], strict=True)
                    if gradient is not None and tensor.requires_grad
                ]
                last = kind == max(call.received)
                slopes = torch.autograd.grad(
                    [tensor for tensor, _ in pairs], asked, [slope for _, slope in pairs],
                    retain_graph=not last, allow_unused=True,
                )  # fmt: skip
                for (empty, _), slope in zip(trained, slopes[len(inputs) :], strict=True):
                    if slope is not None:
                        key = (id(empty), kind)
                        found[key] = slope if key not in found else found[key] + slope
                on = [
                    (edge, slope) for edge, slope in zip(call.edges.values(), slopes, strict=False) if slope is not None
                ]
                self.kind = kind
                if on:
                    torch.autograd.backward([edge for edge, _ in on], [slope for _, slope in on], retain_graph=True)
        return None if rows is None else rows.cpu()


@contextlib.contextmanager
def _alone(model: StreamedModel) -> Iterator[None]:
    """Within, the model's units do not record."""
    tape, model.tape = model.tape, None
    try:
        yield
    finally:
        model.tape = tape


def _floats(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def _trains(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad


def _own(module: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """A module's own weights, and the buffers that checkpoints have."""
    for name, tensor in module._parameters.items():
        if tensor is not None:
            yield module, name, tensor
    for name, tensor in module._buffers.items():
        if tensor is not None and name not in module._non_persistent_buffers_set:
            yield module, name, tensor


def _unit(module: nn.Module) -> Unit:
    return Unit(module, [item for inner in module.modules() for item in _own(inner)])


def _set(owner: nn.Module, name: str, tensor: torch.Tensor) -> None:
    held: dict[str, Any] = owner._parameters if name in owner._parameters else owner._buffers
    held[name] = tensor


def _tensor(model: nn.Module, holder: str) -> torch.Tensor:
    owner, _, name = holder.rpartition(".")
    return getattr(model.get_submodule(owner), name)


def _part(values: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """Part of a tensor that lies as a view of another one of its shape does."""
    return values.contiguous().as_strided(view.shape, view.stride(), view.storage_offset())


def _without_weights(path: Path | str, dtype: torch.dtype, device: str, *, further: bool = False) -> Any:
    """A model whose weights have no values; buffers that no checkpoint has do.

    A layer for a further token is like the last, which does not run with the others, and has norms and a linear more.
    """
    config: Any = AutoConfig.from_pretrained(path, local_files_only=True)
    asked = {"dtype": dtype, "attn_implementation": "eager", "experts_implementation": "eager"}
    config.num_hidden_layers += further
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, **asked)
        if further:
            base, hidden = model.model, config.hidden_size
            config.num_hidden_layers = base.config.num_hidden_layers = len(base.layers) - 1
            base.layers[-1].enorm, base.layers[-1].hnorm, norm = (copy.deepcopy(base.norm) for _ in range(3))
            base.layers[-1].eh_proj = nn.Linear(2 * hidden, hidden, bias=False, dtype=dtype)
            base.layers[-1].shared_head = nn.ModuleDict({"norm": norm})
    for module in model.modules():
        module._is_hf_initialized = False
        for name in module._non_persistent_buffers_set & module._buffers.keys():
            if (buffer := module._buffers[name]) is not None:
                module._buffers[name] = torch.empty_like(buffer, device=device)
    model.initialize_weights()
    compute_the_definition(model, dtype)
    return model.eval()


def _dtypes(model: Any, checkpoint: Checkpoint, dtype: torch.dtype) -> dict[int, torch.dtype]:
    """Dtypes of tensors that stay in float32 in a model of less."""
    strict = model._keep_in_fp32_modules_strict or () if dtype.itemsize < 4 else ()
    found = {}
    stored = {meta.dtype for meta in checkpoint.metas.values()}
    for name, (holder, _) in checkpoint_places(model, checkpoint.names()).items():
        of_float32 = stored != {"float32"} and name in checkpoint.metas and checkpoint.meta(name).dtype == "float32"
        if of_float32 or any(re.search(rf"(^|\.){part}($|\.)", holder) for part in strict):
            found[id(_tensor(model, holder))] = torch.float32
    return found

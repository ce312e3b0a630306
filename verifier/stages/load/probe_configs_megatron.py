"""Probes of configurations: the source's and an export's config.json, and the provider that a trainer is built from."""

from __future__ import annotations

import enum
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from verifier.config_json import texts_of, with_defaults
from verifier.core.record import Probe, real
from verifier.export.live_weights import LiveWeights
from verifier.megatron.lora_megatron import further_settings, read_adapter
from verifier.model.checkpoint import Checkpoint
from verifier.plan.chunk_plan import ChunkPlan
from verifier.plan.digest import described, digest_tensors
from verifier.stages.export.probe_tensors import record_tensors
from verifier.stages.export.records import ExportedAdapterMatrix, ExportedAdapterScaling, ExportedConfig
from verifier.stages.load.records import ExpectedShard, ShardRecord, SourceConfig, StatedConfig
from verifier.stages.logprob.records import LAYER_WINDOWS, NORM_EPSILONS, ROTARY_FREQUENCIES, ProviderFields
from verifier.stages.plan.records import PlanDigest, PlannedTensor
from verifier.stages.train.records import FrozenShard


def record_config(probe: Probe, source: Checkpoint, folder: Path, version: int) -> None:
    """The config.json that megatron-bridge wrote with an export, and the source's, as transformers reads both."""
    key, within = "tie_word_embeddings", True
    for kind, path in ((SourceConfig, source.path), (ExportedConfig, folder)):
        text = json.loads((path / "config.json").read_text()).get("text_config") or {}
        within = within and key in text  # stated by the source, it goes before the whole's; an export has the default
        values = _read(path) | ({key: text[key]} if within else {})
        probe.emit(kind(name="config.json", version=version, values=texts_of(values)))


def record_stated(probe: Probe, source: Checkpoint) -> None:
    """The source's config.json as it stands; for keys that it does not have, what transformers takes."""
    probe.emit(StatedConfig(name="config.json", values=texts_of(with_defaults(source.config, _read(source.path)))))


def record_provider(probe: Probe, provider: Any, chunks: Sequence[nn.Module]) -> None:
    """The plain fields of the provider of a rank's model, windows of layers, epsilons of norms, rotary frequencies."""
    fields = {name: _plain(value) for name, value in vars(provider).items()}
    fields[LAYER_WINDOWS] = dict(window for chunk in chunks for window in _windows(chunk))
    fields[NORM_EPSILONS] = norm_epsilons(chunks)
    fields[ROTARY_FREQUENCIES] = dict(found for chunk in chunks for found in _frequencies(chunk))
    probe.emit(ProviderFields(name="provider", values=texts_of({k: v for k, v in fields.items() if v is not ...})))


def _windows(chunk: nn.Module) -> Iterator[tuple[str, int | None]]:
    """Yield (number of a layer from 0 on, rows before its own that a row attends to; None for all).

    Transformer Engine, its reference functions and megatron-bridge's own attention keep them by two names.
    """
    for path, module in chunk.named_modules():
        attention = getattr(module, "core_attention", None)
        if attention is None or ".mtp." in f".{path}.":
            continue
        if hasattr(attention, "rows_before"):
            yield str(module.layer_number - 1), attention.rows_before
        elif hasattr(attention, "window_size"):
            before = -1 if attention.window_size is None else attention.window_size[0]
            yield str(module.layer_number - 1), None if before < 0 else int(before)


def _frequencies(chunk: nn.Module) -> Iterator[tuple[str, list[float]]]:
    """Yield (path, frequencies) of each module of the text model that has one set of them, as YaRN's have not."""
    for path, module in chunk.named_modules():
        name, found = path.replace("module.", ""), getattr(module, "inv_freq", None)
        plain = isinstance(found, torch.Tensor) and found.ndim == 1 and not hasattr(module, "inv_freq_inter")
        if plain and name.removeprefix("language_model.") == "rotary_pos_emb":
            yield name, found.tolist()


def norm_epsilons(chunks: Iterable[nn.Module]) -> dict[str, list[float]]:
    """Epsilons of the decoder's norms with scales, of their own or fused with a linear; see `NORM_EPSILONS`.

    Transformer Engine keeps them in the modules. Its reference linears have none, and read the config's.
    """
    found = defaultdict[str, set[float]](set)
    for chunk in chunks:
        for path, module in chunk.named_modules():
            name = re.sub(r"\.\d+(?=\.)", ".*", path.replace("module.", ""))
            own = dict(module.named_parameters(recurse=False))  # an adapter's `weight` merges it, a collective
            fused = "layer_norm_weight" in own
            is_norm = fused or ("weight" in own and own["weight"].ndim == 1)
            of_config = getattr(getattr(module, "config", None), "layernorm_epsilon", None)
            eps = getattr(module, "eps", of_config if fused else None)
            if is_norm and isinstance(eps, float) and name.startswith(("decoder.", "language_model.decoder.")):
                found[name].add(eps)
    return {name: sorted(values) for name, values in found.items()}


def _read(path: Path) -> dict[str, Any]:
    from transformers import AutoConfig

    return dict(AutoConfig.from_pretrained(path, local_files_only=True).to_dict())


def _plain(value: Any) -> Any:
    """A number, flag, name or list as it is, an enum or function by its name; an ellipsis for anything else."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, list | tuple):
        parts = [_plain(item) for item in value]
        return ... if ... in parts else parts
    return getattr(value, "__name__", ...) if callable(value) else ...


def record_live(probe: Probe, live: LiveWeights, version: int, *kinds: type[ShardRecord]) -> None:
    """Digest every live tensor, recorded as each of `kinds`; the device is waited for once, not for each tensor.

    Those of updates are held against shards of exports: they are what their tensors are after an export and a load.
    """
    found = list(live.tensors())
    digests = digest_tensors(tensor for _, _, tensor in found)
    for (chunk, name, tensor), digest in zip(found, digests, strict=True):
        place = live.places.get((chunk, name))
        for kind in kinds:
            again = tensor
            if place is not None and version and kind is not FrozenShard:  # which is held against what was loaded
                again = place.loaded_again(tensor)
            probe.emit(
                kind(
                    name=place.global_name if place else f"{name} (chunk {chunk})", version=version,
                    replica=place.group if place else f"rank {live.rank} {chunk} {name}", coordinate=live.coordinate,
                    **described(again, digest if again is tensor else ""),
                )
            )  # fmt: skip


def record_expected(probe: Probe, live: LiveWeights, source: Checkpoint) -> None:
    """Digest, for every placement, what the checkpoint says must be there."""
    for place in live.places.values():
        facts = described(place.shard(source.read))
        probe.emit(ExpectedShard(name=place.global_name, coordinate=live.coordinate, **facts))


def record_exported_adapter(probe: Probe, path: Path, version: int) -> None:
    """Digest the matrices of an adapter's folder, with its scaling and what else its configuration asks for."""
    found, scaling = read_adapter(path)
    record_tensors(probe, ExportedAdapterMatrix, found.items(), version)
    further = further_settings(path)
    probe.emit(ExportedAdapterScaling(name="alpha / rank", version=version, scaling=real(scaling), further=further))


def record_plan(probe: Probe, plan: ChunkPlan, *, entries: bool) -> None:
    """The plan's digest and, from one rank, its entries."""
    tensors, num_chunks = tuple(plan.tensors), len(plan.chunks)
    probe.emit(PlanDigest(name="chunk plan", digest=plan.digest, num_chunks=num_chunks, num_tensors=len(tensors)))
    for tensor in tensors if entries else ():
        probe.emit(PlannedTensor(name=tensor.name, dtype=tensor.dtype, shape=tuple(tensor.shape)))

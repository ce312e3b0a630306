"""Records of the transfer and of what an engine holds after it: transport, engine."""

from __future__ import annotations

from typing import Literal

from verifier.core.record import Count, Record, Shape, TensorRecord


class ReceivedTensor(TensorRecord, frozen=True, kw_only=True, tag="transport/receipt"):
    """One tensor as an engine rank received it, before its loader saw it."""

    chunk: Count
    """Index of the chunk that brought it."""


class Handover(Record, frozen=True, kw_only=True, tag="transport/handover"):
    """End of the transfer of one version."""

    refused: str
    """Why it was refused; empty if it was not."""


class LoadedNames(Record, frozen=True, kw_only=True, tag="engine/loaded"):
    """Report of the engine's own loader on one chunk."""

    names: tuple[str, ...]
    """Parameters, in the engine's spelling."""
    refused: str
    """Why the chunk was refused; empty if it was not."""


class HeldTensorRecord(TensorRecord, frozen=True, kw_only=True):
    """One thing that an engine rank computes with, under the engine's own name."""

    sort: Literal["parameter", "buffer", "view", "derived"]
    """"view" is a buffer in a parameter's memory, "derived" a packed copy or an attribute."""


class SyncedTensor(HeldTensorRecord, frozen=True, kw_only=True, tag="engine/state"):
    """Held by an engine that was synced."""


class ColdTensor(HeldTensorRecord, frozen=True, kw_only=True, tag="engine/cold"):
    """Held by an engine that loaded the weights at its start."""


class SettingsRecord(Record, frozen=True, kw_only=True):
    """Plain attributes that one module of an engine computes with."""

    values: dict[str, str]
    """Number, flag or name, by attribute."""


class SyncedSettings(SettingsRecord, frozen=True, kw_only=True, tag="engine/settings"):
    """Plain attributes that one module of a synced engine computes with."""


class ColdSettings(SettingsRecord, frozen=True, kw_only=True, tag="engine/cold-settings"):
    """Plain attributes that one module computes with in an engine that loaded the weights at its start."""


class CheckpointView(TensorRecord, frozen=True, kw_only=True, tag="engine/view"):
    """The part of one checkpoint tensor that an engine rank holds, read back from what it computes with."""

    tensor: str
    """Checkpoint spelling. The record's name adds the holder where several hold the same."""
    holder: str
    """The engine's own name of what it was read from."""
    box: tuple[tuple[Count, Count], ...]
    """Begin and end of the part, per dim of the checkpoint tensor."""


class ExpectedView(TensorRecord, frozen=True, kw_only=True, tag="engine/view-expected"):
    """Sent tensor, cut to the part that an engine rank holds; all of it where the rank holds none."""

    whole: Shape
    """Shape of the checkpoint tensor."""


class QuantizedNames(Record, frozen=True, kw_only=True, tag="engine/view-quantized"):
    """Checkpoint tensors that an engine rank quantized, so that their bits cannot be what was sent."""

    names: tuple[str, ...]


class Poison(Record, frozen=True, kw_only=True, tag="engine/poison"):
    """Effect of the poison before an update on each tensor of one engine rank."""

    outcomes: dict[str, str]
    """State per tensor: "nan"; "nan, restored before the update", where no checkpoint carries it; "left", still finite;
    "left: " and a reason, which the engine declares."""

"""Records of the stage `engine`: contents of the engine after loading."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from verifier.core.owed import Owed, anyone, every_engine, once, per_held, per_sent, per_sync
from verifier.core.record import Count, Record, Shape, TensorRecord


class LoadedNames(Record, frozen=True, kw_only=True, tag="engine/loaded"):
    """Report of the engine's own loader on one chunk."""

    owed = (Owed(every_engine, per_sync),)

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

    owed = (Owed(every_engine, per_held),)


class ColdTensor(HeldTensorRecord, frozen=True, kw_only=True, tag="engine/cold"):
    """Held by an engine that loaded the weights at its start."""

    owed = (Owed(anyone, per_sent),)


class SettingsRecord(Record, frozen=True, kw_only=True):
    """Plain attributes that one module of an engine computes with."""

    values: dict[str, str]
    """Number, flag or name, by attribute."""


class SyncedSettings(SettingsRecord, frozen=True, kw_only=True, tag="engine/settings"):
    """Plain attributes that one module of a synced engine computes with."""

    owed = (Owed(every_engine, per_held),)


class ColdSettings(SettingsRecord, frozen=True, kw_only=True, tag="engine/cold-settings"):
    """Plain attributes that one module computes with in an engine that loaded the weights at its start."""

    owed = (Owed(anyone, per_sent),)


class CheckpointView(TensorRecord, frozen=True, kw_only=True, tag="engine/view"):
    """The part of one checkpoint tensor that an engine rank holds, read back from what it computes with."""

    owed = (Owed(every_engine, per_held),)

    tensor: str
    """Checkpoint spelling. The record's name adds the holder where several hold the same."""
    holder: str
    """The engine's own name of what it was read from."""
    box: tuple[tuple[Count, Count], ...]
    """Begin and end of the part, per dim of the checkpoint tensor."""


class ExpectedView(TensorRecord, frozen=True, kw_only=True, tag="engine/view-expected"):
    """Tensor that was drawn for a sync, cut to the part that an engine rank holds; all of it where it holds none."""

    owed = (Owed(every_engine, per_held),)

    whole: Shape
    """Shape of the checkpoint tensor."""
    wider_dtype: str = ""
    """Dtype in which the engine rank holds it, if that has every value of its own; empty where they are the same."""
    wider_digest: Annotated[str, Meta(pattern=r"^(|[a-z][a-z0-9]*:[0-9a-f]{32,128})$")] = ""
    """Digest of its values in that dtype."""


class QuantizedNames(Record, frozen=True, kw_only=True, tag="engine/view-quantized"):
    """Checkpoint tensors that an engine rank quantized, so that their bits cannot be what was sent."""

    names: tuple[str, ...]


class EngineRestart(Record, frozen=True, kw_only=True, tag="engine/restart"):
    """Engines died and were started again, before or while they sampled by the weights of this version."""

    restarts: Count
    """Times since the last evidence of what they hold."""


class EngineServed(Record, frozen=True, kw_only=True, tag="engine/served"):
    """Contents of one engine rank after it answered by a version, beside those before."""

    owed = (Owed(every_engine, once),)

    num_tensors: Count
    """Parameters, buffers and derived tensors that were looked at."""
    changed: tuple[str, ...] = ()
    """Tensors with other bits than right after the sync, or at the start of an engine that was sent nothing yet."""


class KeptKeys(Record, frozen=True, kw_only=True, tag="engine/kept-keys"):
    """Keys and values that each engine has right after a sync, by engine."""

    owed = (Owed(anyone, per_sync),)

    blocks: tuple[Count, ...]
    """Blocks that it would give to new prompts."""
    tokens: tuple[Count, ...]
    """Tokens of the requests that run, whose keys it goes on from."""
    kept: bool = False
    """Requests ran during the sync and were to keep theirs."""


class Poison(Record, frozen=True, kw_only=True, tag="engine/poison"):
    """Effect of the poison before an update on each tensor of one engine rank."""

    owed = (Owed(every_engine, per_sync),)

    outcomes: dict[str, str]
    """State per tensor: "nan"; "nan, restored before the update", where no checkpoint carries it; "left", still finite;
    "left: " and a reason, which the engine declares."""

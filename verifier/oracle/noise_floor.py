"""Stored noise floors: what one checkpoint's arithmetic in bf16 alone costs, by length of the sequence."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from verifier.core.outputs import json_text, read_as, require_writable, write_whole
from verifier.core.record import Probe
from verifier.errors import UsageError
from verifier.model.checkpoint import Checkpoint
from verifier.platform.provenance import installed
from verifier.stages.logprob.records import StoredFloor

FLOORS = Path("golden") / "noise"
EDGES = (64, 256, 1024)
"""Longest sequence of each bucket, tokens."""
ARITHMETIC = ("torch", "transformers")
"""Packages whose version a floor belongs to: they do the arithmetic that it measures."""


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """Absolute differences of log-probabilities, bf16 against fp32, over sequences of one range of lengths; nats."""

    longest: int
    """Tokens of the longest sequence; the bucket before it ends below the shortest."""
    tokens: int
    """Number of log-probabilities that it was measured on."""
    mean: float
    deviation: float
    median: float
    p90: float
    p99: float
    max: float


class Floor(msgspec.Struct, frozen=True, kw_only=True):
    """Noise of one checkpoint on one tier."""

    model: str
    dtype: str
    tier: str
    config: str
    """Digest of config.json's content."""
    weights: str
    """Digest of the names and contents of all tensors."""
    versions: dict[str, str]
    command: str
    why: str
    buckets: tuple[Bucket, ...]


def bucket_of(longest: int, rounded: Sequence[Sequence[float]], exact: Sequence[Sequence[float]]) -> Bucket:
    """Statistics of the differences between two scorings, nats, of the same sequences of up to `longest` tokens.

    Raises:
        UsageError: a difference is not finite.
    """
    gaps = sorted(abs(x - y) for low, high in zip(rounded, exact, strict=True) for x, y in zip(low, high, strict=True))
    if not all(map(math.isfinite, gaps)):
        raise UsageError("log-probabilities of this model are not finite: there is no noise to measure")

    def quantile(share: float) -> float:
        return gaps[min(len(gaps) - 1, int(share * len(gaps)))]

    return Bucket(
        longest=longest, tokens=len(gaps), mean=statistics.fmean(gaps), deviation=statistics.pstdev(gaps),
        median=quantile(0.5), p90=quantile(0.9), p99=quantile(0.99), max=gaps[-1],
    )  # fmt: skip


def config_digest(config: Mapping[str, Any]) -> str:
    """Digest of config.json's content, however it is laid out."""
    return hashlib.blake2b(json.dumps(config, sort_keys=True).encode(), digest_size=16).hexdigest()


def weights_digest(checkpoint: Checkpoint) -> str:
    """Digest of the names and contents of all tensors."""
    from verifier.plan.digest import digest_tensor

    found = hashlib.blake2b(digest_size=16)
    for name in sorted(checkpoint.names()):
        found.update(f"{name} {digest_tensor(checkpoint.read(name))}\n".encode())
    return found.hexdigest()


def versions() -> dict[str, str]:
    """Versions of the packages that do the arithmetic, without the build's local label."""
    return {name: installed(name) or "" for name in ARITHMETIC}


def label_of(model: str) -> str:
    """A model's name, without where its checkpoint lies on this machine."""
    return Path(model).name


def floor_path(model: str, dtype: str, tier: str) -> Path:
    """File of a model's floor."""
    return FLOORS / f"{label_of(model).replace(':', '-')}.{dtype}.{tier}.json"


def write_floor(floor: Floor) -> Path:
    """Store a floor, whole or not at all."""
    path = floor_path(floor.model, floor.dtype, floor.tier)
    require_writable(path, make_folder=True)
    write_whole(path, json_text(floor))
    return path


def read_floor(path: Path) -> Floor:
    """Read a stored floor.

    Raises:
        UsageError: the file is no noise floor.
    """
    return read_as(path, Floor, "a noise floor that `verifier noise --record` wrote")


def stored_floor(model: str, checkpoint: Checkpoint, dtype: str, tier: str) -> Floor | None:
    """The floor of this checkpoint, bit for bit, under these versions; None where there is none."""
    path = floor_path(model, dtype, tier)
    if not path.is_file():
        return None
    floor = read_floor(path)
    here = (dtype, tier, versions(), config_digest(checkpoint.config))
    same = (floor.dtype, floor.tier, floor.versions, floor.config) == here
    return floor if same and floor.weights == weights_digest(checkpoint) else None


def record_floor(probe: Probe, floor: Floor) -> None:
    """Record a floor, bucket by bucket, so that whoever judges needs no file."""
    stored = str(floor_path(floor.model, floor.dtype, floor.tier))
    for bucket in floor.buckets:
        numbers = msgspec.structs.asdict(bucket)
        name = f"sequences of up to {bucket.longest} tokens"
        probe.emit(StoredFloor(name=name, stored=stored, greatest=numbers.pop("max"), **numbers))

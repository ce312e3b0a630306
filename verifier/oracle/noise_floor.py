"""Stored noise floors: what one checkpoint's arithmetic in bf16 alone costs, by length of the sequence."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verifier.core.record import Probe
from verifier.core.records_logprobs import StoredFloor
from verifier.errors import UsageError
from verifier.model.checkpoint import Checkpoint
from verifier.platform.pins import installed

FLOORS = Path("golden") / "noise"
EDGES = (64, 256, 1024)
"""Longest sequence of each bucket, tokens."""
ARITHMETIC = ("torch", "transformers")
"""Packages whose version a floor belongs to: they do the arithmetic that it measures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Absolute differences of log-probabilities, bf16 against fp32, over sequences of one range of lengths; nats."""

    longest: int
    """Tokens of the longest sequence that it speaks of; the bucket before it ends below the shortest."""
    tokens: int
    """Log-probabilities that it was measured on."""
    mean: float
    deviation: float
    median: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The floor of one checkpoint on one tier."""

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
    """Differences of two scorings of the same sequences.

    Args:
        longest: upper edge of the bucket, tokens.
        rounded: log-probabilities in bf16, one list per sequence, nats.
        exact: the same in fp32.
    """
    gaps = sorted(abs(x - y) for low, high in zip(rounded, exact, strict=True) for x, y in zip(low, high, strict=True))

    def quantile(share: float) -> float:
        return gaps[min(len(gaps) - 1, int(share * len(gaps)))]

    return Bucket(
        longest=longest, tokens=len(gaps), mean=statistics.fmean(gaps), deviation=statistics.pstdev(gaps),
        median=quantile(0.5), p90=quantile(0.9), p99=quantile(0.99), max=gaps[-1],
    )  # fmt: skip


def config_digest(checkpoint: Checkpoint) -> str:
    """Digest of config.json's content, however it is laid out."""
    return hashlib.blake2b(json.dumps(checkpoint.config, sort_keys=True).encode(), digest_size=16).hexdigest()


def weights_digest(checkpoint: Checkpoint) -> str:
    """Digest of the names and contents of all tensors."""
    from verifier.plan.digest import digest_tensor

    found = hashlib.blake2b(digest_size=16)
    for name in sorted(checkpoint.names()):
        found.update(f"{name} {digest_tensor(checkpoint.read(name))}\n".encode())
    return found.hexdigest()


def versions() -> dict[str, str]:
    """Versions of the packages that do the arithmetic, without the build's local label."""
    return {name: (installed(name) or "").partition("+")[0] for name in ARITHMETIC}


def label_of(model: str) -> str:
    """A model's name, without where its checkpoint lies on this machine."""
    return Path(model).name


def floor_path(model: str, dtype: str, tier: str) -> Path:
    """File that holds the floor of a model."""
    return FLOORS / f"{label_of(model).replace(':', '-')}.{dtype}.{tier}.json"


def write_floor(floor: Floor) -> Path:
    """Store a floor, whole or not at all.

    Raises:
        UsageError: the folder cannot be written.
    """
    path = floor_path(floor.model, floor.dtype, floor.tier)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(".partial")
        aside.write_text(json.dumps(asdict(floor), indent=1) + "\n")
        aside.rename(path)
    except OSError as problem:
        raise UsageError(f"the noise floor cannot be written to `{path}`: {problem.strerror}") from problem
    return path


def read_floor(path: Path) -> Floor:
    """A stored floor.

    Raises:
        UsageError: the file is no noise floor.
    """
    try:
        record: dict[str, Any] = json.loads(path.read_text())
        buckets = tuple(Bucket(**item) for item in record.pop("buckets"))
        return Floor(**record, buckets=buckets)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as problem:
        raise UsageError(f"`{path}` is no noise floor that `verifier noise --record` wrote: {problem}") from problem


def stored_floor(model: str, checkpoint: Checkpoint, dtype: str, tier: str) -> Floor | None:
    """The floor of this checkpoint, bit for bit, under these versions; None where there is none."""
    path = floor_path(model, dtype, tier)
    if not path.is_file():
        return None
    floor = read_floor(path)
    same = (
        (floor.dtype, floor.tier, floor.versions) == (dtype, tier, versions())
        and floor.config == config_digest(checkpoint)
        and floor.weights == weights_digest(checkpoint)
    )
    return floor if same else None


def record_floor(probe: Probe, floor: Floor) -> None:
    """The floor as evidence of a run, a record per bucket, so that whoever judges needs no file."""
    stored = str(floor_path(floor.model, floor.dtype, floor.tier))
    for bucket in floor.buckets:
        probe.emit(
            StoredFloor(
                name=f"sequences of up to {bucket.longest} tokens", longest=bucket.longest, tokens=bucket.tokens,
                greatest=bucket.max, mean=bucket.mean, deviation=bucket.deviation, median=bucket.median,
                p90=bucket.p90, p99=bucket.p99, stored=stored,
            )
        )  # fmt: skip

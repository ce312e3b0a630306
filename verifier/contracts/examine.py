"""Contracts looked at in the environment that runs: which moved, and what a manifest says of them."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from verifier.contracts.table import Contract, by_module, contracts_of
from verifier.core.manifest import MovedContract
from verifier.core.outputs import write_whole
from verifier.launch.failures import Place
from verifier.platform import Tier
from verifier.platform.provenance import code_digest, installed_versions, running_set

DEADLINE_S = 600.0
"""Deadline of one module's process; each takes 5 to 40 s on two cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """A contract and what was seen of it."""

    contract: Contract
    failure: Place | None
    """Why it does not hold; None where it does."""
    answered: bool = True
    """Its process ran to its end, so that a second look would say the same."""
    verified_set: str = ""
    """Verified set in which it was looked at; empty in other versions."""

    @property
    def stated(self) -> bool:
        """Test for one that does not hold, in a verified set of which the table says so."""
        return self.failure is not None and self.verified_set in self.contract.gone_in

    @property
    def moved(self) -> bool:
        """Test for a contract on which checks or a fix rest, and which does not hold."""
        return self.failure is not None and not self.contract.bug and not self.stated

    @property
    def mended(self) -> bool:
        """Test for a bug of upstream's that is not there any more; one that cannot be looked at may be there."""
        return bool(self.contract.bug) and self.failure is not None and self.failure.untrue and not self.stated

    @property
    def unseen(self) -> bool:
        """Test for a bug of upstream's that cannot be looked at."""
        return bool(self.contract.bug) and self.failure is not None and not self.failure.untrue


def look(tier: Tier, progress: Callable[[str], None] = lambda _: None) -> list[Looked]:
    """Look at all contracts of a tier, one process for each module."""
    found = []
    for module in by_module(contracts_of(tier)):
        progress(f"contracts: {module}")
        found += look_at(module, tier)
    return found


def look_at(module: str, tier: Tier) -> list[Looked]:
    """Look at the contracts of one module, in a process of its own."""
    contracts = by_module(contracts_of(tier))[module]
    command = [sys.executable, "-m", "verifier.contracts", module, tier]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)  # noqa: S603 - our own interpreter
        told = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        told, said = None, f"no answer after {DEADLINE_S:g} s"
    if told is None:
        return [Looked(contract=item, failure=Place(message=said), answered=False) for item in contracts]
    return [
        Looked(
            contract=item, failure=None if told[item.name] is None else Place(**told[item.name]),
            verified_set=running_set(tier)[0],
        )
        for item in contracts
    ]  # fmt: skip


def record_of(item: Looked) -> dict[str, Any]:
    """JSON value of what was seen of a contract."""
    contract = item.contract
    return {
        "name": contract.name, "package": contract.package, "checks": list(contract.checks), "bug": contract.bug,
        "fix": contract.fix, "holds": item.failure is None, "stated": item.stated,
        "failure": None if item.failure is None else asdict(item.failure),
    }  # fmt: skip


def text_of(found: Sequence[Looked]) -> str:
    """One line on all, then one block for each contract that moved and one line for each bug that is gone."""
    moved, mended = [item for item in found if item.moved], [item for item in found if item.mended]
    holding = sum(item.failure is None for item in found)
    lines = [f"contracts: {holding} of {len(found)} hold" + (f", {len(moved)} moved" if moved else "")]
    for item in moved:
        contract = item.contract
        lines += [f"  {contract.name} of {contract.package}: {item.failure}"]
        lines += [f"    rests on it: {contract.resting}"]
    unseen = [item for item in found if item.unseen]
    lines += [
        f"  bug cannot be looked for: {item.contract.bug} ({item.contract.name}): {item.failure}" for item in unseen
    ]
    lines += [f"  bug not found, so a fix can go: {item.contract.bug} ({item.contract.name})" for item in mended]
    lines += [
        f"  does not hold in the verified set {item.verified_set}, as docs/upstream.md states: {item.contract.name} "
        f"({item.contract.bug or item.contract.resting})"
        for item in found
        if item.stated
    ]
    return "\n".join(lines)


def declared(tier: Tier, kept: Path) -> dict[str, Any]:
    """Fields of a manifest on the versions that run: the verified set, or what differs from the nearest.

    Args:
        tier: of the run.
        kept: folder in which answers are kept, by versions and by our own files.

    Returns:
        `verified_set`, or `verified` and `moved_contracts`.
    """
    name, pins = running_set(tier)
    if name:
        return {"verified_set": name}
    return {"verified": pins, "moved_contracts": _moved(tier, kept)}


def _moved(tier: Tier, kept: Path) -> tuple[MovedContract, ...]:
    file = _file(tier, kept)
    if file.exists():
        return msgspec.json.decode(file.read_bytes(), type=tuple[MovedContract, ...])
    return keep(tier, kept, look(tier))


def keep(tier: Tier, kept: Path, found: Sequence[Looked]) -> tuple[MovedContract, ...]:
    """Contracts that moved, as manifests have them; kept for later runs if all processes answered."""
    moved = tuple(
        MovedContract(
            name=item.contract.name, package=item.contract.package, why=str(item.failure), checks=item.contract.checks
        )
        for item in found
        if item.moved
    )
    if all(item.answered for item in found):
        kept.mkdir(parents=True, exist_ok=True)
        write_whole(_file(tier, kept), msgspec.json.encode(moved).decode())
    return moved


@cache
def _file(tier: Tier, kept: Path) -> Path:
    known = json.dumps([tier, sys.prefix, installed_versions(), code_digest()])
    return kept / f"{hashlib.blake2b(known.encode(), digest_size=16).hexdigest()}.json"

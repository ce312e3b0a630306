"""Head of a report: what ran, with which options, on which machine, and what replaced upstream code."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from verifier.core.manifest import Manifest
from verifier.core.outputs import printable
from verifier.knob import flat
from verifier.mesh import Mesh
from verifier.report.report import stack_lines

_CONFIG_KEYS = {
    "dtype": "dtype", "engine": "engine.kind", "engine_tp": "engine.tp", "cycles": "cycles", "update": "update",
    "seed": "seed", "against": "against",
}  # fmt: skip
"""Label in the header -> key of the config, of what is always said."""
_SAID = {*_CONFIG_KEYS.values(), "model", "fixes", "timeout_s", "trace", "transport", "record", "why"}
"""Keys of the config that the header has elsewhere, or that change nothing in what is judged."""
_OWNER = re.compile(r"\btrainer rank (\d+)\b(?! \()")


def mesh_of(manifest: Manifest) -> Mesh | None:
    """The trainer's mesh, if the run had one."""
    return None if manifest.mesh is None else Mesh(**msgspec.structs.asdict(manifest.mesh))


def options_of(manifest: Manifest) -> dict[str, Any]:
    """Options of a run that are on and need not be, by key: CUDA graphs, sleep, quantisation, adapters."""
    knobs = {key: value for key, value in flat(manifest.config).items() if key not in _SAID}
    return {key: value for key, value in sorted(knobs.items()) if value and not key.startswith("mesh.")}


def located(owner: str, manifest: Manifest) -> str:
    """An owner with the mesh coordinates of each trainer rank that it names without them."""
    mesh = mesh_of(manifest)
    if mesh is None:
        return owner

    def coordinates(found: re.Match[str]) -> str:
        rank = int(found[1])
        return f"{found[0]} ({mesh.coordinate(rank)})" if rank < mesh.world_size else found[0]

    return _OWNER.sub(coordinates, owner)


def differences(manifest: Manifest) -> str:
    """Each package that runs at another version than the verified one, with both."""
    pairs = sorted(manifest.verified.items())
    return ", ".join(f"{name} {manifest.versions[name]} (verified {verified})" for name, verified in pairs)


def provenance(manifest: Manifest) -> list[tuple[str, str]]:
    """Name and value of each line on where a run comes from; none for what its trace does not say."""
    code = f"verifier {manifest.verifier}" if manifest.verifier else ""
    machine = ", ".join(filter(None, [manifest.host, *manifest.gpus]))
    times = f"{manifest.began} to {manifest.ended}" if manifest.began and manifest.ended else manifest.began
    lines = {
        "made by": code + (f", commit {manifest.commit}" if manifest.commit else ""),
        "on": "; ".join(filter(None, [machine, times])),
        "command": f"`{manifest.command_line}`" if manifest.command_line else "",
    }
    return [(name, value) for name, value in lines.items() if value]


def header(manifest: Manifest) -> str:
    """All lines of the head."""
    knobs = flat(manifest.config)
    lines = [f"verifier {manifest.command} {knobs.get('model') or ''}".rstrip()]
    if (mesh := mesh_of(manifest)) is not None:
        lines[0] += f" on {mesh.label()}"
        if mesh.world_size > 1:
            gpus = manifest.num_gpus
            shared = f" on {gpus} {'GPU' if gpus == 1 else 'GPUs'}" if 0 < gpus < manifest.world_size else ""
            lines[0] += f" ({mesh.world_size} ranks{shared})"
    stated = [f"tier {manifest.tier}"] if manifest.tier else []
    stated += [f"{label} {knobs[key]}" for label, key in _CONFIG_KEYS.items() if knobs.get(key) is not None]
    if transport := manifest.transport or knobs.get("transport"):
        stated.append(f"transport {transport}")
    if stated:
        lines.append("  " + ", ".join(stated))
    if options := options_of(manifest):
        lines.append("  options: " + ", ".join(f"{key}={value}" for key, value in options.items()))
    if manifest.layout:
        lines.append(f"  layout: {manifest.layout}")
    lines += (f"  note: {text}" for text in manifest.notes)
    if manifest.versions:
        named = f"verified set {manifest.verified_set}: " if manifest.verified_set else ""
        versions = ", ".join(f"{name} {version}" for name, version in sorted(manifest.versions.items()))
        lines.append(f"  {named}{versions}")
    if manifest.verified:
        lines.append(f"  differs from the verified set: {differences(manifest)}")
    lines += (f"  moved: {item.name} of {item.package}: {item.why}" for item in manifest.moved_contracts)
    lines += (f"  {name}: {value}" for name, value in [*stack_lines(manifest), *provenance(manifest)])
    return "\n".join(map(printable, lines))

"""Knobs of a run on a Ray cluster."""

from __future__ import annotations

from dataclasses import dataclass

from verifier.knob import Knobs, knob

LOCAL = "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions(Knobs):
    """Ray actors around trainer ranks and engine."""

    place = "ray."

    use: bool = knob("Start trainer ranks, the engine of training, or the workers of a gate, from Ray actors.", False)
    address: str = knob("Ray cluster to join, HOST:PORT; `local` starts one on this host.", LOCAL)
    nodes: int = knob(
        "Nodes for the trainer's ranks, in blocks of the same size, and engines in turn, or a worker of a gate each.",
        1,
        least=1,
    )

    def _contradictions(self) -> dict[str, object]:
        host, _, port = self.address.rpartition(":")
        is_address = bool(host) and port.isdecimal() and 0 < int(port) < 65_536
        return {
            "ray.address and ray.nodes need ray.use=true": (
                not self.use and (self.address != LOCAL or self.nodes != 1)
            ),
            "{ray.nodes}, and a local Ray has one node: give ray.address": self.address == LOCAL and self.nodes != 1,
            "ray.address is `{=ray.address}`, it must be `local` or HOST:PORT": self.address != LOCAL
            and not is_address,
        }

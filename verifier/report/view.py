"""Content of a page in its order; made from a gate, a trace or a run, and drawn by one template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from verifier.report.charts import Chart

Tone = Literal["good", "bad", "unsure", "none"]
"""Colour of a verdict; each has its word too."""
TONES: dict[str, Tone] = {
    "holds": "good", "caught": "good", "PASS": "good", "violated": "bad", "missed": "bad", "failed": "bad",
    "FAIL": "bad", "inconclusive": "unsure", "INCONCLUSIVE": "unsure", "waived": "unsure", "not run": "none",
}  # fmt: skip
"""Verdict, status or decision -> its tone."""


def below(text: str) -> str:
    """Text of a finding under its sentence, without the line that replays it, which the page has apart."""
    lines = text.splitlines()[1:]
    return "\n".join(line for line in lines if not line.startswith("  replay    : "))


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A finding: a sentence, the whole text under it, and what may be its consequences."""

    title: str
    text: str = ""
    place: str = ""
    """Cell that it was found in."""
    stage: str = ""
    replay: str = ""
    """Command that judges its trace again."""
    waiver: str = ""
    """Waiver that it falls under, in words."""
    known_bug: str = ""
    later: tuple[Block, ...] = ()
    """Findings after it in the flow of data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A cell of the matrix, and what opens under it."""

    title: str
    verdict: str
    note: str = ""
    tone: Tone = "none"
    facts: tuple[tuple[str, str], ...] = ()
    checks: tuple[tuple[str, str, str, Tone, int], ...] = ()
    """Code, name, verdict, its tone, and things compared, of each check."""
    blocks: tuple[Block, ...] = ()
    charts: tuple[Chart, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Cells under one heading."""

    title: str
    cards: tuple[Card, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WaiverRow:
    """A waiver as a row of its table."""

    what: str
    of: str
    issue: str
    owner: str
    reason: str
    until: str
    came: str
    """Violations that it waives, or why it waives none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """All of a page."""

    title: str
    decision: str
    tone: Tone
    summary: str
    stage: str = ""
    """First bad stage."""
    reasons: tuple[str, ...] = ()
    roots: tuple[Block, ...] = ()
    """The earliest finding of each cell, the earliest in the flow of data first."""
    groups: tuple[Group, ...] = ()
    charts: tuple[Chart, ...] = ()
    waivers: tuple[WaiverRow, ...] = ()
    notes: tuple[str, ...] = ()
    """Parts that were left out, and failures of earlier attempts."""
    run: tuple[tuple[str, str], ...] = ()
    """Versions, host, commit, fixes, stand-ins."""
    samples: tuple[Mapping[str, Any], ...] = ()
    """Sampled texts of a training run: "step", "prompt", "completion", "answer", "reward"."""

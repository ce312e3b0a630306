"""A page: its content in its order, and the HTML of it, which holds all it needs: no request and no script."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verifier.core.outputs import printable
from verifier.report.charts import Chart, svg
from verifier.report.gate_result import BADNESS, CheckVerdict, WaiverUse

TONES = ("good", "unsure", "bad")
"""Class of a colour in the style sheet, by `BADNESS`."""
TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A finding: a sentence, the whole text under it, and what may be its consequences."""

    title: str
    text: str = ""
    place: str = ""
    """Cell or step that it was found in."""
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
    """A cell of the matrix, a check or a step, and what opens under it."""

    title: str
    verdict: str
    note: str = ""
    facts: tuple[tuple[str, str], ...] = ()
    checks: tuple[CheckVerdict, ...] = ()
    blocks: tuple[Block, ...] = ()
    charts: tuple[Chart, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """All of a page."""

    title: str
    decision: str
    summary: str
    stage: str = ""
    """First bad stage."""
    reasons: tuple[str, ...] = ()
    roots: tuple[Block, ...] = ()
    """The earliest finding of each cell, the earliest in the flow of data first."""
    groups: Mapping[str, tuple[Card, ...]] = field(default_factory=dict)
    """Heading -> the cards under it."""
    charts: tuple[Chart, ...] = ()
    waivers: tuple[WaiverUse, ...] = ()
    notes: tuple[str, ...] = ()
    """Parts that were left out, and failures of earlier attempts."""
    run: tuple[tuple[str, str], ...] = ()
    """Versions, host, commit, fixes, stand-ins."""
    samples: tuple[Mapping[str, Any], ...] = ()
    """Sampled texts of a training run: "step", "prompt", "completion", "answer", "reward"."""


def html(page: Page) -> str:
    """The whole document. Every value is escaped, control characters too."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    def shown(value: Any) -> Any:
        if isinstance(value, str) and not isinstance(value, Markup):
            return "\n".join(map(printable, value.split("\n")))
        return value

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["svg"] = lambda chart: Markup(svg(chart))  # noqa: S704  (ElementTree has escaped every text)
    environment.filters["tone"] = lambda verdict: "none" if verdict == "not run" else TONES[BADNESS[verdict]]
    style = Markup((TEMPLATES / "page.css").read_text(encoding="utf-8"))  # noqa: S704  (a file of this package)
    text: str = environment.get_template("page.html.jinja").render(page=page, style=style)
    return text

"""Made-up results whose every text tries to be markup, and what a page must never hold."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

from msgspec.structs import replace

from tests.unit.campaign.test_gate_data import made
from verifier.report.gate_result import CellResult, CheckVerdict, GateFinding, GateResult, LeftOut

HOSTILE = "</pre></style><script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;\x1b[31m\u202e"
EMPTY = {"meta", "link", "input", "br", "img", "hr"}
REQUESTS = ("src", "srcset", "data", "action", "poster", "background", "xlink:href")


def hostile() -> GateResult:
    """A gate that fails, with every free text hostile."""
    result = made()

    def spoilt(finding: GateFinding) -> GateFinding:
        return replace(finding, sentence=HOSTILE, text=f"{HOSTILE}\n{HOSTILE}", known_bug=HOSTILE, trace=HOSTILE[:20])

    def spoilt_cell(item: CellResult) -> CellResult:
        cell = replace(item.cell, mesh=HOSTILE, engine=HOSTILE, words=(HOSTILE,), carries=(HOSTILE,))
        checks = (CheckVerdict(code="WGT001", name=HOSTILE, verdict="violated", num_compared=3),)
        return replace(
            item, cell=cell, reason=HOSTILE, checks=checks, findings=tuple(map(spoilt, item.findings)),
            failed_before=(HOSTILE,), not_judged=(HOSTILE,),
        )  # fmt: skip

    waivers = tuple(replace(item, owner=HOSTILE, reason=HOSTILE, issue=HOSTILE) for item in result.waivers)
    return replace(
        result, cells=tuple(map(spoilt_cell, result.cells)), reasons=(HOSTILE,), host=HOSTILE, waivers=waivers,
        left_out=(LeftOut(what=HOSTILE, reason=HOSTILE),), versions={HOSTILE: HOSTILE}, models=(HOSTILE,),
        folder="gone",
    )  # fmt: skip


class Document(HTMLParser):
    """A page as it is parsed; every element has to be closed in its turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag not in EMPTY:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def parsed(text: str) -> Document:
    """A page without script, event handler, request, or character that a terminal or reader obeys."""
    found = Document(text)
    assert "script" not in found.tags
    assert "img" not in found.tags
    assert not [name for _, name, _ in found.attributes if name.startswith("on")]
    assert {value for _, name, value in found.attributes if name == "href"} == {"data:,"}
    assert not [name for _, name, _ in found.attributes if name in REQUESTS]
    assert not re.search(r"url\(|@import|https?://", re.search(r"<style>(.*?)</style>", text, re.S)[1])
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202a-\u202e]", text)
    return found


def metrics(steps: int) -> str:
    """Lines of a run's metrics, the last one cut off."""
    rows = [
        {"step": step, "loss": 0.1 / step, "reward": step / steps, "held_out_reward": step / (2 * steps),
         "mismatch_p99": 1e-6, "mismatch_max": 3e-6, "mismatch_floor": 1e-6, "score_s": 0.5, "train_s": 1.0,
         "sync_s": 0.1, "transfer_gb_per_s": 0.2, "peak_memory_gib": 0.5,
         "mismatch_by_position": [1e-6, None, 2e-6, *[None] * 5]}
        for step in range(1, steps + 1)
    ]  # fmt: skip
    return "".join(json.dumps(row) + "\n" for row in rows) + '{"step": '

"""Packaged table of what faults violate: `python -m tests.meta.known_faults` draws it from the kill matrix's ledger."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.meta.sources import ROOT
from verifier.faults.catalog import CATALOG
from verifier.faults.fault import Fault
from verifier.faults.matrix import latest, read

LEDGER = ROOT / "golden" / "kill-matrix.jsonl"
TABLE = ROOT / "verifier" / "report" / "known_faults.json"


def drawn(ledger: Path = LEDGER) -> str:
    """One line a fault that the last trial caught: id, source, first bad stage, checks violated, what a run needs."""
    rows = [
        {
            "fault": name,
            "reproduces": CATALOG[name].reproduces,
            "link": link(CATALOG[name].reproduces),
            "first_bad": row.first_bad,
            "caught": sorted(row.caught),
            "needs": needs(CATALOG[name]),
        }
        for name, row in sorted(latest(read(ledger)).items())
        if row.first_bad and not row.failures
    ]
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"


def needs(item: Fault) -> list[str]:
    """What a run has to have for such a bug: adapters, experts."""
    adapters = item.lora_rank or any(knob.startswith("lora.") for knob in item.training)
    experts = re.search("expert|rout|gates|score-bias|balanc", item.id)
    return [name for name, needed in (("adapters", adapters), ("experts", experts)) if needed]


def link(reproduces: str) -> str:
    """Address of the first issue that a source names; empty for a commit or a file."""
    found = re.search(r"([\w.-]+/[\w.-]+)#(\d+)", reproduces)
    return f"https://github.com/{found[1]}/issues/{found[2]}" if found else ""


if __name__ == "__main__":
    TABLE.write_text(drawn())

"""The table of all faults, by id."""

from __future__ import annotations

from verifier.faults import bugs_export
from verifier.faults.fault import Fault

CATALOG: dict[str, Fault] = {fault.id: fault for fault in bugs_export.FAULTS}

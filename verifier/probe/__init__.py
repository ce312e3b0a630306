"""Evidence of any trainer's hand-overs: a few calls in its loop record a trace that the checks judge."""

from verifier.probe.declared import UNDERTAKINGS
from verifier.probe.recorder import LoopRecorder, attach, open  # noqa: A004 - `probe.open` is what a loop calls

__all__ = ["UNDERTAKINGS", "LoopRecorder", "attach", "open"]

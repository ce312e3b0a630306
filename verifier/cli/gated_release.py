"""`verifier gate`: the plan alone, or the cells and the decision, as text, JSON, JUnit and annotations."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from verifier.cli.results import STDOUT, show
from verifier.config import GateConfig
from verifier.core.outputs import write_whole
from verifier.errors import UsageError
from verifier.report.progress import Progress

if TYPE_CHECKING:
    from verifier.gate.gate_result import GateResult

_GPU = Path("/dev/nvidiactl")
"""Device file of NVIDIA's driver; without it no GPU can be used."""


def dry_run(config: GateConfig) -> int:
    """Print the cells in their order, and what is left out with reasons; loads no torch where there is no GPU."""
    import verifier.checks  # noqa: F401  (fills the registry)
    from verifier.gate.gate_text import listed
    from verifier.gate.gated import planned

    num_gpus = 0
    if _GPU.exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        import torch

        num_gpus = torch.cuda.device_count()
    show(listed(planned(config, "cuda" if num_gpus else "cpu", num_gpus)))
    return 0


def config_in(folder: Path) -> Path:
    """File of the config in the folder of a gate.

    Raises:
        UsageError: there is none.
    """
    from verifier.gate.gate_ledger import CONFIG

    if not (folder / CONFIG).is_file():
        raise UsageError(f"there is no gate in `{folder}` to resume: give the folder that a gate made")
    return folder / CONFIG


def gate(
    config: GateConfig, progress: Progress, *, json: Path | None, junit: Path | None, html: Path | None = None
) -> int:
    """Run a gate, or what is left of it; print and write what it found, and return the decision's exit code."""
    from verifier.gate.deciding import EXIT_CODES
    from verifier.gate.gate_data import gate_json, gate_junit, github_annotations
    from verifier.gate.gate_text import render_gate
    from verifier.gate.gated import gate as run
    from verifier.report.terminal import for_terminal

    result = run(config, progress)
    if STDOUT not in (json, junit, html):
        show(for_terminal(render_gate(result), sys.stdout))
        if os.environ.get("GITHUB_ACTIONS") == "true":
            show(github_annotations(result))
    for file, render in ((json, gate_json), (junit, gate_junit), (html, _page)):
        if file == STDOUT:
            show(render(result))
        elif file is not None:
            write_whole(file, render(result))
    return int(EXIT_CODES[result.decision])


def _page(result: GateResult) -> str:
    from verifier.page.drawn import html
    from verifier.page.gate_page import page_of_gate

    return html(page_of_gate(result))

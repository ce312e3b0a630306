"""`verifier gate`: the plan alone, or the cells and the decision, as text, JSON, JUnit and annotations."""

from __future__ import annotations

import os
from pathlib import Path

from verifier.cli.results import Results, show, show_results
from verifier.config import GateConfig
from verifier.core.outputs import json_text, printable
from verifier.platform.provenance import may_have_gpu
from verifier.report.progress import Progress


def dry_run(config: GateConfig) -> int:
    """Print the cells in their order, and what is left out with reasons; loads no torch where there is no GPU."""
    import verifier.checks  # noqa: F401  (fills the registry)
    from verifier.campaign.gate.matrix import listed
    from verifier.campaign.gate.run import planned

    num_gpus = 0
    if may_have_gpu():
        import torch

        num_gpus = torch.cuda.device_count()
    show(listed(planned(config, "cuda" if num_gpus else "cpu", num_gpus)))
    return 0


def gate(config: GateConfig, progress: Progress, results: Results) -> int:
    """Run a gate, or what is left of it; print and write what it found, and return the decision's exit code."""
    from verifier.campaign.gate.decision import EXIT_CODES
    from verifier.campaign.gate.run import gate as run
    from verifier.report.gate_result import render_gate
    from verifier.report.pages import page_of_gate
    from verifier.report.render_html import html
    from verifier.report.render_junit import gate_junit, github_annotations

    result = run(config, progress)
    show_results(
        lambda: render_gate(result),
        (results.json, lambda: json_text(result)),
        (results.junit, lambda: gate_junit(result)),
        (results.html, lambda: html(page_of_gate(result))),
    )
    if os.environ.get("GITHUB_ACTIONS") == "true" and not results.takes_stdout:
        show(github_annotations(result))
    return int(EXIT_CODES[result.decision])


def check_card(file: Path, config: GateConfig) -> int:
    """Print whether a card still speaks for a model here, and return the exit code that says so."""
    from verifier.campaign.gate.card import check_card as check

    code, sentence = check(file, config)
    show(f"{printable(sentence)}\n")
    return int(code)

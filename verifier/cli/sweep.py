"""`verifier sweep`: the trials, then the table, sweep.json and the plot."""

from __future__ import annotations

from verifier.campaign.sweep import summary
from verifier.campaign.sweep.layouts import fitting, layouts_of, longest_of
from verifier.cli.results import show
from verifier.config.sweep import SweepConfig
from verifier.core.finding import ExitCode
from verifier.core.outputs import write_whole
from verifier.errors import UsageError
from verifier.model.named import sizes_alone
from verifier.platform.provenance import may_have_gpu
from verifier.report.progress import Progress


def dry_run(config: SweepConfig) -> int:
    """Print the layouts that a sweep would try, what a rank of each needs, and the others with their reasons.

    Weights need not be there; no torch is loaded but for a model without a hand-written row.
    """
    sizes = sizes_alone(config.model, config.dtype)
    longest_of(config, sizes)
    valid, invalid = layouts_of(config, sizes, "cuda" if may_have_gpu() else "cpu")
    fits, others, refused = fitting(config, sizes, valid)
    show(summary.listed(config.gpu_gib, fits, others, invalid + refused))
    return ExitCode.HOLDS


def sweep(config: SweepConfig, progress: Progress) -> int:
    """Run a sweep, or what is left of it; print the table and write sweep.json and sweep.html.

    Raises:
        UsageError: no trial ran.
    """
    from verifier.campaign.sweep import run as sweeper
    from verifier.campaign.sweep.summary import page

    found = sweeper.sweep(config, progress)
    rows, invalid = found.rows, found.invalid
    write_whole(config.run / "sweep.json", summary.as_json(config, found.device, rows, invalid))
    write_whole(config.run / "sweep.html", page(f"{config.model}, {config.dtype}, {found.device}", rows))
    if rows:
        show(summary.table(found.device, rows))
    if invalid:
        show(f"{len(invalid):,} invalid:\n" + "".join(f"  {item.what}: {item.reason}\n" for item in invalid))
    if all(row.status != "ok" for row in rows):
        why = rows[0] if rows else None
        reason = invalid[0].reason if why is None and invalid else "" if why is None else why.reason
        raise UsageError(f"no layout of {config.model} ran a step; the first: {reason}")
    show(f"{summary.answer(rows)}run: {config.run}\n")
    return ExitCode.HOLDS

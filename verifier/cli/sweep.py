"""`verifier sweep`: the trials, then the table, sweep.json and the page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from verifier.campaign.sweep import summary
from verifier.campaign.sweep.layouts import SweptLayout, first_budget, layouts_of, longest_of
from verifier.cli.results import show
from verifier.config.commands import GPU_GIB, PlanConfig
from verifier.config.sweep import SweepConfig
from verifier.core.finding import ExitCode
from verifier.core.outputs import write_whole
from verifier.errors import UsageError
from verifier.model.families import JSON
from verifier.model.named import sizes_alone
from verifier.plan.held_shards import holdings_of
from verifier.plan.run_plan import GIB, described, memory_of
from verifier.platform.provenance import may_have_gpu
from verifier.report.progress import Progress


def dry_run(config: SweepConfig) -> int:
    """Print the layouts that a sweep would try, with their memory, and the others with reasons.

    Weights need not be there; torch is loaded for a model without a hand-written row alone.
    """
    sizes = sizes_alone(config.model, config.dtype)
    longest_of(config, sizes)
    valid, invalid = layouts_of(config, sizes, "cuda" if may_have_gpu() else "cpu")
    fits, others = fitting(config, sizes, valid)
    others |= {item.what: item.reason for item in invalid}
    width = max(map(len, (*fits, *others)), default=0)
    lines = [f"{len(fits):,} layouts to try, and what the rank that needs most has by `verifier plan`:"]
    lines += [f"  {name:<{width}}  {said}" for name, said in fits.items()]
    lines += [f"{len(others):,} invalid or too large:"]
    show("\n".join([*lines, *(f"  {name:<{width}}  {said}" for name, said in others.items())]) + "\n")
    return ExitCode.HOLDS


def fitting(
    config: SweepConfig, sizes: Mapping[str, JSON], layouts: list[SweptLayout]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return layout -> memory of its rank that needs most; of those that fit, the roomiest first, and of the others."""
    limit, options, plan = config.memory_limit or GPU_GIB, config.megatron, None
    found, others = list[tuple[int, str, str]](), dict[str, str]()
    for layout in layouts:
        budget = first_budget(config, layout)
        asked = PlanConfig(
            model=config.model, dtype=config.dtype, mesh=layout.mesh, tokens=budget, recompute=layout.recompute,
            grad_reduce_in_fp32=options.grad_reduce_in_fp32, optimizer_offload=options.optimizer_offload,
        )  # fmt: skip
        plan = described(asked, sizes) if plan is None else replace(plan, config=asked)
        try:
            stages = memory_of(plan, holdings_of(plan.layout, layout.mesh, every=layout.mesh.dense_size))
        except UsageError as refused:
            others[layout.name] = str(refused)
            continue
        most = max(stages, key=lambda item: item.total)
        state, activations = (most.certain - most.transfer) / GIB, most.activations / GIB
        said = f"{state:,.2f} GiB and {activations:,.2f} GiB of activations with {budget:,} tokens"
        largest = int((limit - state) / activations * budget) // layout.multiple * layout.multiple
        if largest >= budget:
            found.append((-largest, layout.name, f"{said}; {largest:,} tokens in {limit:g} GiB"))
        else:
            others[layout.name] = f"a rank needs {said}, above {limit:g} GiB"
    return {name: said for _, name, said in sorted(found)}, others


def sweep(config: SweepConfig, progress: Progress) -> int:
    """Run a sweep, or what is left of it; print the table and write sweep.json and sweep.html.

    Raises:
        UsageError: no trial ran.
    """
    from verifier.campaign.sweep import run as sweeper
    from verifier.campaign.sweep.summary import page

    rows, invalid, device = sweeper.sweep(config, progress)
    write_whole(config.run / "sweep.json", summary.as_json(config, device, rows, invalid))
    write_whole(config.run / "sweep.html", page(f"{config.model}, {config.dtype}, {device}", rows))
    if rows:
        show(summary.table(device, rows))
    if invalid:
        show(f"{len(invalid):,} invalid:\n" + "".join(f"  {item.what}: {item.reason}\n" for item in invalid))
    if all(row.status != "ok" for row in rows):
        why = rows[0] if rows else None
        reason = invalid[0].reason if why is None and invalid else "" if why is None else why.reason
        raise UsageError(f"no layout of {config.model} ran a step; the first: {reason}")
    show(f"{summary.answer(rows)}run: {config.run}\n")
    return ExitCode.HOLDS

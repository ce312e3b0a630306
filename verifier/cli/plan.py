"""`verifier plan`: the plan of a model on a mesh as text and as JSON, and its exit code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from verifier.cli.results import show_results
from verifier.config import PlanConfig
from verifier.core.finding import ExitCode
from verifier.mesh.mesh import ranges
from verifier.model.named import sizes_alone
from verifier.plan.chunk_plan import DTYPE_BYTES
from verifier.plan.held_shards import Holding, is_expert
from verifier.plan.run_plan import GIB, MEASURED_GB_S, MEASURED_IN, Made, RunPlan, run_plan


def plan(config: PlanConfig, file: Path | None) -> int:
    """Print a plan, or what contradicts it; write it to a file, or print that in place of the text.

    Raises:
        UsageError: a model that neither a row nor transformers describes, or a file that cannot be written.
    """
    found = run_plan(config, sizes_alone(config.model, config.dtype))
    show_results(lambda: as_text(found), (file, lambda: as_json(found)))
    return ExitCode.VIOLATED if found.contradictions else ExitCode.HOLDS


def as_text(found: RunPlan) -> str:
    """Return the plan as text: a line per fact, a row per kind of pipeline stage, then contradictions or none."""
    config, mesh = found.config, found.config.mesh
    lines = [
        f"plan        {config.model}: {found.family}, {mesh.label()}, {mesh.world_size:,} ranks, {config.dtype}",
        f"model       {found.num_parameters:,} parameters, {_size(found.num_bytes)} in {len(found.specs):,} tensors",
        *([f"placed      {found.derived}"] if found.derived else []),
        *(f"left out    {clause}" for clause in found.left_out),
    ]
    if found.made is not None:
        lines += [*_stages(found, found.made), *_transfer(found, found.made)]
    lines += [f"contradiction: {sentence}" for sentence in found.contradictions]
    if not found.contradictions:
        lines.append("sound: every tensor is owned exactly once, and all ranks would make the same chunk plan")
    return "\n".join(lines) + "\n"


def _stages(found: RunPlan, made: Made) -> Iterator[str]:
    titles = ("parameters", "weights", "gradients", "optimizer", "transfer", "activations*", "total")
    unit, name = (GIB, "GiB") if max(item.total for item in made.memory) > GIB else (MIB, "MiB")
    yield f"{name} of a rank, least to greatest, by pipeline stage:"
    yield f"  {'stages':8} {'layers':>6} " + " ".join(f"{title:>12}" for title in titles)
    sizes = found.config.mesh.stage_sizes(found.layout.sizes["layers"])
    rows = []
    for stage, size in enumerate(sizes):
        held = [(item, memory) for item, memory in zip(made.holdings, made.memory, strict=True) if item.at.pp == stage]
        cells = [_span([(item.count(expert=False) + item.count(expert=True)) / 1e6 for item, _ in held], "M")]
        cells += [_span([getattr(memory, part) / unit for _, memory in held]) for part in (*_PARTS, "total")]
        rows.append((stage, (str(size), *cells)))
    for (layers, *cells), run in groupby(rows, lambda row: row[1]):
        stages = [stage for stage, _ in run]
        yield f"  {ranges(stages):8} {layers:>6} " + " ".join(f"{cell:>12}" for cell in cells)
    yield "  * estimated: " + _ESTIMATE
    sender = made.bytes_of(0, 0)
    yield (
        f"rank 0      sends, from {_size(made.sending)} of chunks besides: {_size(sender.total)} with "
        f"{found.config.tokens:,} tokens in a micro-batch"
    )
    if host := max(item.host for item in made.memory):
        yield f"host        {_size(host)} of the rank that has most: masters, moments and gradients in fp32"
    above = made.above(found.config.gpu_gib * GIB, lambda item: item.total)
    fit = (
        "every rank fits, activations included"
        if not above
        else f"{len(above):,} ranks do not fit with their activations: {ranges(above, most=4)}"
    )
    yield f"memory      of {found.config.gpu_gib:g} GiB a GPU, {fit}"


MIB = 1 << 20
_PARTS = ("weights", "gradients", "optimizer", "transfer", "activations")
_ESTIMATE = "Korthikanti et al. 2022, section 4.1, and gradients of a layer or of the logits; `--busiest`; 1F1B"


def _transfer(found: RunPlan, made: Made) -> Iterator[str]:
    for item in made.plans:
        if item.plan is not None:
            num_tensors, chunks = sum(len(chunk.names) for chunk in item.plan.chunks), item.plan.chunks
            largest = max(chunk.num_bytes for chunk in chunks)
            yield (
                f"chunk plan  {num_tensors:,} tensors in {len(chunks):,} chunks of at most {_size(largest)}, on "
                f"{len(item.ranks):,} ranks: {item.digest}"
            )
    copies = [item.copies for item in made.ownership.replicas.values()]
    owners = {item.owner for item in made.ownership.replicas.values()}
    yield (
        f"owners      {len(copies):,} shards, owned by {len(owners):,} ranks and held {min(copies):,} to "
        f"{max(copies):,} times"
    )
    yield (
        f"sync        at least {max(made.gather_s, made.transfer_s):.2f} s: gather {made.gather_s:.2f} s at "
        f"{found.gather_gb_s:g} GB/s, {found.config.transport} to the engine {made.transfer_s:.2f} s at "
        f"{found.transfer_gb_s:g} GB/s; one after the other {made.gather_s + made.transfer_s:.2f} s"
    )
    used = {"nccl": found.gather_gb_s, found.config.transport: found.transfer_gb_s}
    if any(MEASURED_GB_S[name] == value for name, value in used.items()):
        measured = ", ".join(f"{name} {value:g}" for name, value in MEASURED_GB_S.items())
        yield f"            {measured} GB/s were measured within one host: {MEASURED_IN}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.2f} GiB" if num_bytes > GIB / 10 else f"{num_bytes / MIB:,.2f} MiB"


def _span(values: list[float], unit: str = "") -> str:
    least, greatest = (f"{value:,.1f}{unit}" for value in (min(values), max(values)))
    return least if least == greatest else f"{least}-{greatest}"


def as_json(found: RunPlan) -> str:
    """Return the complete plan as JSON: every rank, every shard of each kind of rank, every tensor of the transfer."""
    values: dict[str, Any] = {
        "config": found.config.to_dict(), "family": found.family,
        "world_size": found.config.mesh.world_size, "sound": not found.contradictions,
        "contradictions": found.contradictions, "left_out": found.left_out, "placed": found.derived,
        "parameters": found.num_parameters, "bytes": found.num_bytes, "chunk_bytes": found.chunk_bytes,
    }  # fmt: skip
    if found.made is not None:
        values |= _made(found, found.made)
    return json.dumps(values, separators=(",", ":")) + "\n"


def _made(found: RunPlan, made: Made) -> dict[str, Any]:
    digests = {rank: item.digest for item in made.plans for rank in item.ranks}
    ranks = []
    for index, holding in enumerate(made.holdings):
        owned = [place for place in holding.places if made.ownership.replicas[place.group].owner == holding.ranks[0]]
        for rank in holding.ranks:
            own = made.bytes_of(index, rank)
            ranks.append(
                {
                    "rank": rank, "coordinate": str(found.config.mesh.coordinate(rank)), "holding": index,
                    "parameters": {
                        "dense": holding.count(expert=False), "expert": holding.count(expert=True),
                    },
                    "bytes": {name: getattr(own, name) for name in (*_PARTS, "total", "host")}, "plan": digests[rank],
                    "sends_bytes": found.num_bytes if rank == 0 else 0,
                    "owns": len(owned) if rank == holding.ranks[0] else 0,
                }
            )  # fmt: skip
    return {
        "activations": f"estimated: {_ESTIMATE}",
        "sync": {
            "gather_s": made.gather_s, "transfer_s": made.transfer_s, "gather_gb_s": found.gather_gb_s,
            "transfer_gb_s": found.transfer_gb_s, "measured_in": MEASURED_IN,
        },
        "ranks": sorted(ranks, key=lambda item: item["rank"]),
        "holdings": [_holding(found, made, holding) for holding in made.holdings],
        "plans": [
            {
                "ranks": item.ranks, "digest": item.digest, "refused": item.refused,
                "chunks": item.plan.to_json() if item.plan else [],
            }
            for item in made.plans
        ],
    }  # fmt: skip


def _holding(found: RunPlan, made: Made, holding: Holding) -> dict[str, Any]:
    """Return the shards of one kind of rank: its share of what travels."""
    shards = []
    for place, size in zip(holding.places, holding.elements, strict=True):
        dtype, replicas = found.dtype_of(place.sources[0]), made.ownership.replicas[place.group]
        shards.append(
            {
                "name": place.global_name, "local": place.param_name, "dtype": dtype, "shape": place.shape,
                "bytes": size * DTYPE_BYTES[dtype], "sources": place.sources, "replica": place.group,
                "owner": replicas.owner, "copies": replicas.copies, "expert": is_expert(place),
                "buffer": place.is_buffer,
            }
        )  # fmt: skip
    return {"ranks": holding.ranks, "shards": shards}

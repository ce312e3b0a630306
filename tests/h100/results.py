"""What `ci/gpu` measured: `python results.py FOLDER MACHINE` makes one file of it, `table` sums up a folder of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]


SHARED = "-shared"
"""Ends the name of a machine on which ranks shared GPUs."""


def main(folder: Path, machine: str) -> None:
    """Write FOLDER/h200-MACHINE.json, "x2" or "x2-shared" for instance, named after its GPUs, and drop the parts."""
    parts = sorted(folder.glob("*.part"))
    found = [json.loads(part.read_text()) for part in parts]
    rows = [row for part in found for row in part["rows"]]
    gpus = max((part["machine"] for part in found), key=len)  # a process sees its own GPUs only
    command = "ci/gpu --share-gpus" if machine.endswith(SHARED) else "ci/gpu"
    record = {**found[0], "machine": gpus, "command": command, "rows": rows}
    model = "h100" if "H100" in gpus[0] else "h200"
    (folder / f"{model}-{machine}.json").write_text(json.dumps(record, indent=1) + "\n")
    for part in parts:
        part.unlink()


def table(folder: Path) -> str:
    """Markdown: a row for each kind of result, a column for each machine's file."""
    machines: list[str] = []
    cells: dict[str, dict[str, str]] = {}
    files = [*folder.glob("h?00-x?.json"), *folder.glob(f"h?00-x?{SHARED}.json")]
    for path in sorted(files, key=lambda path: path.stem):
        record = json.loads(path.read_text())
        model = path.stem.partition("-")[0].upper()
        gpus = f"{len(record['machine'])} {model}{', shared' if path.stem.endswith(SHARED) else ''}"
        not_held = record.get("not_held", {})
        rows = [{**row, "passed": row.get("passed", row["test"] not in not_held)} for row in record["rows"]]
        machines.append(gpus)
        for what, shown in _sums(rows):
            cells.setdefault(what, {})[gpus] = shown
    lines = [f"| what | {' | '.join(machines)} |", "| --- |" + " --- |" * len(machines)]
    lines += [f"| {what} | {' | '.join(of.get(gpus, '') for gpus in machines)} |" for what, of in cells.items()]
    return "\n".join(lines)


def _sums(rows: list[Row]) -> Iterator[tuple[str, str]]:
    exports = [row for row in rows if "bitwise" in row]
    if exports:
        tensors = sum(row["bitwise"] for row in exports)
        yield "exports, bitwise the source; tensors", f"{_passed(exports)}; {tensors:,}"
    trips = [row for row in rows if "mismatch" in row and "transport" in row]
    if trips:
        ratio = max(row["mismatch"][0] / row["noise_mean"] for row in trips)
        yield "round trips by NCCL and IPC that hold; mean mismatch over noise", f"{_passed(trips)}; {ratio:.2f}"
    options = [row for row in rows if "mismatch" in row and "noise_mean" in row and "transport" not in row]
    if options:
        yield "round trips with CUDA graphs, sleep, fp8, an adapter that hold", _passed(options)
    commands = [row for row in rows if "said" in row]
    if commands:
        yield "commands of docs/gpu.md that hold", _passed(commands)
    faults = [row for row in rows if "first_bad_stage" in row]
    if faults:
        caught = sum(bool(row["caught"]) for row in faults)
        yield "injected bugs caught; in their own stage and healed", f"{caught} of {len(faults)}; {_passed(faults)}"
    for row in (row for row in rows if "placement" in row):
        rewards = row["held_out_reward"]
        limits = "limit 0.8" if "on_four" in row["test"] else "limits 0.8 and 300 s"
        shown = f"{next(iter(rewards.values())):.2f} to {max(rewards.values()):.2f}"
        shown += f" in {row['steps']} steps, {row['seconds'] + row['fine_tuning_s']:.0f} s"
        yield f"`held_out_reward` of GRPO in bf16, {row['placement']}, all steps judged ({limits})", shown
    ratios = [step["mean"] for row in rows for step in row.get("mismatch_of_noise", ())]
    if ratios:
        yield "trainer against engine after GRPO: mean mismatch over noise", f"{max(ratios):.2f}"
    floors = [row for row in rows if "longest" in row]
    if floors:
        yield "checkpoints with noise floors by length", str(len(floors))
    yield from _speeds(rows)


def _passed(rows: list[Row]) -> str:
    return f"{sum(row['passed'] for row in rows)} of {len(rows)}"


def _speeds(rows: list[Row]) -> Iterator[tuple[str, str]]:
    for row in rows:
        if "median_share" in row:
            what = "digest of 8 GiB: GB/s; share of an int64 sum (limit 0.8)"
            yield what, f"{row['digest_gb_s']:,}; {row['median_share']:.2f}"
        if "verified_speed_share" in row and row.get("chunk_mib") == 1024:
            ranks = row.get("engine_ranks", 1)
            to = f" to each of {ranks} engine ranks" if ranks > 1 else ""
            yield (
                f"verified {row['transport'].upper()} transfer of 8 GiB{to}, {row['num_tensors']:,} tensors: GB/s; "
                "share of vLLM's unverified (limit 0.97); of ours without digests",
                f"{row['verified_gb_s']:.0f}; {row['verified_speed_share']:.2f}; "
                f"{row['verified_of_own_undigested']:.2f}",
            )
        if "bare_unseeded" in row:
            yield (
                f"rollouts, {row['model']}, {row['requests']} requests of {row['tokens']} tokens with seeds: tokens/s; "
                "share of a bare `vllm.LLM` (limit 0.9)",
                f"{row['tokens_per_s']:,}; {row['share']:.2f}",
            )
        if "largest" in row and "trials" in row:
            yield (
                f"`verifier sweep --model {row['model']}`: largest budget, GiB, tokens/s, time (limit 300 s)",
                f"{row['largest']:,} tokens, {row['peak_gib']}, {row['fastest']:,}, {row['seconds']:.0f} s",
            )
        if "mfu" in row:
            # Rows without a spread were recorded and judged one after the other.
            cost = row["recording_share"] + (0.0 if "spread" in row else row["judging_share"])
            yield (
                f"training step, {row['model']}, {row['tokens_per_step']:,} tokens: tokens/s; MFU; share of a bare "
                "loop (limit 0.95); recording and judging (limit 2 %)",
                f"{row['tokens_per_s']:,}; {row['mfu']:.3f}; {row['speed_share']:.3f}; {cost:.1%}",
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

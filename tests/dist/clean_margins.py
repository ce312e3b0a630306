"""Margins of clean runs: how much of each computed bound the judged steps of many training runs took.

`python -m tests.dist.clean_margins --runs NAME ... --seeds 1 2 --threads 1 2 --isa default avx2 --jobs 8 --seconds 570
--out golden/margins.jsonl` runs those that the file has no row of yet by today's bounds, so many at a time, and
appends a row each.
Called again it goes on. A run that the time does not suffice for is ended, and has a row of the steps that were judged,
with `whole` false: it is run again, and of two rows by the same bounds the one with more steps counts, else the later
one. `--merge FILE ...` adds the rows of
other files to `--out`. `--draw` draws docs/measurements.md anew.

Every run is `verifier train CONFIG --verify`; its steps' shares are kept as they are judged and its traces thrown away.
A step that does not hold is kept as an alarm, and the run goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verifier.trainer.ranks import PRELOAD

ROOT = Path(__file__).parents[2]
LEDGER = ROOT / "golden" / "margins.jsonl"
BOUNDS = 111
"""Number of the last ADR that changed a bound of a check; a row has that of its run."""
CHANGED = {
    **dict.fromkeys(("LGP001", "LGP002", "LGP003", "LGP012", "TRN006"), 109), "LSS001": 110,
    **dict.fromkeys(("LSS007", "LGP009"), 111),
}  # fmt: skip
"""Code -> number of the ADR with its bounds of today. Shares and alarms of older rows are left out."""
HALF = 0.5
"""Share of a bound that no clean comparison is to take more of."""
STATISTICAL = ("LGP004", "LGP011", "LGP014", "LGP018")
"""Checks whose value is a draw: clean ones come near their bound, as often as their stated chance says."""
COMMON = ("--verify", "checkpoint.every=0", "verify.every=5", "evaluation.stop_above=2.0")
SFT, GRPO, MOE, LORA, TOOLS = (f"configs/add-{name}.yaml" for name in ("sft", "grpo", "moe", "lora", "tools"))
RUNS = {
    "sft dp2": (SFT, "steps=400"),
    "sft tp2": (SFT, "mesh.dp=1", "mesh.tp=2", "steps=400"),
    "sft pp2": (SFT, "mesh.dp=1", "mesh.pp=2", "steps=400"),
    "sft cp2": (SFT, "mesh.dp=1", "mesh.cp=2", "steps=400"),
    "sft one rank": (SFT, "mesh.dp=1", "data.batch_size=32", "optimizer.learning_rate=0.0005", "steps=1000"),
    "sft bf16": (SFT, "dtype=bf16", "steps=400"),
    "sft bf16 one rank": (SFT, "dtype=bf16", "mesh.dp=1", "data.batch_size=32", "steps=1000"),
    "sft lora": (SFT, "lora.rank=16", "optimizer.learning_rate=0.002", "steps=300"),
    "sft moe ep2": ("configs/add-moe-sft.yaml", "steps=300"),
    "sft moe bf16": ("configs/add-moe-sft.yaml", "dtype=bf16", "steps=200"),
    "grpo hf": (GRPO, "engine.kind=hf", "data.batch_size=32", "steps=100"),
    "grpo hf bf16": (GRPO, "engine.kind=hf", "dtype=bf16", "data.batch_size=32", "steps=100"),
    "grpo vllm": (GRPO, "data.batch_size=64", "steps=100"),
    "grpo vllm kl": (GRPO, "data.batch_size=64", "grpo.kl_weight=0.1", "grpo.temperature=0.8", "steps=100"),
    "grpo vllm bf16": (GRPO, "dtype=bf16", "data.batch_size=64", "steps=100"),
    "grpo vllm async": (
        GRPO, "grpo.mode=async", "grpo.max_staleness=1", "grpo.ratio_over=engine", "data.batch_size=64", "steps=100",
    ),
    "grpo vllm moe": (MOE, "data.batch_size=32", "steps=60"),
    "grpo vllm lora": (LORA, "data.batch_size=32", "steps=60"),
    "grpo vllm tools": (TOOLS, "steps=60"),
}  # fmt: skip
"""Name of a run -> its config and knobs; what a run begins with is judged too."""
ISAS = {
    "default": {},
    "avx512": {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
}
"""Name -> environment that holds torch, oneDNN and MKL to an instruction set; `default` is what the processor has."""
KEY = ("run", "seed", "threads", "isa", "cpu")


def judge_step(trace: str) -> Any:
    """Judge a step as `verifier train` does, keep its shares beside the run, and throw its trace away."""
    import verifier.checks  # noqa: F401  (fills the registry)
    from verifier.core import store
    from verifier.core.finding import Verdict
    from verifier.probes.training.verdicts import Judged
    from verifier.report.report import report_of

    path = Path(trace)
    report = report_of(store.read(path), trace)
    bad = [item for item in report.outcomes if item.verdict is not Verdict.HOLDS]
    why = {item.code: item.finding.first.sentence if item.finding else item.error for item in bad}
    row = {
        "shares": {
            item.code: [item.shares.count, item.shares.greatest, dict(item.shares.bins)]
            for item in report.outcomes if item.shares.count
        },
        "alarms": [f"{path.name}: {code}: {sentence}" for code, sentence in why.items()],
    }  # fmt: skip
    with Path(os.environ["MARGINS"]).open("a") as stream:
        stream.write(json.dumps(row) + "\n")
    if path.parent.name == "steps":
        shutil.rmtree(path)
    return Judged(0, "")


def load_ranks() -> None:
    """What a rank imports, and the number of its threads, which is 1 elsewhere."""
    import torch

    module, _, function = PRELOAD.partition(":")
    getattr(importlib.import_module(module), function)()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def train_here(words: Sequence[str]) -> int:
    """Be `verifier train` with the judge and the ranks above."""
    from verifier.cli import app, train
    from verifier.trainer import controller

    train.judge_step, controller.PRELOAD = judge_step, "tests.dist.clean_margins:load_ranks"
    sys.argv = ["verifier", "train", *words]
    return int(app.main() or 0)


def processor() -> tuple[str, list[str]]:
    """Name of the processor, and those of its flags that kernels are chosen by."""
    text = Path("/proc/cpuinfo").read_text()
    name = re.search(r"model name\s*: (.*)", text)
    flags = set((re.search(r"flags\s*: (.*)", text) or ["", ""])[1].split())
    return name[1] if name else "", sorted(flag for flag in flags if re.match(r"avx|amx|fma|sse4_2", flag))


def rows_of(file: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Rows by what they are of; of two the one by later bounds, then the one with more steps counts."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in map(json.loads, file.read_text().splitlines() if file.exists() else ()):
        key = tuple(row[name] for name in KEY)
        if key not in found or _rank(found[key]) < _rank(row):
            found[key] = row
    return found


def _rank(row: Mapping[str, Any]) -> tuple[int, int]:
    """Order of rows of one run."""
    return row.get("bounds", 0), row["steps"]


def of_today(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with the shares and alarms of those checks whose bounds are today's."""
    old = {code for code, since in CHANGED.items() if row.get("bounds", 0) < since}
    alarms = [alarm for alarm in row["alarms"] if alarm.split(": ")[1] not in old]
    return {**row, "alarms": alarms, "shares": {code: row["shares"][code] for code in row["shares"] if code not in old}}


def write(file: Path, rows: Mapping[tuple[Any, ...], Mapping[str, Any]]) -> None:
    """Replace a file of rows."""
    file.write_text("".join(json.dumps(rows[key]) + "\n" for key in sorted(rows, key=str)))


def merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Add up distributions: code -> comparisons, greatest share, and comparisons by exponent of two."""
    found: dict[str, list[Any]] = {}
    for code, (count, greatest, bins) in itertools.chain.from_iterable(part["shares"].items() for part in parts):
        all_ = found.setdefault(code, [0, 0.0, Counter()])
        all_[0], all_[1] = all_[0] + count, max(all_[1], greatest)
        all_[2].update({str(key): number for key, number in bins.items()})
    return {code: [count, greatest, dict(bins)] for code, (count, greatest, bins) in sorted(found.items())}


class Running:
    """One run in processes of its own."""

    def __init__(self, head: Mapping[str, Any], limit_s: float) -> None:
        self.head, self.until = head, time.monotonic() + limit_s
        self.folder = Path(tempfile.mkdtemp(prefix="margins-"))
        self.words = [*RUNS[head["run"]], *COMMON, f"seed={head['seed']}", f"run={self.folder / 'run'}"]
        config = self.words.pop(0)
        knobs = {word.partition("=")[0]: word for word in self.words}
        self.words = [config, *knobs.values()]
        self.began = time.monotonic()
        self.log = (self.folder / "log").open("w")
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.dist.clean_margins", "--child", *self.words], cwd=ROOT, stdout=self.log,
            stderr=self.log, start_new_session=True,
            env={
                **os.environ, "PYTHONPATH": os.pathsep.join(paths), **ISAS[head["isa"]],
                "OMP_NUM_THREADS": str(head["threads"]), "MARGINS": str(self.folder / "steps.jsonl"),
            },
        )  # fmt: skip

    def ended(self) -> bool:
        """Tell whether it has ended; one that is over its time is ended."""
        if self.process.poll() is None and time.monotonic() > self.until:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.until = math.inf
        return self.process.poll() is not None

    def row(self) -> dict[str, Any]:
        """The row of what was judged; the folder is gone afterwards."""
        self.log.close()
        file = self.folder / "steps.jsonl"
        steps = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        whole = self.process.returncode == 0
        said = "" if whole else (self.folder / "log").read_text()[-500:]
        said = said.replace(str(self.folder), "RUN").replace(str(ROOT), ".")
        shutil.rmtree(self.folder, ignore_errors=True)
        return {
            **self.head, "command": " ".join(["verifier train", *self.words[:-1]]), "whole": whole,
            "steps": len(steps), "seconds": round(time.monotonic() - self.began), "ended": said,
            "alarms": [alarm for step in steps for alarm in step["alarms"]], "shares": merged(steps),
        }  # fmt: skip


def campaign(heads: Sequence[Mapping[str, Any]], out: Path, jobs: int, seconds: float) -> None:
    """Run those that have no whole row yet, until the time is over."""
    until, rows, running = time.monotonic() + seconds, rows_of(out), list[Running]()
    done = {key for key, row in rows.items() if row["whole"] and row.get("bounds", 0) == BOUNDS}
    left = [head for head in heads if tuple(head[name] for name in KEY) not in done]
    while left or running:
        while left and len(running) < jobs and time.monotonic() < until - 60:
            head = left.pop(0)
            running.append(Running(head, until - 25 - time.monotonic()))
        if not running:
            break
        time.sleep(0.5)
        for item in [item for item in running if item.ended()]:
            running.remove(item)
            row = item.row()
            with out.open("a") as stream:
                stream.write(json.dumps(row) + "\n")
            greatest = max((found[1] for found in row["shares"].values()), default=0.0)
            print(
                f"{row['run']} seed {row['seed']} {row['threads']} threads {row['isa']}: {row['steps']} steps in "
                f"{row['seconds']} s, whole {row['whole']}, greatest share {greatest:.3g}, alarms {len(row['alarms'])}"
                + ("" if row["whole"] else f": {row['ended'].strip().splitlines()[-1:]}"),
                flush=True,
            )
    print(f"{len(left)} runs were not begun", flush=True)
    write(out, rows_of(out))


def quantile(bins: Mapping[str, int], share: float) -> float:
    """Upper end of the power of two that so many comparisons are within."""
    order, total, seen = sorted((int(key), number) for key, number in bins.items()), sum(bins.values()), 0
    for exponent, number in order:
        seen += number
        if seen >= share * total:
            return float(2.0**exponent)
    return 0.0


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Lines of the table: one a check."""
    yield "| check | comparisons | median | p99.9 | greatest share | steps |"
    yield "| --- | --- | --- | --- | --- | --- |"
    steps = Counter[str]()
    for row in rows:
        steps.update(dict.fromkeys(row["shares"], row["steps"]))
    for code, (count, greatest, bins) in merged(rows).items():
        cells = (f"{quantile(bins, 0.5):.2g}", f"{quantile(bins, 0.999):.2g}", f"{greatest:.3g}")
        kind = " (draws)" if code in STATISTICAL else ""
        yield f"| {code}{kind} | {count:,} | {' | '.join(cells)} | {steps[code]:,} |"


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: judged steps, alarms, and the table of checks, of what was held against bounds of today."""
    every, rows = rows, [of_today(row) for row in rows]
    known = merged(rows)
    unseen = [code for code in merged(every) if code not in known]
    old = sum(len(row["alarms"]) for row in every) - sum(len(row["alarms"]) for row in rows)
    alarms = [f"- {row['run']}, seed {row['seed']}: {alarm}"[:110] for row in rows for alarm in row["alarms"]]
    beyond = [code for code, found in known.items() if found[1] > HALF and code not in STATISTICAL]
    runs = sorted({f"{row['run']} ({row['isa']}, {row['threads']} threads)" for row in rows})
    said = [
        f"Judged clean steps: {sum(row['steps'] for row in rows):,}, of {len(rows):,} runs. Alarms: {len(alarms):,}.",
        f"Beyond {HALF} of a bound: {', '.join(beyond) or 'none'}.",
        f"Not judged by bounds of today yet: {', '.join(unseen) or 'none'}. Alarms of older bounds: {old:,}.",
        "", *alarms[:20], *[""][: len(alarms)],
        *table(rows), "", f"{len(runs)} kinds of runs: [golden/margins.jsonl](../golden/margins.jsonl).",
    ]  # fmt: skip
    return "\n".join(said) + "\n"


def main(words: Sequence[str]) -> int:
    """Run, merge or draw."""
    if words[:1] == ["--child"]:
        return train_here(words[1:])
    asked = argparse.ArgumentParser(prog="python -m tests.dist.clean_margins", description=__doc__)
    asked.add_argument("--runs", nargs="*", default=[], choices=[*RUNS, "all"], metavar="NAME")
    asked.add_argument("--seeds", nargs="*", type=int, default=[1])
    asked.add_argument("--threads", nargs="*", type=int, default=[1])
    asked.add_argument("--isa", nargs="*", default=["default"], choices=ISAS)
    asked.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    asked.add_argument("--seconds", type=float, default=570.0)
    asked.add_argument("--out", type=Path, default=LEDGER)
    asked.add_argument("--merge", nargs="*", type=Path, default=[])
    asked.add_argument("--draw", action="store_true")
    given = asked.parse_args(words)
    cpu, flags = processor()
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, timeout=60
    ).stdout.strip()
    names = [*RUNS] if "all" in given.runs else given.runs
    heads = [
        {"run": run, "seed": seed, "threads": threads, "isa": isa, "cpu": cpu, "flags": flags, "commit": commit,
         "bounds": BOUNDS}
        for seed, threads, isa, run in itertools.product(given.seeds, given.threads, given.isa, names)
    ]  # fmt: skip
    campaign(heads, given.out, given.jobs, given.seconds)
    rows = rows_of(given.out)
    for file in given.merge:
        for key, row in rows_of(file).items():
            if key not in rows or _rank(rows[key]) < _rank(row):
                rows[key] = row
    write(given.out, rows)
    if given.draw:
        from tests.meta import measurement_tables

        measurement_tables.draw()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

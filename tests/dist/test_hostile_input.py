"""Drawn hostile values of every command's knobs: an answer or one sentence with exit code 4, soon, in little memory.

`train`, `sweep` and `gate` are asked for their dry run, `plan` for its plan, the others for their config.

What this does not exercise: several hostile values at once, files of data, and started processes.
"""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.meta.sources import ROOT
from tests.processes import said
from verifier.config import CONFIGS
from verifier.knob import KnobEntry, entries

TRIALS = 250
SECONDS = 60
MEMORY = 4 << 30
"""Bytes of address space: a command that lays out what it was asked for would need more."""
PLAIN = {
    "golden": ("--print-config", "model=tiny:qwen3"), "roundtrip": ("--print-config", "model=tiny:qwen3"),
    "bisect": ("--print-config", "model=tiny:qwen3"), "noise": ("--print-config", "model=tiny:qwen3"),
    "train": ("--dry-run", "--config", str(ROOT / "configs/add-grpo.yaml")),
    "sweep": ("--dry-run", "model=tiny:qwen3"), "gate": ("--dry-run", "model=tiny:qwen3"),
    "plan": ("model=wide:qwen3-30b-a3b",),
}  # fmt: skip
NUMBERS = (
    "-1", "0", "1", "7", "1000003", "1000000000", str(2**31), str(2**63), str(2**64), "1" + 300 * "0", "-1e9", "1e-320",
    "1e400", "-1e400", ".nan", ".inf", "-.inf", "1_0", "0x1F", "0o17", "1:30", "\uff11\uff12", "2026-11-30", "1e3",
)  # fmt: skip
TEXTS = (
    "", " ", "null", "~", "true", "no", "[]", "{}", "[a, [b]]", "{a: {b: 1}}", "a\nb", "\u202egnp.exe", "\ud83d",
    "\u00e9" * 5000, "x" * 100_000, "${mesh.tp}", "${model}", "${nothing}", "${", "&a [*a]", "*a",
    "!!python/object/apply:os.system [true]", "%s%n", "{0}", "$(true)", "`true`", "-", "--", "@file", "a,b", "..",
    "../../../../etc/passwd", "/", "/dev/zero", "/dev/stdin", "/dev/full", "/proc/self/mem", "/proc/self/fd/0",
    "nowhere", "https://example.org/x", "hf://a/b",
    "tiny:", "tiny:nothing", "published:", "wide:\x1b[31m", "module", "module:", ":function", "os:getcwd", "a.b:c.d",
)  # fmt: skip


def drawn(seed: int) -> tuple[str, KnobEntry, str]:
    """A command, one of its knobs and a value."""
    chosen = random.Random(seed)
    command = chosen.choice(["train", *CONFIGS])
    entry = chosen.choice(entries(CONFIGS[command]))
    own = NUMBERS if entry.kind in {int, float} else TEXTS
    return command, entry, chosen.choice(own if chosen.random() < 0.8 else NUMBERS + TEXTS)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(TRIALS))
def test_a_hostile_value_is_answered_or_refused_in_one_sentence(seed: int, tmp_path: Path) -> None:
    command, entry, value = drawn(seed)
    plain = [word for word in PLAIN[command] if not word.startswith(f"{entry.key}=")]
    words = [command, *plain, f"{entry.key}={value}"]
    raw = [word.encode("utf-8", "surrogatepass") for word in (sys.executable, "-m", "verifier", *words)]
    done = subprocess.run(
        raw, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY)),
    )  # fmt: skip
    error = done.stderr.decode(errors="replace")
    told = f"{command} {entry.key}={value[:80]!r}\nexit {done.returncode}\n{error[-2000:]}"
    assert done.returncode in {0, 4}, told
    assert len(done.stdout) + len(done.stderr) < 1 << 20, told
    if done.returncode == 4:
        assert len(said(error).strip().splitlines()) == 1, told
        assert len(error) < 4000, told
        assert not any(tmp_path.iterdir()), told

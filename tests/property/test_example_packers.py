"""docs/examples/test_your_packer.py, run as a team would: against a packer that is right, and one that is not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "docs/examples/test_your_packer.py"
RIGHT = '''
"""In the style of a trainer that fills its buffers sequence by sequence."""
import torch


def pack_sequences(sequences, tp, cp, cp_rank):
    align = tp * cp * 2 if cp > 1 else tp
    padded = [-(-len(sequence) // align) * align for sequence in sequences]
    tokens = torch.zeros(sum(padded) // cp, dtype=torch.long)
    labels = torch.full_like(tokens, -100)
    start = 0
    for sequence, size in zip(sequences, padded):
        whole = torch.zeros(size, dtype=torch.long)
        whole[: len(sequence)] = torch.tensor(sequence)
        targets = torch.full_like(whole, -100)
        targets[: len(sequence) - 1] = whole[1 : len(sequence)]
        half = size // cp // 2
        for at, (source, target) in enumerate(((whole, tokens), (targets, labels))):
            if cp == 1:
                target[start : start + size] = source
                continue
            target[start : start + half] = source[half * cp_rank : half * (cp_rank + 1)]
            back = source[size - half * (cp_rank + 1) : size - half * cp_rank]
            target[start + half : start + 2 * half] = back
        start += size // cp
    return tokens.tolist(), labels.tolist()
'''
WRONG = (
    RIGHT
    + '''

def right(sequences, tp, cp, cp_rank, pack=pack_sequences):
    return pack(sequences, tp, cp, cp_rank)


def pack_sequences(sequences, tp, cp, cp_rank):
    """Rolls labels after the split, inside each rank's own rows (verl#4250)."""
    tokens, labels = right(sequences, tp, cp, cp_rank)
    rolled = tokens[1:] + tokens[:1]
    return tokens, [token if label != -100 else -100 for token, label in zip(rolled, labels)]
'''
)


def run_example(tmp_path: Path, packer: str) -> tuple[dict[str, str], str]:
    """Outcome per test, and what pytest printed."""
    (tmp_path / "your_trainer.py").write_text(packer)
    (tmp_path / EXAMPLE.name).write_text(EXAMPLE.read_text())
    profile = "from hypothesis import settings\nsettings.register_profile('ci', derandomize=True, database=None)\n"
    (tmp_path / "conftest.py").write_text(profile + "settings.load_profile('ci')\n")
    path = os.pathsep.join([str(EXAMPLE.parents[2]), str(tmp_path)])
    command = [sys.executable, "-m", "pytest", "-rA", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [*command, EXAMPLE.name],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith(("PASSED", "FAILED"))]
    return {line[1].split("::")[1]: line[0] for line in lines}, done.stdout + done.stderr


def test_a_right_packer_passes(tmp_path: Path) -> None:
    outcomes, said = run_example(tmp_path, RIGHT)
    assert list(outcomes.values()) == ["PASSED"] * 2, said


def test_a_packer_that_rolls_labels_inside_shards_fails_with_the_smallest_case(tmp_path: Path) -> None:
    outcomes, said = run_example(tmp_path, WRONG)
    assert outcomes == {
        "test_every_token_meets_the_next_one_once": "FAILED",
        "test_every_rank_holds_its_own_two_chunks": "FAILED",
    }, said
    assert "case=Packing(tp=1, cp=2, sp=True, fp8='', lengths=[(1, 1)])" in said

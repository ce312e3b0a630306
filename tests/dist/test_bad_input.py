"""Bad input to `python -m verifier`: one sentence, exit code 4, and nothing is left behind.

GPUs are hidden, so that the option that needs some is refused on every machine.

What this does not exercise: every way in which a shard can be damaged (tests/unit/model/test_checkpoint.py).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.processes import said
from verifier.cli.app import run
from verifier.launch.fork_launcher import LEAST_RANK_BYTES
from verifier.model.tiny import write_tiny
from verifier.platform import host_bytes

ROOT = Path(__file__).resolve().parents[2]
KNOWN = (
    "tiny:qwen3",
    "tiny:qwen3-tied",
    "tiny:qwen2",
    "tiny:llama",
    "tiny:qwen3-moe",
    "tiny:qwen3-moe-320",
    "tiny:deepseek-v3",
    "tiny:deepseek-v3-yarn",
    "tiny:nemotron-h",
    "tiny:add",
    "tiny:add-moe",
    "tiny:add-moe-16",
    "tiny:add-deepseek",
    "tiny:qwen3-504",
    "tiny:qwen3-yarn",
)
WIDE = ("wide:qwen3-30b-a3b", "wide:deepseek-v3", "wide:nemotron-3-nano")
TOO_MANY = (
    f"1,000,000 ranks asked for: this machine has {host_bytes() / 2**30:.1f} GiB of memory, which holds 1 to "
    f"{host_bytes() // LEAST_RANK_BYTES:,} ranks of {LEAST_RANK_BYTES >> 20} MiB"
)
GOLDEN_MOE = ("golden", "--model", "tiny:qwen3-moe")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cache folder with the tiny checkpoints that the commands below ask for."""
    folder = tmp_path_factory.mktemp("cache")
    for name in ("qwen3", "qwen3-moe", "deepseek-v3"):
        write_tiny(name, folder / "verifier")
    return folder


class Shell:
    """Runs the command line in a folder of its own and sees what it leaves there."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder = folder
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self._environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "TMPDIR": str(self.temporary)}
        self._environment["CUDA_VISIBLE_DEVICES"] = ""
        self._environment["TORCHINDUCTOR_CACHE_DIR"] = str(cache / "inductor")  # torch's own, kept on purpose

    def refused(self, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
        """The one sentence with which a command ends; the trace and everything temporary are gone."""
        before = sorted(self.folder.rglob("*"))
        done = subprocess.run(
            [sys.executable, "-m", "verifier", *arguments],
            cwd=self.folder, env={**self._environment, "PYTHONPATH": str(ROOT), **(environment or {})},
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 4, done.stderr
        assert done.stdout == ""
        assert sorted(self.folder.rglob("*")) == before
        sentence = said(done.stderr).removeprefix("verifier: ")
        assert "\n" not in sentence
        return sentence


@pytest.fixture
def shell(tmp_path: Path, cache: Path) -> Shell:
    return Shell(tmp_path, cache)


@pytest.fixture
def copy(tmp_path: Path, cache: Path) -> Path:
    """A copy of the tiny Qwen3 checkpoint, to be damaged."""
    return Path(shutil.copytree(write_tiny("qwen3", cache / "verifier"), tmp_path / "copy"))


COMMANDS: list[tuple[tuple[str, ...], str]] = [
    (
        ("golden", "--model", "tiny:gpt5"),
        "unknown model `tiny:gpt5`: nearest are `tiny:gpt_oss`, `tiny:gemma4_text`, `tiny:gemma3_text`",
    ),
    (
        ("golden", "--model", "absent"),
        "unknown model `absent`: it is neither a local checkpoint directory nor one of "
        + ", ".join(f"`{name}`" for name in (*KNOWN, *WIDE, "published:smollm2-135m", "published:gemma3-270m"))
        + ", nor `tiny:` and a model type of docs/models.md",
    ),
    (
        ("golden", "--model", "tiny:qwen3", "--dp", "1000000"),
        TOO_MANY,
    ),
    (
        ("roundtrip", "--model", "tiny:qwen3", "--dp", "1000000"),
        TOO_MANY,
    ),
    (
        (*GOLDEN_MOE, "--tp", "2", "--ep", "4", "--dp", "1"),
        "ep * etp = 4 * 1 = 4 does not divide tp * cp * dp = 2 * 1 * 1 = 2: the least --dp that does is 2",
    ),
    ((*GOLDEN_MOE, "--ep", "3"), "ep = 3 does not divide the 16 experts of Qwen3MoeForCausalLM"),
    ((*GOLDEN_MOE, "--tp", "3"), "tp = 3 does not divide the 8 attention heads of Qwen3MoeForCausalLM"),
    ((*GOLDEN_MOE, "--tp", "16"), "tp = 16 does not divide the 8 attention heads of Qwen3MoeForCausalLM"),
    (
        (*GOLDEN_MOE, "--pp", "3"),
        "4 layers do not divide over pp * vpp = 3 * 1 chunks: give --first-stage-layers or --last-stage-layers, or "
        "other sizes",
    ),
    (
        ("golden", "--model", "tiny:nemotron-h", "--pp", "2", "--vpp", "2"),
        "vpp = 2, but megatron-bridge builds NemotronHForCausalLM without virtual stages",
    ),
    (
        ("golden", "--model", "wide:deepseek-v3"),
        "`wide:deepseek-v3` has the published dtype, so it takes --dtype bf16",
    ),
    (("golden", "--model", "tiny:qwen3", "--ep", "2"), "ep = 2, but Qwen3ForCausalLM has no experts"),
    (
        ("roundtrip", "--model", "tiny:deepseek-v3"),
        "vLLM has no CPU kernels for multi-head latent attention; use --engine hf",
    ),
    (
        ("roundtrip", "--model", "tiny:nemotron-h"),
        "vLLM has no CPU kernels for state-space layers; use --engine hf",
    ),
    (
        ("roundtrip", "--model", "tiny:qwen3", "--engine-tp", "3"),
        "--engine-tp 3 does not divide the 8 attention heads: use a size that does",
    ),
    (
        ("roundtrip", "--model", "tiny:qwen3", "--engine", "hf", "--engine-tp", "2"),
        "--engine hf has one rank, --engine-tp is 2: leave it out, or use --engine vllm",
    ),
    (
        ("roundtrip", "--model", "tiny:qwen3", "--transport", "nccl"),
        "--transport nccl needs GPUs and torch sees none: leave it out",
    ),
    (
        ("roundtrip", "--model", "tiny:qwen3-moe", "--engine-lora-rank", "8"),
        "--engine-lora-rank takes dense models of plain attention, and this one has experts",
    ),
    (
        ("roundtrip", "--model", "tiny:qwen3", "--cuda-graphs", "--sleep-level", "2"),
        "--cuda-graphs needs a GPU and torch sees none: leave it out",
    ),
]


@pytest.mark.parametrize(
    ("arguments", "sentence"), COMMANDS, ids=[" ".join(row[0]).replace("--", "") for row in COMMANDS]
)
def test_what_cannot_be_run_is_refused(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...], sentence: str,
) -> None:  # fmt: skip
    """In this process, which has imported what each command would import anew; the tests below start commands."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    for name, value in {"XDG_CACHE_HOME": cache, "TMPDIR": temporary, "CUDA_VISIBLE_DEVICES": ""}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.chdir(tmp_path)
    assert run([*arguments, "--trace", "trace"]) == 4
    assert capsys.readouterr() == ("", f"verifier: {sentence}\n")
    assert [path for path in tmp_path.rglob("*") if path != temporary] == []


def _lose_a_shard(copy: Path) -> str:
    (copy / "model-00001-of-00002.safetensors").unlink()
    return f"shard {copy}/model-00001-of-00002.safetensors is missing: model.safetensors.index.json names it"


def _cut_a_shard(copy: Path) -> str:
    shard = copy / "model-00001-of-00002.safetensors"
    size = shard.stat().st_size
    os.truncate(shard, size - 100)
    why = "incomplete metadata, file not fully covered"
    return f"shard {shard}, {size - 100:,} bytes, is cut or no safetensors file: {why}"


def _index_an_absent_tensor(copy: Path) -> str:
    index = copy / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    listed["weight_map"]["model.layers.9.mlp.up_proj.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(listed))
    return (
        f"{index} names tensor `model.layers.9.mlp.up_proj.weight`, but shard `model-00001-of-00002.safetensors` "
        "does not hold it"
    )


def _lose_the_config(copy: Path) -> str:
    (copy / "config.json").unlink()
    return f"config.json is missing from {copy}"


@pytest.mark.parametrize("damage", [_lose_a_shard, _cut_a_shard, _index_an_absent_tensor, _lose_the_config])
def test_a_damaged_checkpoint_is_refused(shell: Shell, copy: Path, damage: Callable[[Path], str]) -> None:
    sentence = damage(copy)
    assert shell.refused("golden", "--model", str(copy), "--trace", "trace") == sentence


def test_a_vocabulary_that_tp_does_not_divide_is_refused(shell: Shell, tmp_path: Path) -> None:
    odd = write_tiny("qwen3", tmp_path / "odd", changes={"vocab_size": 511})
    sentence = "tp = 2 does not divide the 511 vocabulary entries of Qwen3ForCausalLM"
    assert shell.refused("golden", "--model", str(odd), "--tp", "2", "--trace", "trace") == sentence


def test_another_dtype_than_the_checkpoints_is_refused(shell: Shell, copy: Path) -> None:
    sentence = (
        "the checkpoint is stored in float32 and the run is in bfloat16: rounding it would hide what is to be "
        "shown; choose the checkpoint's own dtype, or convert it first"
    )
    assert shell.refused("golden", "--model", str(copy), "--dtype", "bf16", "--trace", "trace") == sentence


def test_a_trace_folder_in_use_is_refused(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    sentence = "the trace directory `used` is not empty: choose another --trace"
    assert shell.refused("golden", "--model", "tiny:qwen3", "--trace", "used") == sentence


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a file system of a given size; skips where this user may not mount."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(options: str) -> Path:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True, timeout=30
        )
        if done.returncode:
            pytest.skip(f"a full disk needs a file system of its own: {done.stderr.strip()}")
        return folder

    yield mount
    if os.path.ismount(folder):
        subprocess.run(["umount", str(folder)], check=True, timeout=30)


def test_a_full_disk_is_refused_at_the_start(shell: Shell, small_disk: Callable[[str], Path]) -> None:
    disk = small_disk("size=1m,nr_inodes=2")
    sentence = f"no space is left for the trace at `{disk}/trace`: free some, or choose another --trace"
    assert shell.refused("golden", "--model", "tiny:qwen3", "--trace", str(disk / "trace")) == sentence


def test_a_cache_on_a_full_disk_is_refused_and_left_empty(shell: Shell, small_disk: Callable[[str], Path]) -> None:
    disk = small_disk("size=40k")
    arguments = ("golden", "--model", "tiny:llama", "--trace", "trace")
    environment = {"XDG_CACHE_HOME": str(disk / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    (disk / "cache" / "verifier").mkdir(parents=True)
    assert "No space left on device" in shell.refused(*arguments, environment=environment)


@pytest.mark.slow
def test_a_disk_that_fills_up_under_way_ends_the_run(shell: Shell, small_disk: Callable[[str], Path]) -> None:
    """Ranks are writing evidence when it happens; the trace is removed and so are the reports."""
    disk = small_disk("size=40k")
    sentence = f"no space is left for the trace at `{disk}/trace`: free some, or choose another --trace"
    arguments = ("golden", "--model", "tiny:qwen3", "--trace", str(disk / "trace"), "--json", "report.json")
    assert shell.refused(*arguments) == sentence


@pytest.mark.slow
def test_a_family_that_no_bridge_knows_is_refused(shell: Shell, copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "architectures": ["TotallyNewForCausalLM"]}))
    sentence = f"unknown family: megatron-bridge has no bridge for TotallyNewForCausalLM, which {copy} holds"
    assert shell.refused("golden", "--model", str(copy), "--trace", "trace") == sentence

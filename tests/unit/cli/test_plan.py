"""`verifier plan` as users run it: published models in a minute and 4 GB, exit codes, and the complete JSON.

What this does not exercise: that ranks hold and export what the plan says (tests/dist/test_plan.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from verifier.cli.app import run

PUBLISHED = Path(__file__).parents[1] / "plan" / "published"
SECONDS, BYTES = 60.0, 4e9
LARGE = {
    "deepseek-v3": ("--tp", "8", "--pp", "16", "--ep", "32", "--dp", "32", "--last-stage-layers", "1"),
    "hybrid-108-layers": ("--tp", "8", "--pp", "4", "--ep", "16", "--dp", "32"),
}
MEASURED = """\
import resource, sys
from verifier.cli.app import run
code = run(sys.argv[1:])
heavy = [name for name in ("torch", "numpy", "megatron", "transformers") if name in sys.modules]
print(code, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, *heavy, file=sys.stderr)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_a_published_model_is_planned_in_a_minute_and_4_gb(name, tmp_path):
    """On a core of its own, this takes eight seconds and 0.3 GB."""
    file = tmp_path / "plan.json"
    words = ["plan", "--model", str(PUBLISHED / name / "config.json"), *LARGE[name], "--json", str(file)]
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", MEASURED, *words], capture_output=True, text=True, timeout=300)
    took_s = time.monotonic() - began
    assert done.stdout.endswith("all ranks would make the same chunk plan\n"), done.stdout + done.stderr
    code, kilobytes = done.stderr.split()  # nothing heavy was loaded
    print(f"{took_s:.1f} s, {int(kilobytes) / 1e6:.2f} GB")
    assert code == "0"
    assert took_s < SECONDS
    assert int(kilobytes) * 1024 < BYTES
    said = json.loads(file.read_text())
    assert [item["rank"] for item in said["ranks"]] == list(range(said["world_size"]))
    (plan,) = said["plans"]
    sent = {name: size for _, chunk in plan["chunks"] for name, _, size, _ in chunk}
    owned = {source for item in said["holdings"] for shard in item["shards"] for source in shard["sources"]}
    assert owned == sent.keys()
    assert sum(item["sends_bytes"] for item in said["ranks"]) == said["bytes"]
    assert sum(item["owns"] for item in said["ranks"]) == len(
        {shard["replica"] for item in said["holdings"] for shard in item["shards"]}
    )


def test_a_contradiction_is_exit_code_1(capsys):
    words = ("plan", "--model", str(PUBLISHED / "qwen3-235b-a22b"), "--tp", "6", "--pp", "5", "--ep", "3")
    assert run([*words, "--dp", "3"]) == 1
    said = capsys.readouterr().out
    assert said.count("\ncontradiction: ") == 6
    assert run([*words, "--dp", "3", "--json", "-"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["sound"], len(found["contradictions"]), "ranks" in found) == (False, 6, False)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--model", "absent"), "unknown model `absent`"),
        (("--model", "tiny:qwen3", "--gpu-gib", "0"), "--gpu-gib is 0 GiB, it must be above 0 and finite"),
        (("--model", "tiny:qwen3", "--gather-gb-s", "nan"), "--gather-gb-s is nan GB/s, it must be above 0 and finite"),
        (("--model", "tiny:qwen3-moe", "--ep", "3", "--dp", "2"), "the least --dp that does is 3"),
    ],
)
def test_bad_input_is_exit_code_4(words, sentence, capsys):
    assert run(["plan", *words]) == 4
    assert sentence in capsys.readouterr().err


def test_a_config_without_a_model_is_refused(tmp_path, capsys):
    file = tmp_path / "config.json"
    file.write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    assert run(["plan", "--model", str(file)]) == 4
    assert "`num_hidden_layers` = None where a positive integer is needed" in capsys.readouterr().err
    file.write_text("{")
    assert run(["plan", "--model", str(tmp_path)]) == 4
    assert "is not valid JSON" in capsys.readouterr().err

"""The command line, frozen: help pages and what bad usage says."""

import pytest

from verifier.cli.app import run

COMMANDS = ["", "golden", "roundtrip", "train", "sweep", "gate", "noise", "plan", "bisect", "replay", "judge"]
COMMANDS += ["explain", "doctor"]
COMMANDS += ["report", "report html", "report compare"]
COMMANDS += ["faults", "faults list", "faults run", "faults matrix"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_page(command, same_as_file, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert run([*command.split(), "--help"]) == 0
    same_as_file(f"help{command and '-'}{command.replace(' ', '-')}.txt", capsys.readouterr().out)


BAD_USAGE = {
    "no-command": [],
    "unknown-command": ["rundtrip"],
    "unknown-option": ["roundtrip", "--model", "tiny:qwen3", "--tensor-parallel", "2"],
    "missing-model": ["roundtrip"],
    "not-a-number": ["roundtrip", "--model", "tiny:qwen3", "--tp", "two"],
    "unknown-choice": ["roundtrip", "--model", "tiny:qwen3", "--dtype", "fp16"],
    "size-zero": ["roundtrip", "--model", "tiny:qwen3", "--cp", "0"],
    "experts-do-not-divide": ["golden", "--model", "tiny:qwen3-moe", "--ep", "3", "--dp", "2"],
    "vpp-without-pp": ["golden", "--model", "tiny:qwen3", "--vpp", "2"],
    "no-cycles": ["roundtrip", "--model", "tiny:qwen3", "--cycles", "0"],
    "hf-engine-tp": ["roundtrip", "--model", "tiny:qwen3", "--engine", "hf", "--engine-tp", "2"],
    "hf-cuda-graphs": ["roundtrip", "--model", "tiny:qwen3", "--engine", "hf", "--cuda-graphs"],
    "hf-sleep-level": ["roundtrip", "--model", "tiny:qwen3", "--engine", "hf", "--sleep-level", "1"],
    "sleep-level-3": ["roundtrip", "--model", "tiny:qwen3", "--sleep-level", "3"],
    "unknown-quantization": ["roundtrip", "--model", "tiny:qwen3", "--engine-quantization", "int3"],
    "lora-rank-3": ["roundtrip", "--model", "tiny:qwen3", "--engine-lora-rank", "3"],
    "lora-and-fp8": [
        "roundtrip",
        "--model",
        "tiny:qwen3",
        "--engine-lora-rank",
        "8",
        "--engine-quantization",
        "fp8",
    ],
    "no-time": ["roundtrip", "--model", "tiny:qwen3", "--timeout", "0"],
    "record-and-against": ["golden", "--model", "tiny:qwen3", "--record", "--why", "x", "--against", "x.json"],
    "record-without-why": ["golden", "--model", "tiny:qwen3", "--record"],
    "why-without-record": ["golden", "--model", "tiny:qwen3", "--why", "x"],
    "noise-recorded-without-why": ["noise", "--model", "tiny:qwen3", "--record"],
    "noise-no-time": ["noise", "--model", "tiny:qwen3", "--timeout", "nan"],
    "sweep-ranks-and-mesh": ["sweep", "--model", "tiny:qwen3", "--ranks", "2", "--mesh", "tp=2"],
    "sweep-most-below-least": ["sweep", "--model", "tiny:qwen3", "--most-tokens", "512"],
    "sweep-no-memory": ["sweep", "--model", "tiny:qwen3", "--memory-limit", "0"],
    "sweep-no-layout": ["sweep", "--model", "tiny:qwen3", "--mesh", "tp2", "--dry-run"],
    "sweep-too-long": ["sweep", "--model", "tiny:qwen3", "--longest", "2000", "--dry-run"],
    "sweep-recompute": ["sweep", "--model", "tiny:qwen3", "megatron.recompute=full"],
    "sweep-trial-timeout": ["sweep", "--model", "tiny:qwen3", "--trial-timeout", "0"],
    "gate-without-model": ["gate"],
    "gate-no-model": ["gate", "--model", "absent", "--dry-run"],
    "gate-kind": ["gate", "--model", "tiny:qwen3", "--kind", "silver"],
    "gate-mesh": ["gate", "--model", "tiny:qwen3", "--mesh", "tp2"],
    "gate-mesh-twice": ["gate", "--model", "tiny:qwen3", "--mesh", "tp=2", "--mesh", "tp=2"],
    "gate-no-cell": ["gate", "--model", "tiny:qwen3", "--mesh", "tp=3", "--kind", "golden", "--dry-run"],
    "gate-dtype": ["gate", "--model", "tiny:qwen3", "--dtype", "fp16"],
    "gate-engine": ["gate", "--model", "tiny:qwen3", "--engine", "sglang", "--dry-run"],
    "gate-engine-option": ["gate", "--model", "tiny:qwen3", "--engine", "vllm,cp=2", "--dry-run"],
    "gate-fault": ["gate", "--model", "tiny:qwen3", "--fault", "absent", "--dry-run"],
    "gate-fix": ["gate", "--model", "tiny:qwen3", "--fix", "absent"],
    "gate-budget": ["gate", "--model", "tiny:qwen3", "--budget", "0"],
    "gate-waivers-as-text": ["gate", "--model", "tiny:qwen3", "waivers=WGT001"],
    "gate-no-card": ["gate", "--model", "tiny:qwen3", "--check-card", "absent"],
    "gate-card-and-dry-run": ["gate", "--model", "tiny:qwen3", "--check-card", "absent", "--dry-run"],
    "gate-resume": ["gate", "--resume", "absent"],
    "no-manifest": ["golden", "--model", "tiny:qwen3", "--against", "absent.json"],
    "no-folder": ["golden", "--model", "tiny:qwen3", "--json", "absent/out.json"],
    "no-trace": ["replay", "absent"],
    "bisect-in-bf16": ["bisect", "--model", "tiny:qwen3", "--dtype", "bf16"],
    "bisect-unknown-fault": ["bisect", "--model", "tiny:qwen3", "--fault", "nobody"],
    "bisect-no-trace": ["bisect", "absent"],
    "bisect-three-traces": ["bisect", "a", "b", "c"],
    "bisect-trace-and-model": ["bisect", "a", "--model", "tiny:qwen3"],
    "unknown-check": ["explain", "WGT01"],
    "unknown-check-far": ["replay", "absent", "--check", "zzz"],
}


def test_bad_usage_is_one_sentence_and_code_4(same_as_file, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    said = []
    for name, arguments in BAD_USAGE.items():
        assert run(arguments) == 4, name
        captured = capsys.readouterr()
        assert captured.out == "", name
        assert captured.err.count("\n") == 1, name
        said.append(f"{name}: {captured.err}")
    same_as_file("bad-usage.txt", "".join(said))
    assert list(tmp_path.iterdir()) == [], "bad usage wrote something"

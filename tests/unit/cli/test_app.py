"""The outermost frame: every end of a command is an exit code and, if bad, one sentence."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import verifier
from tests.meta.sources import ROOT
from verifier.cli import app as cli
from verifier.cli import results as cli_results
from verifier.core import store
from verifier.core.manifest import Manifest
from verifier.core.outputs import write_whole
from verifier.errors import ContractError, InternalError, UsageError
from verifier.faults.catalog import CATALOG
from verifier.stages.export.records import ExportedTensor
from verifier.stages.load.records import SourceTensor

MANIFEST = Manifest(command="golden")


def record(path: Path, exported: str, *, complete: bool = True, source: str = "vd1:" + "a" * 32) -> Path:
    """A small golden trace: one source tensor, and what was exported for it by two ranks."""
    store.create(path, MANIFEST)
    for role, kind, digest in (("source", SourceTensor, source), ("trainer", ExportedTensor, exported)):
        recorder = store.Recorder(path, role, 0)
        recorder.emit(kind(name="w", digest=digest, dtype="float32", shape=(2, 3)))
        recorder.close()
    if complete:
        store.complete(path, MANIFEST)
    return path


def digest(letter: str) -> str:
    return "vd1:" + letter * 32


def test_replay_tells_a_violation_by_code_1_and_writes_the_reports(tmp_path, capsys):
    trace = record(tmp_path / "trace", digest("b"))
    files = tmp_path / "out.json", tmp_path / "out.xml"
    assert cli.run(["replay", str(trace), "--check", "WGT004", "--json", str(files[0]), "--junit", str(files[1])]) == 1
    assert "WGT004 export-differs-from-source: " in capsys.readouterr().out
    assert json.loads(files[0].read_text())["exit_code"] == 1
    assert ElementTree.parse(files[1]).getroot().get("failures") == "1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "out.xml", "trace"]


def test_replay_of_a_clean_trace_holds(tmp_path, capsys):
    assert (
        cli.run(["replay", str(record(tmp_path / "trace", digest("a"))), "--check", "export-differs-from-source"]) == 0
    )
    assert "holds: 1 of 1 checks hold" in capsys.readouterr().out


def test_the_same_trace_gives_the_same_text_to_the_byte(tmp_path, capsys):
    trace = record(tmp_path / "trace", digest("b"))
    texts = []
    for _ in range(2):
        cli.run(["replay", str(trace)])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_restriction_to_a_name_that_nothing_has_is_refused(tmp_path, capsys):
    trace = record(tmp_path / "trace", digest("b"))
    assert cli.run(["replay", str(trace), "--check", "WGT004", "--only", "elsewhere"]) == 4
    said = "these checks compared nothing whose name contains `elsewhere`: leave --only out to see all"
    assert capsys.readouterr() == ("", f"verifier: {said}\n")


def test_quiet_is_the_verdict_and_the_cause_and_verbose_has_no_folded_line(tmp_path, capsys):
    trace = record(tmp_path / "trace", digest("b"))
    assert cli.run(["replay", str(trace), "--check", "WGT004", "-q"]) == 1
    verdict, cause = capsys.readouterr().out.splitlines()
    assert verdict.startswith("violated: 1 of 1 checks are violated; first bad stage: export, version 0")
    assert cause == "cause: WGT004 export-differs-from-source: export, version 0, `w`, trainer rank 0"
    assert cli.run(["replay", str(trace), "-v"]) == 1
    assert "after it in the flow of data" not in capsys.readouterr().out
    assert cli.run(["replay", str(trace), "-v", "-q"]) == 4


def test_json_to_stdout_is_the_json_alone(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trace = record(tmp_path / "trace", digest("b"))
    assert cli.run(["replay", str(trace), "--check", "WGT004", "--json", "-"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["cause"]["what"] == "w"
    assert [path.name for path in tmp_path.iterdir()] == ["trace"]


def test_version(capsys):
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"verifier {verifier.__version__}")


def test_an_error_of_a_command_names_the_help_of_that_command(capsys):
    assert cli.run(["faults", "run"]) == 4
    assert capsys.readouterr().err.endswith("; see `verifier faults run --help`\n")


def test_shells_complete_commands():
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "_VERIFIER_COMPLETE": "complete_bash", "COMP_WORDS": "verifier ro",
        "COMP_CWORD": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "verifier"], capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    assert done.stdout.split() == ["roundtrip"]


def test_explain_a_fault(capsys):
    assert cli.run(["explain", "ep-rank-experts-swapped"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("ep-rank-experts-swapped, a re-enacted bug\n\n")
    assert said.endswith("Run it: `verifier faults run ep-rank-experts-swapped`\n")
    gpu = next(item for item in CATALOG.values() if item.gpus)
    assert cli.run(["explain", gpu.id]) == 0
    assert capsys.readouterr().out.endswith(f"Run it: `ci/gpu -k {gpu.id}`\n")


@pytest.mark.parametrize(
    ("error", "code"), [(UsageError("mend it"), 4), (ContractError("refused"), 3), (InternalError("died"), 3)]
)
def test_deliberate_errors_are_one_sentence(error, code, monkeypatch, capsys):
    def fail(*_: object, **__: object) -> int:
        raise error

    monkeypatch.setattr(cli, "judge_trace", fail)
    assert cli.run(["replay", "somewhere"]) == code
    assert capsys.readouterr().err == f"verifier: {error}\n"


def test_an_unforeseen_error_is_one_sentence_and_a_saved_traceback(monkeypatch, capsys, tmp_path):
    def fail(*_: object, **__: object) -> int:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(cli, "judge_trace", fail)
    assert cli.run(["replay", "somewhere"]) == 3
    said = capsys.readouterr().err
    (saved,) = tmp_path.iterdir()
    assert said == f"verifier: internal error: ZeroDivisionError: by zero; the traceback is in `{saved}`\n"
    assert "judge_trace" in saved.read_text()


@pytest.mark.parametrize("code", [0, None, "bye"])
def test_a_plugin_that_leaves_does_not_end_a_command_as_if_all_held(code, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(cli, "judge_trace", lambda *_, **__: sys.exit(code))
    assert cli.run(["replay", "somewhere"]) == 3
    (saved,) = tmp_path.iterdir()
    asked = f"code that the command called asked for the end, SystemExit({code!r})"
    assert capsys.readouterr().err == f"verifier: {asked}; the traceback is in `{saved}`\n"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(13, "Permission denied", "/locked"), "`/locked`: Permission denied"),
        (OSError(28, "No space left on device"), "No space left on device"),
    ],
)
def test_what_the_machine_refuses_is_usage(error, said, monkeypatch, capsys):
    def fail(*_: object, **__: object) -> int:
        raise error

    monkeypatch.setattr(cli, "judge_trace", fail)
    assert cli.run(["replay", "somewhere"]) == 4
    assert capsys.readouterr().err == f"verifier: this machine refused: {said}\n"


def test_a_name_with_a_line_break_stays_in_one_sentence(capsys):
    assert cli.run(["replay", "no\ntrace"]) == 4
    assert capsys.readouterr().err == "verifier: `no trace` holds no trace: there is no manifest.json\n"


def test_what_would_steer_a_terminal_is_escaped_in_a_refusal(capsys):
    assert cli.run(["replay", "a\x1b[31mb\u202ec"]) == 4
    said = "verifier: `a\\x1b[31mb\\u202ec` holds no trace: there is no manifest.json\n"
    assert capsys.readouterr().err == said


SLEEPER = """
import sys, time
from verifier.cli import app as cli

class Held:
    def __enter__(self): pass
    def __exit__(self, *_): print("let go", flush=True)

def sleep(*_, **__):
    with Held():
        print("ready", flush=True)
        time.sleep(60)

cli.judge_trace = sleep
cli.main(["replay", "somewhere"])
"""
DEAF = (
    SLEEPER.replace("        time.sleep(60)", "        Deaf()\n        time.sleep(60)")
    .replace('        print("ready", flush=True)\n', "")
    .replace(
        "def sleep",
        """class Deaf:
    def __del__(self):
        print("ready", flush=True)
        time.sleep(1)

def sleep""",
    )
)
"""A finalizer runs when the signal comes, and Python drops what it raises."""


@pytest.mark.parametrize("program", [SLEEPER, DEAF], ids=["", "in a finalizer"])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_command_in_order(signum, program):
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        preexec_fn=lambda: signal.signal(signum, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signum)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (128 + signum, "let go\n", f"verifier: ended by {signum.name}\n")


def shell(command: str, folder: Path) -> tuple[int, str]:
    """Exit code and stderr of a command line in which VERIFIER stands for ours."""
    line = command.replace("VERIFIER", f"'{sys.executable}' -m verifier")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(line, shell=True, cwd=folder, env=environment, stderr=-1, text=True, timeout=60, check=False)
    return done.returncode, done.stderr


def test_a_full_stdout_is_refused_and_a_closed_one_is_nobody_listening(tmp_path):
    assert shell("VERIFIER explain > /dev/full", tmp_path) == (
        4,
        "verifier: stdout cannot be written: No space left on device\n",
    )
    assert shell("VERIFIER explain >&-", tmp_path) == (0, "")
    assert shell("VERIFIER explain nothing 2>&-", tmp_path) == (4, "")


def test_a_current_directory_that_is_gone_is_refused(tmp_path):
    code, said = shell("mkdir gone && cd gone && rmdir ../gone && VERIFIER golden --model tiny:qwen3", tmp_path)
    assert (code, said) == (4, "verifier: the current directory does not exist any more: change to one that does\n")


def test_two_results_in_one_file_are_refused(tmp_path, capsys):
    files = ["--json", str(tmp_path / "out"), "--junit", str(tmp_path / "out")]
    assert cli.run(["replay", "somewhere", *files]) == 4
    assert capsys.readouterr().err.endswith("out` is asked for twice: give each result a file of its own\n")


def test_a_matrix_that_could_not_be_written_is_refused_before_it_is_drawn(capsys):
    assert cli.run(["faults", "matrix", "--output", "/absent-folder/kill-matrix"]) == 4
    assert capsys.readouterr().err == (
        "verifier: `/absent-folder/kill-matrix` cannot be written: No such file or directory\n"
    )


def test_a_matrix_of_a_stage_that_is_not_there_is_refused(capsys):
    assert cli.run(["faults", "matrix", "--only", "engines"]) == 4
    assert capsys.readouterr().err.startswith("verifier: there is no stage `engines`: choose --only from load, data, ")


def test_a_matrix_is_drawn_from_a_ledger_alone(tmp_path):
    ledger = tmp_path / "ledger.jsonl"
    assert cli.run(["faults", "matrix", "--ledger", str(ledger), "--no-run", "--output", str(tmp_path / "pages")]) == 0
    assert f"0 of {len(CATALOG)} faults are caught" in (tmp_path / "pages" / "README.md").read_text()


def test_a_broken_run_is_a_violation_where_its_trace_shows_one(tmp_path, capsys):
    trace = tmp_path / "trace"

    def run(progress: object) -> None:
        record(trace, digest("b"), complete=False)
        raise InternalError("rank 3 died")

    assert cli_results.run_and_judge("golden", run, trace, cli_results.Results()) == 1
    assert "the run did not finish" in capsys.readouterr().out


def test_a_broken_run_without_a_violation_stays_an_internal_error_and_begins_with_its_reason(tmp_path, capsys):
    trace = tmp_path / "trace"

    def run(progress: object) -> None:
        record(trace, digest("a"), complete=False)
        raise InternalError("rank 3 died")

    assert cli_results.run_and_judge("golden", run, trace, cli_results.Results()) == 3
    said = capsys.readouterr()
    assert said.err == "verifier: rank 3 died\n"
    assert "the run did not finish" in said.out


def test_a_broken_run_without_a_trace_is_just_the_error(tmp_path, capsys):
    def run(progress: object) -> None:
        raise InternalError("no memory")

    with pytest.raises(InternalError, match="no memory"):
        cli_results.run_and_judge("golden", run, tmp_path / "trace", cli_results.Results())
    assert capsys.readouterr().out == ""


def test_results_are_written_whole_or_not_at_all(tmp_path):
    file = tmp_path / "out.json"
    file.write_text("before")
    write_whole(file, "after")
    assert file.read_text() == "after"
    with pytest.raises(UsageError, match=r"cannot be written"):
        write_whole(tmp_path / "absent" / "out.json", "x")
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_a_result_file_that_cannot_be_is_refused_before_the_run():
    with pytest.raises(UsageError, match="a folder, a file for the results is needed"):
        cli_results.require_results(Path("/"))
    with pytest.raises(UsageError, match=r"`/absent-folder/x.json` cannot be written: No such file or directory"):
        cli_results.require_results(None, Path("/absent-folder/x.json"))
    with pytest.raises(UsageError, match=r"`/dev/null` is a device or a pipe"):
        cli_results.require_results(Path("/dev/null"))


def test_a_reader_that_goes_away_is_no_error():
    done = subprocess.run(
        f"'{sys.executable}' -m verifier explain | head -c 1; echo ${{PIPESTATUS[0]}}",
        shell=True, executable="/bin/bash", capture_output=True, text=True, timeout=60, cwd=ROOT, check=True,
    )  # fmt: skip
    assert (done.stdout[1:], done.stderr) == ("0\n", "")


def test_doctor_says_which_tier_runs(capsys):
    assert cli.run(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tier"] in {"cpu", "cuda"}
    assert found["gaps"][found["tier"]] == []
    for gaps in found["gaps"].values():
        assert all(gap["missing"] and gap["mend"] for gap in gaps)


@pytest.mark.parametrize(("code", "said"), [(0, "recorded golden/tiny-qwen3-float32.json"), (1, "not recorded: ")])
def test_golden_records_nothing_of_which_a_check_does_not_hold(code, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("golden").mkdir()

    def ended(what, run, trace, results) -> int:
        record(trace, digest("b"))
        return code

    monkeypatch.setattr(cli, "run_and_judge", ended)
    assert cli.run(["golden", "--model", "tiny:qwen3", "--record", "--why", "a reason", "--trace", "trace"]) == code
    assert said in capsys.readouterr().out
    assert len(list(Path("golden").iterdir())) == (code == 0)

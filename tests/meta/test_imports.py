"""Imports follow the arrow, and a heavy library has one door."""

import ast
import re
import subprocess
import sys

import pytest

from tests.meta.sources import ROOT, circles, import_graph, imports_of, module_of, python_files, tree_of, where
from verifier.core import store
from verifier.core.manifest import Manifest
from verifier.core.stage import Stage

ROOMS = {
    "core": set(),
    "records": {"core"},
    "stages": set(),
    "mesh": set(),
    "environments": set(),
    "config": {"mesh", "platform", "environments"},
    "platform": {"core"},
    "launch": {"core", "records", "mesh", "platform"},
    "data": {"core", "environments"},
    "algorithms": {"core", "data"},
    "rewards": {"core", "data", "environments", "launch"},
    "model": {"core", "mesh", "data", "platform"},
    "megatron": {"core", "mesh", "config", "launch", "data", "algorithms", "model", "platform"},
    "export": {"core", "mesh", "model", "megatron", "platform"},
    "plan": {"core", "mesh", "config", "model", "export"},
    "transport": {"core", "mesh", "plan", "launch", "platform"},
    "engine": {"core", "records", "mesh", "config", "model", "plan", "transport", "platform", "launch"},
    "oracle": {
        "core",
        "records",
        "mesh",
        "model",
        "export",
        "engine",
        "platform",
        "plan",
        "megatron",
        "transport",
        "launch",
    },
    "contracts": {"core", "mesh", "launch", "model", "megatron", "engine", "oracle", "platform"},
    "probes": {
        "core",
        "records",
        "mesh",
        "config",
        "platform",
        "launch",
        "data",
        "algorithms",
        "rewards",
        "model",
        "megatron",
        "export",
        "plan",
        "transport",
        "engine",
        "oracle",
        "contracts",
        "runs",
        "trainer",
    },
    "trainer": {
        "core",
        "mesh",
        "config",
        "platform",
        "launch",
        "data",
        "algorithms",
        "environments",
        "rewards",
        "model",
        "megatron",
        "export",
        "plan",
        "transport",
        "engine",
        "runs",
    },
    "probe": {
        "core",
        "records",
        "mesh",
        "platform",
        "data",
        "algorithms",
        "model",
        "plan",
        "transport",
        "engine",
        "oracle",
        "probes",
        "trainer",
    },
    "campaign": {
        "core",
        "mesh",
        "config",
        "platform",
        "launch",
        "data",
        "model",
        "megatron",
        "engine",
        "oracle",
        "probes",
        "runs",
        "trainer",
        "contracts",
        "checks",
        "report",
        "faults",
    },
    "strategies": {"core", "mesh", "data", "megatron", "export", "plan"},
    "checks": {"core", "records", "mesh", "plan"},
    "report": {"core", "records", "mesh", "checks"},
}
"""Room -> rooms that it may import. A room is a package, or all records, probes, checks or faults of the stages."""
PARTS = {"records": "records", "checks": "checks", "probe": "probes", "faults": "faults"}
"""First word of the name of a file in `verifier/stages/<stage>` -> its room."""
OPEN = ("config_json", "errors", "knob", "__version__")
"""What is open to all."""
JUDGES = ("checks", "faults", "report", "cli", "campaign")
"""What a run must not know of."""
RUNS = {"runs", "knob"}
HEAVY = ("megatron", "vllm", "ray", "transformers", "torch.distributed")
DOORS = ("_megatron.py", "_vllm.py", "_ray.py", "_hf.py")
DOOR_FOLDERS = ("platform", "launch", "transport")
GIVEN_A_GROUP = {"verifier/megatron/vocab_logprob.py"}
"""Takes the process group that it is handed, and loads torch.distributed when it first reduces over one."""


def room_of(module: str) -> str:
    package, *rest = module.split(".")[1:]
    return PARTS.get(rest[-1].partition("_")[0], package) if package == "stages" and rest else package


def room_of_file(path) -> str:
    module = module_of(path)
    return room_of(module) if "." in module else module


def files_of(room: str):
    return [path for path in python_files("verifier") if room_of_file(path) == room]


def test_a_room_imports_only_what_stands_before_it():
    wrong = [
        f"{where(path, line)} imports {module}"
        for path in python_files("verifier")
        if (room := room_of_file(path)) in ROOMS
        for module, line in imports_of(path)
        if module.startswith("verifier.") and room_of(module) not in ROOMS[room] | {room, *OPEN}
    ]
    assert not wrong, "\n".join(wrong)


def test_no_run_knows_who_judges_it():
    wrong = [
        f"{where(path, line)} imports {module}"
        for path in python_files("verifier")
        if room_of_file(path) in ROOMS.keys() - {"checks", "report", "campaign"} | RUNS
        for module, line in imports_of(path)
        if module.startswith("verifier.") and room_of(module) in JUDGES
    ]
    assert not wrong, "\n".join(wrong)


INSTRUMENT = re.compile(r"records|\.emit\(|verifier\.(checks|oracle|probes|stages)|core\.store")
"""Words of what looks at a run."""


def test_the_trainer_names_no_instrument():
    files = [*python_files("verifier/trainer"), *python_files("verifier/megatron")]
    wrong = [where(path) for path in files if INSTRUMENT.search(path.read_text())]
    assert not wrong, "\n".join(wrong)


TRAINS = ("verifier.trainer.controller", "verifier.trainer.loop", "verifier.cli.train")


def test_a_run_that_nobody_judges_loads_no_probe():
    """Ranks, which load torch and megatron-core, are in tests/unit/trainer/test_observer.py."""
    program = f"import sys, {', '.join(TRAINS)}; print([name for name in sys.modules if '.probe' in name])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT, check=True
    )
    assert done.stdout == "[]\n"


def test_every_package_is_in_the_table():
    packages = {path.name for path in (ROOT / "verifier").iterdir() if (path / "__init__.py").exists()}
    assert packages - ROOMS.keys() - {"runs", "cli", "faults"} == set()


def test_a_stage_is_a_folder_of_records_probes_checks_and_faults():
    folders = {path.parent for path in python_files("verifier/stages")} - {ROOT / "verifier" / "stages"}
    assert sorted(folder.name for folder in folders) == sorted(stage.label for stage in Stage)
    wrong = [
        where(path)
        for folder in folders
        for path in folder.glob("*.py")
        if not re.fullmatch(r"(__init__|records|(checks|probe|faults)(_\w+)?)\.py", path.name)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_circle_of_imports():
    assert circles(import_graph("verifier")) == []


def test_checks_do_nothing_but_judge():
    forbidden = {"time", "os", "random", "pathlib", "subprocess", "socket", "datetime", "tempfile", "shutil"}
    wrong = [
        f"{where(path, line)} imports {module}"
        for path in files_of("checks")
        for module, line in imports_of(path)
        if module.split(".")[0] in forbidden
    ]
    assert not wrong, "\n".join(wrong)


def test_no_check_recognises_a_fault():
    wrong = [where(path) for path in files_of("checks") if re.search(r"\bfault", path.read_text(), re.I)]
    assert not wrong, "\n".join(wrong)


def is_heavy(module: str) -> bool:
    return any(module == name or module.startswith(name + ".") for name in HEAVY)


def lines_inside_functions(path) -> set[int]:
    """Lines of the imports that run only when a function is called."""
    functions = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef)]
    return {
        node.lineno
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }


def test_heavy_libraries_come_in_by_their_doors():
    """A fault patches them, so it may load one too, but only while it is being injected."""
    wrong = [
        f"{where(path, line)} imports {module}"
        for path in python_files("verifier")
        if not path.name.endswith(DOORS) and room_of_file(path) not in DOOR_FOLDERS and where(path) not in GIVEN_A_GROUP
        for module, line in imports_of(path)
        if is_heavy(module) and not (room_of_file(path) == "faults" and line in lines_inside_functions(path))
    ]
    assert not wrong, "\n".join(wrong)


LIGHT = {
    "import": "import verifier",
    "help": "from verifier.cli.app import run; run(['--help'])",
    "roundtrip-help": "from verifier.cli.app import run; run(['roundtrip', '--help'])",
    "bad-usage": "from verifier.cli.app import run; run(['roundtrip', '--model', 'x', '--tp', '0'])",
    "explain": "from verifier.cli.app import run; run(['explain', 'WGT001'])",
    "sweep-dry-run": "from verifier.cli.app import run; run(['sweep', 'model=tiny:qwen3-moe', 'ranks=8', '--dry-run'])",
    "gate-dry-run": "from verifier.cli.app import run; run(['gate', '--model', 'tiny:qwen3-moe', '--dry-run'])",
    "faults-list": "from verifier.cli.app import run; run(['faults', 'list'])",
    "replay": "from verifier.cli.app import run; run(['replay', 'TRACE'])",
    "plugin": "import verifier.pytest_plugin",
}


@pytest.mark.parametrize("entry", LIGHT)
def test_light_entries_load_nothing_heavy(entry, tmp_path):
    trace = store.create(tmp_path / "trace", Manifest())
    store.complete(trace, Manifest(command="golden"))
    program = f"""
import sys
{LIGHT[entry].replace("TRACE", str(trace))}
found = sorted({{name.split(".")[0] for name in sys.modules}} & {{"torch", "megatron", "vllm", "ray", "transformers"}})
print("LOADED", found)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "LOADED []", done.stdout


def test_help_is_light():
    """Modules loaded by `verifier --help`, beside those of the two libraries that it is made with: 279 beside 162."""

    def modules(code: str) -> int:
        program = f"{code}\nimport sys; print(len(sys.modules))"
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT, check=True
        )
        return int(done.stdout.splitlines()[-1])

    libraries = modules("import msgspec, typer.main")
    assert modules(LIGHT["help"]) < 2 * libraries

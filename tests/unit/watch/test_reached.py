"""What an engine's processes may have loaded, by the sources: more than enough, and not rows of the trainer."""

from __future__ import annotations

from tests.meta.sources import ROOT
from verifier.watch.imports import reached
from verifier.watch.kept_engines import ENGINE_FOLDER

PACKAGE = ROOT / "verifier"


def test_an_engine_has_its_own_code_what_that_imports_and_what_it_names():
    found = reached(ENGINE_FOLDER.rglob("*.py"))
    inside = ("engine/vllm/worker_vllm.py", "engine/settings.py", "model/families.py", "transport/receiver.py")
    assert {PACKAGE / name for name in (*inside, "errors.py", "transport/__init__.py")} <= found


def test_an_edit_of_a_row_of_the_trainer_or_of_a_check_keeps_the_engine():
    found = reached(ENGINE_FOLDER.rglob("*.py"))
    assert not found & {PACKAGE / name for name in ("export/names.py", "checks/weights.py", "runs/session_megatron.py")}

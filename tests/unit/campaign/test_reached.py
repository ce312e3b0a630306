"""What processes of engine and oracle may have loaded, by the sources: more than enough, and no rows of the trainer."""

from __future__ import annotations

from tests.meta.sources import ROOT
from verifier.campaign.watch.kept_engines import engine_code, oracle_code

PACKAGE = ROOT / "verifier"


def test_an_engine_has_its_own_code_what_that_imports_and_what_it_names():
    found = engine_code()
    inside = ("engine/vllm/worker_vllm.py", "engine/settings.py", "model/families.py", "transport/receiver.py")
    assert {PACKAGE / name for name in (*inside, "errors.py", "transport/__init__.py")} <= found


def test_an_edit_of_a_row_of_the_trainer_or_of_a_check_keeps_engine_and_answers():
    assert not (engine_code() | oracle_code()) & {
        PACKAGE / name for name in ("export/names.py", "checks/weights.py", "runs/session_megatron.py")
    }


def test_the_oracle_has_transformers_and_no_code_of_the_trainer():
    found = oracle_code()
    assert {
        PACKAGE / name for name in ("oracle/step_hf.py", "model/transformers_hf.py", "engine/engine_hf.py")
    } <= found

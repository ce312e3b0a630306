"""The head says what is not the default and where the run comes from; owners get their coordinates."""

from msgspec.structs import replace

from tests.snapshots.reports import MANIFEST
from verifier.core.manifest import Manifest
from verifier.report.render_text import header, located, options_of, provenance


def test_options_that_are_on():
    assert options_of(MANIFEST) == {"engine.sleep_level": 1, "engine.quantization": "fp8"}
    config = {"model": "m", "fixes": ["a"], "engine": {"lora_rank": 8, "cuda_graphs": True, "tp": 2}, "timeout_s": 9.0}
    assert options_of(Manifest(config=config)) == {"engine.lora_rank": 8, "engine.cuda_graphs": True}


def test_provenance_of_a_trace_that_says_nothing_is_nothing():
    assert provenance(Manifest()) == []
    assert "made by" not in header(Manifest())


def test_provenance():
    assert dict(provenance(MANIFEST)) == {
        "made by": "verifier 0.1.0, commit 7683cbf",
        "on": "Linux x86_64, 2 processors, NVIDIA H100 80GB HBM3; 2026-11-24T21:33:05Z to 2026-11-24T21:35:41Z",
        "command": "`verifier roundtrip --model tiny:qwen3-moe --tp 2 --pp 2 --ep 2`",
    }


def test_coordinates_are_added_once_and_only_to_ranks_of_the_mesh():
    at = "trainer rank 3 (tp=1 pp=1 ep=1 etp=0 cp=0 dp=0)"
    assert located("trainer rank 3, chunk 1/2", MANIFEST) == f"{at}, chunk 1/2"
    assert located(at, MANIFEST) == at
    assert located("trainer rank 9, engine rank 0", MANIFEST) == "trainer rank 9, engine rank 0"
    assert located("trainer rank 3", replace(MANIFEST, mesh=None)) == "trainer rank 3"

"""Configurations: the default dp, names of traces, and what the manifest records."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier.config import GoldenConfig, RoundtripConfig, make_mesh, next_trace
from verifier.errors import UsageError
from verifier.mesh import Mesh

SIZES = st.integers(1, 8)


@given(tp=SIZES, cp=SIZES, ep=SIZES, etp=SIZES)
def test_default_dp_is_the_smallest_that_fits(tp, cp, ep, etp):
    dp = make_mesh(tp=tp, cp=cp, ep=ep, etp=etp).dp
    assert tp * cp * dp % (ep * etp) == 0
    assert all(tp * cp * smaller % (ep * etp) for smaller in range(1, dp))


def test_the_default_dp_of_absurd_sizes_is_found_at_once():
    assert make_mesh(ep=1_000_000_007, etp=999_999_937).dp == 1_000_000_007 * 999_999_937


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), 1e300])
def test_a_deadline_that_no_clock_takes_is_refused(seconds):
    with pytest.raises(UsageError, match=r"it must be above 0 and at most 604,800 s, a week"):
        GoldenConfig(model="tiny:qwen3", trace=Path("t"), timeout_s=seconds)


def test_given_dp_is_taken_as_it_is():
    assert make_mesh(ep=2, dp=4).dp == 4
    with pytest.raises(UsageError, match="does not divide"):
        make_mesh(ep=4, dp=2)
    with pytest.raises(UsageError, match="mesh axis dp is 0"):
        make_mesh(dp=0)


def test_traces_are_numbered(tmp_path):
    assert next_trace("golden", tmp_path) == tmp_path / "golden-0001"
    (tmp_path / "golden-0001").mkdir()
    assert next_trace("golden", tmp_path) == tmp_path / "golden-0002"
    assert next_trace("roundtrip", tmp_path) == tmp_path / "roundtrip-0001"


def test_to_dict_is_json_able_and_names_no_trace():
    import json

    values = RoundtripConfig(model="tiny:qwen3", trace=Path("t"), mesh=Mesh(tp=2)).to_dict()
    assert json.loads(json.dumps(values)) == values
    assert "trace" not in values
    assert Mesh(**values["mesh"]) == Mesh(tp=2)


def test_golden_against_becomes_text(tmp_path):
    manifest = tmp_path / "m.json"
    manifest.touch()
    values = GoldenConfig(model="m", trace=Path("t"), against=manifest).to_dict()
    assert values["against"] == str(manifest)

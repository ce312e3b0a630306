"""The known bugs of megatron-core that `--fix` mends: each is there as shipped, and gone with its fix.

When a test of what is shipped fails, upstream is mended, and the fix in `verifier/platform/upstream_fixes_megatron.py`
goes. What a kernel of cuDNN does is shown on a GPU: tests/h100/test_attention.py.
"""

from __future__ import annotations

import pytest

from verifier.model.architectures_hf import write_scaled
from verifier.model.tiny import write_tiny
from verifier.platform.upstream_fixes import MEGATRON_DECAY, MEGATRON_INDEX, MEGATRON_SINKS


@pytest.fixture
def run(trainer_launcher, checkpoints, tmp_path):
    path = write_tiny("nemotron-h", checkpoints, dtype="bfloat16")

    def run(function, *fixes):
        folder = tmp_path / f"{function}-{len(fixes)}"
        args = {"checkpoint": str(path), "fixes": fixes}
        return trainer_launcher.run(f"megatron_fix_functions:{function}", world_size=1, run_dir=folder, args=args)[0]

    return run


@pytest.mark.slow
def test_2777_states_of_a_mixed_model_are_found_where_they_are(run):
    shipped = run("misplaced_states", MEGATRON_DECAY)
    assert any(name.endswith("A_log") for name in shipped)
    assert run("misplaced_states", MEGATRON_DECAY, MEGATRON_INDEX) == []


@pytest.mark.slow
def test_2777_without_float32_parameters_there_is_nothing_to_misplace(run):
    assert run("misplaced_states") == []


@pytest.mark.slow
def test_2777_such_an_optimizer_cannot_be_saved(run):
    assert "get_parameter_state_dp_zero" in run("failure_of_a_save", MEGATRON_DECAY)
    assert run("failure_of_a_save", MEGATRON_DECAY, MEGATRON_INDEX) == ""


@pytest.mark.slow
def test_975_the_decay_of_a_bf16_model_is_rounded(run):
    assert set(run("decay_dtypes").values()) == {"torch.bfloat16"}
    assert set(run("decay_dtypes", MEGATRON_DECAY).values()) == {"torch.float32"}


@pytest.mark.slow
def test_7452_sinks_of_other_ranks_than_the_first_are_not_in_the_norm(trainer_launcher, checkpoints, tmp_path):
    args = {"checkpoint": str(write_scaled("gpt_oss", checkpoints))}
    counted = {
        fixes: trainer_launcher.run(
            "megatron_fix_functions:sinks_in_norm", world_size=2, run_dir=tmp_path / str(len(fixes)),
            args={**args, "fixes": fixes},
        )
        for fixes in ((), (MEGATRON_SINKS,))
    }  # fmt: skip
    first, second = counted[()]
    assert first
    assert all(first)
    assert not any(second)
    assert all(map(all, counted[(MEGATRON_SINKS,)]))

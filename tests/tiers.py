"""Pytest plugin of this repository alone: tiers (`quick`, default, `slow`, `h100`) and the options of GPU runs.

`tests/README.md` says what each tier runs and how long it takes. The root `conftest.py` loads this file; what other
projects get is `verifier/pytest_plugin.py`.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from verifier.pytest_plugin import deselect, fail_skipped, skip_without_gpus

TESTS = Path(__file__).parent
QUICK_FOLDERS = ("unit", "property", "snapshots", "meta")
"""Folders of `tests/` whose tests are quick unless they are named below."""
NOT_QUICK = (
    "unit/engine/test_shaping.py",
    "unit/model/test_transformers_hf.py",
    "unit/oracle/test_step.py",
    "unit/megatron/test_logprob_kernel.py",
    "property/test_example_packers.py",
    "unit/model/test_tiny.py::test_transformers_loads_every_tensor_as_written",
    "unit/plan/test_digest.py::test_gpu_kernel_equals_reference_when_interpreted",
    "unit/plan/test_digest.py::test_no_collision_among_structured_variations",
    "unit/core/test_damage.py",
    "unit/core/test_plugins.py",
    "unit/core/test_without_torch.py",
    "unit/launch/test_fork_job.py",
    "unit/launch/test_fork_server.py",
    "unit/test_pytest_plugin.py",
    "meta/test_gpu_run.py",
    "meta/test_tiers.py",
)
"""Files and tests that import transformers, start processes, or compute for seconds."""
SLOW_ROWS = (
    "dist/test_clean_runs.py::test_golden_holds[more ranks than heads]",
    "dist/test_clean_runs.py::test_golden_holds[pipeline]",
    "dist/test_export_names.py::test_every_rank_holds_what_the_layout_says[deepseek",
    "dist/test_export_names.py::test_every_rank_holds_what_the_layout_says[nemotron-h-1 rank",
    "dist/test_export_names.py::test_every_rank_holds_what_the_layout_says[nemotron-h-cp2",
    "dist/test_export_names.py::test_every_rank_holds_what_the_layout_says[nemotron-h-ep2 dp2",
    "dist/test_export_names.py::test_every_rank_holds_what_the_layout_says[nemotron-h-pp2-",
    "dist/test_export_names.py::test_every_rank_holds_what_the_layout_says[nemotron-h-tp2 etp2",
    "dist/test_export_names.py::test_every_rank_holds_what_the_layout_says[nemotron-h-tp2-float32",
    "dist/test_export_names.py::test_every_rank_holds_what_the_layout_says[nemotron-h-tp4",
    "dist/test_export_names.py::test_every_rank_holds_what_the_layout_says[qwen2-tp4",
    "dist/test_export_names.py::test_every_rank_holds_what_the_layout_says[qwen3-1",
    "dist/test_export_names.py::test_every_rank_holds_what_the_layout_says[qwen3-cp2 dp2",
    "dist/test_export_names.py::test_every_rank_holds_what_the_layout_says[qwen3-moe-ep2 dp2",
    "dist/test_export_names.py::test_every_rank_holds_what_the_layout_says[qwen3-moe-tp2 ep2-",
    "dist/test_export_names.py::test_every_rank_holds_what_the_layout_says[qwen3-moe-tp2 etp2",
    "dist/test_export_names.py::test_every_rank_holds_what_the_layout_says[qwen3-pp2 first1",
    "dist/test_export_names.py::test_every_rank_holds_what_the_layout_says[qwen3-pp2 vpp2",
    "dist/test_export_names.py::test_every_rank_holds_what_the_layout_says[qwen3-pp2-",
    "dist/test_export_names.py::test_every_rank_holds_what_the_layout_says[qwen3-tied-1 rank",
    "dist/test_export_names.py::test_every_rank_holds_what_the_layout_says[qwen3-tp2",
    "dist/test_export_names.py::test_every_rank_holds_what_the_layout_says[qwen3-tp4",
    "dist/test_float32_loop.py::test_a_bug_is_the_cause[advantages]",
    "dist/test_float32_loop.py::test_a_bug_is_the_cause[denominator]",
    "dist/test_float32_loop.py::test_a_bug_is_the_cause[stale]",
    "dist/test_float32_loop.py::test_a_bug_is_the_cause[temperature]",
    "dist/test_plan.py::test_the_plan_is_that_of_real_ranks[qwen3-moe-tp2-ep2-float32]",
    "dist/test_replay_megatron.py::test_routes_are_obeyed_and_natural_ones_change_nothing[deepseek-v3-sizes6",
    "dist/test_replay_megatron.py::test_routes_are_obeyed_and_natural_ones_change_nothing[deepseek-v3-sizes7",
    "dist/test_replay_megatron.py::test_routes_are_obeyed_and_natural_ones_change_nothing[qwen3-moe-sizes1",
    "dist/test_replay_megatron.py::test_routes_are_obeyed_and_natural_ones_change_nothing[qwen3-moe-sizes3",
    "dist/test_replay_megatron.py::test_routes_are_obeyed_and_natural_ones_change_nothing[qwen3-moe-sizes4",
    "dist/test_replay_megatron.py::test_the_routers_own_choice_in_an_update_is_recorded_in_less_than_float32[qwen3-moe-sizes1",
    "dist/test_replay_megatron.py::test_the_routers_own_choice_in_an_update_is_recorded_in_less_than_float32[qwen3-moe-sizes3",
    "dist/test_train_knobs.py::test_recomputation_changes_no_bit_of_a_gradient[deepseek-v3]",
    "dist/test_train_modes.py::test_an_update_reaches_requests_between_two_of_their_tokens[recomputed]",
    "dist/test_train_modes.py::test_every_step_holds[kept]",
    "dist/test_train_modes.py::test_every_step_holds[recomputed]",
    "dist/test_train_modes.py::test_no_token_is_over_the_bound[kept]",
    "dist/test_train_modes.py::test_no_token_is_over_the_bound[recomputed]",
    "dist/test_train_modes.py::test_recomputed_tokens_are_each_within_the_bound_of_the_oracle_of_their_version",
    "dist/test_train_parity.py::test_a_step_on_a_mesh_is_that_of_one_rank_and_of_adam[deepseek-v3",
    "dist/test_train_parity.py::test_a_step_on_a_mesh_is_that_of_one_rank_and_of_adam[qwen3-1",
    "dist/test_train_parity.py::test_a_step_on_a_mesh_is_that_of_one_rank_and_of_adam[qwen3-moe",
    "dist/test_train_parity.py::test_a_step_on_a_mesh_is_that_of_one_rank_and_of_adam[qwen3-tp2",
    "dist/test_train_sampled.py::test_every_sampled_step_holds[clipped on dp=2]",
    "dist/test_train_sampled.py::test_every_sampled_step_holds[live]",
    "dist/test_train_sampled.py::test_every_sampled_step_holds[sft",
    "dist/test_train_sampled.py::test_some_rollouts_are_computed_and_weights_are_those_without_judges[in bf16]",
    "dist/test_train_sampled.py::test_some_rollouts_are_computed_and_weights_are_those_without_judges[live]",
    "dist/test_train_sampled.py::test_some_rollouts_are_computed_and_weights_are_those_without_judges[own",
    "dist/test_train_sampled.py::test_some_rollouts_are_computed_and_weights_are_those_without_judges[sft on dp=2]",
    "dist/test_train_tools.py::test_every_step_holds[step-wise]",
    "dist/test_train_tools.py::test_metrics_count_episodes",
    "dist/test_train_tools.py::test_prompts_of_later_turns_begin_with_all_earlier_ids[step-wise]",
    "dist/test_train_tools.py::test_steps_share_the_advantage_of_their_episode",
    "dist/test_trainer_gradients.py::test_gradients_agree_with_one_rank[qwen3-mesh2]",
    "dist/test_trainer_gradients.py::test_gradients_agree_with_transformers[llama]",
    "dist/test_trainer_gradients.py::test_gradients_do_not_depend_on_the_micro_batch_split[deepseek-v3]",
    "dist/test_trainer_parity.py::test_trainer_agrees_with_the_checkpoint_with_transformers_and_with_one_rank[deepseek",
    "dist/test_trainer_parity.py::test_trainer_agrees_with_the_checkpoint_with_transformers_and_with_one_rank[llama",
    "dist/test_trainer_parity.py::test_trainer_agrees_with_the_checkpoint_with_transformers_and_with_one_rank[nemotron-h",
    "dist/test_trainer_parity.py::test_trainer_agrees_with_the_checkpoint_with_transformers_and_with_one_rank[qwen3-moe-sizes11",
    "dist/test_trainer_parity.py::test_trainer_agrees_with_the_checkpoint_with_transformers_and_with_one_rank[qwen3-moe-sizes12",
    "dist/test_trainer_step.py::test_a_neighbour_in_the_pack_moves_no_bit_of_mine[mesh0-deepseek-v3]",
    "dist/test_trainer_step.py::test_a_neighbour_in_the_pack_moves_no_bit_of_mine[mesh0-qwen3-moe]",
    "dist/test_trainer_step.py::test_a_neighbour_in_the_pack_moves_no_bit_of_mine[mesh1-deepseek",
    "dist/test_trainer_step.py::test_a_neighbour_in_the_pack_moves_no_bit_of_mine[mesh1-qwen3-moe",
    "dist/test_trainer_step.py::test_padding_of_nan_changes_nothing[deepseek",
    "dist/test_trainer_step.py::test_padding_of_nan_changes_nothing[qwen3-moe]",
    "faults/test_some_rollouts.py::test_some_rollouts_show_it_too[kl-loss-detached]",
    "faults/test_token_faults.py::test_fault_is_caught_where_it_sits[labels-rolled-in-the-shard]",
    "faults/test_token_faults.py::test_fault_is_caught_where_it_sits[local-positions]",
    "faults/test_token_faults.py::test_fault_is_caught_where_it_sits[routes-count-dense-layers]",
    "unit/plan/test_recipes.py::test_a_recipe_is_dry_run_and_planned[deepseek",
    "unit/test_pytest_plugin.py::test_a_trace_that_does_not_hold_fails_by_its_report[alone]",
)
"""Begins of the names of rows of tables that are slow: others of the same table stay in the default tier, which has 20
minutes on two cores. Whole tests and files are marked where they stand."""
WITH_ENGINES = (
    "faults/", "dist/test_roundtrip.py", "dist/test_engine_", "dist/test_interrupted.py", "dist/test_foreign_loop.py",
    "dist/test_plugin_runs.py", "dist/test_train_lora.py", "dist/test_train_modes.py", "dist/test_train_tools.py",
)  # fmt: skip
"""Files whose tests start vLLM, which is imported once for them, or have deadlines of seconds."""
MARKERS = (
    "quick: needs no ranks and no engine; `pytest -m quick` runs these in 5 min (set in tests/tiers.py)",
    "slow: takes minutes; left out unless asked for by `-m slow`",
    "h100(gpus=1, least=gpus): needs that many GPUs of compute capability 9.0; with --share-gpus, `least`",
    "timed: an h100 test that needs the host for itself while it measures",
    "own_process: an h100 test that takes longer than the rest of its file",
    "quiet: an h100 test with a limit of minutes, which runs before all others",
    "own_gpus: an h100 test that fills its GPUs, which no other test uses meanwhile",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of GPU runs."""
    group = parser.getgroup("verifier's own tests")
    group.addoption("--no-skip", action="store_true", help="a skipped test fails: green means that everything ran")
    group.addoption("--gpus", type=int, metavar="N", help="deselect h100 tests that need more GPUs than N")
    group.addoption(
        "--share-gpus",
        action="store_true",
        help="with --gpus: only h100 tests for larger hosts whose ranks can share N",
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two workers for a whole tier without GPUs, each with a file at a time; none for tests that are named."""
    whole_tier = config.args == config.getini("testpaths") and config.getoption("gpus") is None
    return min(2, os.cpu_count() or 1) if whole_tier and not config.getoption("collectonly") else 0


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadFileScheduling:
    """A file at a time, and all files of engines in one worker: two engines at once would spin for the same cores."""
    return Scheduling(config, log)


class Scheduling(LoadFileScheduling):  # type: ignore[misc]
    """Gives each worker a file at a time, but all of `WITH_ENGINES` to the one that gets the first of them."""

    def _split_scope(self, nodeid: str) -> str:
        file = str(super()._split_scope(nodeid))
        return "engines" if file.removeprefix("tests/").startswith(WITH_ENGINES) else file


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers; in a quick run search less long, with one thread."""
    for line in MARKERS:
        config.addinivalue_line("markers", line)
    if hasattr(config, "workerinput"):
        import torch

        torch.set_num_threads(1)  # two workers on two cores: threads of one would wait for those of the other
    if is_quick_run(config):
        os.environ.setdefault(
            "OMP_NUM_THREADS", "1"
        )  # small tensors; idle threads of torch would only wait for each other
        if not config.getoption("hypothesis_profile", default=None):
            settings.load_profile("quick")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave what is not quick unread under `-m quick`: importing it costs as much as running the tier."""
    inside = collection_path != TESTS and collection_path.is_relative_to(TESTS)
    return True if inside and is_quick_run(config) and not in_quick_folder(collection_path) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the quick tier and what is slow, and deselect the h100 tests that `--gpus` and `--share-gpus` exclude."""
    for item in items:
        if item.nodeid.removeprefix("tests/").startswith(SLOW_ROWS):
            item.add_marker("slow")
        if is_quick(item):
            item.add_marker("quick")
    limit, share = config.getoption("gpus"), config.getoption("share_gpus")
    if limit is not None:
        deselect(config, items, [item for item in items if not fits(item, limit, share)])


def is_quick_run(config: pytest.Config) -> bool:
    """Test for a pytest that was called with `-m quick`."""
    return bool(config.getoption("markexpr") == "quick")


def is_quick(item: pytest.Item) -> bool:
    """Membership of the quick tier: in a quick folder, no exception, neither slow nor for GPUs."""
    if not in_quick_folder(item.path) or any(item.get_closest_marker(name) for name in ("slow", "h100")):
        return False
    return f"{item.path.relative_to(TESTS)}::{item.name.partition('[')[0]}" not in NOT_QUICK


def in_quick_folder(path: Path) -> bool:
    """Membership of a file or folder of `tests/` in a quick folder, exceptions left out."""
    if not path.is_relative_to(TESTS):
        return False
    name = str(path.relative_to(TESTS))
    return name.split("/")[0] in QUICK_FOLDERS and name not in NOT_QUICK


def needed_gpus(item: pytest.Item) -> tuple[int, int] | None:
    """GPUs that an h100 test is for, and GPUs that suffice where ranks share them; None for other tests."""
    marker = item.get_closest_marker("h100")
    if marker is None:
        return None
    gpus = marker.kwargs.get("gpus", 1)
    return gpus, marker.kwargs.get("least", gpus)


def fits(item: pytest.Item, limit: int, share: bool) -> bool:
    """Selection by number of GPUs: at most `limit`; with `share`, more than that but shareable by that many."""
    needed = needed_gpus(item)
    if needed is None:
        return True
    gpus, least = needed
    return least <= limit < gpus if share else gpus <= limit


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip an h100 test whose GPUs are missing, and name them."""
    needed = needed_gpus(item)
    if needed is not None:
        gpus, least = needed
        skip_without_gpus(least if item.config.getoption("share_gpus") else gpus)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Under `--no-skip`, turn every skip into a failure."""
    report = yield
    if item.config.getoption("no_skip"):
        fail_skipped(item, report, "--no-skip")
    return report

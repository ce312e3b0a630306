"""Bugs that shipped elsewhere, planted into the trainer's own functions: the unit test of each has to fail.

Each was a fault of the catalogue, caught by a check of a trace; docs/contributing.md has what holds it now.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
from msgspec import structs

from tests.unit.data import test_second_reading
from tests.unit.rewards import test_scorer
from tests.unit.trainer import (
    test_ahead,
    test_checkpoint_folder,
    test_continuation,
    test_loop,
    test_metrics,
    test_recorded_steps,
    test_run_folder,
    test_sampled_batch,
)
from tests.unit.trainer import test_evaluated_numbers as evaluated
from tests.unit.trainer import test_step_facts as facts
from tests.unit.trainer import test_step_terms as terms
from verifier.faults.fault import Call, held, replaced

FACTS = "verifier.trainer.grpo_plan:_facts(config, step, rows, given, reasons, old)"
EVENT = "verifier.trainer.metrics:Metrics._add_event(self, step, numbers)"
GREEDY = "verifier.trainer.update_facts_megatron:greedy_answers(trainer, rollouts, batching)"
EVALUATED = "verifier.trainer.generation:EngineRollouts._evaluated(self, step)"
EVALUATE = "verifier.trainer.loop:StepLoop._evaluate(self, step)"
PLAN = "verifier.trainer.grpo_plan:GrpoPlan.updates(self, step, taken, score)"
ROLLOUTS = "verifier.trainer.generation:EngineRollouts.__init__(self, config, checkpoint, whole_answers, observer)"
POOL = "verifier.trainer.generation:RewardPool(reward, environment, processes, deadline_s, errors)"
CHECKPOINTS = "verifier.trainer.checkpoint_folder:Checkpoints"
ROW = "verifier.trainer.grpo_plan:rollout_of(row)"
READ = "verifier.data.text_dataset:load_examples(source, task, split, count, seed, keys, divide, options)"
TAKE = "verifier.trainer.ahead:AheadRollouts._take(self, step)"
REWARDED = "verifier.rewards.scorer:RewardPool.score(self, episodes)"
RUN = "verifier.trainer.loop:StepLoop.run(self, done, metrics)"


class OneEarly(int):
    """Number of steps, with which a loop compares as if it were one less."""

    def __gt__(self, step: int) -> bool:
        return int(self) - 1 > step


@contextmanager
def eights(own: Any) -> Any:
    """Held-out problems beyond a multiple of eight are dropped."""
    whole = len(own._held_out) // 8 * 8
    with held(own, _held_out=own._held_out[:whole], _held_out_prompts=own._held_out_prompts[:whole]):
        yield


def of_eights(call: Call) -> Any:
    with eights(call.self):
        return call.faulty()


def without_failures(call: Call) -> Any:
    return call.wrong({**call.original(), "accuracy": 1.0})


def of_what_stays(call: Call) -> Any:
    return call.faulty(rows=[row for row, why in zip(call.rows, call.reasons, strict=True) if why is None])


def with_prompts(call: Call) -> Any:
    found = call.original()
    return call.wrong({**found, "answer_tokens": found["answer_tokens"] + 3})


def cut_by_longest(call: Call) -> Any:
    ends = [len(row.response) for row in call.rows]
    return call.wrong({**call.original(), "truncated_share": 1 - ends.count(max(ends)) / len(ends)})


def meant_by_answer(call: Call) -> Any:
    from verifier.trainer.metrics import mismatch_facts

    pairs = zip(call.given, call.old, strict=True)
    means = [mismatch_facts((own - item.logprobs)[3:])["mismatch_k3"] for item, own in pairs]
    return call.wrong({**call.original(), "mismatch_k3": sum(means) / len(means)})


def batch_before(call: Call) -> Any:
    before, call.state["before"] = call.state.get("before"), call.original()
    return call.wrong(before or call.state["before"])


def meant_over_turns(call: Call) -> Any:
    counts = [item.episodes.count(name) for item in call.rounds for name in item.episodes]
    return call.wrong(sum(counts) / len(counts))


def all_so_far(call: Call) -> Any:
    call.state["tokens"] = call.state.get("tokens", 0) + call.values.get("tokens", 0)
    return call.faulty(values={**call.values, "tokens": call.state["tokens"]})


def opened_anew(call: Call) -> Any:
    if call.values["step"] == 3 and call.values["loss"] == 30:
        (call.self.path / "metrics.jsonl").unlink()
    return call.faulty()


def stale_lines(call: Call) -> Any:
    file = call.self.path / "metrics.jsonl"
    before, found = file.read_text().rpartition("\n")[0] + "\n", call.original()
    file.write_text(before)
    return call.wrong(found)


def untold(call: Call) -> Any:
    call.self._restarted = True
    return call.faulty()


def end_alone(call: Call) -> Any:
    def ends(mask: Any) -> Any:
        return [*(False for _ in mask[1:]), True] & mask

    return call.faulty(rollouts=[dataclasses.replace(item, mask=ends(item.mask)) for item in call.rollouts])


def one_early(call: Call) -> Any:
    config = call.self.config
    with held(call.self, config=dataclasses.replace(config, steps=OneEarly(config.steps))):
        return call.faulty()


def begins_late(call: Call) -> Any:
    if call.step == 0 and not call.state.get("late"):
        call.state["late"] = True
        return call.wrong({})
    return call.original()


def no_stop(call: Call) -> Any:
    config = call.self.config
    rule = dataclasses.replace(config.evaluation, stop_above=2.0)
    with held(call.self, config=dataclasses.replace(config, evaluation=rule)):
        return call.faulty()


def planned(others: Callable[[Any], Any]) -> Callable[[Call], Any]:
    """A plan that works by another config."""

    def body(call: Call) -> Any:
        with held(call.self, _config=others(call.self._config)):
            return call.faulty()

    return body


def grpo(**others: Any) -> Callable[[Any], Any]:
    return lambda config: dataclasses.replace(config, grpo=dataclasses.replace(config.grpo, **others))


def sampled_by(others: Callable[[Any], Any]) -> Callable[[Call], Any]:
    return lambda call: call.faulty(config=others(call.config))


def all_examples(config: Any) -> Any:
    return dataclasses.replace(config, data=dataclasses.replace(config.data, num_examples=None))


def keeps_the_oldest(call: Call) -> Any:
    with held(call.self, _keep=10):
        found = call.original()
    for step in call.self._steps()[2:]:
        shutil.rmtree(call.self.path(step))
    return call.wrong(found)


def sorted_as_text(call: Call) -> Any:
    return call.wrong(sorted(call.original(), key=str))


def without_decay(call: Call) -> Any:
    rule = dataclasses.replace(call.config.optimizer, weight_decay=0.0)
    return call.faulty(config=dataclasses.replace(call.config, optimizer=rule))


def in_a_row(call: Call) -> Any:
    made = call.original()
    found = sorted(made, key=lambda update: update.file.name)
    pairs = zip(found, made, strict=True)
    return call.wrong([dataclasses.replace(update, number=own.number, first=own.first) for update, own in pairs])


def trained_twice(call: Call) -> Any:
    """A batch stays in the queue, and the next step trains on it once more."""
    found, kept = call.original(), call.state.get("kept")
    call.state["kept"] = found
    return found if kept is None else call.wrong(kept)


def thrown_away(call: Call) -> Any:
    """The batch of a checkpoint, which step 4 is to take."""
    if call.step == 4:
        call.self._queue.clear()
    return call.faulty()


def one_behind(call: Call) -> Any:
    """The number of the step before, whose next batch the state was trained on."""
    step, metrics = call.original()
    return call.wrong((max(0, step - 1), metrics))


def without_batch(call: Call) -> Any:
    found, refused = call.original()
    return call.wrong((found and structs.replace(found, rollouts=[]), refused))


def batch_of_the_resume(call: Call) -> Any:
    at = call.self._at
    return call.original() if at is None else call.faulty(rollouts=list(at.rollouts))


def without_the_last_route(call: Call) -> Any:
    """The last token of a prompt loses its routes where the answer's are joined on, and has those of padding."""
    routes, last = call.row.routes, len(call.row.prompt) - 1
    if routes is None:
        return call.original()
    filled = tuple(tuple(range(len(experts))) for experts in routes[last])
    return call.faulty(row=structs.replace(call.row, routes=(*routes[:last], filled, *routes[last + 1 :])))


def means_below_half(call: Call) -> Any:
    means = [sum(row.reward for row in rows) / len(rows) for rows in call.self.groups]
    return call.wrong([at for at, mean in enumerate(means) if mean < 0.5])


def on_every_turn(call: Call) -> Any:
    last = {row.trajectory: row.reward for rows in call.groups for row in rows if row.is_last_step}
    groups = [[structs.replace(row, reward=last.get(row.trajectory, 0.0)) for row in rows] for rows in call.groups]
    return call.faulty(groups=groups)


def longest_left_out(call: Call) -> Any:
    found = call.original()
    sizes = [len(item.question) + len(item.answer or "") for item in found]
    return call.wrong(tuple(item for item, size in zip(found, sizes, strict=True) if size < max(sizes)))


def answers_apart(call: Call) -> Any:
    found = call.original()
    turned = [item.answer for item in (*found[1:], found[0])]
    return call.wrong(tuple(dataclasses.replace(item, answer=own) for item, own in zip(found, turned, strict=True)))


def longest_failed(call: Call) -> Any:
    """A reward that fails, as for the longest answers by its deadline, is 0."""
    sizes = [len(item.completion) for item in call.episodes]
    return call.wrong([0.0 if size == max(sizes) else own for size, own in zip(sizes, call.original(), strict=True)])


STEPS = test_loop.test_a_run_takes_all_its_steps_unless_an_evaluation_lets_it_stop
LINE = test_metrics.test_a_line_has_rates_trend_and_signs_and_a_resumed_run_goes_on_with_them
CURVES = test_metrics.test_tensorboard_has_each_number_of_a_line_at_its_step
RESUMED = test_metrics.test_a_resume_keeps_the_lines_up_to_its_checkpoint_and_adds_one_a_step
AGAIN = test_metrics.test_tensorboard_shows_steps_that_are_taken_again_once
ASKED = evaluated.test_every_held_out_problem_is_asked_and_counts_once
SOLVED = evaluated.test_a_problem_is_solved_where_all_tokens_of_its_response_are_the_likeliest
ALL = facts.test_a_step_shows_all_of_its_answers_those_that_leave_the_loss_too
TERMS = terms.test_every_part_of_a_step_works_by_the_config
SIZES = terms.test_all_answers_are_in_the_files_of_a_step_each_once_and_all_its_updates_are_made
MADE = terms.test_the_reward_and_the_environment_are_those_of_the_config
LAST = test_checkpoint_folder.test_the_last_checkpoints_stay_and_a_run_goes_on_from_the_newest
KEPT = test_run_folder.test_the_config_that_a_run_keeps_is_the_one_that_it_trains_by
MISMATCH = facts.test_mismatch_is_that_of_tokens_of_the_trained_weights_each_counted_once
EXAMPLES = terms.test_a_run_samples_from_as_many_examples_as_its_config_says
ORDER = terms.test_steps_take_each_example_once_an_epoch_in_another_order_and_none_that_is_held_out
AHEAD = test_ahead.test_each_batch_that_is_sampled_ahead_is_taken_by_its_own_step_once
RESUME = test_continuation.test_a_resume_takes_the_step_and_the_batch_that_its_checkpoint_has
FILE = test_recorded_steps.test_a_step_trains_on_its_file_field_by_field
SOURCE = test_second_reading.test_rows_of_a_file
SCORED = test_scorer.test_answers_are_scored_in_order

PLANTED: dict[str, tuple[str, Callable[[Call], Any], Callable[..., None]]] = {
    "reward-of-what-stays": (FACTS, of_what_stays, ALL),
    "answer-length-with-its-prompt": (FACTS, with_prompts, ALL),
    "cut-off-by-the-longest-of-the-batch": (FACTS, cut_by_longest, ALL),
    "age-from-the-version-to-come": (
        FACTS, lambda call: call.wrong({**call.original(), "staleness": call.original()["staleness"] + 1}),
        facts.test_age_is_counted_from_the_weights_that_the_step_trains,
    ),
    "mismatch-meant-by-answer": (FACTS, meant_by_answer, MISMATCH),
    "mismatch-never-shown": (
        "verifier.trainer.grpo_plan:mismatch_facts(differences)",
        lambda call: call.wrong({"mismatch_max": 0.0, "mismatch_p99": 0.0, "mismatch_k3": 0.0}), MISMATCH,
    ),
    "position-within-the-longest-of-the-batch": (
        "verifier.trainer.grpo_plan:by_position(differences, positions, longest)",
        lambda call: call.faulty(longest=int(call.positions.max()) + 1),
        facts.test_positions_are_eighths_of_the_longest_answer_that_is_allowed,
    ),
    "tokens-of-the-batch-before": (
        "verifier.trainer.grpo_plan:_token_counts(given, with_reference)", batch_before,
        facts.test_tokens_are_those_of_the_batch,
    ),
    "turns-meant-over-turns": (
        "verifier.trainer.sampled_batch:mean_turns(rounds)", meant_over_turns,
        facts.test_turns_are_meant_over_episodes_of_all_rounds,
    ),
    "metrics-of-the-last-update": (
        "verifier.trainer.loop:mean_of(reports)", lambda call: call.wrong({**call.reports[-1]} if call.reports else {}),
        facts.test_a_step_of_several_updates_shows_their_mean_the_greatest_gap_and_all_tokens,
    ),
    "shown-norm-summed-over-micro-batches": (
        "verifier.trainer.update_facts_megatron:metrics_of_update(result, facts, policy)",
        lambda call: call.wrong({**call.original(), "grad_norm": 3 * call.result.grad_norm}),
        facts.test_an_update_shows_its_norm_once_and_shares_of_all_its_tokens,
    ),
    "clipped-share-of-one-side": (
        "verifier.megatron.policy_loss_megatron:loss_metrics(name, inputs, options)",
        lambda call: call.faulty(options=dataclasses.replace(call.options, clip_high=1e9)),
        facts.test_clipped_tokens_are_those_beyond_either_bound_on_the_side_that_the_loss_clips,
    ),
    "metrics-under-another-step": (
        "verifier.trainer.metrics:Metrics.add(self, values, lengths)",
        lambda call: call.faulty(values={**call.values, "step": 2 * call.values["step"]}), LINE,
    ),
    "rate-of-all-tokens-so-far": ("verifier.trainer.metrics:_rates_of(values)", all_so_far, LINE),
    "lines-overwritten-by-a-resume": (
        "verifier.trainer.run_folder:RunFolder.add_metrics(self, values)", opened_anew, RESUMED,
    ),
    "lines-stay-of-steps-taken-again": (
        "verifier.trainer.run_folder:RunFolder.rewind(self, step)", stale_lines, RESUMED,
    ),
    "events-counted-from-zero": (EVENT, lambda call: call.faulty(step=call.step - 1), CURVES),
    "evaluation-without-a-curve": (
        EVENT,
        lambda call: call.faulty(numbers={key: value for key, value in call.numbers.items() if key != "accuracy"}),
        CURVES,
    ),
    "points-stay-of-steps-taken-again": (EVENT, untold, AGAIN),
    "last-problems-of-an-evaluation-dropped": (EVALUATED, of_eights, ASKED),
    "failed-problems-left-out-of-an-evaluation": (EVALUATED, without_failures, ASKED),
    "last-problems-counted-twice": (
        GREEDY, lambda call: call.wrong([*call.original(), *call.original()[: -len(call.rollouts) % 8]]), SOLVED,
    ),
    "failed-problems-left-out-of-the-last-accuracy": (
        GREEDY, lambda call: call.wrong(call.original()[:-3]), SOLVED
    ),
    "end-token-alone-decides-the-accuracy": (GREEDY, end_alone, SOLVED),
    "run-ends-before-its-last-step": (RUN, one_early, STEPS),
    "run-goes-on-above-the-accuracy-that-ends-it": (RUN, no_stop, STEPS),
    "due-evaluation-not-made": (
        EVALUATE, lambda call: call.wrong({}) if call.step == 2 else call.original(), STEPS,
    ),
    "baseline-after-the-first-update": (EVALUATE, begins_late, STEPS),
    "estimator-keeps-its-default": (PLAN, planned(grpo(advantage="grpo")), TERMS),
    "aggregation-not-handed-on": (
        PLAN, planned(lambda config: dataclasses.replace(config, aggregation="token_mean")), TERMS,
    ),
    "correction-switched-on-and-not-made": (PLAN, planned(grpo(weight_level=None, weight_cap=2.0)), TERMS),
    "filter-on-where-it-is-off": (PLAN, planned(grpo(drop_zero_variance=True)), SIZES),
    "several-updates-become-one": (PLAN, planned(grpo(mini_batches=1, epochs=1)), SIZES),
    "passes-of-each-mini-batch-in-a-row": (
        "verifier.trainer.grpo_plan:GrpoPlan._divided(self, step, taken, kept, columns, parts)", in_a_row, SIZES,
    ),
    "rollout-left-out-unsaid": (
        "verifier.trainer.batches:save_rollouts(path, rollouts, columns)",
        lambda call: call.faulty(
            rollouts=call.rollouts[:-1],
            columns={name: values[:-1] for name, values in (call.columns or {}).items()},
        ),
        SIZES,
    ),
    "tail-of-a-batch-dropped": (
        "verifier.trainer.batches:batch_indices(num_examples, batch_size, seed, step)",
        lambda call: call.wrong(call.original()[: call.batch_size // 3 * 3]),
        terms.test_a_step_of_fine_tuning_has_as_many_examples_as_its_config_asks_for,
    ),
    "seed-not-given-to-the-sampler": (
        ROLLOUTS, sampled_by(lambda config: dataclasses.replace(config, seed=1)), TERMS
    ),
    "number-of-examples-not-read": (ROLLOUTS, sampled_by(all_examples), EXAMPLES),
    "limit-of-answers-of-another-group": (ROLLOUTS, sampled_by(grpo(max_answer_tokens=5)), TERMS),
    "environment-left-at-its-default": (
        POOL, lambda call: call.faulty(environment="calculator"), MADE,
    ),
    "reward-of-ones-own-passed-over": (
        POOL, lambda call: call.faulty(reward="answer"), MADE,
    ),
    "newest-checkpoint-removed": (f"{CHECKPOINTS}.finish(self, state)", keeps_the_oldest, LAST),
    "resumed-from-an-older-checkpoint": (f"{CHECKPOINTS}._steps(self)", sorted_as_text, LAST),
    "override-lost-while-it-is-read": (
        "verifier.config.load:_overridden(known, overrides)",
        lambda call: call.faulty(overrides=[text for text in call.overrides if "beta_2" not in text]), KEPT,
    ),
    "kept-config-without-overrides": (
        "verifier.trainer.run_folder:RunFolder.write_config(self, config)", without_decay, KEPT,
    ),
    "second-stage-begun-with-the-base": (
        "verifier.trainer.run_folder:going_on(config, begin)",
        lambda call: call.wrong(dataclasses.replace(call.config, first=None)),
        test_run_folder.test_a_second_stage_trains_what_the_first_has_left,
    ),
    "position-of-data-lost": (
        "verifier.trainer.batches:batch_indices(num_examples, batch_size, seed, step)",
        lambda call: call.faulty(step=0), ORDER,
    ),
    "order-of-the-first-epoch": (
        "verifier.data.examples:epoch_order(num_examples, seed, epoch)", lambda call: call.faulty(epoch=0), ORDER,
    ),
    "held-out-trained-on": (
        "verifier.data.arithmetic:is_held_out(prompt)", lambda call: call.wrong(False), ORDER,
    ),
    "batch-sampled-ahead-trained-twice": (TAKE, trained_twice, AHEAD),
    "update-not-counted-in-flight": (
        "verifier.trainer.ahead:AheadRollouts.resume(self, held)", lambda call: call.faulty(held=None),
        test_ahead.test_requests_in_flight_go_on_over_as_many_updates_as_the_bound_allows,
    ),
    "batch-ahead-dropped-at-a-resume": (TAKE, thrown_away, AHEAD),
    "batch-ahead-not-saved": (f"{CHECKPOINTS}.last_whole(self, before)", without_batch, RESUME),
    "saved-before-the-step-is-counted": (
        "verifier.trainer.checkpoint_folder:Continuation.rewind(self)", one_behind, RESUME,
    ),
    "state-stays-that-of-the-resume": (
        "verifier.trainer.checkpoint_folder:Continuation.begin(self, call, step, updates, rollouts)",
        batch_of_the_resume, RESUME,
    ),
    "recorded-mask-not-read": (
        ROW, lambda call: call.faulty(row=structs.replace(call.row, mask=call.row.sampled)), FILE,
    ),
    "recorded-answers-count-as-whole": (
        "verifier.data.recorded:_decoded(line)",
        lambda call: call.wrong(structs.replace(call.original(), truncated=False)), FILE,
    ),
    "routes-lost-between-prompt-and-answer": (ROW, without_the_last_route, FILE),
    "files-in-the-order-of-their-text": (
        "verifier.trainer.grpo_plan:recorded_files(folder)",
        lambda call: call.wrong(sorted(call.folder.glob("*.jsonl"))), FILE,
    ),
    "groups-replaced-by-their-mean": (
        "verifier.trainer.sampled_batch:Round.without_variance(self)", means_below_half,
        test_sampled_batch.test_a_group_of_one_reward_is_replaced_in_its_place_and_no_other,
    ),
    "reward-on-every-turn": (
        "verifier.trainer.generation:EngineRollouts._ordered(self, step, number, indices, groups, turns, noted)",
        on_every_turn, terms.test_the_reward_of_an_episode_stands_on_its_last_turn_alone,
    ),
    "new-weights-reach-no-running-request": (
        "verifier.trainer.generation:EngineRollouts.begin(self, step, last)",
        lambda call: call.wrong(call.self._holding.begin_batch([], None, 10**6)),
        terms.test_requests_in_flight_stop_for_an_update_after_as_many_tokens_as_the_config_says,
    ),
    "long-examples-filtered-unsaid": (READ, longest_left_out, SOURCE),
    "gold-answers-shuffled-apart": (READ, answers_apart, SOURCE),
    "data-set-in-another-order-after-resume": (
        READ, lambda call: call.wrong(call.original()[::-1]), SOURCE,
    ),
    "rewards-of-the-order-before": (
        REWARDED, lambda call: call.faulty(episodes=sorted(call.episodes, key=lambda item: len(item.completion))),
        SCORED,
    ),
    "failed-reward-is-zero": (REWARDED, longest_failed, SCORED),
}  # fmt: skip
"""Id of the fault -> function, what stands in for it, and the test that has to fail."""
FIXTURES = ("tmp_path", "monkeypatch")
ARGUMENTS = {
    STEPS: ((2.0, 3), (0.5, 2)), TERMS: ((terms.WEIGHED,),), SOURCE: ((False,),),
    FILE: test_recorded_steps.CASES,
}  # fmt: skip
"""Arguments of each case of a test that has several."""


@pytest.mark.parametrize("name", PLANTED)
def test_the_test_of_a_function_fails_where_its_bug_is_planted(name, tmp_path, monkeypatch):
    target, body, test = PLANTED[name]
    names = test.__code__.co_varnames[: test.__code__.co_argcount]
    fixtures = [{"tmp_path": tmp_path, "monkeypatch": monkeypatch}[one] for one in names if one in FIXTURES]
    with replaced(target, body), pytest.raises((AssertionError, LookupError)):
        all(test(*fixtures, *given) is None for given in ARGUMENTS.get(test, ((),)))

"""The table of a training run, whole, and that a file gets none."""

import io

from rich.console import Console

from verifier.report.progress import LiveView, live_view

STEP = {
    "step": 12, "loss": 0.0123, "reward": 0.5, "held_out_reward": 0.25, "held_out_version": 12.0, "rollout_s": 4.0,
    "rollout_tokens_per_s": 1234.5, "train_s": 2.0, "train_tokens_per_s": 600.0, "sync_s": 0.0, "peak_memory_gib": 1.5,
    "mfu": 0.345, "mismatch_p99": 2e-5, "mismatch_floor": 1e-5, "mismatch_trend": 2.0, "mismatch_max": 1e-4,
    "mismatch_k3": 1e-10, "signs": ["reward is flat over 20 steps: 0.5, then 0.5 [sic]"],
}  # fmt: skip
SHOWN = """\
step      12 of 100
learning  loss 0.0123, reward 0.5, held out reward 0.25
held out  evaluated with version 12
rollout   ######################## 4 s, 1,234 tokens/s
train     ############             2 s, 600 tokens/s
sync                               0 s
device    peak memory 1.5 GiB, MFU 34.5%
mismatch  p99 2e-05 nats, floor 1e-05, 2 times lately; greatest 0.0001, k3 1e-10
judged    step 11 holds
sign      reward is flat over 20 steps: 0.5, then 0.5 [sic]
train: importing [nothing]
"""


def drawn(shown):
    """Text that the view shows now."""
    console = Console(file=io.StringIO(), width=100)
    console.print(shown.shown())
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"


def view():
    return LiveView(Console(file=io.StringIO(), width=100), "train")


def test_a_step_is_shown_whole():
    shown = view()
    with shown.run(100):
        shown.progress("importing [nothing]")
        shown.judged(11, 0)
        shown.add(STEP)
        assert drawn(shown) == SHOWN
    assert drawn(shown) == SHOWN.removesuffix("train: importing [nothing]\n")


def test_a_run_that_begins_shows_what_it_is_doing_alone():
    shown = view()
    with shown.run(100):
        shown.add(STEP)
    with shown.run(3):
        shown.progress("loading")
        assert drawn(shown) == "train: loading\n"


def test_a_step_without_tokens_in_the_loss_is_shown():
    shown = view()
    with shown.run(3):
        shown.add({"step": 2, "reward": 0.0})
        assert drawn(shown) == "step      2 of 3\nlearning  reward 0\n"


def test_a_file_gets_a_plain_line_a_stage(capsys):
    with live_view("train") as (progress, shown):
        progress("loading")
        progress("step 1: loss 0.5")
    assert shown is None
    assert capsys.readouterr() == ("", "train: 0 s: loading\ntrain: 0 s: step 1: loss 0.5\n")

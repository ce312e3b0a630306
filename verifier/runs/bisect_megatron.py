"""The trainer's side of `verifier bisect` on every rank: one pass that scores and one with gradients, both watched."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from verifier.core.stage import Stage, in_stage
from verifier.launch.child import resolve
from verifier.probes.activations_megatron import ActivationProbe
from verifier.runs.rank_run_megatron import RankRun, rank_run
from verifier.runs.spec import RunSpec
from verifier.runs.trained_weights_megatron import FullWeights
from verifier.runs.workload import policy_loss, rollouts_of
from verifier.train import step_megatron

if TYPE_CHECKING:
    from verifier.launch.rank import RankContext


def run(context: RankContext) -> None:
    """Rank function: load, score, compute one step's gradients; nothing is stepped."""
    spec = RunSpec.from_json(context.args["session"])
    with contextlib.ExitStack() as stack:
        if spec.within:
            function, *arguments = spec.within
            stack.enter_context(resolve(function)(spec, context, *arguments))
        _passes(stack.enter_context(rank_run(spec, context)))


def _passes(run: RankRun) -> None:
    workload = run.spec.workload
    assert workload is not None
    weights = FullWeights(run)
    run.say(f"loading {run.mesh.world_size} trainer ranks ({run.mesh.label()})")
    with in_stage(Stage.LOAD):
        weights.build(training=True)
    batch, trainer = workload.batches[0], weights.trainer
    sequences = {row.id: at for at, row in enumerate(batch)}
    temperature = workload.objective.temperature

    def probe(step: str) -> ActivationProbe:
        return ActivationProbe(run.probe, trainer, run.mesh, run.rank, sequences, step)

    run.say(f"scoring {len(batch)} sequences, every module watched")
    watch = probe("score")
    with in_stage(Stage.LOGPROB), watch.watching():
        found = step_megatron.score(trainer, rollouts_of(batch), temperature=temperature, on_shards=watch)
    watch.scored(found)
    run.say("forward and backward, every module watched")
    watch = probe("train")
    with in_stage(Stage.LOSS), watch.watching():
        step_megatron.backward(
            trainer, rollouts_of(batch), loss=watch.loss(policy_loss(workload.objective, 1)), temperature=temperature,
            micro_batch_size=workload.micro_batch_size, on_shards=watch,
        )  # fmt: skip
    weights.hand_on_gradients(1)

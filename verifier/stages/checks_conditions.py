"""Conditions that several checks share: of a training step, of its config, of its model, and of other runs."""

from __future__ import annotations

from verifier.core.condition import condition, knob, recorded, told
from verifier.stages.engine.records import ExpectedView
from verifier.stages.logprob.records import OracleEnds, OracleEntropy, OracleLogprobs, OracleOfPlaces
from verifier.stages.loss.records import GradientRecord

# Of a training step.
UPDATED = condition("no token was left in the loss", lambda run: run.facts.updates)
SFT = condition("no fine-tuning", lambda run: knob(run, "algorithm") == "sft")
GRPO = condition("no policy gradient", lambda run: knob(run, "algorithm") == "grpo")
LIVE = GRPO & condition("no engine samples", lambda run: knob(run, "data.rollouts") is None)
SYNCED = LIVE & UPDATED
REWARDED = condition("no known gold answer", lambda run: run.facts.rewarded)
FRESH = SYNCED & condition("no token is of the weights that it trains", lambda run: run.facts.fresh)
NOISE = condition(
    lambda run: f"no step has measured the noise of {run.dtype} yet, as those of verify.every do",
    lambda run: run.facts.noise or run.dtype == "float32", gap=True,
)  # fmt: skip
SAMPLED = condition(
    lambda run: run.facts.why_unsampled, lambda run: run.facts.sampled or not run.facts.why_unsampled, gap=True
) & condition("transformers does not compute this step", lambda run: run.facts.sampled)  # fmt: skip
LOADED = condition("the ranks loaded no checkpoint of a model", lambda run: run.facts.loaded)
SENT = condition("nothing was sent before", lambda run: run.facts.sent)
RESUMED = condition("the run was not resumed", lambda run: run.facts.resumed)
STORED = condition("no checkpoint was written", lambda run: run.facts.stored)
EXAMINED = GRPO & condition("no answers of an evaluation", lambda run: run.facts.examined)
EVALUATED = condition("no evaluation was read again", lambda run: run.facts.examined)
FIRST = condition("not the first step", lambda run: run.facts.step == 1)

# Of the config.
ADAPTER = condition("no adapter", lambda run: run.facts.frozen_base)
NO_ADAPTER = condition("adapters are trained", lambda run: not run.facts.frozen_base)
ADAPTERS_SENT = condition("the engine gets no adapters", lambda run: run.facts.adapters_sent)
WEIGHTS_SENT = condition("the engine gets adapters", lambda run: not run.facts.adapters_sent)
REFERENCE = condition("no reference", lambda run: run.facts.has_reference)
TURNS = condition("no environment answers turns", lambda run: run.facts.has_turns)
AWAKE = condition("the engine sleeps", lambda run: not knob(run, "engine.sleep_level"))
REPLAYED = condition("routes are not replayed", lambda run: knob(run, "grpo.replay_routes"))
NOT_REPLAYED = condition("routes are replayed", lambda run: not knob(run, "grpo.replay_routes"))
NO_FSDP = condition(
    "gradients, masters and moments of megatron.use_fsdp are not where they are looked for",
    lambda run: not knob(run, "megatron.use_fsdp"), gap=True,
)  # fmt: skip
STEPPED = condition("no optimizer step", lambda run: knob(run, "update") == "step")

# Of the model.
EXPERTS = condition("no routed experts", lambda run: run.facts.expert_stages)
LOWER = condition("the run is in float32", lambda run: run.dtype != "float32")
LAYOUT = condition(
    lambda run: ", ".join(filter(None, ("no layout for the model's family", run.facts.why_no_layout))),
    lambda run: run.layout, gap=True,
)  # fmt: skip
REPLICAS = LAYOUT & condition("no shard is held twice", lambda run: run.facts.replicas)
READ_AGAIN = condition(lambda run: run.facts.why_unread, lambda run: not run.facts.why_unread, gap=True)
GRADIENTS = condition(
    "transformers cannot compute the gradients: no layout, or above 1 GiB on a GPU",
    lambda run: run.facts.judges_gradients, gap=True,
)  # fmt: skip
SAVED = condition("the export is not saved to files too", lambda run: run.facts.saved)
CUT = SYNCED & LAYOUT & condition("exports are not cut at this size", lambda run: run.facts.cut)
EXPORTS = condition("nothing is exported", lambda run: run.synced_versions or run.command == "golden")
"""Fact of a golden run or a round trip; one of the token path alone exports nothing."""

# Of a recorded loop.
OF_SOURCE = condition("version 0 was not exported beside its checkpoint", lambda run: run.untouched_versions)
UNSCORED = "transformers has not scored the tokens (`verifier judge --oracle` does)"
SCORED = recorded(OracleLogprobs, gap=UNSCORED)
PLACED = recorded(OracleOfPlaces, gap=UNSCORED)
ALL_ANSWERS = told("all answers", "answers may have been chosen for what they say")
ENDS = ALL_ANSWERS & recorded(OracleEnds, gap=UNSCORED)
ENTROPIES = told("entropies", "the loss is given no entropies") & recorded(OracleEntropy, gap=UNSCORED)
ON_A_HOST = condition(
    "what a batch changes in fp32 on a GPU is not measured",
    lambda run: run.tier != "cuda" or run.dtype != "float32", gap=True,
)  # fmt: skip
COMPARED = recorded(GradientRecord, gap="transformers has not computed the step (`verifier judge --oracle` does)")
EXPECTED = recorded(ExpectedView, gap="an engine rank holds parts of tensors, or another dtype")

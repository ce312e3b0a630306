"""Manifest of the trace of one training step."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from functools import cache
from typing import Any

import msgspec

import verifier
from verifier.config.grpo import ADVANTAGES, LOSSES
from verifier.config.training import TrainConfig
from verifier.contracts.examine import declared
from verifier.core.manifest import Manifest, MeshSizes, Scope
from verifier.data.second_tokenizer import why_unread
from verifier.model.families import has_score_bias, num_experts_of
from verifier.platform import Tier
from verifier.platform.pins import installed_versions
from verifier.platform.provenance import gpu_names, host, this_code
from verifier.platform.stand_ins import stand_ins_of
from verifier.platform.upstream_fixes import RunFacts, bugs_of
from verifier.probes.training.sampled_step import unsampled_because
from verifier.probes.training.spot import has_spot, why_no_spot
from verifier.runs.model_under_test import ModelUnderTest, cache_folder

NO_NOISE = (
    "trainer against engine was not judged (LGP009): no step has measured the noise of {dtype} yet, as those of "
    "verify.every do"
)
"""Clause of the report on a step of less than float32, before the first sampled one."""
UNREAD = (
    "the text in the loss of {unread} conversations was not judged (DAT003): the chat template does not write what an "
    "assistant says as it stands"
)
"""Clause of the report on a step with conversations that have no second reader."""
UNREREAD = "the tokens of prompts, and the text that a reward reads, were not read a second time (DAT013): {why}"
"""Clause of the report on a step of a checkpoint whose tokenizer has no second reader."""
MAX_CUT_BYTES = 2**28
"""Largest checkpoint whose exports a GPU's ranks copy to the host at every sync."""
UNSAMPLED = "gradients were not judged against transformers (LSS001, LSS002, TRN001): {reason}"
"""Clause of the report on a run none of whose steps transformers computes too."""
NO_LAYOUT = "what the ranks loaded was not judged (WGT001): no layout row for the model's family"
"""Clause of the report on the first step of a family that has none; why none was derived goes with it."""
NO_SUMS = "sums of gradients over micro-batches and ranks were not judged (TRN006): no layout says who has copies"
"""Clause of the report on a step of a model without a layout."""
NO_AUDIT = (
    "what the optimizer is given and makes of each step's gradient was not judged (TRN005, TRN006): gradients, masters "
    "and moments of megatron.use_fsdp are not where they look"
)
"""Clause of the report on a step whose masters and moments nothing reads."""
NO_EXAM = (
    "log-probabilities of the evaluation's answers were not judged (LGP015): no step has measured the noise of {dtype} "
    "yet, as those of verify.every do"
)
"""Clause of the report on what follows an evaluation in less than float32, before the first sampled step."""
NO_SPOT = "one rollout of each step, scored by itself, was not judged (LGP013): {why}"
"""Clause of the report on a step of a run whose packed and single scores may differ, or by nobody knows how much."""


def can_audit(config: TrainConfig) -> bool:
    """Tell whether masters, moments and gradients of a run are where the audit of its updates looks for them."""
    return not config.megatron.use_fsdp


def has_router_losses(config: TrainConfig) -> bool:
    """Tell whether the routers of a run have losses of their own that a second formula knows."""
    options = config.megatron
    return not config.grpo.replay_routes and bool(options.moe_aux_loss or options.moe_z_loss)


def compares_products(tier: str) -> bool:
    """Tell whether gradients of weights that scale the same numbers are compared (LSS007).

    On GPUs fine-tuning in bf16 is within 0.18 of its bound; neither GRPO nor what it costs a step there was measured.

    Args:
        tier: "cpu" or "cuda".
    """
    return tier == "cpu"


def cuts_exports(config: TrainConfig, tier: str, num_bytes: int) -> bool:
    """Tell whether each rank compares its export with its shards at every sync: on a GPU, of small models alone.

    Args:
        config: of the run.
        tier: "cpu" or "cuda".
        num_bytes: of the checkpoint, which the comparison copies to the host once a sync.
    """
    small = tier == "cpu" or num_bytes <= MAX_CUT_BYTES
    return small and not config.lora.rank and not config.megatron.use_fsdp


def step_manifest(
    config: TrainConfig, model: ModelUnderTest, step: int, *, resumed: bool = False, sampled: bool = False,
    dropped: bool = False, fresh: bool = True, noise: bool = False, text: bool = True, unread: int = 0,
    rewarded: bool = True, restarted: bool = False, evaluated: bool = False,
    loaded: bool = False, sent: bool = False,
    examined: bool = False, stored: bool = False,
) -> Manifest:  # fmt: skip
    """Identity of the trace of a step.

    Args:
        config: of the run.
        model: of the run.
        step: from 1.
        resumed: it is the first after a resume.
        sampled: transformers computes it too.
        dropped: no token is left in its loss, so that it takes no update and syncs nothing.
        text: fine-tuning has examples whose text in the loss is known.
        unread: examples of fine-tuning whose text in the loss is not known.
        fresh: a token in the loss was sampled by the weights that it trains.
        noise: what the run's dtype costs a log-probability is measured; needed for no float32.
        rewarded: of some rollout a second reader can tell the reward.
        restarted: engines that sampled it had been started again.
        evaluated: the problems of the evaluation are recorded.
        loaded: it is the first that the ranks train on after they loaded the model's checkpoint.
        examined: answers of an evaluation are recorded.
        sent: the engine got the weights that sample it, and this is recorded.
        stored: a checkpoint was written since the step before, and some of it was read back.
    """
    sizes = model.checkpoint.config
    facts = RunFacts(
        tier=model.tier, dtype=model.dtype, fixes=tuple(config.fixes), steps=1, lora_rank=config.lora.rank or 0,
        tp=config.mesh.tp, sleep_level=config.engine.sleep_level, training=True,
        quantization=config.engine.quantization, cuda_graphs=config.engine.replays_graphs(model.tier),
        balanced=bool(config.megatron.moe_bias_update_rate),
    )  # fmt: skip
    live = config.algorithm == "grpo" and config.data.rollouts is None
    synced = live and not dropped
    compared = False
    scopes: list[Scope] = ["config", "data", "read", "batch", "formula", "schedule", "tokens"]
    if text:
        scopes.append("text")
    if config.algorithm == "grpo":
        scopes = ["dropped"] if dropped else ["config", "batch", "schedule", "tokens", "policy"]
        # Only of this reward there is a second reader; recorded ones may be of any.
        scopes += ["reward"] if rewarded and (config.grpo.reward == "answer" or not live) else []
        # Only of these there is a second formula; plugins have others.
        scopes += ["estimator"] if config.grpo.advantage in ADVANTAGES else []
        scopes += ["penalty"] if config.grpo.has_reference and config.grpo.kl_in == "reward" else []
        scopes += ["formula"] if config.grpo.loss in LOSSES and not dropped else []
        scopes += ["data", "read", "prompts"] if live else ["recorded"]
        scopes += ["resampled"] if config.grpo.max_sampling_rounds > 1 else []
        scopes += ["turns"] if config.grpo.has_turns and not dropped else []
        scopes += ["reference"] if config.grpo.has_reference and not dropped else []
        scopes += [] if dropped else ["passes"]
        scopes += ["routes"] if config.grpo.replay_routes and not dropped else []
        scopes += ["held", *_delivery(config)] if synced else []
        if synced and model.layout is not None and cuts_exports(config, model.tier, model.checkpoint.num_bytes):
            scopes.append("cut")
        scopes += ["cold", "settings", "served"] if synced and not config.engine.sleep_level else []
        scopes += ["emptied"] if synced and "engine" in scopes and not config.grpo.keep_kv_cache else []
        scopes += ["draws"] if live else []
        scopes += ["ends"] if synced else []
        compared = synced and fresh
        scopes += ["mismatch"] if compared and (noise or model.dtype == "float32") else []
    unreread = why_unread(model.checkpoint.path) if live or config.algorithm == "sft" else ""
    scopes += ["reread"] if (live or config.algorithm == "sft") and not unreread else []
    scopes += ["evaluated"] if evaluated else []
    scopes += [] if dropped else ["stated"]
    engine_facts = replace(facts, engine=config.engine.kind, routes=config.grpo.replay_routes) if live else facts
    scopes += ["stored"] if stored else []
    if not dropped and (config.megatron.moe_bias_update_rate or has_score_bias(sizes)):
        scopes.append("balance")
    if not dropped and has_router_losses(config):
        scopes.append("routers")
    if loaded and model.layout_scopes:
        scopes.append("layout")
    if "replicas" in model.layout_scopes and not dropped:
        scopes.append("replicas")
    chooses = bool(num_experts_of(sizes)) and not config.grpo.replay_routes and model.dtype != "float32"
    if sampled:
        scopes += ["gradient", "entropy"]
        scopes += ["choices"] if chooses else []
        scopes += ["scored"] if config.algorithm == "grpo" else []
        scopes += ["sampled"] if synced else []
        scopes += ["joined"] if synced and not config.lora.rank else []
        # In further rounds answers replace others for what was sampled; a quantized engine draws from other weights.
        whole = config.grpo.max_sampling_rounds == 1 and not config.engine.quantization
        scopes += ["lengths"] if compared and whole else []
    audited = can_audit(config)
    scopes += ["audited"] if audited and not dropped else []
    scopes += ["summed"] if audited and not dropped and model.layout is not None else []
    scopes += ["products"] if "summed" in scopes and compares_products(model.tier) else []
    if config.lora.rank and not dropped:
        scopes += ["frozen", "scaled", "begun"] if step == 1 else ["frozen", "scaled"]
    if restarted:
        scopes.append("restarted")
    if resumed or (config.engine.sleep_level and not dropped):
        scopes.append("resume")
    scopes += ["continued"] if resumed else []
    scopes += ["untouched"] if sent and synced and step == 1 and not config.lora.rank else []
    gaps = [NO_NOISE.format(dtype=model.dtype)] if compared and "mismatch" not in scopes else []
    also = f", {model.why_no_layout}" if model.why_no_layout else ""
    gaps += [NO_LAYOUT + also] if loaded and model.layout is None else []
    gaps += [NO_SUMS] if audited and not dropped and model.layout is None else []
    no_spot = why_no_spot(config, model)
    if not no_spot and has_spot(step) and model.dtype != "float32" and model.tier != "cpu" and "mismatch" not in scopes:
        no_spot = f"no noise of {model.dtype} stands beside this step"
    known = noise or model.dtype == "float32"
    scopes += ["examined"] if examined else []
    gaps += [NO_EXAM.format(dtype=model.dtype)] if examined and not known else []
    scopes += ["spot"] if has_spot(step) and not no_spot else []
    gaps += [NO_SPOT.format(why=no_spot)] if no_spot else []
    gaps += [UNREAD.format(unread=unread)] if unread else []
    gaps += [UNREREAD.format(why=unreread)] if unreread else []
    gaps += [] if audited or dropped else [NO_AUDIT]
    gaps += [UNSAMPLED.format(reason=reason)] if (reason := unsampled_because(config, model)) else []
    return Manifest(
        command="train", command_line=shlex.join(["verifier", *sys.argv[1:]]), verifier=verifier.__version__,
        commit=this_code().commit, host=host(), gpus=gpu_names(model.tier), model=config.model,
        dtype=model.dtype, mesh=msgspec.convert(model.mesh.to_dict(), MeshSizes), world_size=model.mesh.world_size,
        tier=model.tier, notes=model.notes if loaded else (), **_installed(model.tier),
        config=config.to_dict(), layout=model.layout_kind, stand_ins=tuple(stand_ins_of(sizes, engine_facts)),
        upstream_bugs=tuple(bugs_of(sizes, facts)), scopes=tuple(scopes),
        engine=config.engine.kind if synced else "",
        engine_ranks=config.engine.tp * config.engine.replicas if synced else 0,
        synced_versions=(*((step - 1,) if sent else ()), step) if synced else (),
        untouched_versions=(0,) if "untouched" in scopes else (),
        not_judged=tuple(gaps),
    )  # fmt: skip


@cache
def _installed(tier: Tier) -> dict[str, Any]:
    """Fields of a manifest on the versions that run, which stay while the run does."""
    return {"versions": installed_versions(), **declared(tier, cache_folder() / "contracts")}


def _delivery(config: TrainConfig) -> list[Scope]:
    """Scopes of what goes to the engine, and how."""
    if config.lora.engine_rank(samples=True):
        return ["exported", "handed"]
    merged: list[Scope] = ["exported", "merged"] if config.lora.rank else []
    return ["plan", "transport", "engine", *merged]

"""Contents of the engine after loading, its settings, and what it changes while it serves."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import product
from typing import Any

import verifier.stages.logprob.checks_stated as stated
from verifier.config_json import Config, epsilon, rope, rotary_dim
from verifier.core.check import At, Comparison, Stage, Trace, check, compare_set, compare_value
from verifier.core.condition import NEEDS, condition, knob, on, recorded
from verifier.stages.checks_conditions import AWAKE, EXPECTED, EXPORTS, SENT, SYNCED, WEIGHTS_SENT
from verifier.stages.checks_content import by_name, compare_contents, compare_ranks
from verifier.stages.engine.records import (
    CheckpointView,
    ColdSettings,
    ColdTensor,
    EngineRestart,
    EngineServed,
    ExpectedView,
    KeptKeys,
    LoadedNames,
    Poison,
    QuantizedNames,
    SyncedSettings,
    SyncedTensor,
)
from verifier.stages.load.records import StatedConfig
from verifier.stages.logprob.checks_configs import ENGINE_KEYS, Wanted, text_of, value_stated, values_of
from verifier.stages.plan.checks import DELIVERED

MODULES: tuple[tuple[str, str, Wanted], ...] = (
    ("variance_epsilon", "rms_norm_eps", epsilon),
    ("base", "rope_theta", stated.rope_theta),
    ("rotary_dim", "head_dim", rotary_dim),
    ("max_seq_len_cached", "max_position_embeddings", stated.positions),
    ("max_position_embeddings", "max_position_embeddings", stated.positions),
    ("scaling", "head_dim", stated.attention_scale),
    ("impl.scale", "head_dim", stated.attention_scale),
    ("total_num_heads", "num_attention_heads", partial(value_stated, key="num_attention_heads")),
    ("total_num_kv_heads", "num_key_value_heads", partial(value_stated, key="num_key_value_heads")),
    ("top_k", "num_experts_per_tok", partial(value_stated, key="num_experts_per_tok")),
    ("router.top_k", "num_experts_per_tok", partial(value_stated, key="num_experts_per_tok")),
    ("renormalize", "norm_topk_prob", partial(value_stated, key="norm_topk_prob")),
    ("router.renormalize", "norm_topk_prob", partial(value_stated, key="norm_topk_prob")),
    ("norm_topk_prob", "norm_topk_prob", partial(value_stated, key="norm_topk_prob")),
    ("n_group", "n_group", partial(value_stated, key="n_group")),
    ("topk_group", "topk_group", partial(value_stated, key="topk_group")),
    ("soft_cap", "final_logit_softcapping", partial(value_stated, key="final_logit_softcapping")),
    ("impl.logits_soft_cap", "attn_logit_softcapping", partial(value_stated, key="attn_logit_softcapping")),
    ("mscale", "rope_scaling.factor", stated.rope_magnitude),
    ("attention_scaling", "rope_scaling.factor", stated.rope_magnitude),
    ("limit", "swiglu_limit", lambda config: stated.glu_limit(config) or ...),
)
"""Attribute of an engine's module, the key that it comes from, and its value."""


@check("ENG007", needs=(StatedConfig, SyncedSettings), applies=on(roundtrip=EXPORTS, step=SYNCED & AWAKE, loop=NEEDS))
def engine_setting_differs_from_config(trace: Trace) -> Iterator[Comparison]:
    """The engine computes with the sizes, ropes, epsilons and scales of the checkpoint's config.json.

    What it checks: per engine rank and version, the engine's own configuration of its model, where vLLM keeps it or
    transformers does, and attributes of its modules, the window of each layer among them, against config.json by an
    explicit table (`MODULES` in `verifier/stages/engine/checks.py`); the rows of its tables of angles against the
    greatest position; and in vLLM the factor of routed experts, which it applies in one of two places.
    Why it matters: an engine that starts with another value starts cold with it too, and what no sample reaches, such
    as a position beyond 300, changes no log-probability.
    Evidence: load/stated-config, engine/settings, engine/state (tables of angles).
    Tolerance and its source: exact, numbers as float64; these values are copied, or products of two of them.
    Where to look: how the engine derives this value from config.json.
    What it does not catch: attributes that are not in the table (ENG005 compares them with a cold engine), and contents
    of a table of angles (ENG002, LGP002).
    References: vllm#48312, vllm#4845, lmdeploy#3614, vllm#45037, vllm#48621.
    """
    config = values_of(next(trace.of(StatedConfig)))
    modules = {(item.version, item.rank, item.name): item for item in trace.of(SyncedSettings)}
    for item in modules.values():
        runner = modules.get((item.version, item.rank, f"{item.name}.runner"))
        if runner is not None:
            yield from _scale_of_experts(item, runner, config)
        for attribute, key, wanted in _compared(config, item.name):
            if wanted is ... or (attribute not in item.values and not _lacks(item, attribute, wanted)):
                continue
            got, want = text_of(_parsed(item.values.get(attribute, "none"))), text_of(wanted)
            yield _engine(item, f"{item.name}.{attribute}", key, got, want, same=got == want)
        if "config.rope_parameters" in item.values:
            yield from _rope_of_engine(item, config)
    greatest = stated.positions(config)
    for table in trace.of(SyncedTensor, sort="buffer"):
        if table.name.endswith("cos_sin_cache") and greatest is not ...:
            rows = table.shape[0]
            same = rows >= greatest
            yield _engine(table, table.name, "max_position_embeddings", f"{rows} rows", f"{greatest}", same=same)


def _compared(config: Config, module: str) -> Iterator[tuple[str, str, Any]]:
    """(attribute, key of config.json, its value) of what one module of an engine may hold."""
    for key in ENGINE_KEYS & config.keys():
        if not isinstance(config[key], list | dict) and config[key] is not None:
            yield f"config.{key}", key, config[key]
    own = module.rpartition(".")[2]
    yield "impl.sliding_window", "sliding_window", stated.engine_window(config, module)
    for attribute, key, want in MODULES:
        if own == "qkv_proj" and attribute == "total_num_heads" and stated.gates_attention(config):
            yield attribute, key, 2 * want(config)
        elif attribute == "max_position_embeddings" and "mrope_section" in rope(config) and want(config) is not ...:
            yield attribute, key, 4 * want(config)  # vLLM's table for positions of videos, which text computes with too
        elif (own, attribute) not in stated.OTHERS_OF_THE_NAME:
            yield attribute, key, want(config)


def _lacks(item: SyncedSettings, attribute: str, wanted: Any) -> bool:
    """Test for a bound that a module of vLLM has to have, and has not: settings that are None are not recorded."""
    of_logits = attribute == "soft_cap" and item.name.rpartition(".")[2] == "logits_processor"
    of_scores = attribute == "impl.logits_soft_cap" and "impl.sliding_window" in item.values
    return wanted is not None and (of_logits or of_scores)


def _scale_of_experts(item: SyncedSettings, runner: SyncedSettings, config: Config) -> Iterator[Comparison]:
    """Compare the factor of vLLM's experts: what weighs each one, times what their sum is multiplied by."""
    name, wanted = "routed_scaling_factor", config.get("routed_scaling_factor")
    if wanted is not None and name in item.values and name in runner.values:
        got = text_of(float(item.values[name]) * float(runner.values[name]))
        yield _engine(item, f"{item.name}.{name}", name, got, text_of(wanted), same=got == text_of(wanted))


def _rope_of_engine(item: SyncedSettings, config: Config) -> Iterator[Comparison]:
    parts = item.values["config.rope_parameters"].strip("[]").split(", ")
    held = dict(zip(parts[::2], parts[1::2], strict=False))
    for key, value in rope(config).items():
        if key in held and not isinstance(value, list):  # sections of positions: those of text are equal
            got, want = text_of(stated.ROPE_NAMES.get(held[key], _parsed(held[key]))), text_of(value)
            yield _engine(item, f"rope_parameters.{key}", f"rope_scaling.{key}", got, want, same=got == want)


def _engine(item: SyncedSettings | SyncedTensor, what: str, key: str, got: str, want: str, *, same: bool) -> Comparison:
    subject = f"`{what}` of the engine, by `{key}` of config.json,"
    at = At(Stage.ENGINE, item.version, f"engine rank {item.rank}")
    return compare_value(at, what, got, want, same=same, subject=subject, says=("", "config.json"))


def _parsed(text: str) -> Any:
    flags = {"True": True, "False": False}
    try:
        return flags[text] if text in flags else float(text)
    except ValueError:
        return text


RESTARTED = condition("no engine was started again", lambda run: run.facts.restarted)


@check(
    "ENG001", needs=(CheckpointView, ExpectedView),
    applies=on(roundtrip=EXPORTS, step=RESTARTED | SYNCED, answers=SENT, loop=recorded(CheckpointView) & EXPECTED),
)  # fmt: skip
def engine_tensor_differs(trace: Trace) -> Iterator[Comparison]:
    """After every sync each engine rank's live tensors, mapped back to checkpoint layout, are what was sent.

    What it checks: names both ways, dtypes, shapes and bits of every checkpoint slice that an engine rank holds, read
    from the tensors that its forward uses. Of each tensor, and each place that holds it, that the elements of the
    different parts which the ranks say they hold add up to those of the whole. After a restart the same of what a new
    process holds, as it is asked after its answers, by what the trainer exports at that moment.
    Why it matters: reload bugs leave single layers half-processed, or loaded twice, without an error. A rank that takes
    itself for another loads that one's part, and holds exactly what it asked for. A new process holds the checkpoint
    that the run began with, and requests that reach it before a sync are answered by that policy.
    Evidence: engine/view, engine/view-expected (the export cut to the engine rank's slice), engine/restart.
    Tolerance and its source: bitwise; loading copies. Where an engine holds a tensor in a wider dtype (a router of a
    bfloat16 checkpoint in float32), in that dtype: the report says once which.
    Where to look: the engine's weight loader, and its processing after this version's reload; the rank and the sizes by
    which each engine rank cuts a layer; what is sent between a start and the first request.
    What it does not catch: buffers that no checkpoint tensor names (ENG002), and tensors that the engine quantised
    (ENG002, LGP002); a restart after the last samples of a run, or while answers are sampled ahead.
    References: vllm#42821, SkyRL#1680, prime-rl#2714, verl#7986, vllm-gguf-plugin#103, vllm#56949, miles#1724.
    """
    for version, rank in product(trace.versions(CheckpointView), range(trace.manifest.engine_ranks)):
        says = f"engine rank {rank}", "the export, cut to this rank"
        yield from compare_ranks(trace, (CheckpointView, version), (ExpectedView, version), says, [rank])
    yield from _parts(trace)
    for restart, rank in product(trace.of(EngineRestart), range(trace.manifest.engine_ranks)):
        looked = any(trace.of(CheckpointView, version=restart.version, rank=rank))
        at, sentence = At(Stage.ENGINE, restart.version), f"nobody looked at engine rank {rank} after its restart"
        what, right = f"engine rank {rank} after its restart", "a look at what it holds"
        yield compare_value(at, what, right if looked else "none", right, sentence=sentence, absent=not looked)


def _parts(trace: Trace) -> Iterator[Comparison]:
    """Elements of each tensor that the engine's ranks hold together, against those of the whole."""
    for version in trace.versions(CheckpointView):
        wholes = {item.name: item.whole for item in trace.of(ExpectedView, version=version)}
        parts: dict[tuple[str, str], set[tuple[tuple[int, int], ...]]] = defaultdict(set)
        for item in trace.of(CheckpointView, version=version):
            if item.tensor in wholes:
                parts[item.tensor, item.holder].add(item.box)
        rounded = {name for item in trace.of(QuantizedNames, version=version) for name in item.names}
        elsewhere = rounded | {name for name, holder in parts if holder}
        for (name, holder), boxes in parts.items():
            if not holder and name in elsewhere:
                continue
            whole = math.prod(wholes[name])
            held = sum(math.prod(end - begin for begin, end in box) for box in boxes)
            where = f"{len(boxes)} different parts of `{holder}`" if holder else "layers that each leaves to others"
            says, at = (f"in {where}", ""), At(Stage.ENGINE, version)
            sentence = f"the engine's ranks together hold {held:,} of the {whole:,} elements of `{name}`"
            yield compare_value(at, name, held, whole, sentence=sentence, says=says)


@check(
    "ENG002", needs=(SyncedTensor, ColdTensor),
    applies=on(roundtrip=EXPORTS, step=SYNCED & AWAKE, answers=SENT & AWAKE, loop=NEEDS),
)  # fmt: skip
def engine_differs_from_cold(trace: Trace) -> Iterator[Comparison]:
    """The synced engine equals, bit for bit, an engine that loads the same weights cold.

    What it checks: per engine rank, every parameter, buffer (persistent or not) and derived tensor, at the version for
    which an engine was started cold; at every other version those buffers that no update loads, which are the same.
    Why it matters: rotary caches, scales and repacked weights are in no checkpoint; a reload can lose them.
    Evidence: engine/state and engine/cold of the same version.
    Tolerance and its source: bitwise; both hold a function of the same bits.
    Where to look: what the reload does with tensors that are in no checkpoint.
    What it does not catch: an engine that loads wrongly both cold and live (ENG001, LGP002).
    References: vllm#44371, vllm#16564, vllm#48284, RFC vllm#48312.
    """
    versions = sorted({*trace.versions(SyncedTensor), *trace.versions(ColdTensor)})
    for version, rank in product(versions, range(trace.manifest.engine_ranks)):
        cold = list(trace.of(ColdTensor, version=version, rank=rank))
        state = list(trace.of(SyncedTensor, version=version, rank=rank))
        if not any(item.sort == "parameter" for item in cold):  # the buffers that no update brings, views apart
            loaded = _loaded(trace.of(LoadedNames, rank=rank))
            buffers = [item for item in cold or trace.of(ColdTensor, rank=rank) if item.sort == "buffer"]
            cold = [item for item in buffers if item.name not in loaded]
            kept = by_name(cold)
            state = [item for name, item in by_name(state).items() if name in kept]
        says = f"synced engine rank {rank}", "an engine that loaded them cold"
        yield from compare_contents(state, cold, says, Stage.ENGINE, version)


def _loaded(reports: Iterable[LoadedNames]) -> set[str]:
    return {name for item in reports for name in item.names}


@check("ENG003", needs=(Poison,), applies=on(**DELIVERED, loop=NEEDS))
def poison_left_tensor_intact(trace: Trace) -> Iterator[Comparison]:
    """Before each sync the receiver was really poisoned, so that what it holds afterwards came from the sync.

    What it checks: of the engine's floating-point parameters and buffers, those that still held a finite value after
    the poison, per engine rank: none, but those that the engine declares it cannot reach.
    Why it matters: without poison a sync that skips a tensor leaves the right old value in place and passes.
    Evidence: engine/poison (the outcome of each tensor).
    Tolerance and its source: exact.
    Where to look: what the poison cannot reach: a sync may not reach it either.
    What it does not catch: tensors that the engine never reads.
    References: prime-rl#2714, slime `--check-weight-update-equal`.
    """
    for item in trace.of(Poison):
        intact = [name for name, outcome in item.outcomes.items() if outcome == "left"]
        subject, total = "tensors that were still finite after the poison", len(item.outcomes)
        yield compare_set(item, next(iter(intact), f"engine rank {item.rank}"), intact, total=total, subject=subject)


@check("ENG004", needs=(LoadedNames, SyncedTensor), applies=on(**DELIVERED, loop=NEEDS))
def engine_parameter_not_loaded(trace: Trace) -> Iterator[Comparison]:
    """At every sync the engine's own loader reported every parameter of the engine as loaded.

    What it checks: per engine rank, each parameter that the engine holds against what `load_weights` reported over all
    chunks of the update.
    Why it matters: a name that the loader does not know is skipped without an error, and vLLM drops the set that its
    loader returns.
    Evidence: engine/loaded, engine/state (parameters).
    Tolerance and its source: exact.
    Where to look: the received names, and the engine's own mapping of names.
    What it does not catch: a parameter that was loaded with wrong contents (ENG001).
    References: vLLM `receive_weights`, prime-rl#2326, slime debugging guide.
    """
    for version, rank in product(trace.versions(LoadedNames), range(trace.manifest.engine_ranks)):
        reports = list(trace.of(LoadedNames, version=version, rank=rank))
        loaded, why = _loaded(reports), next((f": {item.name}, {item.refused}" for item in reports if item.refused), "")
        for held in trace.of(SyncedTensor, version=version, rank=rank, sort="parameter"):
            sentence = f"engine rank {rank} never loaded its parameter `{held.name}`{why}"
            there = "loaded" if held.name in loaded else "not reported by the loader"
            yield compare_value(held, held.name, there, "loaded", sentence=sentence)


@check("ENG005", needs=(SyncedSettings, ColdSettings), applies=on(roundtrip=EXPORTS, step=SYNCED & AWAKE, loop=NEEDS))
def engine_setting_differs_from_cold(trace: Trace) -> Iterator[Comparison]:
    """The synced engine computes with the epsilons, scales, windows and flags that a cold one computes with.

    What it checks: per engine rank and module, every number, flag and name that is an attribute of the module or of an
    object that computes for it (attention backend, router), at every version, against an engine started cold; in
    training against the engine itself before anything was sent to it.
    Why it matters: no update brings them, as they are no tensors. A reload that builds or processes a layer anew can
    take a default instead, and a wrong epsilon hides below any noise.
    Evidence: engine/settings, engine/cold-settings.
    Tolerance and its source: exact; a reload changes weights and nothing else.
    Where to look: what the reload builds or processes anew in this module.
    What it does not catch: a setting that is wrong in a cold engine too (LGP002), values in closures, and the order of
    a module's list of different names, which may come from a set. What a cold engine has not is not judged: a forward
    that does without it does not read it. On GPUs it has no subject yet.
    References: vllm#44371, vllm#48284, RL#1046, slime#1734.
    """
    for rank, version in product(range(trace.manifest.engine_ranks), trace.versions(SyncedSettings)):
        live = by_name(trace.of(SyncedSettings, version=version, rank=rank))
        start = list(trace.of(ColdSettings, version=version, rank=rank)) or trace.of(ColdSettings, rank=rank)
        for module, cold in by_name(start).items():
            got, want = live[module].values if module in live else {}, cold.values
            other = [name for name in want if got.get(name) != want[name]]
            first = next(iter(other), "")
            name = f"{module}.{first}" if other else module
            at, says = At(Stage.ENGINE, version, f"engine rank {rank}"), ("the synced engine", "one that loaded cold")
            part = f"{len(other)} of the {len(want)} settings of this module"
            yield compare_value(at, name, got.get(first), want.get(first), same=not other, says=says, mismatched=part)


@check("ENG009", needs=(EngineServed,), applies=on(step=SYNCED & AWAKE, loop=NEEDS))
def engine_changed_while_it_served(trace: Trace) -> Iterator[Comparison]:
    """An engine holds the same as a sync begins as it held after the sync before.

    What it checks: per engine rank, every parameter, buffer and derived tensor, as it is asked before each sync of a
    training run, against what it held right after the last one; before the first, against what it held at its start.
    Why it matters: an engine that reads its checkpoint once more when it wakes, or multiplies an adapter by its factor
    at each use, held the right weights when the sync was judged, and answered by others.
    Evidence: engine/served.
    Tolerance and its source: bitwise; answering changes no weights.
    Where to look: what loads, wakes or rescales weights between a sync and the requests after it.
    What it does not catch: what is changed and put back before the next sync (LGP009); engines that sleep between
    syncs, which are not asked; settings (ENG005).
    References: trl#5312, trl#5355, SkyRL#2250, unsloth-zoo#941.
    """
    for item in trace.of(EngineServed):
        owner, first = f"engine rank {item.rank}", next(iter(item.changed), f"engine rank {item.rank}")
        subject = f"tensors that changed while {owner} answered by version {item.version}"
        yield compare_set(item, first, item.changed, total=item.num_tensors, subject=subject, owner=owner)


KEYS_DROPPED = condition("requests keep their keys at a sync", lambda run: not knob(run, "grpo.keep_kv_cache"))


@check("ENG010", needs=(KeptKeys,), applies=on(step=SYNCED & WEIGHTS_SENT & KEYS_DROPPED, loop=NEEDS))
def keys_outlive_their_weights(trace: Trace) -> Iterator[Comparison]:
    """No engine goes on from keys and values of older weights after a sync.

    What it checks: of each sync of a training run that sends weights, and of each engine, counted in its process right
    after the sync: the blocks in which its prefix cache would look for a prompt, and the tokens of running requests
    whose keys it has. None of either, unless requests that ran were to keep theirs (`grpo.keep_kv_cache`).
    Why it matters: a prompt that comes again, a system message that all prompts begin with, and requests that run on
    are then read by keys of weights that are gone. In bf16 that is less than the noise of a token.
    Evidence: engine/kept-keys.
    Tolerance and its source: exact; a sync is to empty the cache.
    Where to look: what resets the prefix cache at a sync, and what it answers.
    What it does not catch: a prefix that is cached under a name that later weights have too, where the engine gets
    adapters (LGP011 names them); what `grpo.keep_kv_cache` leaves behind after the requests that ran.
    References: RL#4018, prime-rl#1650, RL#3152, lmdeploy#4917.
    """
    for item in trace.of(KeptKeys):
        pairs = () if item.kept else zip(item.blocks, item.tokens, strict=True)
        for engine, (blocks, tokens) in enumerate(pairs):
            found = f"{blocks:,} blocks of keys for new prompts and {tokens:,} tokens of running requests"
            at, what = At(Stage.ROLLOUT, item.version, f"engine {engine}"), f"engine {engine}"
            sentence = f"{what} has {found} after the sync of version {item.version}, by older weights"
            yield compare_value(at, what, found, "none", same=not blocks and not tokens, sentence=sentence)

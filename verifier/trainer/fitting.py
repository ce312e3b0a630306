"""Refusals of a training run before anything starts, from config, config.json and data; loads no torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verifier.algorithms.registry import check_name, load_plugins
from verifier.config.load import resolved
from verifier.config.training import TrainConfig
from verifier.data.examples import Example
from verifier.data.rollout import Rollout
from verifier.data.text_dataset import Task
from verifier.engine.api import refuse_adapters
from verifier.engine.kv_cache import (
    LENT_SHARE,
    MOST_KV_CACHE_BYTES,
    OWN_SHARE,
    bytes_per_token,
    cache_bytes,
    most_on_gpu,
)
from verifier.engine.replicas import node_of
from verifier.errors import UsageError
from verifier.knob import refuse
from verifier.launch.fork_launcher import require_ranks
from verifier.megatron.memory import is_out_of_memory, peaks
from verifier.megatron.microbatch import split_by_count
from verifier.megatron.token_layout import Alignment
from verifier.model.checkpoint import require_computed
from verifier.model.families import family_of, has_score_bias, num_experts_of, size_if_any
from verifier.model.mesh_fit import architecture_of, misfit, validate
from verifier.model.named import config_alone, config_of
from verifier.platform import Tier
from verifier.platform.provenance import gpu_bytes, may_have_gpu
from verifier.trainer.metrics import require_wandb
from verifier.trainer.run_data import load_held_out, load_train, open_chat_template

_WITHOUT_OUTPUT = ("layernorm", "mla_up_proj", "moe_act")
"""Modules that megatron-core 0.19.2 recomputes by `CheckpointWithoutOutput`, which calls Transformer Engine."""
BATCH_BYTES, PACKED_BYTES, PACKED_BATCH_BYTES = 37, 20, 9
"""Bytes a token on disk of a batch, of a judged step that holds with its batch, and of the batch when it is packed."""
_TEXT_OF_TEMPLATE = 256
"""Bytes that a chat template may put around an example, generously."""


def load_algorithms(config: TrainConfig) -> None:
    """Import the plugins of a run, and refuse a loss, an estimator or a wandb that is not there."""
    require_wandb(config)
    load_plugins(config.plugins)
    if config.algorithm == "grpo":
        check_name("loss", config.grpo.loss)
        check_name("advantage", config.grpo.advantage)


def require_fit(config: TrainConfig, sizes: Mapping[str, Any], tier: Tier) -> None:
    """Refuse knobs that the model or the tier does not have."""
    require_computed(sizes)
    refuse(config, _of_host(config, tier) | _of_model(config, sizes, tier), model=architecture_of(sizes))
    engine = config.engine
    for option in engine.gpu_options()[:1]:
        rows: dict[str, object] = {
            f"{option} is given and the run samples from no engine: leave it out": not config.samples,
            f"{option} needs a GPU and none is here: leave it out": tier == "cpu",
            "--sleep-level is {=engine.sleep_level} and {grpo.mode}, in which the engine samples while the trainer "
            "steps: leave it out, or use grpo.mode=sync": engine.sleep_level and config.grpo.mode != "sync",
            "--sleep-level is {=engine.sleep_level} and {checkpoint.asynchronous}: a checkpoint would be written from "
            "memory that the engine gets; leave one of the two out": (
                engine.sleep_level and config.checkpoint.asynchronous
            ),
        }
        refuse(config, rows)
    rank = config.lora.rank
    if rank:
        refuse_adapters(sizes, f"lora.rank is {rank}, which")
    multiple, most = alignment_of(config).total_multiple, config.batch.max_tokens
    reason, remedy = config.beyond_oracle
    rows = {
        "{lora.rank}, and the family of {model} has no layout by which adapters could be judged: leave it out": (
            rank and family_of(sizes) is None
        ),
        f"{{batch.max_tokens}}, below {multiple}, the multiple that mesh.tp = {config.mesh.tp} and mesh.cp = "
        f"{config.mesh.cp} pad every rollout to": most is not None and most < multiple,
        f"{{verify.every}} and {reason}: set verify.every=0{remedy}": config.verify.every and reason,
    }
    refuse(config, rows, model=architecture_of(sizes))


def _of_host(config: TrainConfig, tier: Tier) -> dict[str, object]:
    """More engines than this machine, or each node like it, can hold."""
    count, nodes, cores = config.engine.replicas, config.ray.nodes, os.cpu_count() or 1
    host = "this host" if nodes == 1 else f"a node of {nodes} like this"
    ranks = -(-count // nodes) * config.engine.ranks
    computes = tier == "cpu" or config.engine.kind == "hf"
    return {
        f"{{engine.replicas}}, {{engine.tp}} and {{engine.pp}}, {ranks} processes that compute at once, and {host} "
        f"has {cores} cores: use fewer": count > 1 and ranks > cores and computes,
        "{engine.replicas} and {ray.use}: engines on GPUs have those of the host of rank 0, use 1": (
            count > 1 and config.ray.use and not computes
        ),
    }


def _of_model(config: TrainConfig, sizes: Mapping[str, Any], tier: Tier) -> dict[str, object]:
    """Settings of Megatron that the model or the tier does not have."""
    options, family, has_experts = config.megatron, family_of(sizes), bool(num_experts_of(sizes))
    replays, modules = config.grpo.replay_routes, options.recompute_modules
    layers, mesh = size_if_any(sizes, "num_hidden_layers"), config.mesh
    asked = options.recompute_layers or 0
    held = -(-max(mesh.stage_sizes(layers)) // mesh.vpp) if asked and layers is not None else asked
    of_mixtures = {
        f"{knob} is {value}, but {{model}} has no experts: leave it out": not has_experts
        for knob, value in options.mixture_knobs.items()
    }
    of_gpus = {
        f"megatron.recompute_modules has {module}, which takes Transformer Engine, so a GPU, and none is here: leave "
        "it out": tier == "cpu"
        for module in modules
        if module in _WITHOUT_OUTPUT
    }
    reason = misfit(sizes) if options.rope_fusion else ""
    further = {
        "but {model} has no layer for a further token behind its last, or several (num_nextn_predict_layers)": (
            sizes.get("num_nextn_predict_layers") != 1
        ),
        "and {mesh.cp}, over whose ranks megatron-core shifts labels apart": mesh.cp > 1,
        "and {mesh.vpp}: such a layer's loss was not judged with it": mesh.vpp > 1,
        "and {lora.rank}: such a layer has no adapters": config.lora.rank,
        "and {grpo.replay_routes}: such a layer's routers have no routes": replays,
    }
    return {
        **of_mixtures,
        **{
            f"{{megatron.mtp_loss_scaling_factor}} {why}: leave it out": options.mtp_loss_scaling_factor and value
            for why, value in further.items()
        },
        "{grpo.replay_routes}, but {model} has no experts to route to: leave it out": replays and not has_experts,
        "{grpo.replay_routes}, but which layers of {model} have routers is unknown: leave it out": (
            replays and family is None
        ),
        "{megatron.moe_bias_update_rate}, but the routers of {model} have no score bias to update: leave it out": (
            options.moe_bias_update_rate and family and not has_score_bias(sizes)
        ),
        "megatron.recompute_modules has mla_up_proj, but {model} has no latent attention: leave it out": (
            "mla_up_proj" in modules and sizes.get("kv_lora_rank") is None
        ),
        f"{{megatron.rope_fusion}}, but {{model}} has {reason}, which its kernel does not compute: leave it "
        "out": reason,
        f"{{megatron.recompute_layers}}, more than the {held} layers that mesh.pp = {mesh.pp} and mesh.vpp = {mesh.vpp}"
        " leave to a stage": asked > held,
        **of_gpus,
        "{megatron.distributed_optimizer}, and checkpoints of a run hold the shards of a distributed one: leave it "
        "on": not options.distributed_optimizer,
        "{megatron.use_fsdp}, which takes a GPU, and none is here: leave it out": options.use_fsdp and tier == "cpu",
        "{megatron.use_fsdp}, but {model} has experts, whose shards are not judged so far: leave it out": (
            options.use_fsdp and has_experts
        ),
        "{megatron.optimizer_offload} and this machine has no GPU: its optimizer is on the host already, leave it "
        "out": options.optimizer_offload and tier == "cpu",
    }


def alignment_of(config: TrainConfig) -> Alignment:
    """Return the multiples that the mesh of a run pads rollouts to."""
    return Alignment(tp=config.mesh.tp, cp=config.mesh.cp, sp=config.mesh.tp > 1)


def near_budget(config: TrainConfig, examples: Iterable[Example]) -> list[Example]:
    """Return the examples whose text has bytes enough for more tokens than the budget of a micro-batch."""
    most = config.batch.max_tokens
    if most is None:
        return []

    def size(item: Example) -> int:
        turns = [message.content for message in item.messages]
        return sum(len(text.encode()) for text in (item.prompt, item.response or "", *turns)) + _TEXT_OF_TEMPLATE

    return [item for item in examples if size(item) > most - alignment_of(config).total_multiple]


def require_budget(config: TrainConfig, rollouts: Sequence[Rollout]) -> None:
    """Refuse a rollout that is longer than a micro-batch may be."""
    most, alignment = config.batch.max_tokens, alignment_of(config)
    if most is None or not rollouts:
        return
    longest = max(rollouts, key=len)
    padded = -(-len(longest) // alignment.total_multiple) * alignment.total_multiple
    if padded > most:
        raise UsageError(
            f"batch.max_tokens is {most:,}, below the {padded:,} tokens of `{longest.id}`, padded to a multiple of "
            f"{alignment.total_multiple}: raise it, or shorten the example"
        )


def require_room(config: TrainConfig, prompt: int, rest: int) -> None:
    """Refuse a micro-batch that could not hold the longest rollout that a run may sample.

    The longest prompt has `prompt` tokens, and an episode `rest` after it at most: answers and replies.
    """
    most, multiple = config.batch.max_tokens, alignment_of(config).total_multiple
    padded = -(-(prompt + rest) // multiple) * multiple
    if most is not None and padded > most:
        raise UsageError(
            f"batch.max_tokens is {most:,}, below the {padded:,} tokens of the longest rollout: a prompt of {prompt:,} "
            f"and {rest:,} of answers and replies, padded to a multiple of {multiple}: raise it, or lower "
            "grpo.max_answer_tokens"
        )


def require_place(run: Path) -> None:
    """Refuse a run folder that cannot be made or written, and write nothing."""
    there = next(path for path in (run, *run.parents) if path.exists())
    if not there.is_dir():
        raise UsageError(f"the run folder `{run}` cannot be written: `{there}` is no folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"the run folder `{run}` cannot be written: `{there}` is not writable for this user")


def dry_run(config: TrainConfig, owners: Mapping[str, str]) -> str:
    """Check everything that needs no torch and no tokenizer; return the resolved config and the arithmetic of a step.

    A folder with config.json alone is planned for a machine with GPUs, whatever this one has. `owners` says who gave
    the value of each key.
    """
    require_place(config.run)
    load_algorithms(config)
    alone = config_alone(config.model)
    sizes = config_of(config.model, config.dtype) if alone is None else alone
    require_ranks(config.mesh.world_size, config.ray.nodes)
    validate(sizes, config.mesh)
    has_gpu = may_have_gpu()
    tier: Tier = "cpu" if alone is None and not has_gpu else "cuda"
    require_fit(config, sizes, tier)
    lines = [resolved(config, owners), "\n", _mesh_line(config), "\n"]
    if config.data.rollouts is None:
        task: Task = "sft" if config.algorithm == "sft" else "grpo"
        open_chat_template(config)
        train = load_train(config, task)
        held_out = load_held_out(config, train, task)
        epochs = config.steps * config.data.batch_size / len(train)
        lines.append(
            f"data: {len(train):,} examples to train on, {len(held_out):,} held out, none in both; "
            f"{config.steps:,} steps of {config.data.batch_size:,} are {epochs:.3g} epochs\n"
        )
    if config.samples:
        if config.ray.use:
            nodes = [f"{k} on node {node_of(k, config.ray.nodes)}" for k in range(config.engine.replicas)]
            lines.append(f"engines: {', '.join(nodes)}; rank 0 is on node 0\n")
        lines.append(_rollout_line(config, sizes, tier, gpu_bytes() if has_gpu and alone is None else None))
        lines.append(_disk_line(config))
    lines += [_batch_line(config), "\nnot checked without torch and the tokenizer: weights, lengths in tokens, GPUs\n"]
    if alone is not None:
        lines.append(f"`{config.model}` holds no weights, which a run needs: planned by config.json, for GPUs\n")
    return "".join(lines)


def _mesh_line(config: TrainConfig) -> str:
    mesh = config.mesh
    return (
        f"mesh: {mesh.world_size} ranks = tp {mesh.tp} * cp {mesh.cp} * dp {mesh.dp} * pp {mesh.pp}; "
        f"experts: etp {mesh.etp} * ep {mesh.ep} * {mesh.expert_dp} copies in each of {mesh.pp} stages"
    )


def _rollout_line(config: TrainConfig, sizes: Mapping[str, Any], tier: Tier, device_bytes: int | None) -> str:
    """Answers that run at once in an engine, by its cache, where the memory of a GPU is known."""
    options, engine = config.grpo, config.engine
    count = -(-config.data.batch_size // engine.replicas) * options.group_size
    shown = f"rollout: {count:,} answers of up to {options.max_answer_tokens:,} tokens an engine and step"
    shown += f", on {engine.ranks} ranks = tp {engine.tp} * pp {engine.pp}" if engine.ranks > 1 else ""
    each = bytes_per_token(sizes, config.dtype, engine)
    unknown = tier == "cuda" and device_bytes is None and engine.kv_cache_gib is None
    if engine.kind != "vllm" or each is None or unknown:
        return f"{shown}; how many run at once is not known before the engine has started\n"
    most: float = MOST_KV_CACHE_BYTES
    if device_bytes is not None:
        share = OWN_SHARE if engine.sleep_level or config.transport == "nccl" else LENT_SHARE
        stored = sum(file.stat().st_size for file in Path(config.model).glob("*.safetensors"))
        most = most_on_gpu(share, device_bytes, stored, engine)
    length = options.max_turns * options.max_answer_tokens
    cache = cache_bytes(
        engine.kv_cache_gib, sizes, dtype=config.dtype, engine=engine, length=length, count=count, most=most
    )
    at_once = min(count, cache // (each * length))
    return (
        f"{shown}; a cache of {cache / 2**30:.3g} GiB has room for {cache // each:,} tokens: {at_once:,} answers run "
        "at once, less what their prompts take\n"
    )


def _disk_line(config: TrainConfig) -> str:
    """Most that answers leave on disk, in batches and in traces of judged steps."""
    options = config.grpo
    length = options.max_turns * (options.max_answer_tokens + options.max_reply_tokens) - options.max_reply_tokens
    tokens = config.data.batch_size * options.group_size * length
    each = PACKED_BYTES if config.verify.steps else BATCH_BYTES
    bare = 0 if config.verify.keep is None or not config.verify.steps else max(0, config.steps - config.verify.keep)
    whole = each * (config.steps - bare) + PACKED_BATCH_BYTES * bare
    return (
        f"disk: {tokens * each / 1e6:,.3g} MB a step whose answers all have full length, "
        f"{tokens * whole / 1e9:,.3g} GB in {config.steps:,} steps; prompts as much a token, and checkpoints beside "
        "them\n"
    )


def _batch_line(config: TrainConfig) -> str:
    if config.data.rollouts is not None:
        return f"batch: the rollouts of each step are those of `{config.data.rollouts}`"
    mesh, most, options = config.mesh, config.batch.max_tokens, config.grpo
    size, shown = config.data.batch_size, f"{config.data.batch_size:,} examples a step"
    if config.algorithm == "grpo":
        size = size * options.group_size // options.mini_batches
        shown += (
            f" * {options.group_size} answers / {options.mini_batches} mini-batches * {options.epochs} epochs = "
            f"{options.updates} optimizer steps of {size:,} rollouts"
        )
    multiple = mesh.pp if mesh.vpp > 1 else 1
    if most is not None:
        return (
            f"batch: {shown}; over {mesh.dp} data-parallel ranks in micro-batches of at most {most:,} tokens, "
            f"padded to multiples of {alignment_of(config).total_multiple}; a multiple of {multiple} micro-batches on "
            f"each rank, so at most {mesh.dp * multiple * most:,} tokens at a time"
        )
    parts = split_by_count(size, dp=mesh.dp, micro_batch_size=config.batch.count, multiple=multiple)
    counts = sorted({len(part) for rank in parts for part in rank})
    span = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return (
        f"batch: {shown}; {size:,} = {mesh.dp} data-parallel ranks * {len(parts[0])} micro-batches of {span} "
        f"(at most {config.batch.count})"
    )


@contextlib.contextmanager
def refused_for_memory(config: TrainConfig, tier: Tier, rank: int, call: str) -> Iterator[None]:
    """Turn an error for want of memory into a UsageError of one sentence."""
    try:
        yield
    except (MemoryError, RuntimeError) as problem:  # torch's OutOfMemoryError is a RuntimeError
        if not is_out_of_memory(f"{type(problem).__name__}: {problem}"):
            raise
        raise UsageError(
            f"rank {rank} ran out of memory in `{call}`, its peak is {peaks(tier).text()}: {_knobs(config)}; "
            f"`verifier sweep --model {config.model} --ranks {config.mesh.world_size}` finds the largest budget"
        ) from problem


def _knobs(config: TrainConfig) -> str:
    """Advice: the knobs of a step's memory that are not at their least yet."""
    batch, options = config.batch, config.megatron
    if batch.max_tokens is not None:
        advice = [f"lower batch.max_tokens, {batch.max_tokens:,}"]
    else:
        advice = [f"lower batch.micro_batch_size, {batch.count}"] if batch.count > 1 else []
    if options.recompute != "full":
        advice.append(f"set megatron.recompute=full in place of {options.recompute}")
    return ", ".join([*advice, "or raise mesh.tp, mesh.pp or mesh.cp"])

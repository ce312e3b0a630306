"""Refusals of a training run before anything starts, from config, config.json and data; loads no torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
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
from verifier.errors import UsageError
from verifier.launch.fork_launcher import require_ranks
from verifier.model.families import family_of, has_score_bias, num_experts_of, size_if_any
from verifier.model.mesh_fit import architecture_of, validate
from verifier.model.named import config_alone, config_of
from verifier.model.rotary import misfit
from verifier.platform import Tier
from verifier.platform.provenance import gpu_bytes
from verifier.train.microbatch import split_by_count
from verifier.train.token_layout import Alignment
from verifier.trainer.run_data import load_held_out, load_train, open_chat_template
from verifier.trainer.wandb_offline import require_wandb

_GPU = Path("/dev/nvidiactl")
"""Device file of NVIDIA's driver; without it no GPU can be used."""
_WITHOUT_OUTPUT = ("layernorm", "mla_up_proj", "moe_act")
"""Modules that megatron-core 0.19.2 recomputes by `CheckpointWithoutOutput`, which calls Transformer Engine."""
_TEXT_OF_TEMPLATE = 256
"""Bytes that a chat template may put around an example, generously."""


def load_algorithms(config: TrainConfig) -> None:
    """Import the plugins of a run, and refuse a loss, an estimator or a wandb that is not there.

    Raises:
        UsageError: see `load_plugins`, `check_name` and `require_wandb`.
    """
    require_wandb(config)
    load_plugins(config.plugins)
    if config.algorithm == "grpo":
        check_name("loss", config.grpo.loss)
        check_name("advantage", config.grpo.advantage)


def require_fit(config: TrainConfig, sizes: Mapping[str, Any], tier: Tier) -> None:
    """Refuse knobs that the model or the tier does not have.

    Args:
        config: of the run.
        sizes: config.json of its model.
        tier: of this machine.

    Raises:
        UsageError: names the knob, its value and what it contradicts.
    """
    options, name = config.megatron, architecture_of(sizes)
    _refuse_replicas(config, tier)
    if not num_experts_of(sizes):
        for knob, value in options.mixture_knobs.items():
            raise UsageError(f"{knob} is {value}, but {name} has no experts: leave it out")
        if config.grpo.replay_routes:
            raise UsageError(f"grpo.replay_routes is true, but {name} has no experts to route to: leave it out")
    family = family_of(sizes)
    if config.grpo.replay_routes and family is None:
        raise UsageError(
            f"grpo.replay_routes is true, but which layers of {name} have routers is unknown: leave it out"
        )
    if options.moe_bias_update_rate and family and not has_score_bias(sizes):
        raise UsageError(
            f"megatron.moe_bias_update_rate is {options.moe_bias_update_rate:g}, but the routers of {name} have no "
            "score bias to update: leave it out"
        )
    if "mla_up_proj" in options.recompute_modules and sizes.get("kv_lora_rank") is None:
        raise UsageError(
            f"megatron.recompute_modules has mla_up_proj, but {name} has no latent attention: leave it out"
        )
    if options.rope_fusion and (reason := misfit(sizes)):
        raise UsageError(
            f"megatron.rope_fusion is true, but {name} has {reason}, which its kernel does not compute: leave it out"
        )
    layers = size_if_any(sizes, "num_hidden_layers")
    if layers is not None and options.recompute_layers is not None:
        held = max(config.mesh.stage_sizes(layers)) // config.mesh.vpp
        if options.recompute_layers > held:
            raise UsageError(
                f"megatron.recompute_layers is {options.recompute_layers}, more than the {held} layers that "
                f"mesh.pp = {config.mesh.pp} and mesh.vpp = {config.mesh.vpp} leave to a stage"
            )
    needing = [module for module in options.recompute_modules if module in _WITHOUT_OUTPUT]
    if needing and tier == "cpu":
        raise UsageError(
            f"megatron.recompute_modules has {needing[0]}, which takes Transformer Engine, so a GPU, and none "
            "is here: leave it out"
        )
    if not options.distributed_optimizer:
        raise UsageError(
            "megatron.distributed_optimizer is false, and checkpoints of a run hold the shards of a distributed one: "
            "leave it on"
        )
    if options.use_fsdp and tier == "cpu":
        raise UsageError("megatron.use_fsdp is true, which takes a GPU, and none is here: leave it out")
    if options.use_fsdp and num_experts_of(sizes):
        raise UsageError(
            f"megatron.use_fsdp is true, but {name} has experts, whose shards are not judged so far: leave it out"
        )
    if options.optimizer_offload and tier == "cpu":
        raise UsageError(
            f"megatron.optimizer_offload is {options.optimizer_offload:g} and this machine has no GPU: its optimizer "
            "is on the host already, leave it out"
        )
    if (asked := config.engine.gpu_options()) and not config.samples:
        raise UsageError(f"{asked[0]} is given and the run samples from no engine: leave it out")
    if asked and tier == "cpu":
        raise UsageError(f"{asked[0]} needs a GPU and none is here: leave it out")
    if config.engine.sleep_level and config.grpo.mode != "sync":
        raise UsageError(
            f"--sleep-level is {config.engine.sleep_level} and grpo.mode is {config.grpo.mode}, in which the engine "
            "samples while the trainer steps: leave it out, or use grpo.mode=sync"
        )
    if config.engine.sleep_level and config.checkpoint.asynchronous:
        raise UsageError(
            f"--sleep-level is {config.engine.sleep_level} and checkpoint.asynchronous is true: a checkpoint would be "
            "written from memory that the engine gets; leave one of the two out"
        )
    if config.lora.rank:
        _require_adaptable(config.lora.rank, sizes)
    alignment = alignment_of(config)
    if config.batch.max_tokens is not None and config.batch.max_tokens < alignment.total_multiple:
        raise UsageError(
            f"batch.max_tokens is {config.batch.max_tokens}, below {alignment.total_multiple}, the multiple that "
            f"mesh.tp = {config.mesh.tp} and mesh.cp = {config.mesh.cp} pad every rollout to"
        )


def _refuse_replicas(config: TrainConfig, tier: Tier) -> None:
    """Refuse more engines than this machine can hold."""
    count, ranks, cores = config.engine.replicas, config.engine.tp, os.cpu_count() or 1
    if count > 1 and count * ranks > cores and (tier == "cpu" or config.engine.kind == "hf"):
        raise UsageError(
            f"engine.replicas is {count} and engine.tp is {ranks}, {count * ranks} processes that compute at once, and "
            f"this host has {cores} cores: use fewer"
        )


def _require_adaptable(rank: int, sizes: Mapping[str, Any]) -> None:
    """Refuse a model whose adapters have no layout."""
    refuse_adapters(sizes, f"lora.rank is {rank}, which")
    if family_of(sizes) is None:
        raise UsageError(
            f"lora.rank is {rank}, and the family of {architecture_of(sizes)} has no layout by which adapters could be "
            "judged: leave it out"
        )


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
    """Refuse a rollout that is longer than a micro-batch may be.

    Raises:
        UsageError: names the longest, its padded length and the knob.
    """
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

    Args:
        config: of the run.
        prompt: tokens of the longest prompt.
        rest: tokens of an episode after its prompt, at most: answers and replies.

    Raises:
        UsageError: names the numbers and the knobs.
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
    """Refuse a run folder that cannot be made or written, and write nothing.

    Raises:
        UsageError: names the folder and the nearest one that exists.
    """
    there = next(path for path in (run, *run.parents) if path.exists())
    if not there.is_dir():
        raise UsageError(f"the run folder `{run}` cannot be written: `{there}` is no folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"the run folder `{run}` cannot be written: `{there}` is not writable for this user")


def dry_run(config: TrainConfig, owners: Mapping[str, str]) -> str:
    """Check everything that needs no torch and no tokenizer; return the resolved config and the arithmetic of a step.

    A folder with config.json alone is planned for a machine with GPUs, whatever this one has.

    Args:
        config: of the run.
        owners: key -> who gave its value.

    Raises:
        UsageError: what the run would be refused for.
    """
    require_place(config.run)
    load_algorithms(config)
    alone = config_alone(config.model)
    sizes = config_of(config.model, config.dtype) if alone is None else alone
    require_ranks(config.mesh.world_size, config.ray.nodes)
    validate(sizes, config.mesh)
    has_gpu = _GPU.exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != ""
    tier: Tier = "cpu" if alone is None and not has_gpu else "cuda"
    require_fit(config, sizes, tier)
    lines = [resolved(config, owners), "\n", _mesh_line(config), "\n"]
    if config.data.rollouts is None:
        task: Task = "sft" if config.algorithm == "sft" else "grpo"
        open_chat_template(config)
        train = load_train(config, task)
        held_out = load_held_out(config, train, task)
        lines.append(
            f"data: {len(train):,} examples to train on, {len(held_out):,} held out, none in both; "
            f"{config.steps:,} steps of {config.data.batch_size:,} are {_epochs(config, len(train))} epochs\n"
        )
    if config.samples:
        lines.append(_rollout_line(config, sizes, tier, gpu_bytes() if has_gpu and alone is None else None))
    lines += [_batch_line(config), "\nnot checked without torch and the tokenizer: weights, lengths in tokens, GPUs\n"]
    if alone is not None:
        lines.append(f"`{config.model}` holds no weights, which a run needs: planned by config.json, for GPUs\n")
    return "".join(lines)


def _epochs(config: TrainConfig, num_examples: int) -> str:
    return f"{config.steps * config.data.batch_size / num_examples:.3g}"


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
    each = bytes_per_token(sizes, config.dtype, engine.tp)
    unknown = tier == "cuda" and device_bytes is None and engine.kv_cache_gib is None
    if engine.kind != "vllm" or each is None or unknown:
        return f"{shown}; how many run at once is not known before the engine has started\n"
    most: float = MOST_KV_CACHE_BYTES
    if device_bytes is not None:
        share = OWN_SHARE if engine.sleep_level or config.transport == "nccl" else LENT_SHARE
        most = most_on_gpu(share, device_bytes, _stored_bytes(config.model), engine.tp)
    length = options.max_turns * options.max_answer_tokens
    cache = cache_bytes(
        engine.kv_cache_gib, sizes, dtype=config.dtype, tp=engine.tp, length=length, count=count, most=most
    )
    at_once = min(count, cache // (each * length))
    return (
        f"{shown}; a cache of {cache / 2**30:.3g} GiB has room for {cache // each:,} tokens: {at_once:,} answers run "
        "at once, less what their prompts take\n"
    )


def _stored_bytes(model: str) -> int:
    """Bytes of the weight files of a local directory; 0 of a generated model, which is small."""
    return sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))


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

"""From a YAML file, `key=value` and flags to one config, and back to YAML; omegaconf is loaded for the first two alone.

Order of precedence: a flag or a `key=value` beats the file, and the file beats the default. A flag and a `key=value`
for the same knob are refused, and so is a knob that is given twice in one place.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from verifier.errors import UsageError
from verifier.knob import KnobEntry, build, entries

Config = TypeVar("Config")

_WORDS = {
    int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path",
    tuple: "a list of texts",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """One value that the user gave."""

    value: Any
    name: str
    """Spelling that the user gave the knob: a flag or a key."""
    where: str
    """Owner of the value: "--tp", "mesh.tp=2", or the file."""


def load(
    kind: type[Config],
    *,
    file: Path | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> tuple[Config, dict[str, str]]:
    """Make the config that a command was asked for; return it, and for each key that was given its owner.

    Args:
        kind: type of the config.
        file: YAML file; groups are nested mappings, or dotted keys.
        overrides: `key=value`, with dotted keys.
        flags: dotted key -> value of each flag that was given, typed already.

    Raises:
        UsageError: an unknown key, a value of another type, a knob that is given twice, a required one that is not
            given, or whatever the config itself refuses.
    """
    known = {entry.key: entry for entry in entries(kind)}
    asked = _overridden(known, overrides)
    for key, value in (flags or {}).items():
        flag = known[key].option
        if key in asked:
            raise UsageError(f"{flag} and {asked[key].where} set the same knob: leave one of the two out")
        asked[key] = Given(value=value, name=flag, where=flag)
    given = {**(_read(known, file) if file is not None else {}), **asked}
    values = {key: item.value for key, item in given.items()}
    if file is not None or overrides:
        values = _typed(kind, known, given)
    for key, value in values.items():
        values[key] = known[key].checked(tuple(value) if isinstance(value, list) else value, given[key].name)
    for key, entry in known.items():
        if entry.required and values.get(key) is None:
            raise UsageError(f"missing option '{entry.option}': give it, or {key}=..., or `{key}` in --config")
    return build(kind, values), {key: item.where for key, item in given.items()}


def resolved(config: Any, owners: Mapping[str, str]) -> str:
    """Return a config as YAML that `--config` takes again: a line per knob, with its owner and default in a comment.

    `owners` has for each key who gave its value; a knob that nobody gave has its default.
    """
    lines = []
    for entry in entries(type(config)):
        text = f"{entry.key}: {_written(entry, operator.attrgetter(entry.key)(config))}"
        note = f"{owners[entry.key]}; default {default(entry)}" if entry.key in owners else "default"
        if entry.computed and entry.key not in owners:
            text = f"# {text}"
        lines.append(f"{text:<40}  # {note}\n")
    return "".join(lines)


def _written(entry: KnobEntry, value: Any) -> str:
    if isinstance(value, tuple):
        rows = value if entry.knob.record is None else [dataclasses.asdict(item) for item in value]
        return json.dumps(list(rows))
    spelled = entry.spelled(value)
    return json.dumps(str(spelled) if isinstance(spelled, Path) else spelled)


def default(entry: KnobEntry) -> str:
    """Describe the default of a knob."""
    if entry.required:
        return "none, it is required"
    return "computed" if entry.computed else _written(entry, entry.default)


def _overridden(known: Mapping[str, KnobEntry], overrides: Sequence[str]) -> dict[str, Given]:
    found: dict[str, Given] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"`{text}` is neither an option nor key=value, such as {next(iter(known))}=...")
        _require_known(known, key, "")
        if key in found:
            raise UsageError(f"{found[key].where} and {text} set the same knob: leave one of the two out")
        found[key] = Given(value=value, name=key, where=text)
    return found


def _require_known(known: Mapping[str, Any], key: str, where: str) -> None:
    """Refuse a key that a config does not have; name the nearest, or those of a group that was given a value."""
    if key in known:
        return
    inside = [name for name in known if name.startswith(f"{key}.")]
    if inside:
        raise UsageError(f"`{key}`{where} is a group of knobs: give one of {', '.join(inside)}")
    word = key.rpartition(".")[2]
    last = [name for name in known if name.rpartition(".")[2] == word]
    for part, why in NOT_SUPPORTED.items():
        if part in f".{key}".lower().replace("-", "_"):
            raise UsageError(f"`{key}`{where} is not supported: {why}")
    term = TERMS.get(word.lower().replace("-", "_"))
    near = [term] if term in known else last or difflib.get_close_matches(key, known, n=1)
    raise UsageError(
        f"there is no knob `{key}`{where}: " + (f"did you mean `{near[0]}`" if near else "`--print-config` lists them")
    )


def _read(known: Mapping[str, KnobEntry], file: Path) -> dict[str, Given]:
    import yaml
    from omegaconf import OmegaConf

    if not file.is_file():
        raise UsageError(f"--config `{file}` is no file")
    try:
        content = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    except yaml.YAMLError as problem:
        mark = getattr(problem, "problem_mark", None)
        what = getattr(problem, "problem", None) or getattr(problem, "reason", None) or " ".join(str(problem).split())
        line = f" line {mark.line + 1}" if mark else ""
        raise UsageError(f"--config `{file}`{line} is no YAML: {what}") from problem
    except (UnicodeError, RecursionError, OSError, ValueError) as problem:
        raise UsageError(f"--config `{file}` cannot be read: {' '.join(str(problem).split())}") from problem
    if not isinstance(content, dict):
        raise UsageError(f"--config `{file}` is no mapping of keys to values")
    found: dict[str, Given] = {}
    for key, value in _flattened(known, content):
        _require_known(known, key, f" in {file}")
        if key in found:
            raise UsageError(f"`{key}` is given twice in {file}: leave one of the two out")
        if known[key].kind in (str, Path) and not isinstance(value, str | None):
            raise UsageError(f"{key} is `{value}` in {file}, it must be text: put it into quotes")
        found[key] = Given(value=value, name=key, where=str(file))
    return found


def _flattened(
    known: Mapping[str, KnobEntry], content: Mapping[Any, Any], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and key not in known and any(item.startswith(f"{key}.") for item in known):
            yield from _flattened(known, value, f"{key}.")
        else:
            yield key, value


def _typed(kind: type, known: Mapping[str, KnobEntry], given: Mapping[str, Given]) -> dict[str, Any]:
    """Convert values by the config's own types, and resolve `${other.key}`."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    tree = OmegaConf.structured(kind)
    values: dict[str, Any] = {}
    for key in known:  # frozen dataclasses are read-only nodes
        OmegaConf.set_readonly(OmegaConf.select(tree, key.rpartition(".")[0]) if "." in key else tree, False)
    plain = {key: item for key, item in given.items() if known[key].knob.record is None}
    for key, item in plain.items():
        try:
            OmegaConf.update(tree, key, _parsed(known[key], item.value))
        except (OmegaConfBaseException, ValueError) as problem:
            place = "" if item.where.startswith(item.name) else f" in {item.where}"
            said = f"{item.name} is `{item.value}`{place}, it must be {_WORDS[known[key].kind]}"
            raise UsageError(said) from problem
    for key, item in plain.items():
        try:
            value = OmegaConf.select(tree, key)
        except OmegaConfBaseException as problem:
            raise UsageError(f"{item.where}: {str(problem).splitlines()[0]}") from problem
        values[key] = list(value) if known[key].kind is tuple and value is not None else value
    return values | {key: _records(known[key], item) for key, item in given.items() if key not in plain}


def _records(entry: KnobEntry, item: Given) -> list[Any]:
    record, value = entry.knob.record, item.value
    assert record is not None
    names = [field.name for field in dataclasses.fields(record)]
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        raise UsageError(f"{item.name} is no list of mappings of {', '.join(names)}: give it in the file of --config")
    found = []
    for number, row in enumerate(value, start=1):
        for key, text in row.items():
            if key not in names:
                raise UsageError(f"{item.name}, item {number} has no `{key}`: give some of {', '.join(names)}")
            if not isinstance(text, str):
                raise UsageError(f"{item.name}, item {number}, {key} is `{text}`, it must be text: put it into quotes")
        found.append(record(**row))
    return found


def _parsed(entry: KnobEntry, value: Any) -> Any:
    """Take text for nothing and for lists; each type converts its own."""
    if value == "null":
        return None
    if entry.kind is tuple and isinstance(value, str):
        return [part.strip() for part in value.strip("[]").split(",") if part.strip()]
    return list(value) if isinstance(value, tuple) else value


TERMS = {
    "lr": "optimizer.learning_rate", "max_lr": "optimizer.learning_rate", "min_lr": "optimizer.least_learning_rate",
    "lr_scheduler": "optimizer.schedule", "lr_scheduler_type": "optimizer.schedule", "scheduler": "optimizer.schedule",
    "lr_decay_style": "optimizer.schedule", "warmup": "optimizer.warmup_steps",
    "lr_warmup_steps": "optimizer.warmup_steps", "num_warmup_steps": "optimizer.warmup_steps",
    "lr_warmup_iters": "optimizer.warmup_steps", "wd": "optimizer.weight_decay",
    "max_grad_norm": "optimizer.clip_grad", "gradient_clipping": "optimizer.clip_grad",
    "adam_beta1": "optimizer.beta_1", "beta1": "optimizer.beta_1", "adam_beta2": "optimizer.beta_2",
    "beta2": "optimizer.beta_2", "eps": "optimizer.epsilon", "adam_epsilon": "optimizer.epsilon",
    "max_steps": "steps", "total_steps": "steps", "total_training_steps": "steps", "num_train_steps": "steps",
    "num_rollout": "steps", "train_batch_size": "data.batch_size", "rollout_batch_size": "data.batch_size",
    "dataset": "data.source", "train_files": "data.source", "val_files": "data.held_out",
    "micro_train_batch_size_per_gpu": "batch.micro_batch_size",
    "ppo_micro_batch_size_per_gpu": "batch.micro_batch_size",
    "per_device_train_batch_size": "batch.micro_batch_size", "max_tokens_per_gpu": "batch.max_tokens",
    "ppo_max_token_len_per_gpu": "batch.max_tokens", "max_tokens_per_microbatch": "batch.max_tokens",
    "n": "grpo.group_size", "num_generations": "grpo.group_size", "n_samples_per_prompt": "grpo.group_size",
    "ppo_mini_batch_size": "grpo.mini_batches", "ppo_epochs": "grpo.epochs", "num_iterations": "grpo.epochs",
    "max_new_tokens": "grpo.max_answer_tokens", "max_completion_length": "grpo.max_answer_tokens",
    "max_response_length": "grpo.max_answer_tokens", "max_generate_length": "grpo.max_answer_tokens",
    "rollout_max_response_len": "grpo.max_answer_tokens", "kl_coef": "grpo.kl_weight", "kl_loss_coef": "grpo.kl_weight",
    "beta": "grpo.kl_weight", "entropy_coeff": "grpo.entropy_weight", "entropy_coef": "grpo.entropy_weight",
    "clip_ratio_low": "grpo.clip_low", "eps_clip": "grpo.clip_low", "clip_ratio_high": "grpo.clip_high",
    "eps_clip_high": "grpo.clip_high", "adv_estimator": "grpo.advantage", "advantage_estimator": "grpo.advantage",
    "loss_mode": "grpo.loss", "policy_loss_type": "grpo.loss", "loss_agg_mode": "aggregation",
    "loss_reduction": "aggregation", "reward_funcs": "grpo.reward", "rm_type": "grpo.reward",
    "enforce_eager": "engine.cuda_graphs", "gpu_memory_utilization": "engine.kv_cache_gib",
    "kv_cache_memory_bytes": "engine.kv_cache_gib", "free_cache_engine": "engine.sleep_level",
    "colocate_all": "engine.sleep_level", "tensor_parallel_size": "engine.tp",
    "pipeline_parallel_size": "engine.pp",
    "enable_expert_parallel": "engine.ep", "expert_parallel_size": "engine.ep",
    "tensor_model_parallel_size": "mesh.tp", "pipeline_model_parallel_size": "mesh.pp",
    "virtual_pipeline_model_parallel_size": "mesh.vpp", "context_parallel_size": "mesh.cp",
    "expert_model_parallel_size": "mesh.ep", "expert_tensor_parallel_size": "mesh.etp",
    "n_gpus_per_node": "mesh.dp", "nnodes": "ray.nodes", "gradient_checkpointing": "megatron.recompute",
    "recompute_granularity": "megatron.recompute", "optimizer_cpu_offload": "megatron.optimizer_offload",
    "lora_rank": "lora.rank", "lora_alpha": "lora.alpha", "target_modules": "lora.targets",
    "save_steps": "checkpoint.every",
    "save_freq": "checkpoint.every", "save_interval": "checkpoint.every", "eval_steps": "evaluation.every",
    "test_freq": "evaluation.every", "eval_interval": "evaluation.every", "model_name_or_path": "model",
    "model_path": "model", "hf_checkpoint": "model", "output_dir": "run", "default_local_dir": "run",
}  # fmt: skip
"""Last word of a key in verl, SkyRL, slime or TRL -> key here; docs/coming-from.md says what differs."""
_DRAFTS = "beside drafted tokens vLLM 0.21 reports other log-probabilities than its model's on a CPU"
NOT_SUPPORTED = {
    "kv_cache_dtype": "keys and values of fewer bits change the engine's log-probabilities, which no bound allows",
    "speculative": _DRAFTS, ".enable_mtp": _DRAFTS,
}  # fmt: skip
"""Part of a key in another trainer that no knob stands for -> why."""

"""Preflight of a training run: one step of its longest samples with all checks, its sync, and its checkpoint loaded."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from verifier.config.training import DataOptions, EvaluationOptions, ProfileOptions, TrainConfig, VerifyOptions
from verifier.core.finding import ExitCode
from verifier.core.manifest import Facts
from verifier.core.store import complete, create
from verifier.data.encode import encode_example, encode_prompt
from verifier.data.examples import PARTS, Example
from verifier.data.recorded import read_recorded, recorded_files
from verifier.data.tokenizer import open_tokenizer
from verifier.errors import ContractError, UsageError, ViolationFound
from verifier.launch.fork_launcher import Launcher
from verifier.model.checkpoint import Checkpoint
from verifier.probes.training.run_evidence import RANKS, RunEvidence
from verifier.probes.training.sampled_step import require_judgeable
from verifier.probes.training.step_trace import step_manifest
from verifier.probes.training.verdicts import Judge, require_held
from verifier.runs.derived_layout import with_kept_layout
from verifier.runs.model_under_test import ModelUnderTest, open_model
from verifier.runs.resources import Deadline, Resources
from verifier.trainer import update_log
from verifier.trainer.checkpoint_folder import Continuation
from verifier.trainer.controller import Trainer
from verifier.trainer.fitting import require_fit
from verifier.trainer.ranks import PRELOAD, start_ranks
from verifier.trainer.run_data import load_train, open_chat_template
from verifier.trainer.run_folder import RunFolder

ENTROPY_WEIGHT = 0.01
"""Weight of the entropy where the config has none: answers that nobody ended earn equal rewards, and the gradient of
the rest of the loss is then 0."""
SECONDS = ("rollout_s", "score_s", "prepare_s", "train_s", "sync_s", "time_s")
"""Metrics that are shown."""
_NOTHING_S = 1e-4
"""Seconds of a stage that the run has not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """End of a preflight that held."""

    samples: int
    """Rollouts of the step."""
    longest: int
    """Tokens of the longest of them."""
    tokens: int
    """Tokens of all of them."""
    seconds: dict[str, float]
    """Stage -> seconds."""
    peak_memory: list[int]
    """Most memory that each rank has held, bytes; see `update_facts_megatron.peak_memory`."""
    notes: tuple[str, ...]
    """Differences of the step from those of the run, each in a few words."""


def preflight(
    config: TrainConfig,
    progress: Callable[[str], None],
    judge: Judge,
    *,
    launcher: Launcher | None = None,
) -> Preflight:
    """Train one step in the folder `config.run`, which holds nothing yet, and load its checkpoint in new ranks.

    A `launcher` has Megatron imported; None starts one.

    Raises:
        UsageError: what the run would be refused for.
        ViolationFound: a check does not hold.
        VerifierError: a process died or hung.
    """
    until = Deadline(config.timeout_s)
    model = open_model(config.model, config.dtype, config.mesh, config.ray.nodes)
    require_fit(config, model.checkpoint.config, model.tier)
    config.run.mkdir(parents=True)
    own, notes = _one_step(config, model)
    with contextlib.ExitStack() as stack:
        if launcher is None:
            progress("importing Megatron")
            launcher = stack.enter_context(Resources(preload=PRELOAD)).launcher(until)
        ranks = None if own.ray.use else launcher
        evidence = RunEvidence(judge)
        Trainer(own, progress, evidence, launcher=ranks, whole_answers=True).run()
        for item in evidence.suspicions.open.values() if evidence.suspicions is not None else ():
            raise ViolationFound(f"suspected: {item.sentence}: try once more\n", ExitCode.INCONCLUSIVE)
        trace = _load_again(own, with_kept_layout(own, model, own.run), launcher, until, progress)
        require_held(judge, trace, "the load")
    metrics = json.loads((own.run / "metrics.jsonl").read_text().splitlines()[-1])
    if "loss" not in metrics:
        raise UsageError("no token of the longest samples was in the loss: there is nothing to try the step with")
    most = own.grpo.max_answer_tokens
    if "rollout_s" in metrics and metrics["answer_tokens"] != most:
        raise ContractError(
            f"the engine ended answers before grpo.max_answer_tokens, {most}, though nothing was to end"
        )
    lengths = _lengths(own)
    return Preflight(
        samples=len(lengths), longest=max(lengths), tokens=sum(lengths), notes=notes,
        seconds={name.removesuffix("_s"): metrics[name] for name in SECONDS if metrics.get(name, 0) > _NOTHING_S},
        peak_memory=[
            max(item.peak_memory for item in update_log.read(own.run, rank)) for rank in range(own.mesh.world_size)
        ],
    )  # fmt: skip


def _one_step(config: TrainConfig, model: ModelUnderTest) -> tuple[TrainConfig, tuple[str, ...]]:
    """Config of one judged step of the longest samples, and what it has otherwise than the run."""
    data, notes = replace(config.data, held_out=None, num_examples=None), ["no held-out problems"]
    if config.first is not None:
        notes.append("begins with the weights of `model`, not with those of `first`")
    options = config.grpo
    if config.algorithm == "grpo":
        options = replace(options, drop_overlong=False, drop_zero_variance=False)
        notes.append("no answer is dropped")
        if not options.entropy_weight:
            options = replace(options, entropy_weight=ENTROPY_WEIGHT)
            notes.append(f"grpo.entropy_weight is {ENTROPY_WEIGHT:g}, for a gradient where all rewards are equal")
        if options.has_turns:
            notes.append("episodes have one turn, which nobody ends")
    own = replace(
        config, first=None, steps=1, grpo=options, verify=VerifyOptions(steps=True),
        evaluation=EvaluationOptions(num_problems=0), profile=ProfileOptions(),
        data=_longest(config, data, model.checkpoint),
        optimizer=replace(config.optimizer, schedule="constant", warmup_steps=0, least_learning_rate=0.0),
    )  # fmt: skip
    try:
        sampled = replace(own, verify=VerifyOptions(steps=True, every=1))
        require_judgeable(sampled, model)
    except UsageError as problem:
        return own, (*notes, f"not computed by transformers too: {str(problem).partition(': set verify')[0]}")
    return sampled, tuple(notes)


def _longest(config: TrainConfig, data: DataOptions, checkpoint: Checkpoint) -> DataOptions:
    """Write the longest samples of the run's data into its folder, as data of one step."""
    if data.rollouts is not None:
        files = recorded_files(data.rollouts)[: config.steps]
        if not files:
            raise UsageError(f"data.rollouts, `{data.rollouts}`, has no files *.jsonl")
        folder = config.run / "longest"
        folder.mkdir()
        sizes = {file: sorted((len(row.tokens) for row in read_recorded(file)), reverse=True) for file in files}
        shutil.copy(max(files, key=lambda file: sizes[file]), folder)
        return replace(data, rollouts=folder)
    tokenizer = open_tokenizer(checkpoint.path, open_chat_template(config))
    examples = load_train(config, "sft" if config.algorithm == "sft" else "grpo", tokenizer)

    def length(example: Example) -> int:
        return len((encode_example if config.algorithm == "sft" else encode_prompt)(example, tokenizer))

    chosen = sorted(examples, key=length, reverse=True)[: data.batch_size]
    file = config.run / "longest.jsonl"
    file.write_bytes(b"".join(msgspec.json.encode(_row(example)) + b"\n" for example in chosen))
    return DataOptions(
        source=str(file), batch_size=data.batch_size, chat_template=data.chat_template,
        chat_template_kwargs=data.chat_template_kwargs,
    )  # fmt: skip


def _row(example: Example) -> dict[str, Any]:
    """Return an example as a row of a file; further columns that are called as a part of a row are left out."""
    row: dict[str, Any] = {name: value for name, value in example.metadata.items() if name not in PARTS}
    row["id"] = example.id
    if example.prompt:
        row["prompt"] = example.prompt
    else:
        row["messages"] = [
            {"role": item.role, "content": item.content, "weight": int(item.in_loss)} for item in example.messages
        ]
    return row | {name: value for name in ("response", "answer") if (value := getattr(example, name)) is not None}


def _load_again(
    config: TrainConfig, model: ModelUnderTest, launcher: Launcher, until: Deadline, progress: Callable[[str], None]
) -> Path:
    folder = RunFolder(config.run)
    continuation = Continuation(config, folder, progress)
    continuation.rewind()
    manifest = step_manifest(config, model, Facts(part="load", step=1))
    trace = create(config.run / "loaded", manifest)
    job = start_ranks(config, model, launcher, config.run / "again", until, progress, observer=RANKS)
    try:
        continuation.load(job.call)
        job.call("observe", stage="LOAD", what="record_load", trace=str(trace))
        job.finish()
    finally:
        job.kill()
    complete(trace, manifest)
    return trace


def _lengths(config: TrainConfig) -> Sequence[int]:
    from verifier.data.rollout import load_rollouts

    folder, files = RunFolder(config.run), {(item.step, item.batch) for item in update_log.read(config.run, 0)}
    return [len(rollout) for at in sorted(files) for rollout in load_rollouts(folder.read_batch(*at))[0]]

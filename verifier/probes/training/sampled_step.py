"""Steps that transformers computes too: gradients, Adam and log-probabilities by the oracle, on the step's record."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from verifier.config import TrainConfig
from verifier.config_json import text_model
from verifier.core.outputs import full_disk_refused
from verifier.core.record import Probe
from verifier.core.store import Recorder
from verifier.data.rollout import Rollout, route_rows
from verifier.data.tokenizer import open_tokenizer
from verifier.errors import UsageError
from verifier.model.adapted import Adapted
from verifier.model.families import moe_layers_of, size_if_any
from verifier.oracle.oracle import Oracle, Reported, Sides
from verifier.oracle.recording import (
    ends_record,
    entropy_record,
    numbered,
    sampled_noise,
    sided,
)
from verifier.oracle.updates import choices, judged, routes_of, save_inputs
from verifier.platform import host_bytes
from verifier.runs.derived_layout import may_derive
from verifier.runs.model_under_test import ModelUnderTest
from verifier.stages.logprob.probe_oracle_scores import load_scores
from verifier.stages.logprob.records import (
    OracleLogprobs,
    OracleOfSampled,
    SampledNoise,
    TrainerLogprobs,
)
from verifier.stages.replay.records import OracleRecord
from verifier.stages.rollout.records import SampledTokens
from verifier.trainer.batches import OptimizerUpdate, ScoredRollouts
from verifier.trainer.evaluation import ends_of
from verifier.trainer.sampled_batch import exact_tokens, has_fresh

COLUMNS = ("advantage", "divisor", "reference")
"""Inputs of a loss besides tokens, mask and weight."""

TOKENS = 2**14
"""Tokens of a step's rollouts that the oracle computes by default. Each takes 8 operations a weight in float32, forward
twice and backward: of 0.6 billion weights 8e13, by arithmetic 2 s of a GPU that makes 4e13 a second."""
NEAR = 1e-5
"""Share of the greatest magnitude of a token's scores by which float32 may change the order of two experts: as much as
log-probabilities of right sides may differ, in nats (docs/numerics.md)."""

OF_RUN = 32
"""Bytes of each weight that trainer, reference and engine of a run on the CPU hold: eight copies in float32."""
OF_UNIT = 24
"""Bytes of each weight of the largest layer that the oracle holds: in float64 it, its gradient and the sum of that."""


def is_sampled(config: TrainConfig, step: int) -> bool:
    """Tell whether transformers computes a step too, in a run that samples any: by default powers of two."""
    every = config.verify.every
    if not config.verify.steps or every == 0:
        return False
    return step.bit_count() == 1 if every is None else step % every == 0


def unsampled_because(config: TrainConfig, model: ModelUnderTest) -> str:
    """Reason for which a judged run samples no step; empty where it does."""
    if config.verify.every == 0:
        return "verify.every is 0"
    if config.verify.every is None and (lack := _lack_of_room(config, model)):
        return f"{lack}, and verify.every is not given"
    return _unjudgeable(config, model)[0]  # where it was given, because no layout could be derived


def require_judgeable(config: TrainConfig, model: ModelUnderTest) -> None:
    """Refuse sampled steps that were asked for and that the oracle has no means to judge, whatever layout is derived.

    Raises:
        UsageError: a family without a layout, and without one that could be derived, a host without room for the
            model, a loss of a plugin, or an option of Megatron that the oracle has not.
    """
    if config.verify.steps and config.verify.every:
        reason, remedy = _unjudgeable(config, model, derives=True)
        if reason := reason or _lack_of_room(config, model):
            raise UsageError(f"verify.every is {config.verify.every} and {reason}: set verify.every=0{remedy}")


def _lack_of_room(config: TrainConfig, model: ModelUnderTest) -> str:
    """Clause on memory or disk that a sampled step needs and this host has not; empty where it has."""
    checkpoint, layers = model.checkpoint, Counter[str]()
    for name, meta in checkpoint.metas.items():
        layers[(re.match(r".*?\.\d+\.", name) or [name])[0]] += math.prod(meta.shape)  # its first number is a layer's
    memory = OF_UNIT * max(layers.values()) + OF_RUN * checkpoint.num_weights * (model.tier == "cpu")
    hidden = size_if_any(text_model(checkpoint.config), "hidden_size") or 0
    memory += 8 * TOKENS * hidden * (sum(name.endswith(".") for name in layers) + 2)  # the tape
    updates, exact = config.grpo.updates if config.algorithm == "grpo" else 1, config.dtype == "float32"
    of_weight = updates * (16 if exact else 20) + (8 if exact else 4)  # gradients, moments, masters; the oracle's own
    disk = ((updates + 1) * checkpoint.num_bytes + of_weight * checkpoint.num_weights) * (not config.lora.rank)
    for needed, held, what in ((memory, host_bytes(), "memory"), (disk, _free_bytes(config.run), "disk for the run")):
        if needed > held:
            return (
                f"a sampled step of {config.model} needs {needed / 2**30:,.1f} GiB of {what}, and this host has "
                f"{held / 2**30:,.1f} GiB"
            )
    return ""


@cache
def _free_bytes(folder: Path) -> int:
    """Bytes that were free where a folder is, or will be, when a run asked first."""
    return shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.exists())).free


def _unjudgeable(config: TrainConfig, model: ModelUnderTest, *, derives: bool = False) -> tuple[str, str]:
    """Reason for which the oracle cannot judge a step, and what else than judging none would help; empty if it can.

    If it `derives`, it may get a derived layout yet.
    """
    if not (model.judges_gradients or (derives and not config.lora.rank and may_derive(model))):
        return f"the gradients of {config.model} cannot be judged: its family has no layout", ""
    factor = config.megatron.mtp_loss_scaling_factor
    if factor and any(name.startswith("mtp.") for name in model.checkpoint.metas):
        return f"megatron.mtp_loss_scaling_factor is {factor:g}, which the oracle does not compute", ", or leave it out"
    return config.beyond_oracle


def record_scored(probe: Probe, config: TrainConfig, step: int, scored: ScoredRollouts) -> None:
    """Record what trainer and engine say of a step's rollouts, each under the version of the weights that it claims."""
    temperature, lengths = config.grpo.temperature, tuple(len(rollout) - 1 for rollout in scored.rollouts)
    sides = [("old", step - 1, scored.old)]
    if scored.reference is not None:
        sides.append(("reference", 0, scored.reference))
    for name, version, values in sides:
        record = TrainerLogprobs(name=name, version=version, lengths=lengths, temperature=temperature)
        probe.emit(record, np.concatenate([row[1:] for row in values]).astype(np.float32))
    if config.data.rollouts is None:
        runs = [run for rollout in scored.rollouts for run in _runs(config, rollout)]
        for version in sorted({rollout.versions[begin] for rollout, begin, _ in runs}):
            _record_sampled(
                probe, int(version), [run for run in runs if run[0].versions[run[1]] == version], temperature
            )


def _runs(config: TrainConfig, rollout: Rollout) -> list[tuple[Rollout, int, int]]:
    exact = exact_tokens(config, rollout)
    keys = np.where(exact, rollout.versions, -1)
    edges = [0, *(np.flatnonzero(np.diff(keys)) + 1).tolist(), len(rollout)]
    return [(rollout, a, b) for a, b in pairwise(edges) if exact[a]]


def _record_sampled(probe: Probe, version: int, runs: Sequence[tuple[Rollout, int, int]], temperature: float) -> None:
    tokens = tuple(tuple(rollout.tokens[a:b].tolist()) for rollout, a, b in runs)
    record = SampledTokens(
        name="rollouts", version=version, lengths=tuple(map(len, tokens)), tokens=tokens,
        prompts=tuple(tuple(rollout.tokens[:a].tolist()) for rollout, a, _ in runs), stops=((),) * len(runs),
        limits=tuple(map(len, tokens)), ended=("length",) * len(runs), temperatures=(temperature,) * len(runs),
    )  # fmt: skip
    probe.emit(record, np.concatenate([rollout.logprobs[a:b] for rollout, a, b in runs]))


def _at(places: Sequence[int], values: Sequence[Any]) -> list[Any]:
    return [values[at] for at in places]


def _spread(count: int, asked: int, begin: int) -> list[int]:
    """So many of `count` places, evenly spread from one on."""
    asked = min(asked, count)
    return sorted((begin + at * count // asked) % count for at in range(asked))


class SampledStep:
    """One step that the oracle computes too, in a folder of its own that ranks and controller fill.

    Of a step of more than `TOKENS` it computes some rollouts, or those that the config asks for. Their choice depends
    on no reward or length: of an update, evenly spread among those with a gradient; for log-probabilities, among all,
    as the ends of these are counted. For what is in the folder see `verifier.oracle.policy_hf`; `scored` is None in
    supervised fine-tuning.

    Attributes:
        places: number of each update of which some rollouts are computed, to their places.
        scored: those of the rollouts that are.
    """

    def __init__(
        self, config: TrainConfig, model: ModelUnderTest, oracle: Oracle, folder: Path, step: int,
        updates: Sequence[OptimizerUpdate], scored: ScoredRollouts | None,
    ) -> None:  # fmt: skip
        self._config, self._model, self._oracle, self.folder, self._step = config, model, oracle, folder, step
        self.places: dict[str, list[int]] = {}
        self.scored, tokens = scored, [len(item) for update in updates for item in update.rollouts]
        most = max(config.verify.rollouts or TOKENS * len(tokens) // sum(tokens) // len(updates), config.mesh.dp)
        if config.verify.rollouts or sum(tokens) > TOKENS:
            for update in (item for item in updates if len(item.rollouts) > most):
                pairs = [*zip(update.weights, update.columns.get("advantage", update.weights), strict=True)]
                acting = [at for at, (weight, advantage) in enumerate(pairs) if (weight * advantage).any()]
                acting = acting or [at for at, item in enumerate(update.rollouts) if item.mask.any()]
                self.places[str(update.number)] = _at(_spread(len(acting), most, step), acting)
        if scored is not None and self.places:
            fresh = [at for at, item in enumerate(scored.rollouts) if has_fresh(config, [item], step - 1)]
            chosen = _spread(len(scored.rollouts), most * len(updates), step)
            chosen = chosen if {*chosen} & {*fresh} else sorted({*chosen, *fresh[:1]})
            reference = None if scored.reference is None else _at(chosen, scored.reference)
            rollouts, old = _at(chosen, scored.rollouts), _at(chosen, scored.old)
            self.scored = ScoredRollouts(rollouts=rollouts, old=old, reference=reference)
        self._routed = bool(moe_layers_of(model.checkpoint.config)) and not config.grpo.replay_routes
        shutil.rmtree(folder, ignore_errors=True)
        with full_disk_refused(folder):
            folder.mkdir(parents=True)

    def judge(
        self, trace: Path, updates: Sequence[OptimizerUpdate], rates: Sequence[float], earlier: Mapping[int, Path],
        known: SampledNoise | None = None,
    ) -> SampledNoise | None:  # fmt: skip
        """Ask the oracle about all updates of the step, record what it says, and remove the folder.

        `rates` are the learning rates of the updates, `earlier` has checkpoints of weights before the last, by which
        tokens were sampled, and `known` is the noise of the sampled step before. Returns the noise of the run's dtype
        on the tokens that the last weights sampled; None without any.
        """
        noise = None
        config, model, scored = self._config, self._model, self.scored
        sizes = {item.number: len(item.rollouts) for item in updates if str(item.number) in self.places}
        updates = [self._computed(update) for update in updates]
        for update in updates:
            self._save_inputs(update)
        asked = [{"number": item.number, "learning_rate": rate} for item, rate in zip(updates, rates, strict=True)]
        further = config.megatron.mtp_loss_scaling_factor
        rule, objective = asdict(config.optimizer), {**objective_of(config), "further": further}
        told = (rule, objective, asked, model.layout, model.mesh, model.oracle_device)
        rows = judged(self._oracle, self.folder, *told, lora=(config.lora.rank, config.lora.targets))
        with contextlib.closing(Recorder(trace, "oracle", 0)) as recorder:
            for row in rows:
                if (size := sizes.get(row.update)) is not None:
                    row = replace(row, rollouts=len(self.places[str(row.update)]), of_rollouts=size)
                recorder.emit(replace(row, version=self._step))
            self._record_choices(recorder, updates)
            entropies: Mapping[str, list[list[float]]] = {}
            if scored is not None:
                before = self.folder / f"weights-{updates[0].number - 1}"
                noise, entropies = self._record_logprobs(recorder, scored, before, earlier, known)
            self._record_entropies(recorder, updates, objective["temperature"], entropies)
        if model.oracle_device == "cuda":  # of weights too large for their answers to be known again
            self._oracle.ask("streaming_hf:release", [self.folder / f"weights-{updates[0].number - 1}"])
        shutil.rmtree(self.folder)
        return noise

    def _computed(self, update: OptimizerUpdate) -> OptimizerUpdate:
        if (places := self.places.get(str(update.number))) is None:
            return update
        columns = {name: _at(places, values) for name, values in update.columns.items()}
        rollouts, weights = _at(places, update.rollouts), _at(places, update.weights)
        return dataclasses.replace(update, rollouts=rollouts, weights=weights, columns=columns)

    def _record_choices(self, recorder: Recorder, updates: Sequence[OptimizerUpdate]) -> None:
        """Record how good the experts were that routers chose by themselves, in less than float32."""
        if self._config.grpo.replay_routes or self._model.dtype == "float32":
            return
        for update in updates:
            routes = chosen_routes(self.folder / f"routes-{update.number}", len(update.rollouts))
            if routes:
                tokens, places = [item.tokens.tolist() for item in update.rollouts], self.places.get(str(update.number))
                asked = (update.name, self._step, tokens, routes, self._model.dtype, self._model.oracle_device, places)
                for record in choices(self._oracle, self.folder / f"weights-{update.number - 1}", *asked):
                    recorder.emit(record)

    def _record_entropies(
        self, recorder: Recorder, updates: Sequence[OptimizerUpdate], temperature: float,
        known: Mapping[str, list[list[float]]],
    ) -> None:  # fmt: skip
        """Record the entropy at each token in the loss, of each update.

        `known` has by rollout what the weights before the first update give it, as `Sides` has it. Where that is all of
        the first update, and its routers were given no experts of their own choice, it is not asked again.
        """
        replayed, dtype = self._config.grpo.replay_routes, self._model.dtype
        for update in updates:
            trained = [at for at, rollout in enumerate(update.rollouts) if rollout.mask[1:].any()]
            rollouts, given = _at(trained, update.rollouts), self._given(update)
            if update is updates[0] and (replayed or not given) and {item.id for item in rollouts} <= known.keys():
                sides = Sides(*([known[item.id][side] for item in rollouts] for side in range(3)))
            else:
                routes = [rows.tolist() for rows in _at(trained, given)] if given else []
                margin, before = None if replayed or dtype != "float32" else NEAR, f"weights-{update.number - 1}"
                _, _, sides = self._oracle.sides(
                    self.folder / before, [item.tokens.tolist() for item in rollouts], dtype,
                    self._model.oracle_device, temperature=temperature, routes=routes, ends=[], margin=margin,
                )  # fmt: skip
            masks, places = [item.mask.astype(bool) for item in rollouts], self.places.get(str(update.number))
            recorder.emit(*entropy_record(update.name, self._step, temperature, sides, masks, places))

    def _save_inputs(self, update: OptimizerUpdate) -> None:
        columns = {
            "tokens": [item.tokens for item in update.rollouts], "mask": [item.mask for item in update.rollouts],
            "weight": update.weights, **{name: update.columns[name] for name in COLUMNS if name in update.columns},
        }  # fmt: skip
        arrays = {name: np.concatenate([*values]) for name, values in columns.items()}
        arrays["lengths"] = np.array([len(rollout) for rollout in update.rollouts], np.int64)
        if (scores := load_scores(self.folder, update.number, arrays["lengths"].tolist())) is not None:
            arrays["score"] = scores
        margin = None if self._config.grpo.replay_routes or self._model.dtype != "float32" else NEAR
        save_inputs(self.folder, update.number, arrays, self._given(update), margin)

    def _given(self, update: OptimizerUpdate) -> list[np.ndarray]:
        """Routes that the oracle's routers are given: those to replay, or those that the trainer's chose."""
        chosen = self.folder / f"routes-{update.number}"
        return self._routes(update.rollouts) or chosen_routes(chosen, len(update.rollouts))

    def _routes(self, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
        """Position, global layer and experts of each routed token of each rollout; nothing unless they are replayed."""
        if not self._config.grpo.replay_routes:
            return []
        layers = moe_layers_of(self._model.checkpoint.config)
        return [route_rows([rollout], layers)[:, 1:] for rollout in rollouts]

    def _record_logprobs(
        self, recorder: Recorder, scored: ScoredRollouts, before: Path, earlier: Mapping[int, Path],
        known: SampledNoise | None,
    ) -> tuple[SampledNoise | None, Mapping[str, list[list[float]]]]:  # fmt: skip
        """Score what `record_scored` recorded, by the weights that it claims.

        Returns what `judge` does, and by rollout the entropies at its tokens by the last weights, as `Sides` has them.
        """
        noise = None
        source, last = self._model.checkpoint.path, self._step - 1
        sequences = [rollout.tokens.tolist() for rollout in scored.rollouts]
        whole, routes = [len(tokens) for tokens in sequences], [rows.tolist() for rows in self._routes(scored.rollouts)]
        checkpoint = self._model.checkpoint
        live = self._config.data.rollouts is None
        ends = ends_of(checkpoint, open_tokenizer(checkpoint.path)) if live else ()  # recorded ones need no tokenizer
        temperature, options = self._config.grpo.temperature, {"routes": routes, "ends": ends}
        sampled = [[rollout.logprobs] for rollout in scored.rollouts]
        reported = [[old, *row] for old, row in zip(scored.old, sampled, strict=True)]
        own_sides, shares, entropies = self._scored(before, sequences, reported, **options)
        self._record_oracle(recorder, OracleLogprobs, "old", last, own_sides, whole)
        if (sent := self._sent(before)) != before:
            own_sides, shares, _ = self._scored(sent, sequences, sampled, **options)
        if scored.reference is not None:
            (sides,) = self._scored(source, sequences, [[row] for row in scored.reference], routes=routes)
            self._record_oracle(recorder, OracleLogprobs, "reference", 0, sides, whole)
        if live:
            runs = [(at, run) for at, rollout in enumerate(scored.rollouts) for run in _runs(self._config, rollout)]
            for version, weights in {last: before, **earlier}.items():
                own = [(at, a, b) for at, (rollout, a, b) in runs if rollout.versions[a] == version]
                if not own:
                    continue
                sides = own_sides
                if version != last:
                    (sides,) = self._scored(self._sent(weights), sequences, sampled, routes=routes)
                tails = _of_runs(sides, own)
                self._record_oracle(recorder, OracleOfSampled, "rollouts", version, tails, [b for _, _, b in own])
                if version == last:
                    recorder.emit(*ends_record("rollouts", last, ends, temperature, _of_runs(shares, own)))
                    places = numbered((scored.rollouts[at].group, place) for at, a, b in own for place in range(a, b))
                    noise = self._noise(tails, places, known)
                    recorder.emit(noise)
        if noise is None and known is not None:  # no token is of the last weights: one step ahead all are older
            recorder.emit(msgspec.structs.replace(known, version=self._step))
        rows = zip(*(side for side in entropies), strict=True)
        return noise, {rollout.id: [*row] for rollout, row in zip(scored.rollouts, rows, strict=True)}

    def _sent(self, weights: Path) -> Path:
        """Weights as the engine gets them: adapters that are merged are rounded with the base."""
        adapted = Adapted.of(weights) if self._config.lora.sync == "merged" else None
        return weights if adapted is None else adapted.merged(weights)

    def _record_oracle(
        self, probe: Probe, kind: type[OracleRecord], name: str, version: int, sides: Sides, whole: Sequence[int]
    ) -> None:
        for record, arrays in sided(kind, name, version, sides, whole, routed=self._routed):
            probe.emit(record, arrays)

    def _noise(self, sides: Sides, places: np.ndarray, known: SampledNoise | None) -> SampledNoise:
        """Noise on the tokens of runs of one version, at these places."""
        found = sampled_noise(self._step, self._step - 1, sides, places, routed=self._routed)
        found = replace(found, partly=bool(self.places))
        if known is None:
            return found
        return replace(found, greatest_of_run=max(known.greatest_of_run, found.greatest_of_run, key=float))

    def _scored(
        self, checkpoint: Path, sequences: Sequence[Sequence[int]], reported: Reported, **options: Any
    ) -> list[Any]:
        """See `Oracle.sides`."""
        told = {"temperature": self._config.grpo.temperature, "reported": reported, **options}
        return self._oracle.sides(checkpoint, sequences, self._model.dtype, self._model.oracle_device, **told)


def chosen_routes(folder: Path, num_rollouts: int) -> list[np.ndarray]:
    """Routes that the trainer's routers chose by themselves in an update of so many rollouts.

    The folder has a file [N, 3 + K] int32 of each rank: index of the rollout, position, global layer, K experts.
    Returns [M, 2 + K] of each rollout, by position and layer; nothing if no rank wrote any.
    """
    return routes_of([np.load(file) for file in sorted(folder.glob("*.npy"))], num_rollouts)


def _of_runs(sides: Sides, runs: Sequence[tuple[int, int, int]]) -> Sides:
    """Values of runs of tokens: place of its rollout, begin and end of each."""
    return Sides(*([rows[at][a - 1 : b - 1] for at, a, b in runs] for rows in sides))


def objective_of(config: TrainConfig) -> Mapping[str, Any]:
    """The loss that a config asks for: fields of `LossTerms`, and what `verifier.oracle.policy_hf` takes."""
    if config.algorithm == "sft":
        return {
            "loss": "cross_entropy", "temperature": 1.0, "clip_low": 0.0, "clip_high": 0.0, "kl_weight": 0.0,
            "entropy_weight": 0.0,
        }  # fmt: skip
    options = config.grpo
    return {
        "loss": options.loss, "temperature": options.temperature, "clip_low": options.clip_low,
        "clip_high": options.clip_high, "dual_clip": options.dual_clip, "kl_kind": options.kl_kind,
        "kl_weight": options.kl_weight if options.kl_in == "loss" else 0.0, "entropy_weight": options.entropy_weight,
    }  # fmt: skip

"""The oracle's evidence of a recorded loop: transformers on its own tokens, by the weights that the loop kept.

Weights of version 0 are the checkpoint that the loop began with; later ones, and gradients, are there of the steps that
`keep_every` named.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from verifier.algorithms.aggregation import token_weights
from verifier.config_json import text_model
from verifier.core import ragged, store
from verifier.core.manifest import MeshSizes
from verifier.core.outputs import work_folder
from verifier.core.reader import read
from verifier.core.record import Record, kind_of
from verifier.core.trace import Trace
from verifier.errors import UsageError
from verifier.mesh import Mesh
from verifier.model.adapted import Adapted
from verifier.model.checkpoint import open_checkpoint
from verifier.oracle.oracle import Oracle, Sides
from verifier.oracle.recording import (
    ends_record,
    entropy_record,
    numbered,
    places_record,
    sampled_noise,
    sided,
)
from verifier.oracle.updates import NO_STEP, content_of, judged, save_inputs
from verifier.probe.tokens import mark_of, seal
from verifier.stages.advantage.records import LossColumns, PolicyColumns
from verifier.stages.data.records import SamplingAsked
from verifier.stages.load.records import Unbounded
from verifier.stages.logprob.records import OracleLogprobs, OracleOfSampled, SampledNoise, TrainerLogprobs
from verifier.stages.loss.records import FORMULAS, GradientRecord, KeptGradients, KeptTensors, LossTerms
from verifier.stages.pack.records import Rollouts
from verifier.stages.rollout.records import SampledTokens
from verifier.stages.train.records import KeptMatrices, KeptWeights, LiveAdapterScaling

MATRIX = ".lora_A.weight"
"""End of the name of an adapter's first matrix, as the oracle and peft's state dict have it."""


def source_of(trace: Path, model: Path | None) -> Path | None:
    """Checkpoint that the oracle of a loop starts with, `model` or the one that the loop named; None if it is done.

    Raises:
        UsageError: no such trace, no checkpoint, or nothing that transformers could score.
    """
    seen = read(trace)
    if any((trace / "evidence").glob("oracle-*.jsonl")):
        return None
    source = model or Path(seen.manifest.model)
    if not (source / "config.json").is_file():
        raise UsageError(f"the oracle needs the checkpoint that the loop began with, `{source}` is none: give --model")
    if not any(seen.has(kind) for kind in (TrainerLogprobs, SampledTokens, KeptGradients)):
        raise UsageError(f"`{trace}` has neither log-probabilities nor gradients that the oracle could compute")
    return source


def add_oracle(trace: Path, source: Path, oracle: Oracle) -> None:
    """Score and judge by transformers what a loop recorded, add that to its trace, and seal it anew.

    Args:
        trace: trace directory of a recorded loop without the oracle's evidence.
        source: checkpoint of version 0.
        oracle: running.
    """
    seen, mark = read(trace), mark_of(trace, "oracle", 0)
    with work_folder("oracle") as work:
        recording = _Recording(oracle, seen, source, work)
        ranks = sorted({0, *(item.rank for item in seen.of(Rollouts))})
        found = {rank: [*recording.of_rank(rank), *(() if rank else recording.gradients())] for rank in ranks}
    store.fail(trace, seen.manifest, "the oracle was adding its evidence")
    mark.touch()
    for rank, records in found.items():  # what a trainer rank scored is judged by the oracle's of that rank
        with contextlib.closing(store.Recorder(trace, "oracle", rank)) as recorder:
            for record, array in records:
                recorder.emit(record, array)
    mark.unlink()
    seal(trace, seen.manifest.failure)


@dataclass
class _Recording:
    """State of one `add_oracle`."""

    oracle: Oracle
    seen: Trace
    source: Path
    work: Path
    _folders: dict[int, Path] = field(default_factory=dict)

    def _weights(self, version: int) -> Path | None:
        """Checkpoint of a version; None if it was not kept."""
        if version == 0:
            return self.source
        kept = list(self.seen.of(KeptWeights, version=version))
        if kept and version not in self._folders:
            self._folders[version] = self._written(kept, self.work / f"weights-{version}")
        return self._folders.get(version)

    def _written(self, kept: Sequence[KeptTensors], folder: Path) -> Path:
        """Write copies, which came in one call or several, as a checkpoint."""
        import torch

        from verifier.model.checkpoint import write_shard

        folder.mkdir()
        tensors = dict[str, torch.Tensor]()
        for part in kept:
            arrays = self.seen.arrays(part)
            for name, dtype in part.dtypes.items():
                tensors[name] = torch.from_numpy(arrays[name].copy()).to(getattr(torch, dtype))
        write_shard(folder / "model.safetensors", tensors)
        shutil.copy(self.source / "config.json", folder)
        return folder

    def of_rank(self, rank: int) -> Iterator[tuple[Record, Any]]:
        """Log-probabilities of a rank's passes and samples of versions that were kept, and the dtype's noise."""
        seen, dtype = self.seen, self.seen.manifest.dtype
        last: SampledNoise | None = None
        for rollouts in sorted(seen.of(Rollouts, rank=rank), key=attrgetter("version")):
            step = rollouts.version
            tokens = [row.tolist() for row in ragged.split(seen.array(rollouts, "tokens"), rollouts.lengths)]
            for scored in seen.of(TrainerLogprobs, rank=rank):
                if (scored.name, scored.version) != ("old", step - 1) and scored.name != f"old of step {step}":
                    continue
                if (weights := self._weights(scored.version)) is not None and len(scored.lengths) == len(tokens):
                    (sides,) = self.oracle.sides(weights, tokens, dtype, temperature=scored.temperature)
                    tails = _cut(sides, scored.lengths)
                    yield from sided(OracleLogprobs, scored.name, scored.version, tails, rollouts.lengths)
            for columns in seen.of(LossColumns, version=step, rank=rank):
                if (weights := self._weights(step - 1)) is not None and "entropies" in seen.manifest.facts.told:
                    temperature = next((item.temperature for item in seen.of(LossTerms, version=step)), 1.0)
                    told: dict[str, Any] = {"temperature": temperature, "reported": []}
                    _, _, sides = self.oracle.sides(weights, tokens, dtype, ends=[], **told)
                    masks = ragged.split(seen.array(columns, "mask").astype(bool), columns.lengths)
                    yield entropy_record(columns.name, step, temperature, sides, masks)
            for sampled in seen.of(SampledTokens, name=f"step {step}", rank=rank):
                if (weights := self._weights(sampled.version)) is None:
                    continue
                rows = [[*prompt, *more] for prompt, more in zip(sampled.prompts, sampled.tokens, strict=True)]
                drawn = [size if heat else 0 for size, heat in zip(sampled.lengths, sampled.temperatures, strict=True)]
                heats = [*sampled.temperatures]
                sides, places = self.oracle.sides(weights, rows, dtype, temperature=heats, sampled=drawn)
                tails = _cut(sides, sampled.lengths)
                yield from sided(OracleOfSampled, sampled.name, sampled.version, tails, [*map(len, rows)])
                size = int(text_model(json.loads((weights / "config.json").read_text())).get("vocab_size", 0))
                if described := [*chain.from_iterable(places)]:  # greedy tokens are drawn from nothing
                    yield places_record(sampled, size or 1 << 30, described)
                if sampled.version == step - 1:
                    yield from self._ends(weights, sampled, rows, step)
                    last = self._noise(step, sampled, tails)
            if last is not None:
                yield replace(last, version=step), None

    def _ends(
        self, weights: Path, sampled: SampledTokens, rows: Sequence[Sequence[int]], step: int
    ) -> Iterator[tuple[Record, Any]]:
        """Probabilities of an end token at each sampled token, where one ends an answer."""
        asked = next((item for item in self.seen.of(SamplingAsked, version=step) if item.max_answer_tokens), None)
        if asked is None:
            return
        ends, temperature = (asked.end, *asked.other_ends), sampled.temperatures[0]
        told: dict[str, Any] = {"temperature": temperature, "reported": []}
        _, shares, _ = self.oracle.sides(weights, rows, self.seen.manifest.dtype, ends=ends, **told)
        yield ends_record(sampled.name, sampled.version, ends, temperature, _cut(shares, sampled.lengths))

    def _noise(self, step: int, sampled: SampledTokens, tails: Sides) -> SampledNoise:
        rows = zip(sampled.prompts, sampled.lengths, strict=True)
        places = numbered((tuple(prompt), place) for prompt, length in rows for place in range(length))
        return sampled_noise(step, sampled.version, tails, places)

    def gradients(self) -> Iterator[tuple[Record, Any]]:
        """Gradients of steps whose weights and gradients were kept and whose loss is known, over all ranks."""
        seen = self.seen
        mesh = Mesh(**msgspec.structs.asdict(seen.manifest.mesh or MeshSizes()))
        for step in seen.versions(KeptGradients):
            weights = self._weights(step - 1)
            terms = min(seen.of(LossTerms, version=step), key=attrgetter("rank"), default=None)
            inputs = self._inputs(step, terms) if terms is not None and terms.loss in FORMULAS else {}
            kept = list(seen.of(KeptGradients, version=step))
            if weights is None or terms is None or not inputs:
                continue
            folder = self.work / f"step-{step}"
            folder.mkdir()
            self._written(kept, folder / f"gradients-{step}")
            save_inputs(folder, step, inputs)
            objective = {**content_of(terms), "dtype": seen.manifest.dtype}
            before = folder / f"weights-{step - 1}"
            if not any(name.endswith(MATRIX) for part in kept for name in part.dtypes):
                before.symlink_to(weights.absolute())
            elif not self._adapts(before, step - 1, weights):
                why = "gradients are an adapter's, whose matrices, of linears, `adapter_exported` has not recorded"
                yield Unbounded(name=kind_of(GradientRecord), version=step, why=why), None
                continue
            asked = [{"number": step, "learning_rate": 0.0}]
            # A sampled padding token is an input without a gradient where the embedding has a `padding_idx`.
            padding = text_model(json.loads((self.source / "config.json").read_text())).get("pad_token_id")
            either = [None, padding][: 1 + bool((inputs["tokens"] == padding).any())]
            told: list[list[GradientRecord]] = []
            for token in either:
                given = (NO_STEP, {**objective, "padding": token}, asked, None, mesh)
                told.append(judged(self.oracle, folder, *given))
            lacking = [name for part in kept for name in part.lacking or ()]
            for row in min(told, key=_farthest):
                if row.gradient is not None or row.name in lacking or any(part.lacking is None for part in kept):
                    yield replace(row, version=step), None

    def _adapts(self, folder: Path, version: int, weights: Path) -> bool:
        """Write the matrices of a version, which its weights have within; False if they were not kept, or are others.

        Those of stacked experts, and of names that the checkpoint has not, are of no linear that the oracle knows.
        """
        kept = list(self.seen.of(KeptMatrices, version=version))
        scaling = next(self.seen.of(LiveAdapterScaling, version=version), None)
        held = {name.removesuffix(MATRIX) for part in kept for name in part.dtypes if name.endswith(MATRIX)}
        linears = {name.removesuffix(".weight") for name in open_checkpoint(weights).names() if ".experts." not in name}
        if scaling is None or not held or not held <= linears:
            return False
        self._written(kept, folder)
        names = {name: [name] for part in kept for name in part.dtypes if name.endswith(MATRIX)}
        told = Adapted(base=str(weights.absolute()), scaling=float(scaling.scaling), names=names, how="within")
        told.save(folder)
        return True

    def _inputs(self, step: int, terms: LossTerms) -> dict[str, np.ndarray]:
        """Columns of all ranks' rollouts, one rank after the other; empty where some lack what the loss reads."""
        seen, parts, groups = self.seen, list[dict[str, np.ndarray]](), list[str]()
        read = [] if terms.loss == "cross_entropy" else ["advantage", "divisor"]
        read += ["reference"] if terms.kl_weight else []
        known = set[tuple[Any, bytes]]()
        for rollouts in sorted(seen.of(Rollouts, version=step), key=attrgetter("rank")):
            columns = dict(seen.arrays(rollouts))
            same = rollouts.ids, columns["tokens"].tobytes()
            if same in known:  # ranks of one place in the data, as of tensor parallelism, record the same
                continue
            known.add(same)
            own = next(seen.of(LossTerms, version=step, rank=rollouts.rank), None)
            policy = next(seen.of(PolicyColumns, version=step, rank=rollouts.rank), None)
            if own is None or (read and policy is None):
                return {}
            columns |= {"lengths": np.array(rollouts.lengths), **({} if policy is None else seen.arrays(policy))}
            shares = {key: np.repeat(np.array(row), rollouts.lengths) for key, row in own.shares.items()}
            parts.append({name: columns[name] for name in ("lengths", "tokens", "mask", *read)} | shares)
            groups += own.parts or rollouts.groups
        inputs = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        masks = ragged.split(inputs["mask"].astype(bool), inputs["lengths"])
        return inputs | {"weight": np.concatenate(_weights(terms, masks, groups))}


def _farthest(rows: Sequence[GradientRecord]) -> float:
    """Greatest distance of a gradient, in units of its tensor's greatest element."""
    known = [(row.gradient, float(row.gradient_scale)) for row in rows if row.gradient is not None]
    return max((float(gap.value) / scale for gap, scale in known if scale), default=0.0)


def _weights(terms: LossTerms, masks: Sequence[np.ndarray], groups: Sequence[str]) -> list[np.ndarray]:
    """Weight of each token in the mean that the loss is to be, [L] of each rollout."""
    if not any(mask.any() for mask in masks):
        return [np.zeros(len(mask)) for mask in masks]
    found = token_weights(masks, groups, terms.name)
    if terms.divisor is None:
        return found
    kept = [group for mask, group in zip(masks, groups, strict=True) if mask.any()]
    number = {"token_mean": sum(int(mask.sum()) for mask in masks), "sequence_mean": len(kept)}
    return [row * number.get(terms.name, len({*kept})) / terms.divisor for row in found]


def _cut(sides: Sides, lengths: Sequence[int]) -> Sides:
    """The last values of each row."""
    return Sides(*([row[len(row) - size :] for row, size in zip(side, lengths, strict=True)] for side in sides))

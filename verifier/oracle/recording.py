"""Evidence of the oracle, from the run's own evidence and the weights that it dumped, and from nothing else.

Weights lie in a folder: ``weights-v``, the checkpoint of version v, joined without Megatron-Bridge; ``gradients-v``,
the gradients of the step that made it; of an adapter its matrices (`Adapted`).
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, takewhile
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace
from safetensors.numpy import load_file

from verifier.core import ragged, store
from verifier.core.comparison import slope_of
from verifier.core.manifest import MeshSizes
from verifier.core.reader import read
from verifier.core.record import ONLY, Record, real
from verifier.core.trace import Trace
from verifier.export.derived import DerivedLayout
from verifier.export.names import ModelLayout
from verifier.knob import flat
from verifier.mesh import Mesh
from verifier.model.checkpoint import Checkpoint
from verifier.model.families import size_if_any
from verifier.model.module_points import OF_THE_LOSS, order_of
from verifier.oracle.noise_floor import record_floor, stored_floor
from verifier.oracle.oracle import Oracle, Reported, Scored, Sides
from verifier.oracle.updates import (
    NO_STEP,
    choices,
    content_of,
    judged,
    objective_of,
    policy_columns,
    routes_of,
    save_inputs,
)
from verifier.stages.logprob.records import (
    ROUNDINGS,
    Activation,
    DtypeNoise,
    EngineNoise,
    OracleEnds,
    OracleEntropy,
    OracleLogprobs,
    OracleOfNext,
    OracleOfPlaces,
    OracleOfSampled,
    OracleOfShaped,
    SampledNoise,
    TrainerLogprobs,
)
from verifier.stages.loss.records import ActivationGradient, Objective
from verifier.stages.pack.records import Rollouts
from verifier.stages.replay.records import (
    OWN_ROUTES,
    GivenRoutes,
    LogprobRecord,
    OracleOfForced,
    OracleRecord,
    UsedRoutes,
)
from verifier.stages.rollout.records import DrawnTokens, EngineLogprobs, SampledTokens, ShapedTokens
from verifier.stages.train.records import OptimizerRule

SLACK = 2e-5
"""Nats, or a share, by which a token may miss the edge of a truncated distribution: twice what sides may differ by."""
DUMPED = ("weights", "gradients")
"""Kinds of weights and gradients that a run dumps; see above."""
Group = Sequence[tuple[Sequence[int], float]]
"""Token ids of sequences, and the temperature of each."""


def record_oracle(
    oracle: Oracle, trace: Path, weights: Path, source: Checkpoint, device: str,
    layout: ModelLayout | DerivedLayout | None,
) -> None:  # fmt: skip
    """Score and judge, with the weights of every version, all that a trace says was scored, sampled and trained on.

    The noise of an engine that quantizes is its own at version 0, where it holds, bit for bit, what a cold start gives.
    A stored noise floor of the source goes on record too, and what float32 alone changes each place by. The run has
    dumped its weights into the folder `weights`; `source` is the checkpoint of version 0, and `layout` says where its
    tensors live in the trainer, None where nobody knows.
    """
    seen = read(trace)
    with contextlib.closing(store.Recorder(trace, "oracle", 0)) as recorder:
        _Recording(oracle, seen, recorder, weights, source, device, layout).record()


@dataclass
class _Recording:
    """State of one `record_oracle`."""

    oracle: Oracle
    seen: Trace
    recorder: store.Recorder
    weights: Path
    source: Checkpoint
    device: str
    layout: ModelLayout | DerivedLayout | None
    slack: float = SLACK
    engine_gaps: list[float] = field(default_factory=list)

    def record(self) -> None:
        """Everything."""
        manifest = self.seen.manifest
        floor = stored_floor(manifest.model, self.source, manifest.dtype, manifest.tier)
        if floor is not None:
            record_floor(self.recorder, floor)
        for version in self.seen.versions(TrainerLogprobs):
            checkpoint = self.source.path if version == 0 else self.weights / f"weights-{version}"
            if checkpoint.is_dir():
                self._record_version(checkpoint, version)
        if manifest.layout:
            for item in self.seen.of(GivenRoutes, version=0):
                self._record_routed(item)
        if flat(manifest.config)["engine.quantization"]:
            for version in self.seen.versions(EngineLogprobs):
                for name in ("scored", *(item.name for item in self.seen.of(SampledTokens, version=version))):
                    self.recorder.emit(_noise_of(EngineNoise, name, version, self.engine_gaps))
        if manifest.facts.judges_gradients:
            self._record_steps()

    def _record_version(self, checkpoint: Path, version: int) -> None:
        """Everything that was scored or sampled with the weights of one version."""
        seen = self.seen
        passes = list(seen.of(TrainerLogprobs, version=version))
        samples = list(seen.of(SampledTokens, version=version))
        scored: list[Group] = [
            [(tokens, item.temperature) for tokens in self._tokens(item.name, version)] for item in passes
        ]
        reported = [rows for item in (*passes, *samples) for rows in self._reported(item)]
        sides, places = self._score(checkpoint, scored, samples, reported)
        exact = [side.exact for side in sides]
        for item, side in zip(passes, sides, strict=False):
            self._emit(OracleLogprobs, item.name, version, side.exact, side.scales)
        for record, side in zip([*passes, *samples], sides, strict=True):
            noise = noise_of_logprobs(record.name, version, side)
            self.recorder.emit(noise)
            self.slack = max(self.slack, 2 * ROUNDINGS * float(noise.coarsest))
        every = [*seen.of(DrawnTokens, version=version)]
        for prompt in dict.fromkeys(drawn.prompt for drawn in every):
            alike = [drawn for drawn in every if drawn.prompt == prompt]
            asked = (prompt, [(drawn.temperature, drawn.bias) for drawn in alike], self.device)
            for drawn, nats in zip(alike, self.oracle.ask("logprob_hf:next_token", [checkpoint], *asked), strict=True):
                self.recorder.emit(OracleOfNext(name=drawn.name, version=version), np.array(nats, np.float64))
        for shaped in seen.of(ShapedTokens, version=version):
            self._record_shaped(checkpoint, shaped)
        for sampled, rows in zip(samples, places, strict=True):
            if rows:  # it has tokens that were drawn
                self.recorder.emit(*places_record(sampled, self.vocabulary, rows))
        if version == 0 and version in seen.versions(EngineLogprobs):  # a refused version was not scored
            self.engine_gaps += self._gaps(EngineLogprobs, passes[0].name, exact[0])
        for sampled, side in zip(samples, sides[len(passes) :], strict=True):
            tails = [self._tail(row, more) for row, more in zip(side.exact, sampled.tokens, strict=True)]
            scales = [row[len(row) - len(more) :] for row, more in zip(side.scales, sampled.tokens, strict=True)]
            self._emit(OracleOfSampled, sampled.name, version, tails, scales, [len(row) + 1 for row in side.exact])
            if any(seen.of(EngineLogprobs, name=sampled.name, version=version)):  # scored from end to end
                self._emit(OracleLogprobs, sampled.name, version, side.exact, side.scales)
            if version == 0:
                self.engine_gaps += self._gaps(SampledTokens, sampled.name, tails)

    @property
    def vocabulary(self) -> int:
        """Ids that the model has."""
        return size_if_any(self.source.config, "vocab_size") or 0

    def _known(self, tokens: Sequence[int]) -> list[int]:
        return [token if token < self.vocabulary else 0 for token in tokens]

    def _tail(self, nats: Sequence[float], tokens: Sequence[int]) -> list[float]:
        """Last log-probabilities of a row, those of the sampled tokens; an id that the model does not have has none."""
        both = zip(nats[len(nats) - len(tokens) :], tokens, strict=True)
        return [value if token < self.vocabulary else -math.inf for value, token in both]

    def _continued(self, sampled: SampledTokens) -> Group:
        rows = zip(sampled.prompts, sampled.tokens, sampled.temperatures, strict=True)
        return [([*prompt, *self._known(more)], temperature) for prompt, more, temperature in rows]

    def _tokens(self, name: str, version: int) -> list[list[int]]:
        record = next(self.seen.of(Rollouts, name=name, version=version))
        return [part.tolist() for part in ragged.split(self.seen.arrays(record)["tokens"], record.lengths)]

    def _reported(self, item: LogprobRecord) -> list[list[np.ndarray]]:
        """Per sequence, what a record and engines that scored the same gave its last tokens."""
        engines = self.seen.of(EngineLogprobs, name=item.name, version=item.version)
        every = [ragged.split(self.seen.array(record), record.lengths) for record in (item, *engines)]
        return [[*rows] for rows in zip(*every, strict=False)]  # an engine may have answered fewer

    def _score(
        self, checkpoint: Path, scored: Sequence[Group], samples: Sequence[SampledTokens], reported: Reported
    ) -> tuple[list[Sides], list[list[Any]]]:
        """Log-probabilities of groups of sequences, each at its temperature; and per sample what it was drawn from."""
        groups = [*scored, *map(self._continued, samples)]
        sequences, temperatures = zip(*chain.from_iterable(groups), strict=True)
        drawn = [len(tokens) for item in samples for tokens in item.tokens]
        counts = [0] * (len(sequences) - len(drawn)) + drawn  # what is greedy is drawn from nothing
        sampled = [count if temperature else 0 for count, temperature in zip(counts, temperatures, strict=True)]
        told: dict[str, Any] = {"temperature": list(temperatures), "reported": reported, "sampled": sampled}
        found, places = self.oracle.sides(checkpoint, sequences, self.seen.manifest.dtype, self.device, **told)
        rows, described = [iter(side) for side in found], iter(places[len(counts) - len(drawn) :])
        return (
            [Sides(*([*islice(side, len(group))] for side in rows)) for group in groups],
            [[*chain.from_iterable(islice(described, len(item.tokens)))] for item in samples],
        )

    def _record_shaped(self, checkpoint: Path, item: ShapedTokens) -> None:
        """Score what the engine should report; the nearest value where rounding decides what truncation keeps."""
        rows = [list(row) for row in zip(item.prompts, map(self._known, item.tokens), item.asked, strict=True)]
        found = self.oracle.ask("logprob_hf:shaped_logprobs", [checkpoint], rows, self.slack, self.device)
        least, most = np.array([pair for row in found for pair in row], np.float64).T
        record = OracleOfShaped(
            name=item.name, version=item.version, lengths=tuple(len(row) for row in found),
            whole=tuple(len(row[0]) + len(row[1]) for row in rows),
        )  # fmt: skip
        self.recorder.emit(record, np.clip(self.seen.array(item).astype(np.float64), least, most))

    def _record_routed(self, item: GivenRoutes) -> None:
        name = next(self.seen.of(TrainerLogprobs, version=0)).name
        tokens, told = self._tokens(name, 0), (self.seen.manifest.dtype, self.device)
        routes = [rows.tolist() for rows in routes_of([self.seen.array(item)], len(tokens))]
        (sides,) = self.oracle.sides(self.source.path, tokens, *told, routes=routes)
        self._emit(OracleOfForced, item.name, 0, sides.exact, sides.scales, [])
        self.recorder.emit(noise_of_logprobs(item.name, 0, sides))

    def _record_steps(self) -> None:
        seen = self.seen
        rule, objective = next(seen.of(OptimizerRule), None), next(seen.of(Objective), None)
        if rule is None or objective is None:
            return
        given = {item.version: [seen.array(item)] for item in seen.of(GivenRoutes)}
        given.pop(0, None)  # of a pass that scores: the idle step replays none
        own = self._own_routes()
        trained = sorted(seen.of(Rollouts, name="trained"), key=attrgetter("version"))
        routes = {item.version: routes_of((given | own).get(item.version, []), len(item.ids)) for item in trained}
        if not self._before(1).exists():
            self._before(1).symlink_to(self.source.path.absolute())
        updates, past = list[dict[str, Any]](), 0
        for record in takewhile(self._is_dumped, trained):
            factor = 1.0 if record.version % 2 else objective.every_second
            columns = policy_columns(record, seen.arrays(record), factor)
            save_inputs(self.weights, record.version, columns, routes[record.version])
            updates.append({"number": record.version, "past": past})
            past += len(record.ids) if record.version else 0
        mesh = Mesh(**msgspec.structs.asdict(seen.manifest.mesh or MeshSizes()))
        rank, targets = flat(seen.manifest.config)["engine.lora_rank"], tuple[str, ...]()
        if rank:
            from verifier.megatron import lora_megatron

            targets = lora_megatron.TARGETS
        told = (content_of(rule), objective_of(objective), updates, self.layout, mesh)
        for row in judged(self.oracle, self.weights, *told, lora=(rank, targets), from_first=True):
            self.recorder.emit(replace(row, version=row.update, update=0))
        for record in (item for item in trained if item.version in own):
            if (before := self._before(record.version)).is_dir():
                name, version = record.name, record.version
                asked = (name, version, self._tokens(name, version), routes[version], seen.manifest.dtype)
                for item in choices(self.oracle, before, *asked):
                    self.recorder.emit(item)

    def _before(self, version: int) -> Path:
        """Checkpoint that the step to a version began with."""
        return self.weights / f"weights-{max(version - 1, 0)}"

    def _is_dumped(self, record: Rollouts) -> bool:
        kinds = DUMPED if record.version else ("gradients",)
        return all((self.weights / f"{kind}-{record.version}").is_dir() for kind in kinds)

    def _own_routes(self) -> dict[int, list[np.ndarray]]:
        """Routes that the trainer's routers chose by themselves, of each rank, in each update that was watched.

        Nothing of an update in which a token has fewer experts than its layer's routers choose: nobody can be told so.
        """
        parts = defaultdict[int, list[np.ndarray]](list)
        for item in self.seen.of(UsedRoutes, name=OWN_ROUTES):
            parts[item.version].append(self.seen.array(item))
        return {version: found for version, found in parts.items() if all((rows >= 0).all() for rows in found)}

    def _emit(
        self, kind: type[OracleRecord], name: str, version: int, rows: Scored, scales: Scored,
        whole: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Log-probabilities, with the length of each sequence, by default one more than it has of them."""
        whole = [len(row) + 1 for row in rows] if whole is None else whole
        self.recorder.emit(*oracle_record(kind, name, version, rows, scales, whole))

    def _gaps(self, kind: type[LogprobRecord], name: str, exact: Scored) -> list[float]:
        found = [value for item in self.seen.of(kind, version=0, name=name) for value in self.seen.array(item)]
        return [abs(float(x) - y) for x, y in zip(found, (value for row in exact for value in row), strict=True)]


def oracle_record(
    kind: type[OracleRecord], name: str, version: int, rows: Scored, scales: Scored, whole: Sequence[int]
) -> tuple[OracleRecord, dict[str, np.ndarray]]:
    """Record of log-probabilities and its arrays; `scales` as `Sides` has them."""
    record = kind(name=name, version=version, lengths=tuple(map(len, rows)), whole=tuple(whole))
    parts = {ONLY: rows, **({"scale": scales} if any(scales) else {})}
    return record, {key: np.array([*chain.from_iterable(part)], np.float64) for key, part in parts.items()}


def sided(
    kind: type[OracleRecord], name: str, version: int, sides: Sides, whole: Sequence[int], *, routed: bool = False
) -> Iterator[tuple[Record, Any]]:
    """Records of log-probabilities, and of what the run's dtype changes them by, each with its arrays."""
    yield oracle_record(kind, name, version, sides.exact, sides.scales, whole)
    yield noise_of_logprobs(name, version, sides, routed=routed), None


def ends_record(
    name: str, version: int, ends: Sequence[int], temperature: float, shares: Sides
) -> tuple[OracleEnds, np.ndarray]:
    """Record of how likely an end token was at each sampled token, and its array."""
    exact, other = (np.concatenate([*map(np.asarray, side)]) for side in shares[:2])
    noise = real(float(np.abs(exact - other).sum()))
    return OracleEnds(name=name, version=version, ends=tuple(ends), temperature=temperature, noise=noise), exact


def entropy_record(
    name: str, version: int, temperature: float, sides: Sides, masks: Sequence[np.ndarray],
    rollouts: Sequence[int] | None = None,
) -> tuple[OracleEntropy, dict[str, np.ndarray]]:  # fmt: skip
    """Record of entropies at tokens in the loss, of all rollouts of an update or of some, with the noise of all.

    `masks` are [L] bool of each sequence.
    """
    exact, _, scale = (
        [np.array(row)[mask[1:]] if len(row) else np.zeros(0) for row, mask in zip(side, masks, strict=True)]
        for side in sides
    )
    both = zip(sides.exact, sides.other, strict=True)
    noise = real(max(float(np.abs(np.array(a) - np.array(b)).max()) for a, b in both))
    places = None if rollouts is None else tuple(rollouts)
    record = OracleEntropy(name=name, version=version, temperature=temperature, noise=noise, rollouts=places)
    return record, {ONLY: np.concatenate(exact), "scale": np.concatenate(scale)}


def places_record(
    sampled: SampledTokens, vocabulary: int, rows: Sequence[Sequence[Any]]
) -> tuple[OracleOfPlaces, dict[str, np.ndarray]]:
    """Record of the distributions that the tokens of a record, one at least, were drawn from, and its arrays."""
    columns = dict(zip(("rank", "kept", "rest", "earlier", "repeats"), zip(*rows, strict=True), strict=True))
    record = OracleOfPlaces(name=sampled.name, version=sampled.version, vocabulary=vocabulary)
    return record, {name: np.array(column) for name, column in columns.items()}


def noise_of_logprobs(name: str, version: int, sides: Sides, *, routed: bool = False) -> DtypeNoise:
    """Record of the distances of what one dtype gives from the exact log-probabilities."""
    found = zip(chain.from_iterable(sides.other), chain.from_iterable(sides.exact), strict=True)
    noise = _noise_of(DtypeNoise, name, version, [abs(x - y) for x, y in found])
    return replace(noise, routed=routed, **scales_of(sides.scales))


def scales_of(scales: Scored) -> dict[str, Any]:
    """Fields of a `NoiseRecord` by the scales of its tokens; none where there are none."""
    values = np.array([*chain.from_iterable(scales)], np.float64)
    if not len(values):
        return {}
    return {"scale": real(float(np.sqrt((values**2).mean()))), "coarsest": real(float(values.max()))}


def _noise_of(kind: type[Any], name: str, version: int, gaps: Sequence[float]) -> Any:
    off = np.array(gaps, np.float64)  # of weights that are not finite neither is this
    mean, deviation = real(float(off.mean())), real(float(off.std()))
    return kind(name=name, version=version, greatest=real(float(off.max())), mean=mean, deviation=deviation)


def record_activations(
    oracle: Oracle, trace: Path, work: Path, source: Checkpoint, columns: Mapping[str, np.ndarray],
    objective: Objective, layout: ModelLayout | DerivedLayout | None, mesh: Mesh,
) -> None:  # fmt: skip
    """Have transformers compute the step, and record it.

    The ranks have left their gradients in the folder `work`, as those of an update 0. For `columns` see
    `policy_columns`, for `layout` see `record_oracle`.
    """
    save_inputs(work, 0, columns)
    told, lengths = objective_of(objective), columns["lengths"]
    oracle.ask("activations_hf:record", [source.path, work], told)
    layers = size_if_any(source.config, "num_hidden_layers") or 0
    with contextlib.closing(store.Recorder(trace, "oracle", 0)) as recorder:
        for name, values in load_file(work / "activations.safetensors").items():
            side, _, point = name.partition(" ")
            rows = [length - (point in OF_THE_LOSS) for length in lengths]
            kind = ActivationGradient if side == "backward" else Activation
            step = "moved" if side == "moved" else "train"
            recorder.emit(
                kind(name=point, version=1, step=step, order=order_of(point, layers)),
                {
                    "values": values, "columns": np.arange(values.shape[1], dtype=np.int32),
                    "sequence": np.repeat(np.arange(len(rows), dtype=np.int32), rows),
                    "position": np.concatenate([np.arange(count, dtype=np.int32) for count in rows]),
                },
            )  # fmt: skip
        if layout is not None:
            (work / "weights-0").symlink_to(source.path.absolute())
            for row in judged(oracle, work, NO_STEP, told, [{"number": 0}], layout, mesh, from_first=True):
                recorder.emit(replace(row, version=1))


def numbered(places: Iterable[Hashable]) -> np.ndarray:
    """[N] int64, a number for each, from 0; equal ones have the same."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(place, len(numbers)) for place in places], np.int64)


def sampled_noise(
    step: int, measured: int, sides: Sides, places: np.ndarray | None = None, *, routed: bool = False
) -> SampledNoise:
    """Noise of a dtype on sampled tokens.

    The weights of the version `measured` sampled the tokens of a step, which `sides` has in two dtypes. `places` has
    the number of the place behind its prompt of each token, which samples of one prompt share; all differ by default.
    """
    rounded, exact = (np.concatenate([*side]) for side in (sides.other, sides.exact))
    differences = np.asarray(rounded, np.float64) - np.asarray(exact, np.float64)
    sizes, squares = np.abs(differences), differences**2
    unsure = -np.expm1(np.minimum(np.asarray(exact, np.float64), 0.0))
    slope, error = slope_of(differences, (np.asarray(rounded, np.float64) + exact) / 2, places)
    return SampledNoise(
        name="rollouts", version=step, measured=measured, tokens=len(sizes), greatest=real(float(sizes.max())),
        places=0 if places is None else len(np.unique(places)),
        mean=real(float(sizes.mean())), deviation=real(float(sizes.std())), squares=real(float(squares.mean())),
        squares_deviation=real(float(squares.std())), p99=real(float(np.quantile(sizes, 0.99))),
        bias=real(float(differences.mean())), slope=real(slope), slope_error=real(error), routed=routed,
        greatest_of_run=real(float(sizes.max())), unsure=real(float(unsure.mean())),
        unsure_squares=real(float((unsure**2).mean())), most_unsure=real(float(unsure.max())),
        **scales_of(sides.scales),
    )  # fmt: skip

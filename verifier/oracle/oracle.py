"""The independent fp32 oracle: transformers, in a process of its own that no patch of ours touches."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from verifier.core import store
from verifier.core.record import real
from verifier.core.records_logprobs import (
    DrawnTokens,
    DtypeNoise,
    EngineLogprobs,
    EngineNoise,
    LogprobRecord,
    NoiseRecord,
    OracleLogprobs,
    OracleOfForced,
    OracleOfNext,
    OracleOfSampled,
    OracleOfShaped,
    OracleRecord,
    SampledTokens,
    ShapedTokens,
    TrainerLogprobs,
)
from verifier.core.records_tokens import GivenRoutes
from verifier.engine.api import EngineConfig
from verifier.engine.process import EngineProcess
from verifier.export.adapters import adapters_of
from verifier.export.names import layout_of
from verifier.export.owners import Owners
from verifier.model.named import is_generated
from verifier.oracle.gradients import gradient_record
from verifier.oracle.noise_floor import record_floor, stored_floor
from verifier.runs.scenario import (
    AT_LENGTH,
    AT_TEMPERATURE,
    CLIP_GRAD,
    DRIFT_WEIGHT,
    ENTROPY_WEIGHT,
    NO_DECAY,
    RATES,
    TEMPERATURE,
    made_up_logprobs,
    made_up_reward,
    trained,
    turns,
)

if TYPE_CHECKING:
    from verifier.core.trace import Trace
    from verifier.runs.model_under_test import ModelUnderTest
    from verifier.runs.spec import RunSpec


SLACK = 2e-5
"""Nats, or a share, by which a token may miss the edge of a truncated distribution: twice what sides may differ by."""
FP32_NOISES = 2
"""Times what fp32 alone costs a checkpoint that was not generated, if that is more."""


class Oracle:
    """Scores token sequences with any checkpoint directory.

    Args:
        checkpoint: any directory that transformers loads; the process starts with it.
        deadline_s: for the start and for each request.
    """

    def __init__(self, checkpoint: Path, deadline_s: float) -> None:
        self._process = EngineProcess(
            EngineConfig(kind="hf", checkpoint=str(checkpoint), dtype="float32"), name="the fp32 oracle"
        )
        with contextlib.ExitStack() as undo:
            undo.callback(self._process.stop)
            self._client = self._process.client(deadline_s=deadline_s)
            undo.pop_all()

    def __enter__(self) -> Oracle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()
        self._process.stop()

    def score(
        self,
        checkpoint: Path,
        sequences: Sequence[Sequence[int]],
        dtype: str = "float32",
        device: str = "cpu",
        temperature: float = 1.0,
    ) -> list[list[float]]:
        """Per sequence, entry t is log p(token t + 1 | tokens 0..t) at the temperature, nats."""
        arguments = [str(checkpoint), [list(tokens) for tokens in sequences], dtype, device, temperature]
        return self._client.call("verifier.oracle.logprob_hf", "score", arguments)[0]

    def record(self, trace: Path, spec: RunSpec, subject: ModelUnderTest) -> None:
        """Score the run's tokens, and those that the engine sampled, with the weights of every version.

        Version 0 is the source; later ones are the trainer's live shards, joined without Megatron-Bridge, or what was
        exported where the family has no layout row. The noise of an engine that quantizes is its own at version 0,
        where it holds, bit for bit, what a cold start gives. A stored noise floor of the source goes on record too, and
        what float32 alone costs a checkpoint that was not generated.
        All of it is computed on the subject's `oracle_device`.
        """
        recorder = store.Recorder(trace, "oracle", 0)
        seen = store.read(trace)
        engine_gaps: list[float] = []
        slack = SLACK
        device = subject.oracle_device
        floor = stored_floor(seen.manifest.model, subject.checkpoint, subject.dtype, subject.tier)
        if floor is not None:
            record_floor(recorder, floor)
        for version in seen.versions(TrainerLogprobs):
            checkpoint = subject.checkpoint.path if version == 0 else Path(spec.work) / f"live-{version}"
            if not checkpoint.is_dir():
                continue
            samples = list(seen.of(SampledTokens, version=version))
            groups: list[list[tuple[Sequence[int], float]]] = [
                [(tokens, 1.0) for tokens in spec.scenario.sequences],
                *map(_continued, samples),
            ]
            exact, *exact_samples = self._score_groups(checkpoint, groups, "float32", device)
            _emit(recorder, OracleLogprobs, "scored", version, exact, [len(row) + 1 for row in exact])
            for item in seen.of(DrawnTokens, version=version):
                arguments = [str(checkpoint), list(item.prompt), device, item.temperature]
                nats = self._client.call("verifier.oracle.logprob_hf", "next_token", arguments)[0]
                recorder.emit(OracleOfNext(name=item.name, version=version), np.array(nats, np.float64))
            if version == 0:
                against = "float64" if subject.dtype == "float32" else subject.dtype
                if against == "float64" and is_generated(seen.manifest.model):
                    against = ""
                elif against == "float64":
                    doubled = self.score(checkpoint, spec.scenario.sequences, against, device)
                    slack = max(slack, FP32_NOISES * _emit_noise(recorder, "scored", 0, exact, doubled))
                for name, asked, temperature in (
                    (AT_TEMPERATURE, spec.scenario.sequences, TEMPERATURE),
                    (AT_LENGTH, spec.scenario.at_length, 1.0),
                ):
                    if any(seen.of(TrainerLogprobs, name=name)):
                        self._record_once(recorder, checkpoint, name, asked, temperature, against, device)
            if subject.dtype != "float32":
                rounded = self._score_groups(checkpoint, groups, subject.dtype, device)
                _emit_noise(recorder, "scored", version, rounded[0], exact)
                for sampled, low, rows in zip(samples, rounded[1:], exact_samples, strict=True):
                    _emit_noise(recorder, sampled.name, version, low, rows)
            for shaped in seen.of(ShapedTokens, version=version):
                self._record_shaped(recorder, checkpoint, seen, shaped, device, slack)
            if version == 0 and version in seen.versions(EngineLogprobs):  # a refused version was not scored
                engine_gaps += _gaps_of(seen, EngineLogprobs, "scored", exact)
            for sampled, rows in zip(samples, exact_samples, strict=True):
                tails = [row[-n:] for row, n in zip(rows, sampled.lengths, strict=True)]
                _emit(recorder, OracleOfSampled, sampled.name, version, tails, [len(row) + 1 for row in rows])
                if any(seen.of(EngineLogprobs, name=sampled.name, version=version)):  # scored from end to end
                    _emit(recorder, OracleLogprobs, sampled.name, version, rows, [len(row) + 1 for row in rows])
                if version == 0:
                    engine_gaps += _gaps_of(seen, SampledTokens, sampled.name, tails)
        for given in seen.of(GivenRoutes, version=0):
            routes = _routes_of(seen, given, len(spec.scenario.sequences))
            self._record_replayed(recorder, spec, subject, device, given, routes)
        if seen.manifest.config["engine"]["quantization"]:
            for version in seen.versions(EngineLogprobs):
                for name in ("scored", *(item.name for item in seen.of(SampledTokens, version=version))):
                    _emit_gaps(recorder, EngineNoise, name, version, engine_gaps)
        if spec.roundtrip.update == "step" and spec.gradients:
            self._record_steps(recorder, spec, subject, seen)
        recorder.close()

    def _record_once(
        self,
        recorder: store.Recorder,
        checkpoint: Path,
        name: str,
        asked: Sequence[Sequence[int]],
        temperature: float,
        against: str,
        device: str,
    ) -> None:
        """Score what the trainer scores at version 0 alone, and, against another dtype if any, its noise."""
        exact = self.score(checkpoint, asked, "float32", device, temperature)
        _emit(recorder, OracleLogprobs, name, 0, exact, [len(row) + 1 for row in exact])
        if against:
            _emit_noise(recorder, name, 0, self.score(checkpoint, asked, against, device, temperature), exact)

    def _record_shaped(
        self, recorder: store.Recorder, checkpoint: Path, seen: Trace, item: ShapedTokens, device: str, slack: float
    ) -> None:
        """Score what the engine should report; the nearest value where rounding decides what truncation keeps."""
        rows = [list(row) for row in zip(item.prompts, item.tokens, item.asked, strict=True)]
        arguments = [str(checkpoint), rows, slack, device]
        found = self._client.call("verifier.oracle.logprob_hf", "shaped_logprobs", arguments)[0]
        least, most = np.array([pair for row in found for pair in row], np.float64).T
        record = OracleOfShaped(
            name=item.name, version=item.version, lengths=tuple(len(row) for row in found),
            whole=tuple(len(row[0]) + len(row[1]) for row in rows),
        )  # fmt: skip
        recorder.emit(record, np.clip(seen.array(item).astype(np.float64), least, most))

    def _record_replayed(
        self, recorder: store.Recorder, spec: RunSpec, subject: ModelUnderTest, device: str, item: GivenRoutes,
        routes: list[list[list[int]]],
    ) -> None:  # fmt: skip
        """Score by the routes that the trainer's routers were given, where transformers' can be told."""
        if not subject.layout_scopes:
            return
        scored = {}
        for dtype in {"float32", subject.dtype}:
            sequences = [list(row) for row in spec.scenario.sequences]
            arguments = [str(subject.checkpoint.path), sequences, routes, dtype, device]
            scored[dtype] = self._client.call("verifier.oracle.routes_hf", "score_routed", arguments)[0]
        exact = scored["float32"]
        _emit(recorder, OracleOfForced, item.name, 0, exact, [])
        if subject.dtype != "float32":
            _emit_noise(recorder, item.name, 0, scored[subject.dtype], exact)

    def _score_groups(
        self, checkpoint: Path, groups: Sequence[Sequence[tuple[Sequence[int], float]]], dtype: str, device: str
    ) -> list[list[list[float]]]:
        """`score` of groups of sequences, each at its temperature; the checkpoint is loaded for each of these."""
        rows = {}
        for temperature in {at for group in groups for _, at in group}:
            asked = [tokens for group in groups for tokens, at in group if at == temperature]
            rows[temperature] = iter(self.score(checkpoint, asked, dtype, device, temperature))
        return [[next(rows[at]) for _, at in group] for group in groups]

    def _record_steps(self, recorder: store.Recorder, spec: RunSpec, subject: ModelUnderTest, seen: Trace) -> None:
        from verifier.train.lora_megatron import SCALING, TARGETS

        batches = [[_sample(index, tokens) for index, tokens in enumerate(batch)] for batch in spec.scenario.batches]
        rule: dict[str, float] = {
            **RATES, "clip": CLIP_GRAD, "temperature": TEMPERATURE, "entropy": ENTROPY_WEIGHT, "drift": DRIFT_WEIGHT,
        }  # fmt: skip
        replayed = {item.version: item for item in seen.of(GivenRoutes)}
        routes = [
            _routes_of(seen, replayed[version], len(batch)) if version in replayed else []
            for version, batch in enumerate(batches, start=1)
        ]
        layout = layout_of(subject.checkpoint.config)
        adapters = adapters_of(layout, TARGETS, spec.lora_rank) if layout and spec.lora_rank else None
        owners = Owners(adapters or layout, subject.mesh) if layout else None
        name = "judge_steps"
        arguments: list[Any] = [str(subject.checkpoint.path), spec.work, batches, rule, routes]
        if adapters is not None:
            name, arguments[3] = "judge_adapter_steps", {**rule, **NO_DECAY, "scaling": SCALING}
            arguments.append(adapters.names())
        for row in self._client.call("verifier.oracle.step_hf", name, arguments)[0]:
            recorder.emit(gradient_record(row, owners, subject.mesh))


def _continued(sampled: SampledTokens) -> list[tuple[Sequence[int], float]]:
    """Each prompt with the tokens that the engine sampled after it, and the temperature that these were sampled at."""
    rows = zip(sampled.prompts, sampled.tokens, sampled.temperatures, strict=True)
    return [([*prompt, *more], temperature) for prompt, more, temperature in rows]


def _routes_of(seen: Trace, item: GivenRoutes, num_sequences: int) -> list[list[list[int]]]:
    """Per sequence, rows of position, layer and experts, as an oracle takes them."""
    routes: list[list[list[int]]] = [[] for _ in range(num_sequences)]
    for sequence, *row in seen.array(item).tolist():
        routes[sequence].append(row)
    return routes


def _sample(index: int, tokens: Sequence[int]) -> list[Any]:
    """One training sequence as the oracle of a step takes it."""
    prompt, _ = turns(index, len(tokens))
    mask = [False] * prompt + trained(index, len(tokens))
    nats = [0.0] * prompt + made_up_logprobs(index, len(tokens) - prompt)
    return [list(tokens), mask, made_up_reward(index), nats]


def _emit(
    recorder: store.Recorder,
    kind: type[OracleRecord],
    name: str,
    version: int,
    rows: Sequence[Sequence[float]],
    whole: Sequence[int],
) -> None:
    """The oracle's log-probabilities, with the length of each sequence, tokens before the first scored included."""
    record = kind(name=name, version=version, lengths=tuple(len(row) for row in rows), whole=tuple(whole))
    recorder.emit(record, np.array([value for row in rows for value in row], np.float64))


def _emit_noise(
    recorder: store.Recorder,
    name: str,
    version: int,
    rounded: Sequence[Sequence[float]],
    exact: Sequence[Sequence[float]],
) -> float:
    """The distances of what one dtype gives from the exact; the greatest of them, nats."""
    gaps = [abs(x - y) for low, high in zip(rounded, exact, strict=True) for x, y in zip(low, high, strict=True)]
    _emit_gaps(recorder, DtypeNoise, name, version, gaps)
    return max(gaps)


def _emit_gaps(
    recorder: store.Recorder, kind: type[NoiseRecord], name: str, version: int, gaps: Sequence[float]
) -> None:
    mean, deviation = real(statistics.fmean(gaps)), real(statistics.pstdev(gaps))
    recorder.emit(kind(name=name, version=version, greatest=real(max(gaps)), mean=mean, deviation=deviation))


def _gaps_of(seen: Trace, kind: type[LogprobRecord], name: str, exact: Sequence[Sequence[float]]) -> list[float]:
    """Distances of what the engine reported at version 0 from the oracle, nats."""
    reported = [value for item in seen.of(kind, version=0, name=name) for value in seen.array(item).tolist()]
    return [abs(x - y) for x, y in zip(reported, (value for row in exact for value in row), strict=True)]

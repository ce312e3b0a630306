"""Tokens that one scoring holds several times, behind the same tokens: conversations that begin alike."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from verifier.core import ragged
from verifier.core.check import Trace
from verifier.core.record import Record
from verifier.core.records_tokens import Rollouts, SampledTokens


def repeated_tokens(trace: Trace, scoring: Record, lengths: Sequence[int]) -> np.ndarray:
    """[N] int64, a number for each scored token, from 0; those behind the same tokens have the same one.

    All differ where nobody says which tokens they are.

    Args:
        trace: holds the tokens, under the name and version of the scoring.
        scoring: of the tokens.
        lengths: scored tokens of each sequence, which are its last ones.
    """
    sequences = _sequences(trace, scoring)
    if len(sequences) != len(lengths) or any(map(int.__lt__, map(len, sequences), lengths)):
        return np.arange(sum(lengths))
    numbers: dict[tuple[int, int], int] = {}
    places: list[int] = []
    for tokens, length in zip(sequences, lengths, strict=True):
        number, path = -1, []
        for token in tokens:
            number = numbers.setdefault((number, token), len(numbers))
            path.append(number)
        places += path[len(path) - length :]
    return np.unique(np.array(places, np.int64), return_inverse=True)[1]


def tokens_apart(scoring: Record, lengths: Sequence[int]) -> int:
    """Number of tokens whose noise scatters by itself: of samples of one prompt, those of the longest.

    A router that flips within a prompt moves what comes after it in each of its samples. All tokens if the scoring is
    not of samples.

    Args:
        scoring: of the tokens.
        lengths: scored tokens of each sequence.
    """
    if not isinstance(scoring, SampledTokens):
        return sum(lengths)
    longest: dict[tuple[int, ...], int] = {}
    for prompt, length in zip(scoring.prompts, lengths, strict=True):
        longest[tuple(prompt)] = max(longest.get(tuple(prompt), 0), length)
    return sum(longest.values())


def counted_once(values: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Mean value of each different token: a repeated one says nothing new of how far they scatter."""
    return np.bincount(numbers, values) / np.bincount(numbers)


def _sequences(trace: Trace, scoring: Record) -> list[list[int]]:
    """Tokens of what was scored or sampled under a name and version; none where nobody says."""
    for sampled in trace.of(SampledTokens, name=scoring.name, version=scoring.version):
        both = zip(sampled.prompts, sampled.tokens, strict=True)
        return [[*prompt, *tokens] for prompt, tokens in both]
    for item in trace.of(Rollouts, name=scoring.name, version=scoring.version):
        return [part.tolist() for part in ragged.split(trace.arrays(item)["tokens"], item.lengths)]
    return []

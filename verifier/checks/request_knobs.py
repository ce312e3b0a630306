"""Knobs that the processes of engines asked of their library, of the requests of training and of evaluations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from verifier.core.comparison import Comparison
from verifier.core.stage import Stage

NEUTRAL = "temperature 1, all else neutral"


def compare_knobs(
    name: str, answers: str, temperature: float, found: Iterable[str], version: int
) -> Iterator[Comparison]:
    """Compare the knobs of each kind of request with a temperature, and with nothing else that changes a distribution.

    Args:
        name: of the requests.
        answers: words for what they asked for.
        temperature: that the config has for them.
        found: knobs that are not neutral, as `RequestSeeds` has them; once for each kind.
        version: of the weights.
    """
    right = "" if temperature == 1 else f"temperature={temperature!r}"
    for words in found:
        yield Comparison(
            what=f"requests {name}", same=words == right, stage=Stage.ROLLOUT, version=version, badness=1.0,
            owner="engine",
            sentence=f"{answers} are sampled with {words or 'a temperature of 1 alone'}, the config asks for "
            f"{right or 'a temperature of 1 alone'}",
            expected=right or NEUTRAL, actual=words or NEUTRAL, allowed="exact (knobs)",
            hint="look at the defaults of a request: the model's generation_config, a server's, a penalty",
        )  # fmt: skip

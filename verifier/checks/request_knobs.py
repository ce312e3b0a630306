"""Knobs that the processes of engines asked of their library, of the requests of training and of evaluations."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator

from verifier.core.comparison import Comparison
from verifier.core.stage import Stage

_ADAPTER = re.compile(r"^adapter=[^,]*(, )?")
NEUTRAL = "temperature 1, all else neutral"


def compare_knobs(
    name: str, answers: str, temperature: float, found: Iterable[str], version: int,
    adapters: Collection[str] | None = (),
) -> Iterator[Comparison]:  # fmt: skip
    """Compare the knobs of each kind of request with a temperature, and with nothing else that changes a distribution.

    Args:
        name: of the requests.
        answers: words for what they asked for.
        temperature: that the config has for them.
        found: knobs that are not neutral, as `RequestSeeds` has them; once for each kind.
        version: of the weights.
        adapters: that they may name, of which each has to name one; empty for a run whose engine gets none, None where
            it is not known which it had.
    """
    cold = "" if temperature == 1 else f"temperature={temperature!r}"
    rights = [", ".join(text for text in (own and f"adapter={own}", cold) if text) for own in adapters or ()] or [cold]
    right = " or ".join(text or NEUTRAL for text in rights)
    known = found if adapters is not None else (_ADAPTER.sub("", words) for words in found)
    for words in known:
        yield Comparison(
            what=f"requests {name}", same=words in rights, stage=Stage.ROLLOUT, version=version, badness=1.0,
            owner="engine",
            sentence=f"{answers} are sampled with {words or 'a temperature of 1 alone'}, the config asks for "
            f"{'a temperature of 1 alone' if right == NEUTRAL else right}",
            expected=right, actual=words or NEUTRAL, allowed="exact (knobs)",
            hint="look at the defaults of a request: the model's generation_config, a server's, a penalty; at the "
            "adapter that it names",
        )  # fmt: skip

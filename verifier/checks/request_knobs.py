"""Knobs that the processes of engines asked of their library, of the requests of training and of evaluations."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator

from verifier.core.check import At, Comparison, Stage, compare_value

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
        at = At(Stage.ROLLOUT, version, "engine")
        hint = "look at the defaults of a request (generation_config, a server's) and its adapter"
        subject, same = f"the knobs of {answers}", words in rights
        yield compare_value(at, f"requests {name}", words or NEUTRAL, right, same=same, subject=subject, hint=hint)

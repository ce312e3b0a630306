"""Records of the stage `replay`: recorded expert routes to per-layer router indices."""

from __future__ import annotations

from verifier.core.owed import Owed, anyone, expert_rank, once
from verifier.core.record import ArrayRecord, Lengths, RankArrays

OWN_ROUTES = "own routes"
"""Name of `UsedRoutes` of an update whose routers chose by themselves."""


class GivenRoutes(ArrayRecord, frozen=True, kw_only=True, tag="replay/routes"):
    """Routes that rollouts carry. The array [N, 3 + K] int32 holds rollout, position, global layer, K experts."""

    owed = (Owed(anyone, once),)

    rollouts: tuple[str, ...]
    """Ids, in the order of the rows' first column."""
    passes: tuple[str, ...] = ("",)
    """Passes of the trainer that each must obey them, by name."""


class UsedRoutes(RankArrays, frozen=True, kw_only=True, tag="replay/choice"):
    """Experts that one rank's routers used. The array [N, 3 + K] int32 is as that of `GivenRoutes`."""

    owed = (Owed(expert_rank, once),)

    during: str = ""
    """Pass of the trainer, by name."""


class LogprobRecord(ArrayRecord, frozen=True, kw_only=True):
    """Log-probabilities of tokens; the array [sum of lengths] is in nats, sequence after sequence."""

    lengths: Lengths


class OracleRecord(LogprobRecord, frozen=True, kw_only=True):
    """Log-probabilities by transformers in float32, log-softmax in float64.

    In a float32 run also ``scale`` [sum of lengths] float64, nats: the root mean square, over the vocabulary, of what
    float32 changes the log-probabilities of each place by, against float64 on the same weights.
    """

    whole: Lengths = ()
    """Tokens of each sequence, with those before the first scored one."""


class RouteLogprobs(LogprobRecord, frozen=True, kw_only=True):
    """Teacher-forced, by a trainer with experts; float32."""

    rollouts: tuple[str, ...]
    """Id of each sequence."""


class NaturalRouteLogprobs(RouteLogprobs, frozen=True, kw_only=True, tag="replay/natural"):
    """Trainer's log-probabilities by routes that the routers chose by themselves."""


class ReplayedRouteLogprobs(RouteLogprobs, frozen=True, kw_only=True, tag="replay/scored"):
    """Trainer's log-probabilities by natural routes replayed, or by none after a replay."""


class ForcedRouteLogprobs(RouteLogprobs, frozen=True, kw_only=True, tag="replay/forced"):
    """Trainer's log-probabilities by routes that no router would choose."""


class OracleOfForced(OracleRecord, frozen=True, kw_only=True, tag="replay/oracle"):
    """Oracle's log-probabilities by those routes."""

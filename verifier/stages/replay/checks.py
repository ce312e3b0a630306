"""Router replay: routes that rollouts carry, against what the trainer's routers do with them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from verifier.core import ragged
from verifier.core.check import At, Comparison, Stage, Trace, check, compare_value
from verifier.core.comparison import describe_difference
from verifier.core.condition import NEEDS, on
from verifier.stages.checks_conditions import EXPERTS, GRPO, LAYOUT, NO_ADAPTER, REPLAYED, UPDATED
from verifier.stages.logprob.checks_logprobs import ORACLE, compare_with_oracle
from verifier.stages.logprob.records import OracleLogprobs, TrainerLogprobs
from verifier.stages.replay.records import (
    ForcedRouteLogprobs,
    GivenRoutes,
    NaturalRouteLogprobs,
    OracleOfForced,
    ReplayedRouteLogprobs,
    UsedRoutes,
)

Place = tuple[int, int, int]
"""Rollout, position in it, global layer."""


@check(
    "RPL001", needs=(GivenRoutes, UsedRoutes),
    applies=on(roundtrip=EXPERTS & NO_ADAPTER, step=GRPO & UPDATED & REPLAYED, loop=NEEDS),
)  # fmt: skip
def replayed_route_differs(trace: Trace) -> Iterator[Comparison]:
    """Each router uses for each token the experts that the token's own rollout says for that layer.

    What it checks: made-up routes, other ones for every (rollout, position, global layer), travel with the rollouts and
    are replayed; the experts read off every router's output, on every rank, against the rollouts. In a training run
    that replays, the engine's routes, in each pass over a mini-batch: those that score it, and each update, with what
    runs again for its gradients. Each place must be seen, and right wherever it is seen; padding and a last token
    without a route are left out.
    Why it matters: a route of the neighbouring token, layer, shard or sample is a valid route; the loss goes on, and
    replay makes the mismatch worse that it should mend.
    Evidence: replay/routes (what the rollouts say), replay/choice (what each rank's routers used).
    Tolerance and its source: exact; expert numbers are copied, not computed.
    Where to look: the experts of the next token, layer or shard: the shift names the slice.
    What it does not catch: right experts with wrong weights (RPL002, RPL003); in a training run, routes that were wrong
    when the engine reported them (LGP009), and routers that choose for themselves what the engine chose.
    References: verl#5037, verl#7106, SkyRL#1908, slime#2175, slime#1052, miles#2570, AReaL#1166.
    """
    for item in trace.of(GivenRoutes):
        wanted: dict[int, dict[Place, list[int]]] = defaultdict(dict)
        for place, experts in _routes(trace, item):
            wanted[place[0]][place] = experts
        used: dict[str, dict[Place, list[tuple[int, list[int]]]]] = {name: defaultdict(list) for name in item.passes}
        for choice in trace.of(UsedRoutes, name=item.name, version=item.version):
            for place, experts in _routes(trace, choice) if choice.during in used else ():
                used[choice.during][place].append((choice.rank, experts))
        for during, (rollout, name) in product(item.passes, enumerate(item.rollouts)):
            bad = []
            for place, experts in sorted(wanted[rollout].items()):
                wrong = [(rank, found) for rank, found in used[during][place] if found != experts]
                if wrong or not used[during][place]:
                    bad.append((place, str(experts), wrong))
            sentence = want = got = owner = ""
            if bad:
                (_, position, layer), want, wrong = bad[0]
                owner, got, said = "no rank", "no rank routed it", "was routed by no rank"
                if wrong:
                    owner, got = f"trainer rank {wrong[0][0]}", str(wrong[0][1])
                    said = f"uses experts {got}, its route says {want}"
                sentence = f"token {position} of `{name}` {said} in layer {layer}"
                sentence += f", in the pass `{during}`" if during else ""
            part, many = len(bad) / max(len(wanted[rollout]), 1), f"places (token, layer): {len(bad):,}"
            absent, what = not any(wrong for _, _, wrong in bad), f"{name}, {during}" if during else name
            scores = during in ("old", "reference")  # by the weights before the step, as the oracle's of that pass
            at = At(Stage.REPLAY, max(item.version - scores, 0), owner)
            yield compare_value(
                at, what, got, want, same=not bad, badness=part, mismatched=many, sentence=sentence, absent=absent
            )


def _routes(trace: Trace, item: GivenRoutes | UsedRoutes) -> Iterator[tuple[Place, list[int]]]:
    for rollout, position, layer, *experts in trace.array(item).tolist():
        yield (rollout, position, layer), sorted(experts)


@check("RPL002", needs=(NaturalRouteLogprobs, ReplayedRouteLogprobs), applies=on(roundtrip=EXPERTS & NO_ADAPTER))
def replay_changed_logprob(trace: Trace) -> Iterator[Comparison]:
    """Replaying the routes that the routers chose by themselves changes no log-probability, nor does having replayed.

    What it checks: teacher-forced log-probabilities by natural routes, against those with the same routes recorded,
    packed with the rollouts and replayed, and against those of a pass after replay was switched off.
    Why it matters: replay that forces experts but gets their weights, order or normalisation wrong; state of one pass
    that is left for the next.
    Evidence: replay/natural, replay/scored (arrays).
    Tolerance and its source: bitwise; the same experts get the same numbers in the same order.
    Where to look: what replay does to the experts' weights, and what it leaves behind.
    What it does not catch: routes that go to another place and back by the same error (RPL001), and what goes wrong
    only where a route is not what the router would choose (RPL003).
    References: miles#2722, SkyRL#1908.
    """
    for natural in trace.of(NaturalRouteLogprobs):
        expected = ragged.split(trace.array(natural), natural.lengths)
        for item in trace.of(ReplayedRouteLogprobs, version=natural.version):
            actual = ragged.split(trace.array(item), natural.lengths)
            for name, left, right in zip(natural.rollouts, actual, expected, strict=True):
                found = describe_difference(left, right)
                same, at = found.greatest == 0.0 and not found.num_not_finite, At(Stage.REPLAY, item.version)
                badness = math.inf if found.num_not_finite else found.greatest
                subject = f"the gap, nats, of log-probabilities of `{name}` with {item.name} to the natural ones"
                what, part = f"{name}, {item.name}", found.text
                yield compare_value(
                    at, what, badness, 0.0, badness=badness, subject=subject, mismatched=part, same=same
                )


@check("RPL003", needs=(ForcedRouteLogprobs, OracleOfForced), applies=on(roundtrip=EXPERTS & NO_ADAPTER & LAYOUT))
def replayed_logprob_differs_from_oracle(trace: Trace) -> Iterator[Comparison]:
    """Under routes that no router would choose, the trainer scores as transformers does under the same routes.

    What it checks: teacher-forced log-probabilities, token by token, of the pass that replays made-up routes, against
    transformers in fp32 whose routers are told to choose them. Where the trainer is wrong by its routers' own choice
    too (LGP001), replay is not the stage that is named.
    Why it matters: gate weights that are those of the router's own choice, or zero where a route departs from it, are
    right on every token whose route is natural: and routes are replayed for the others.
    Evidence: replay/forced, replay/oracle (arrays).
    Tolerance and its source: as LGP001; in bf16 the run's own noise under the same routes, which no router flips.
    Where to look: the gate weights of the routes' experts (RPL001), and rows that have no route.
    What it does not catch: gradients under replay (LSS001).
    References: ISEEKYAN/Megatron-LM#79, miles#2722, SkyRL#1908.
    """
    natural = compare_with_oracle(trace, TrainerLogprobs, OracleLogprobs, "the trainer", version=0)
    stage = Stage.REPLAY if all(found.same for found in natural) else Stage.LOGPROB
    says = f"{ORACLE} on the same routes"
    sides = ForcedRouteLogprobs, OracleOfForced, "the replaying trainer"
    for found in compare_with_oracle(trace, *sides, expected_says=says):
        yield replace(found, stage=stage)

"""One step of a training run as the checks see it, all right; and for each check the smallest thing that goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec.structs import replace

from tests.snapshots import measured_traces
from verifier.core.record import Record
from verifier.stages.advantage.records import Advantages, LossColumns, PolicyColumns
from verifier.stages.checkpoint.records import LoadedState, SavedState
from verifier.stages.data.records import (
    DataOrder,
    Drops,
    EpisodeTurns,
    HeldOutRead,
    RequestSeeds,
    RolloutTexts,
    SamplingAsked,
    TokensRead,
)
from verifier.stages.load.records import KnobsAsked, KnobsReached
from verifier.stages.logprob.records import OracleEnds, OracleEntropy, ReferenceShard, SpotScore
from verifier.stages.loss.records import LogitSpreads, LossRows, LossTerms, RouterChoices, UpdateRatios
from verifier.stages.reward.records import GivenRewards
from verifier.stages.rollout.records import EvaluatedAnswers, SampledTokens
from verifier.stages.train.records import (
    AdamSample,
    GradientSums,
    OptimizerSettings,
    ParameterGroup,
    PreviousStep,
    RouterBalance,
    SampledMaster,
    SummedTensor,
    TrainerStep,
)

ARRAYS: dict[str, dict[str, np.ndarray]] = {
    "columns": {"weight": np.array([0, 1, 1, 0, 1]) / 3, "mask": np.array([False, True, True, False, True])},
    "policy": {
        "old": np.array([np.nan, -1.0, -2.0, np.nan, -3.0], np.float32),
        "engine": np.array([np.nan, -1.5, -2.25, np.nan, -3.0], np.float32),
        "divisor": np.array([np.nan, -1.0, -2.0, np.nan, -3.0], np.float32),
        "advantage": np.array([0, 0.5, 0.5, 0, -0.5]),
        "mask": np.array([False, True, True, False, True]),
        "penalty_reference": np.array([np.nan, -1.5, -1.75, np.nan, -3.25], np.float32),
        "own": np.array([False, True, True, False, True]),
        "version": np.array([-1, 0, 0, -1, 1], np.int32),
    },
    "means of means": {"weight": np.array([0, 2, 2, 0, 3]) / 6, "mask": np.array([False, True, True, False, True])},
}


ARRAYS["other weights"] = {**ARRAYS["policy"], "engine": np.array([np.nan, -1.5, -2.25, np.nan, -6.0], np.float32)}
ARRAYS["loss rows"] = {
    "sentinel": np.array([1 << 32 | 1, 1 << 32 | 2, 0, 2 << 32 | 1]), "mask": np.array([True, True, False, True]),
    "current": np.array([-1.0, -2.0, 0, -3.0], np.float32), "entropy": np.full(4, 1.5, np.float32),
    "loss": np.array([-0.5, -0.5, 0, 0.5], np.float32), "gradient": np.array([-0.5, -0.5, 0, 0.5], np.float32),
    "entropy_gradient": np.zeros(4, np.float32), "weight": np.array([1, 1, 0, 1], np.float32),
    "divisor": np.array([-1.0, -2.0, 0, -3.0], np.float32), "advantage": np.array([0.5, 0.5, 0, -0.5], np.float32),
}  # fmt: skip
ARRAYS |= {"sizes of logits": {"size": np.full(4, 2.0)}, "entropies of the oracle": {"array": np.full(3, 1.5)}}
ARRAYS["entropies of other logits"] = {"array": np.array([1.5, 1.5, 1.25])}
ARRAYS["chances of an end"] = {"array": np.array([0.125, 0.25, 0.5, 0.25, 0.75])}
ARRAYS["chances of few ends"] = {"array": np.tile([0.0625, 0.125], 30)}
ARRAYS["alone"] = {"current": np.array([-1.0, -2.0], np.float32), "reference": np.array([-1.5, -1.75], np.float32)}
ARRAYS["alone and otherwise"] = {**ARRAYS["alone"], "reference": np.array([-1.5, -2.5], np.float32)}
ARRAYS["evaluated"] = {
    "tokens": np.array([5, 2, 5, 2]), "mask": np.array([False, True, False, True]),
    **dict.fromkeys(("engine", "trainer"), np.array([np.nan, -1.25, np.nan, -0.5], np.float32)),
    "shortfall": np.array([np.nan, np.nan, np.nan, 0], np.float32),
}  # fmt: skip
ARRAYS["evaluated by drawing"] = {
    **ARRAYS["evaluated"], "shortfall": np.array([np.nan, np.nan, np.nan, 0.75], np.float32)
}  # fmt: skip
ARRAYS["rows without gradient"] = {
    **ARRAYS["loss rows"], "gradient": np.array([-0.5, -0.5, 0, 0.0], np.float32)
}  # fmt: skip
ARRAYS["rows of another token"] = {
    **ARRAYS["loss rows"], "advantage": np.array([0.5, 0.5, 0, 0.5], np.float32)
}  # fmt: skip
ARRAYS["over the engine"] = {
    **ARRAYS["policy"], "divisor": np.array([np.nan, -1.5, -2.25, np.nan, -3.0], np.float32)
}  # fmt: skip
ADDED = (np.array([2, 1, 0], np.float32), np.array([1, -1, 3], np.float32))
ARRAYS |= measured_traces.ARRAYS | {
    name: {"added": ADDED[rank], "reduced": np.array(given, np.float32) / 3, "used": ADDED[0].clip(0, most)}
    for name, rank, most, given in (
        ("sums 0", 0, 9, [3, 0]), ("sums 1", 1, 9, [3]), ("sums of stale weights", 1, 1, [3]),
        ("sums of one rank", 0, 9, [1, 0]), ("rounded sums 0", 0, 9, [3.01, 0]), ("rounded sums 1", 1, 9, [3.01]),
    )
}  # fmt: skip
for number, row in enumerate(([5, 6, 3, 1.75], [4, 7, 3, 1.25])):  # given, magnitudes, passes, reduced
    ARRAYS[f"sums {number}"]["whole"] = np.array([row], np.float64)
ARRAYS["sums without the last"] = {**ARRAYS["sums 1"], "whole": np.array([[4, 7, 3, 1]], np.float64)}
STEPPED = np.linspace(-1, 1, 8, dtype=np.float32)
GIVEN = np.linspace(0.25, 2, 8, dtype=np.float32)
CLIPPED = GIVEN.astype(np.float64) / (2 + 1e-6)  # by a norm of 2 to one of 1
# The first step of Adam is the sign of the gradient.
MOVED = (1 - 5e-4 * 0.1) * STEPPED.astype(np.float64) - 5e-4 * CLIPPED / (CLIPPED + 1e-8)
ARRAYS |= {
    name: {
        "master_before": STEPPED, **dict.fromkeys(("exp_avg_before", "exp_avg_sq_before"), np.zeros(8, np.float32)),
        "gradient": GIVEN, "exp_avg": np.float32(0.1 * CLIPPED), "exp_avg_sq": np.float32(0.05 * CLIPPED**2),
        **dict.fromkeys(("master", "weight"), np.float32(MOVED + off)),
    }
    for name, off in (("update", 0), ("update of other masters", 0.75 * 5e-4))
}  # fmt: skip
RATE = np.float32(1e-3)
BIASES = np.array([[0.5, -0.25, 0.125]], np.float32)
BALANCED, OTHERS = (BIASES + RATE * np.array([[1, -1, last]], np.float32) for last in (0, 1))
ARRAYS["balance"] = {"before": BIASES, "after": BALANCED, "tokens": np.array([[1, 3, 2]])}
ARRAYS["other balance"] = ARRAYS["balance"] | {"after": OTHERS}
ARRAYS["balance of a bias that moved"] = ARRAYS["balance"] | {"left": BIASES + np.float32(2**-12)}
ARRAYS["balance of a bias that stayed"] = ARRAYS["balance"] | {"left": BIASES}


ARRAYS["held out"] = {"array": np.array([-1])}
ARRAYS["trained on too"] = {"array": np.array([3])}
ARRAYS["prompts read again"] = {"tokens": np.array([4, 1, 4, 7]), "read": np.array([4, 1, 4, 7])}
ARRAYS["prompt of another template"] = {"tokens": np.array([4, 1, 4, 7]), "read": np.array([4, 1, 4, 7, 5])}


GROUPS = (
    ParameterGroup(learning_rate=5e-4, weight_decay=0.1, vectors=0, others=6),
    ParameterGroup(learning_rate=5e-4, weight_decay=0.0, vectors=3, others=0),
)
AUDITED = (
    SampledMaster(
        name="decoder.weight", begin=0, elements=8, dtype="float32", learning_rate=5e-4, weight_decay=0.1, step=1,
        left=0.0,
    ),
)  # fmt: skip
ADAM = {"clip_grad": 1.0, "grad_norm": 2.0, "beta_1": 0.9, "beta_2": 0.95, "epsilon": 1e-8}
SUMMED = tuple(
    SummedTensor(
        name="decoder.weight", group="decoder.weight of 1", copies=2, begin=4, elements=3, owned_begin=begin,
        owned=owned, dtype="float32", size=10, owned_size=all_owned,
    )
    for begin, owned, all_owned in ((0, 2, 6), (2, 1, 4))
)  # fmt: skip
"""Elements that two ranks share: the first one's optimizer is given two of them."""


def training() -> list[Record]:
    """Data, batch and step 1, over the two rollouts of `check_traces.tokens`."""
    return [
        *measured_traces.measured(),
        KnobsAsked(name="config", version=1, values={"megatron.recompute": "full", "optimizer.clip_grad": "1.0"}),
        *(
            KnobsReached(
                name="update 1", version=1, rank=rank,
                values={"megatron.recompute": "full", "optimizer.clip_grad": "1.0", "megatron.bucket_size": "40000.0"},
            )
            for rank in range(2)
        ),
        DataOrder(
            name="examples", version=1, step=1, examples=("a", "b"), prompts=("1+1=", "3+1="), answers=("7", "7"),
            rendered=("<bos>1+1=", "<bos>3+1="),
        ),
        RolloutTexts(
            name="texts", version=1, begin="<bos>", ids=("x", "y"), groups=("1/0/a", "1/1/b"),
            prompts=("<bos>1+1=", "<bos>3+1="), answers=("so #### 7", "8"),
        ),
        HeldOutRead(name="held-out", version=1, source="held.jsonl", ids=("c",), array="held out"),
        TokensRead(
            name="tokens", version=1, ids=("x", "y"), whole=False, prompt_lengths=(2, 2), lengths=(2, 2),
            read_prompt_lengths=(2, 2), read_lengths=(2, 2), texts=("so #### 7", "8"), array="prompts read again",
        ),
        PreviousStep(name="step", version=1, updated=True, here=True),
        LossColumns(
            name="update 1", version=1, aggregation="token_mean", ids=("x", "y"), groups=("x", "y"), lengths=(3, 2),
            array="columns",
        ),
        OptimizerSettings(
            name="Adam", version=1, schedule="cosine", learning_rate=1e-3, least_learning_rate=1e-4, warmup_steps=2,
            decay_steps=10, weight_decay=0.1, clip_grad=1.0, beta_1=0.9, beta_2=0.95, epsilon=1e-8,
        ),
        *(
            TrainerStep(
                name="update 1", version=1, rank=rank, step=1, loss=-1 / 6, num_tokens=3, grad_norm=2.0,
                learning_rate=5e-4, weight_decay=0.1, optimizer_steps=1, scheduler_steps=2, groups=GROUPS,
            )
            for rank in range(2)
        ),
        *(
            AdamSample(
                name="update 1", version=1, rank=rank, coordinate=f"tp={rank} pp=0 ep=0 etp=0 cp=0 dp=0",
                tensors=AUDITED, begun_with=0.0, **ADAM, array="update",
            )
            for rank in range(2)
        ),
        *(
            GradientSums(
                name="update 1", version=1, rank=rank, coordinate=f"tp={rank} pp=0 ep=0 etp=0 cp=0 dp=0",
                tensors=(SUMMED[rank],), squares=2.0, array=f"sums {rank}",
            )
            for rank in range(2)
        ),
        *(
            RouterBalance(
                name="update 1", version=1, rank=rank, coordinate=f"tp={rank} pp=0 ep=0 etp=0 cp=0 dp=0", layers=(2,),
                rate=1e-3, array="balance",
            )
            for rank in range(2)
        ),
        GivenRewards(
            name="rewards", version=1, reward="answer", ids=("x", "y"), texts=("so #### 7", "8"), answers=("7", "7"),
            rewards=(1.0, 0.0),
        ),
        Advantages(
            name="advantages", version=1, estimator="dr_grpo", ids=("x", "y"), groups=("g", "g"),
            trajectories=("x", "y"), rewards=(1.0, 0.0), penalties=(0.025, 0.025), token_counts=(2, 1),
            advantages=(0.5, -0.5), kl_weight=0.1, kl_kind="k1",
        ),
        RequestSeeds(name="round 0", version=1, round=0, turns=((6000018, 6000019),), **measured_traces.SEALED),
        SamplingAsked(
            name="answers", version=1, seed=3, batch_size=1, group_size=2, max_rounds=2, max_turns=3, temperature=1.0,
            max_answer_tokens=2, end=3, other_ends=(5,), vocab_size=16,
        ),
        PolicyColumns(
            name="policy inputs", version=1, ids=("x", "y"), lengths=(3, 2), ratio_over="old", weight_level="",
            weight_cap=2.0, max_staleness=1, trained_version=1,
            array="policy",
        ),
        *(
            UpdateRatios(
                name="update 1", version=1, rank=rank, update=1, first=True, ratio_over="old", at_reference=False,
                ratio_gap=0.0, kl_gap=0.0, clipped=0, clamped=0,
            )
            for rank in range(2)
        ),
        Drops(
            name="batch", version=1, ids=("x", "y"), truncated=(False, False), reasons=("", ""), drop_overlong=True,
            drop_zero_variance=True,
        ),
        EpisodeTurns(
            name="round 0", version=1, environment="calculator", max_turns=3, step_wise=False, before="<tool>",
            after="<assistant>", end=3, episodes=("sequence-0", "sequence-1", "longer", "longer", "x", "y"),
            indices=(0, 0, 0, 1, 0, 0), prompts=((1,), (7,), (1,), (1, 2, 3, 6, 8, 4), (1,), (1,)),
            sampled=((2, 3), (5,), (2, 3), (9, 3), (2, 3), (2, 3)),
            texts=("####2", "1", "1+1=", "####2", "so #### 7", "8"), replies=((), (), (6, 8, 4), (), (), ()),
            said=("", "", "<tool>2<assistant>", "", "", ""),
        ),
        LossTerms(name="loss", version=1, loss="clipped", clip_low=0.2, clip_high=0.2),
        LossRows(name="update 1", version=1, coordinate="tp=0 pp=0 ep=0 etp=0 cp=0 dp=0", array="loss rows"),
        LogitSpreads(name="update 1", version=1, coordinate="tp=0", array="sizes of logits"),
        OracleEntropy(
            name="update 1", version=1, role="oracle", temperature=1.0, noise=1e-7, array="entropies of the oracle"
        ),
        RouterChoices(
            name="update 1", version=1, role="oracle", layer=3, num_tokens=60, shortfall=0.01, place=(0, 5),
            noise=0.02, closed=0, closed_in_dtype=0,
        ),
        OracleEnds(
            name="batch", version=0, role="oracle", array="chances of an end", ends=(3, 5), temperature=1.0, noise=0.0
        ),
        SpotScore(name="spot", version=1, id="x", seed=3, step=1, mini_batches=1, array="alone"),
        EvaluatedAnswers(
            name="held-out problems", version=1, claimed=1, temperature=1.0,
            ids=("held_out_reward 1/0/0/c", "accuracy 1/0/0/c"), lengths=(2, 2),
            greedy=(False, True), array="evaluated", max_answer_tokens=4, end=2,
        ),
        *(
            ReferenceShard(
                name="decoder.weight (chunk 0)", version=1, rank=rank, digest=f"vd1:{5:032x}", dtype="float32",
                shape=(4, 2), frozen=f"vd1:{5:032x}",
            )
            for rank in range(2)
        ),
        *(
            kind(
                name="optimizer/exp_avg/decoder.weight (chunk 0)", version=1, rank=rank, digest=f"vd1:{rank + 7:032x}",
                dtype="float32", shape=(4, 2), coordinate=f"tp=0 pp=0 ep=0 etp=0 cp=0 dp={rank}",
            )
            for kind in (SavedState, LoadedState)
            for rank in range(2)
        ),
    ]  # fmt: skip


def having(**values: Any) -> Callable[[Any], Record]:
    return lambda item: replace(item, **values)


def many_ends(seen: list[Record]) -> list[Record]:
    """These facts with thirty short answers of the weights of version 0, which ended where few draws do."""
    return [
        replace(item, tokens=((7, 5),) * 30) if isinstance(item, SampledTokens) and item.version == 0
        else replace(item, array="chances of few ends") if isinstance(item, OracleEnds) else item
        for item in seen
    ]  # fmt: skip


CHANGES: dict[str, tuple[type[Record], Callable[[Any], Record]]] = {
    **measured_traces.CHANGES,
    "ADV002": (Advantages, having(advantages=(0.5, 0.5))),
    "ADV004": (Advantages, having(penalties=(0.025, -0.025))),
    "ADV003": (PolicyColumns, having(array="over the engine")),
    "LGP009": (PolicyColumns, having(array="other weights")),
    "DAT004": (Drops, having(reasons=("", "zero_variance"))),
    "DAT008": (SamplingAsked, having(max_answer_tokens=1)),
    "DAT007": (SamplingAsked, having(batch_size=2)),
    "DAT006": (EpisodeTurns, having(prompts=((1,), (7,), (1,), (1, 9, 3, 6, 8, 4), (1,), (1,)))),
    "LSS005": (RouterChoices, having(shortfall=0.4)),
    "LSS003": (UpdateRatios, having(ratio_gap=0.25)),
    "LGP011": (RequestSeeds, having(turns=((6000018, 6000018),))),
    "LGP012": (OracleEntropy, having(array="entropies of other logits")),
    "LGP013": (SpotScore, having(array="alone and otherwise")),
    "LGP015": (EvaluatedAnswers, having(array="evaluated by drawing")),
    "LGP010": (ReferenceShard, having(digest=f"vd1:{6:032x}")),
    "LSS004": (LossRows, having(array="rows without gradient")),
    "PCK004": (LossRows, having(array="rows of another token")),
    "RWD001": (GivenRewards, having(rewards=(0.0, 0.0))),
    "ADV001": (LossColumns, having(array="means of means")),
    "CKP001": (LoadedState, having(digest=f"vd1:{0:032x}")),
    "CFG001": (
        KnobsReached,
        having(values={"megatron.recompute": "null", "optimizer.clip_grad": "1.0", "megatron.bucket_size": "40000.0"}),
    ),
    "DAT009": (RolloutTexts, having(prompts=("<bos>1+1=", "<bos>+1="))),
    "DAT011": (HeldOutRead, having(array="trained on too")),
    "DAT016": (EvaluatedAnswers, having(ids=("held_out_reward 1/0/0/other", "accuracy 1/0/0/c"))),
    "DAT013": (TokensRead, having(array="prompt of another template", read_prompt_lengths=(2, 3), read_lengths=(2, 3))),
    "TRN002": (TrainerStep, having(learning_rate=1e-3)),
    "TRN003": (TrainerStep, having(optimizer_steps=2)),
    "TRN005": (AdamSample, having(array="update of other masters")),
    "TRN006": (GradientSums, having(array="sums of one rank")),
    "TRN004": (RouterBalance, having(array="other balance")),
}
"""Check -> kind of the fact that is wrong, and how."""

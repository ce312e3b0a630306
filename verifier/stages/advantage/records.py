"""Records of the stage `advantage`: rewards and masks to the advantage and the weight of each token."""

from __future__ import annotations

from verifier.core.owed import Owed, anyone, per_step, per_update
from verifier.core.record import ArrayRecord, Count, Lengths, Real, Record

ESTIMATORS = ("grpo", "grpo_batch", "grpo_others", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline")
"""Estimators of advantages that a check has a formula of."""


class Advantages(Record, frozen=True, kw_only=True, tag="advantage/advantages"):
    """Advantages of a batch; lists have an entry a rollout."""

    owed = (Owed(anyone, per_step),)

    estimator: str
    ids: tuple[str, ...]
    groups: tuple[str, ...]
    trajectories: tuple[str, ...]
    """Trajectory that each rollout is a step of; its own id where it is a whole one."""
    rewards: tuple[float, ...]
    penalties: tuple[float, ...]
    """KL penalty that was taken from each reward; 0 where the KL is in the loss."""
    kl_weight: float = 0.0
    """Weight of the KL estimate in the reward; 0 where it is in the loss."""
    kl_kind: str = "k3"
    token_counts: tuple[Count, ...]
    """Tokens of each rollout in the loss before any filter."""
    advantages: tuple[Real, ...]
    dtype: str = "float64"
    """Dtype that rewards, means and deviations were rounded to."""
    epsilons: tuple[float, float] | None = None
    """Least and greatest epsilon that may have been added to a standard deviation; None: the textbook's own."""
    ddofs: tuple[Count, ...] = ()
    """Numbers of which one was subtracted from the terms under a variance; empty: the textbook's own."""


class PolicyColumns(ArrayRecord, frozen=True, kw_only=True, tag="advantage/policy"):
    """Inputs of a policy loss per token, for a whole batch.

    Arrays [N] over all tokens of all rollouts: ``old``, ``engine``, ``divisor``, ``reference`` float32, nats, NaN where
    not sampled; ``advantage`` float64, the rollout's times the token's importance factor; ``mask`` bool, in the loss;
    ``own`` bool, in the loss before any filter; ``version`` int32, weights that sampled the token. With the KL in the
    reward ``penalty_reference``, and no ``reference``; of a recorded loop that names none, no ``engine``.
    """

    owed = (Owed(anyone, per_step),)

    ids: tuple[str, ...]
    lengths: Lengths
    ratio_over: str
    weight_level: str
    """Level of importance weights; empty: none."""
    weight_cap: Real
    weight_floor: Real = 0.0
    masks: tuple[tuple[str, Real, Real], ...] = ()
    """Importance masks: level of a ratio, or of KL estimates as "token_k3"; the least and the greatest that stay."""
    rejects: bool = False
    """Tokens that no mask keeps left the loss mask (``own`` has them); otherwise their factor is 0."""
    max_staleness: Count
    keep_kv_cache: bool = False
    """Requests keep keys and values at an update, so that later tokens of a rollout read those of other weights."""
    trained_version: Count
    """Version of the weights that the batch trains."""


class LossColumns(ArrayRecord, frozen=True, kw_only=True, tag="advantage/columns"):
    """Inputs of the loss per token, made once for the whole batch. Arrays [N] float64 over all tokens, by name.

    The ``weight`` of a token that came to no loss of a recorded loop is NaN.
    """

    owed = (Owed(anyone, per_update),)

    aggregation: str
    """Mean that the weights make: "token_mean", "sequence_mean", "prompt_mean" or "constant"."""
    constant: float = 1.0
    """Tokens of a sequence that the aggregation "constant" divides by."""
    divisor: float | None = None
    """Divisor of the sum over tokens, or of means; None: the number of those with tokens in the loss."""
    gradient_divisor: float | None = None
    """Divisor of the sum of all ranks' gradients, by which the weights of each are multiplied; None: the number of
    ranks with rollouts of their own."""
    dtype: str = "float64"
    """Dtype in which the weights were computed."""
    ids: tuple[str, ...]
    groups: tuple[str, ...]
    lengths: Lengths

"""Records of a policy-gradient step: rewards, advantages, log-probabilities by name, ratios and rows of the loss."""

from __future__ import annotations

from verifier.core.owed import Owed, anyone, every_rank, last_stage, per_answers, per_step, per_update
from verifier.core.record import ArrayRecord, Count, Digest, Lengths, Real, Record, TensorRecord


class GivenRewards(Record, frozen=True, kw_only=True, tag="reward/rewards"):
    """Rewards of a batch and what they were given for; lists have an entry a rollout."""

    owed = (Owed(anyone, per_answers),)

    reward: str
    """Name of the reward function; empty for rewards that were recorded."""
    ids: tuple[str, ...]
    texts: tuple[str | None, ...]
    """Text of each answer; None where it is not known."""
    answers: tuple[str | None, ...]
    """Gold answer of each prompt; None where it is not known."""
    rewards: tuple[float, ...]


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
    weight_cap: float
    mask_level: str
    """Level of importance masks; empty: none."""
    mask_low: float
    mask_high: float
    max_staleness: Count
    keep_kv_cache: bool = False
    """Requests keep keys and values at an update, so that later tokens of a rollout read those of other weights."""
    trained_version: Count
    """Version of the weights that the batch trains."""


class UpdateRatios(Record, frozen=True, kw_only=True, tag="loss/ratios"):
    """Ratios and KL estimates of one optimizer step, over all tokens in the loss."""

    owed = (Owed(every_rank, per_update),)

    update: Count
    """Number of the optimizer step, from 1."""
    first: bool
    """The weights are those that made the `old` log-probabilities."""
    ratio_over: str
    at_reference: bool
    """The weights are the reference's."""
    ratio_gap: Real
    """Greatest distance of a ratio from 1."""
    kl_gap: Real
    """Greatest magnitude of a token's KL estimate, nats."""
    clipped: Count
    clamped: Count


class Drops(Record, frozen=True, kw_only=True, tag="data/drops"):
    """Reasons for which rollouts of a batch left the loss; lists have an entry a rollout."""

    owed = (Owed(anyone, per_step),)

    ids: tuple[str, ...]
    truncated: tuple[bool, ...]
    """The answer was cut off at the greatest length."""
    reasons: tuple[str, ...]
    """Empty for a rollout that stays."""
    drop_overlong: bool
    """The config asks to leave out answers that were cut off."""
    drop_zero_variance: bool
    """The config asks to leave out groups whose rewards are all equal."""


class SamplingAsked(Record, frozen=True, kw_only=True, tag="data/asked"):
    """Answers of a step that the config asks of the engine."""

    owed = (Owed(anyone, per_step),)

    seed: int | None
    """Seed of the run, of which those of its requests follow; None where they follow of none."""
    batch_size: Count
    """Prompts of a round, at most; 0 where nobody says."""
    group_size: Count
    max_rounds: Count
    """Rounds of sampling of a step, at most."""
    max_turns: Count
    """Turns of an episode, at most."""
    temperature: float
    max_answer_tokens: Count
    """Tokens of an answer, or of a turn, at most."""
    end: Count
    """Token that ends an answer."""
    other_ends: tuple[Count, ...] = ()
    """Further end tokens that the checkpoint names: an engine may stop at them too."""
    ends: bool = True
    """An end token ends an answer; otherwise each has the greatest length."""
    vocab_size: Count = 0
    """Tokens of the vocabulary; 0: not known."""
    quantized: bool = False
    """The engine rounds the weights that it samples from."""
    filtered: bool = False
    """Answers leave the loss, or are replaced, for what was sampled: those that are left are no fair sample."""
    sent: tuple[Count, ...] = ()
    """Versions that the engine was sent last, in order; a step without an update sends none."""


class RequestSeeds(Record, frozen=True, kw_only=True, tag="data/seeds"):
    """Seeds of the answers of one round of sampling, as the processes of the engines named them in their answers."""

    owed = (Owed(anyone, per_step),)

    round: Count
    """From 0."""
    turns: tuple[tuple[int, ...], ...]
    """Seed of each answer, prompt by prompt, in each turn; in later turns those of the episodes that go on; -1 for
    none of its own. Empty where a checkpoint that the run goes on from has none."""
    seals: tuple[tuple[tuple[int, int], ...], ...] = ()
    """Checksums of the token ids (int64) and of the log-probabilities (float32) of each of these answers, as they came
    from the engines; empty where there are no seeds."""
    routes: tuple[tuple[int, ...], ...] = ()
    """Checksum of the routes (int32) of each of these answers, as the engines' processes took it; -1 for none."""
    answers: tuple[str, ...] = ()
    """Rollout, or episode of several turns, that each answer of the first turn begins."""
    shaped: tuple[str, ...] = ()
    """Knobs of their requests that change the next token's distribution, as the engines' processes gave them: every
    combination that was asked for, each as name=value of what is not neutral, an adapter first."""
    weights: tuple[tuple[tuple[tuple[Count, Count], ...], ...], ...] = ()
    """Versions of the weights that the engines' processes held when they sampled each of these answers, in order, each
    with its number of tokens; empty of engines that get adapters, and in older traces."""


class EpisodeTurns(Record, frozen=True, kw_only=True, tag="data/turns"):
    """Turns of a round's episodes with an environment, as the engine sampled them; lists have an entry a turn."""

    owed = (Owed(anyone, per_step),)

    environment: str
    max_turns: Count
    """Turns that the config allows."""
    step_wise: bool
    """Each turn is a rollout of its own, whose id is the episode's and the number of the turn."""
    before: str
    """Text that the chat template puts before a tool's message, from the end token of the turn on."""
    after: str
    """Text that it puts between a tool's message and the next turn."""
    end: Count
    """Token that ends a turn."""
    episodes: tuple[str, ...]
    indices: tuple[Count, ...]
    """Number of the turn in its episode, from 0."""
    prompts: tuple[tuple[int, ...], ...]
    """Token ids that the engine was given."""
    sampled: tuple[tuple[int, ...], ...]
    """Token ids that it sampled."""
    texts: tuple[str, ...]
    """Text of the sampled tokens, without their end token."""
    replies: tuple[tuple[int, ...], ...]
    """Token ids that the environment added; empty where the episode ends."""
    said: tuple[str, ...]
    """Text of the added tokens."""
    seals: tuple[int, ...] = ()
    """Seals of what the environment said, in any order, with the turns that it read; none in older traces."""
    read_replies: tuple[tuple[int, ...], ...] = ()
    """Token ids of each reply by a second reader of the tokenizer's files; none without one, and in older traces."""
    read_texts: tuple[str, ...] = ()
    """Text of each turn by the same reader."""


class LossTerms(Record, frozen=True, kw_only=True, tag="loss/terms"):
    """Loss of a token that the config asks for."""

    owed = (Owed(anyone, per_step),)

    loss: str
    """Name of the loss; plugins add others."""
    clip_low: float
    clip_high: float
    dual_clip: float | None = None
    kl_weight: float = 0.0
    """Weight of the KL estimate in the loss; 0 where it is in the reward."""
    kl_kind: str = "k3"
    entropy_weight: float = 0.0
    temperature: float = 1.0
    """Divisor of the logits."""


class LossRows(ArrayRecord, frozen=True, kw_only=True, tag="loss/rows"):
    """Rows that the loss of one update read and made on one rank, over its micro-batches; every array is [T].

    ``sentinel`` int64 as in `TokenLedger`; ``mask`` bool, in the loss; ``current``, ``entropy`` float32, nats;
    ``loss`` float32, of the token before its weight; ``gradient``, ``entropy_gradient`` float32, of the rank's summed
    loss by the token's log-probability and entropy. And the columns that it read, float32: ``weight``, and for a policy
    loss ``divisor``, ``advantage`` and ``reference``.
    """

    owed = (Owed(last_stage, per_update),)

    coordinate: str
    """Mesh coordinate of the rank."""


class OracleEntropy(ArrayRecord, frozen=True, kw_only=True, tag="logprob/entropy"):
    """Entropy by transformers in float32 at each token in the loss of one update.

    Arrays [N] float64, nats: ``array``; ``scale``, most that differences of logits of the size of their
    rounding to the run's dtype change it by.
    """

    owed = (Owed(anyone, per_update),)

    temperature: float
    """Divisor of the logits."""
    noise: Real
    """Greatest distance by weights of the run's dtype, or of float64, at any token of the rollouts; nats."""


class ScoredRows(ArrayRecord, frozen=True, kw_only=True, tag="logprob/rows"):
    """Rows of a pass that scored a mini-batch of a step, on one rank, as the rank made them; every array is [T].

    ``sentinel`` int64 as in `TokenLedger`, of the batch's rollouts; ``logprob`` float32, nats.
    """

    owed = (Owed(last_stage, per_step),)

    which: str
    """Weights: "current", which make `old`, or "reference"."""
    ids: tuple[str, ...]
    """Rollouts of the batch."""
    coordinate: str
    """Mesh coordinate of the rank."""


class SpotScore(ArrayRecord, frozen=True, kw_only=True, tag="logprob/spot"):
    """One rollout of a step that the trainer scored by itself, alone in its pack, before the step's first update.

    Arrays [L - 1] float32, nats: ``current`` by the weights as they were, ``reference`` where there is one; and the
    first ones of ``current`` again, ``beginning``, where the rollout was scored without its end.
    """

    owed = (Owed(anyone, per_step),)

    id: str
    """Id of the rollout, which a rule of seed, step and mini-batches chooses."""
    seed: int
    """Seed of the run."""
    step: Count
    mini_batches: Count
    """0 where a recorded loop chose the rollout."""
    temperature: float = 1.0
    """Divisor of the logits."""


class EvaluatedAnswers(ArrayRecord, frozen=True, kw_only=True, tag="rollout/evaluated"):
    """A few answers of an evaluation, and the trainer's scores of them; lists have an entry an answer.

    Arrays over all tokens of all answers, prompts included: ``tokens`` int64; ``mask`` bool, sampled ones; float32
    nats, NaN elsewhere: ``engine`` as it reported them, ``trainer`` by the live weights of this version, and of greedy
    answers ``shortfall``, how far the logit of a token is below the greatest one in the trainer.
    """

    claimed: Count
    """Version that the metrics of the evaluation name."""
    temperature: float
    """Divisor of the logits of answers that are not greedy; of greedy ones it is 1."""
    ids: tuple[str, ...]
    lengths: Lengths
    greedy: tuple[bool, ...]
    max_answer_tokens: Count
    """Greatest length of an answer, or of a turn, that the config asks for."""
    end: Count
    """End token of the tokenizer."""
    other_ends: tuple[Count, ...] = ()
    """Other tokens at which engines stop too."""
    shaped: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    """Knobs of the requests for all answers of the evaluation, those that are not greedy first, as `RequestSeeds` has
    them; None in older traces."""
    sent: Count | None = None
    """Version that the engine was sent last before the evaluation; None in older traces."""
    seeds: tuple[tuple[int, ...], ...] = ()
    """Seeds of all answers that are not greedy, problem by problem, in each turn, as `RequestSeeds` has them; empty in
    older traces."""
    weights: tuple[Count, ...] = ()
    """Versions of the weights that the engines' processes held when they sampled all answers of the evaluation, each
    once; empty of engines that get adapters, and in older traces."""


class ReferenceShard(TensorRecord, frozen=True, kw_only=True, tag="logprob/reference"):
    """One live tensor of a rank while it scored as the reference."""

    owed = (Owed(every_rank, per_step),)

    frozen: Digest
    """Content of the reference's tensor when the run was loaded."""
    begun: Digest | None = None
    """Content of the live tensor when the run was loaded; None beyond the first step, and after a resume."""

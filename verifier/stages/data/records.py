"""Records of the stage `data`: data set to the examples and rollouts of a step."""

from __future__ import annotations

from verifier.core.owed import Owed, anyone, per_answers, per_step
from verifier.core.record import ArrayRecord, Count, Lengths, Record


class HeldOutRead(ArrayRecord, frozen=True, kw_only=True, tag="data/evaluated"):
    """Problems of the evaluation.

    Array [N] int64: the first example to train on that has the question of each, -1 for none.
    """

    owed = (Owed(anyone, per_step),)

    source: str
    ids: tuple[str, ...]
    """Id of each problem."""


class TokensRead(ArrayRecord, frozen=True, kw_only=True, tag="data/tokens-read"):
    """Tokens of a step's prompts, or of whole examples in fine-tuning, beside a second reading; an entry a rollout.

    The second reader calls nothing that renders, encodes or decodes for the trainer. Arrays: ``tokens``, as they are
    trained, and ``read``, [N] int64 each; of whole examples ``mask``, their tokens in the loss, and ``read_mask``, [N]
    bool each, which older traces do not have.
    """

    owed = (Owed(anyone, per_answers),)

    ids: tuple[str, ...]
    whole: bool
    """Examples of fine-tuning, whole; otherwise the prompts alone."""
    prompt_lengths: Lengths
    lengths: Lengths
    read_prompt_lengths: Lengths
    read_lengths: Lengths
    texts: tuple[str, ...] = ()
    """Text of the last turn that was sampled, without its end token, by the second reader; empty in fine-tuning."""
    end: int | None = None
    """Token that ends an answer; None in older traces."""
    read_end: int | None = None
    """The same by the second reader; None where it finds none."""


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
    replicas: Count = 1
    """Engines; prompt p of a round is answered by engine p modulo their number."""
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
    """Seed of each answer, prompt by prompt, in each turn; in later turns those of the episodes that go on; for none of
    its own -2 less the seed of the generator that serves all of its engine, or -1 where nobody says which. Empty where
    a checkpoint that the run goes on from has none."""
    seals: tuple[tuple[tuple[int, int], ...], ...] = ()
    """Checksums of the token ids (int64) and of the log-probabilities (float32) of each of these answers, as they came
    from the engines; empty where there are no seeds."""
    routes: tuple[tuple[int, ...], ...] = ()
    """Checksum of the routes (int32) of each of these answers, as the engines' processes took it; -1 for none."""
    answers: tuple[str, ...] = ()
    """Rollout, or episode of several turns, that each answer of the first turn begins."""
    rewards: tuple[int, ...] = ()
    """Seals of the rewards of the round, in any order, with the text and the gold answer that they were given for, as
    the reward's processes took them; none where a checkpoint had them, and in older traces."""
    shaped: tuple[str, ...] = ()
    """Knobs of their requests that change the next token's distribution, as the engines' processes gave them: every
    combination that was asked for, each as name=value of what is not neutral, an adapter first."""
    weights: tuple[tuple[tuple[tuple[Count, Count], ...], ...], ...] = ()
    """Versions of the weights that the engines' processes held when they sampled each of these answers, in order, each
    with its number of tokens; empty of engines that get adapters, and in older traces."""
    cached: tuple[tuple[Count, ...], ...] = ()
    """Tokens of the prompt of each of these answers that the prefix cache held; empty where it outlives weights."""
    common: tuple[tuple[int, ...], ...] = ()
    """Most that it can have held, see `Asked.common`; -1 if nobody looked."""


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


class DataOrder(Record, frozen=True, kw_only=True, tag="data/order"):
    """Examples that one round of sampling asks, in order."""

    owed = (Owed(anyone, per_step),)

    step: Count
    """Number of the step, from 1."""
    examples: tuple[str, ...]
    """Id of each example."""
    prompts: tuple[str, ...]
    """Text of each prompt."""
    answers: tuple[str | None, ...] = ()
    """Gold answer of each example."""
    rendered: tuple[str, ...] = ()
    """Text of all that an engine is given for each prompt, as the tokenizer's template writes it."""
    round: Count = 0
    """Round of sampling within the step: prompts of a later one replace others."""


class RolloutTexts(Record, frozen=True, kw_only=True, tag="data/texts"):
    """Texts of a batch's rollouts, decoded from the tokens that are trained; lists have an entry a rollout."""

    owed = (Owed(anyone, per_step),)

    begin: str
    """Text of the tokens that the tokenizer puts before a whole text, such as `<bos>`."""
    ids: tuple[str, ...]
    groups: tuple[str, ...]
    """Step, round of sampling unless it is the first, place in it and id of the example, as "3.1/0/example"."""
    prompts: tuple[str, ...]
    answers: tuple[str, ...]
    """Last turn that was sampled, without its end token."""


class TrainedText(Record, frozen=True, kw_only=True, tag="data/trained"):
    """Texts of a step's examples in a recorded loop; lists have an entry an example."""

    owed = (Owed(anyone, per_step),)

    ids: tuple[str, ...]
    responses: tuple[str, ...]
    """Text that the data set has after the prompt."""
    texts: tuple[str, ...]
    """Text of the tokens in the loss, special ones included."""
    end: str
    """Text of the end token."""

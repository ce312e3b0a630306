"""Records of a run's data beside a second reading: examples, held-out problems, recorded rollouts, tokens."""

from __future__ import annotations

from verifier.core.owed import Owed, anyone, per_answers, per_step
from verifier.core.record import ArrayRecord, Count, Lengths


class RowsRead(ArrayRecord, frozen=True, kw_only=True):
    """Examples beside the rows of their source, by digests that a second reader has taken."""

    source: str
    num_examples: Count
    """Examples, or problems of the evaluation, that the trainer has."""
    num_rows: Count
    """Rows of the source that the config asks for, by the second reader."""
    parts: tuple[str, ...]
    ids: tuple[str, ...]
    """Id of each example, as the trainer has it."""


class ExamplesRead(RowsRead, frozen=True, kw_only=True, tag="data/read"):
    """Examples of a step beside the rows of their source, by digests that a second reader has taken.

    Arrays: ``indices`` [N] int64, of the examples in the data set; [N, parts] int64 each: ``used``, digests of the
    parts of the examples as the trainer has them; ``read``, of the rows at these indices, 0 beyond the last;
    ``found``, the first row of the source that has the part that was used, -1 for none.
    """

    owed = (Owed(anyone, per_step),)


class HeldOutRead(RowsRead, frozen=True, kw_only=True, tag="data/evaluated"):
    """Problems of the evaluation beside the rows of their source.

    Arrays as those of `ExamplesRead`, and ``trained`` [N] int64: the first row of the source of training that has the
    question, by the second reader, -1 for none.
    """

    owed = (Owed(anyone, per_step),)


class RolloutsRead(ArrayRecord, frozen=True, kw_only=True, tag="data/recorded"):
    """Recorded rollouts of a step as a second reader finds them in their file; lists have an entry a rollout.

    Arrays, each [N] over all tokens: ``tokens`` int64; ``sampled`` and ``mask`` bool; ``logprobs`` float32, nats, and
    ``versions`` int32, which mean nothing where not sampled; where all rollouts have them, ``routes`` [N, M, K] int32.
    """

    owed = (Owed(anyone, per_step),)

    ids: tuple[str, ...]
    groups: tuple[str, ...]
    trajectories: tuple[str, ...]
    """Trajectory that each rollout is a step of; its own id where it is a whole one."""
    prompt_lengths: Lengths
    lengths: Lengths
    rewards: tuple[float, ...]
    texts: tuple[str | None, ...]
    answers: tuple[str | None, ...]
    truncated: tuple[bool, ...]
    """The answer was cut off at the greatest length."""


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

"""Records of a run's data: its held-out problems, and tokens beside a second reading."""

from __future__ import annotations

from verifier.core.owed import Owed, anyone, per_answers, per_step
from verifier.core.record import ArrayRecord, Lengths


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

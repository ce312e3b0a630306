"""Reward by the package math-verify, for answers in LaTeX; optional."""

from __future__ import annotations

import logging

from verifier.data.examples import short
from verifier.errors import UsageError
from verifier.rewards.answer import without_reasoning

try:
    from math_verify import parse, verify
except ImportError as _absent:
    raise UsageError("the package math-verify is not installed: install math-verify==0.9.0") from _absent

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at each call that its deadlines are off


def math_verify_reward(completion: str, answer: str) -> float:
    r"""1 if math-verify finds the completion's answer equal to the gold one, else 0.

    A gold answer is plain, or LaTeX as in `\frac{1}{2}`. The package's own deadlines, by signals, are off: the process
    that calls this has one.

    Raises:
        UsageError: the package finds no expression in the gold answer.

    Source:
        https://github.com/huggingface/Math-Verify, `parse` and `verify`.
    """
    gold = parse(f"${answer}$", parsing_timeout=None)
    if not gold:
        raise UsageError(f"math-verify finds no expression in the gold answer {short(answer)}: mend the data")
    return float(verify(gold, parse(without_reasoning(completion), parsing_timeout=None), timeout_seconds=None))

"""Lengths of a report."""

from __future__ import annotations

import enum


class Detail(enum.IntEnum):
    """Length of a report on a terminal or in a file of text."""

    ANSWER = 0
    """The verdict and the cause alone."""
    USUAL = 1
    """The findings where data first went wrong whole, and a line for each later one."""
    WHOLE = 2
    """Every finding whole."""

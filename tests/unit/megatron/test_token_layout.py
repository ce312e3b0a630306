"""The alignment rules, against those of the other trainers as they state them; what is refused."""

import math

import numpy as np
import pytest

from verifier.errors import ContractError, UsageError
from verifier.megatron.token_layout import Alignment, cp_rows, lay_out, sp_slice

SIZES = [(tp, cp) for tp in (1, 2, 3, 4, 8) for cp in (1, 2, 4, 8)]


def skyrl(tp: int, cp: int, fp8: str) -> int:
    """get_packed_seq_align_size."""
    layout = tp * cp * 2 if cp > 1 else tp
    if not fp8:
        return layout
    tile = 32 * tp * cp if fp8 == "mxfp8" else 128 * tp * cp if tp > 1 else 16 * cp
    return math.lcm(layout, tile)


def verl(tp: int, cp: int, fp8: str) -> tuple[int, int]:
    """preprocess_packed_seqs: (multiple of each sequence, multiple of the whole)."""
    align = tp * cp * 2 if cp > 1 else tp
    return (math.lcm(16, align), align * 128) if fp8 else (align, align)


@pytest.mark.parametrize(("tp", "cp"), SIZES)
@pytest.mark.parametrize("fp8", ["", "blockwise", "mxfp8"])
def test_every_trainers_rule_holds(tp: int, cp: int, fp8: str) -> None:
    ours = Alignment(tp=tp, cp=cp, fp8=fp8)
    assert ours.sequence_multiple == skyrl(tp, cp, fp8)
    per_sequence, total = verl(tp, cp, fp8)
    assert ours.sequence_multiple % per_sequence == 0
    assert ours.total_multiple % total == 0
    assert ours.total_multiple % ours.sequence_multiple == 0
    if not fp8:
        assert (ours.sequence_multiple, ours.total_multiple) == (per_sequence, total)


def test_without_sequence_parallelism_tensor_parallelism_does_not_pad() -> None:
    assert Alignment(tp=8, sp=False).sequence_multiple == 1
    assert Alignment(tp=8, cp=2, sp=False).sequence_multiple == 4


def test_the_last_subsequence_takes_the_rest_of_the_whole() -> None:
    real, padded = lay_out(np.array([5, 3]), Alignment(fp8="blockwise"))
    assert real.tolist() == [0, 5, 8]
    assert padded.tolist() == [0, 16, 128]


def test_zigzag_rows_of_two_subsequences() -> None:
    ends = np.array([0, 8, 12])
    assert cp_rows(ends, 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert cp_rows(ends, 2, 1).tolist() == [2, 3, 4, 5, 9, 10]


def test_rows_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ContractError, match="sub-sequence 1 has 6 padded tokens, which 2 \\* cp = 4 does not divide"):
        cp_rows(np.array([0, 8, 14]), 2, 0)
    with pytest.raises(ContractError, match="7 rows do not divide over tp = 2"):
        sp_slice(7, 2, 0)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"tp": 0}, "tp and cp of at least 1"),
        ({"fp8": "e4m3"}, "unknown fp8 recipe `e4m3`: choose one of blockwise, mx"),
    ],
)
def test_impossible_alignments_are_refused(sizes: dict, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Alignment(**sizes)

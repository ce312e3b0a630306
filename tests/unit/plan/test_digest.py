"""The content digest: fixed answers, every kind of damage shows, all implementations agree bit for bit."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import reference_digest
from tests.reference_digest import lane_sums_numpy
from verifier.errors import ContractError
from verifier.plan.digest import Pieces, digest_tensor, digest_tensors
from verifier.plan.digest_definition import BLOCK_BYTES, COLUMNS, KEYS, ROWS, finish, finish_all

EDGES = [0, 1, 2, 3, 4, 5, 511, 512, 513, 1024, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 5 * BLOCK_BYTES + 7]


def bytes_of(num_bytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)


def reference(data: torch.Tensor) -> str:
    first, second = finish(*lane_sums_numpy(data), data.numel())
    return f"vd1:{first:016x}{second:016x}"


MASK = (1 << 64) - 1
GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mixed(value: int) -> int:
    """The finaliser of splitmix64."""
    value = (value ^ value >> 30) * MIX_1 & MASK
    value = (value ^ value >> 27) * MIX_2 & MASK
    return value ^ value >> 31


def finished(low: int, high: int, num_bytes: int) -> str:
    first = mixed(low + mixed(num_bytes + GOLDEN & MASK) & MASK)
    second = mixed(high + first * MIX_1 & MASK)
    return f"vd1:{mixed(first + second * MIX_2 & MASK):016x}{second:016x}"


def by_definition(data: bytes) -> str:
    """The docstring's definition, word for word, in Python integers."""
    sums = [0, 0]
    keys = [[mixed((lane * ROWS + row + 1) * GOLDEN & MASK) >> 32 for row in range(ROWS)] for lane in range(2)]
    padded = data + bytes(-len(data) % BLOCK_BYTES)
    words = [int.from_bytes(padded[at : at + 4], "little") for at in range(0, len(padded), 4)]
    for lane in range(2):
        for block in range(len(padded) // BLOCK_BYTES):
            for column in range(COLUMNS):
                value = 0
                for row in range(0, ROWS, 2):
                    at = (block * ROWS + row) * COLUMNS + column
                    value += (words[at] ^ keys[lane][row]) * (words[at + COLUMNS] ^ keys[lane][row + 1])
                place = (block * COLUMNS + column + 1) * GOLDEN
                sums[lane] += mixed(value + place & MASK)
    return finished(sums[0] & MASK, sums[1] & MASK, len(data))


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.zeros(0), "vd1:e7f0ca6e469f46d83965a9c6cd3226fb"),
        (torch.zeros(1, dtype=torch.uint8), "vd1:b9cecab06b33c6c34a8b7080e3d71d46"),
        (torch.arange(64, dtype=torch.float32), "vd1:a3e9940a290028021a9add3515d863d2"),
        (torch.arange(100_000, dtype=torch.int32), "vd1:80ca3e6075f69b0b518c18bd3f370fb8"),
    ],
)
def test_known_answers(tensor, expected):
    """These never change: recorded manifests hold digests."""
    assert digest_tensor(tensor) == expected


@pytest.mark.parametrize("num_bytes", [1, 7, 1000, BLOCK_BYTES + 5])
def test_it_is_what_the_definition_says(num_bytes):
    data = bytes_of(num_bytes)
    assert digest_tensor(data) == by_definition(bytes(data.tolist()))


def test_keys_are_all_different():
    keys = KEYS.flatten().tolist()
    assert len(set(keys)) == len(keys) == 2 * ROWS
    assert all(0 < key < 1 << 32 for key in keys)


@pytest.mark.parametrize("num_bytes", EDGES)
@pytest.mark.parametrize("offset", [0, 1, 2])
def test_host_path_equals_reference_at_every_edge(num_bytes, offset):
    data = bytes_of(num_bytes + offset)[offset:]
    assert digest_tensor(data) == reference(data)


@given(num_bytes=st.integers(0, 70_000), offset=st.integers(0, 5), seed=st.integers(0, 2**31))
@settings(max_examples=60)
def test_host_path_equals_reference(num_bytes, offset, seed):
    data = bytes_of(num_bytes + offset, seed)[offset:]
    assert digest_tensor(data) == reference(data)


def test_reference_in_several_pieces():
    data = bytes_of(2 * reference_digest._REFERENCE_BLOCKS * BLOCK_BYTES + 12345)
    assert digest_tensor(data) == reference(data)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_gpu_kernel_equals_reference_when_interpreted():
    """Triton's interpreter runs the kernel on the host; tests/h100 runs it on a GPU."""
    script = Path(__file__).with_name("interpret_digest_kernel.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[3])}
    run = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "26 cases equal\n"


ALL_DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.complex64,
]  # fmt: skip


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_every_dtype_by_its_bytes(dtype):
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 2, (24 * size,), dtype=torch.uint8)
    tensor = raw.view(dtype)
    assert digest_tensor(tensor) == digest_tensor(tensor.reshape(2, 3, 4)) == digest_tensor(raw)
    assert digest_tensor(tensor[0]) == digest_tensor(raw[:size])


def test_layout_in_memory_does_not_enter():
    tensor = torch.randn(33, 65)
    assert digest_tensor(tensor.t()) == digest_tensor(tensor.t().contiguous()) != digest_tensor(tensor)
    assert digest_tensor(tensor[:, ::3]) == digest_tensor(tensor[:, ::3].clone())
    assert digest_tensor(tensor[0].expand(4, 65)) == digest_tensor(tensor[0].repeat(4, 1))
    value = torch.randn(8, dtype=torch.complex64)
    assert digest_tensor(value.conj()) == digest_tensor(value.conj().resolve_conj()) != digest_tensor(value)
    assert digest_tensor(value.conj().imag) == digest_tensor(-value.imag)


def test_a_parameter_is_its_data():
    parameter = torch.nn.Parameter(torch.randn(3, 5))
    assert digest_tensor(parameter) == digest_tensor(parameter.data)


def test_many_at_once_in_order():
    tensors = [torch.randn(5), torch.zeros(0), torch.arange(9), torch.randn(100_000)]
    assert digest_tensors(tensors) == [digest_tensor(tensor) for tensor in tensors]
    assert digest_tensors([]) == []


def test_sums_of_many_end_as_one_by_one():
    """What a GPU hands back is finished by the same arithmetic."""
    sums = torch.randint(-(2**63), 2**63 - 1, (50, 2))
    sizes = [0, 1, 2**40, *range(100, 147)]
    one_by_one = [
        finished(low & MASK, high & MASK, size) for (low, high), size in zip(sums.tolist(), sizes, strict=True)
    ]
    assert finish_all(sums, sizes) == one_by_one


def test_pieces_of_a_buffer_are_its_slices():
    buffer = bytes_of(3 * BLOCK_BYTES + 48)
    begins, sizes = [0, BLOCK_BYTES, BLOCK_BYTES + 16, 3 * BLOCK_BYTES], [100, 0, 2 * BLOCK_BYTES - 17, 48]
    expected = [digest_tensor(buffer[begin : begin + size]) for begin, size in zip(begins, sizes, strict=True)]
    pieces = Pieces(begins, sizes)
    assert pieces.start(buffer).result() == pieces.start(buffer).result() == expected


@pytest.mark.parametrize("tensor", [torch.empty(3, device="meta"), torch.eye(3).to_sparse()], ids=["meta", "sparse"])
def test_what_has_no_bytes_is_refused(tensor):
    with pytest.raises(ContractError, match="has no bytes to digest"):
        digest_tensor(tensor)


def test_the_input_is_not_touched():
    tensor = torch.randn(70_001)
    before = tensor.clone()
    digest_tensor(tensor)
    assert torch.equal(tensor, before)


DAMAGE = {
    "one bit": lambda t: t.view(torch.int32)[7].bitwise_xor_(1),
    "sign of one element": lambda t: t[9].neg_(),
    "sign of two elements in a row": lambda t: t[8:10].neg_(),
    "sign of all": lambda t: t.neg_(),
    "sign of zero": lambda t: t[0].fill_(-0.0),
    "two words swapped": lambda t: t.copy_(t[[1, 0, *range(2, t.numel())]]),
    "two words of one column swapped": lambda t: t[: 2 * COLUMNS : COLUMNS].copy_(t[: 2 * COLUMNS : COLUMNS].flip(0)),
    "all shifted by one": lambda t: t.copy_(t.roll(1)),
    "two rows swapped": lambda t: t.view(-1, 64).copy_(t.view(-1, 64)[[1, 0, *range(2, t.numel() // 64)]]),
    "two kernel rows swapped": lambda t: t.view(-1, 128).copy_(t.view(-1, 128)[[2, 1, 0, *range(3, t.numel() // 128)]]),
    "two blocks swapped": lambda t: t.view(-1, 4096).copy_(t.view(-1, 4096)[[1, 0, *range(2, t.numel() // 4096)]]),
    "transposed": lambda t: t.copy_(t.view(128, -1).t().reshape(-1)),
    "reversed": lambda t: t.copy_(t.flip(0)),
    "last element": lambda t: t[-1].add_(1),
    "NaN's payload": lambda t: t.view(torch.int32)[3].bitwise_xor_(2),
    "zeroed": lambda t: t.zero_(),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_shows(what):
    tensor = torch.randn(8 * 4096, generator=torch.Generator().manual_seed(5))
    tensor[0] = 0.0
    tensor[3] = float("nan")
    before = digest_tensor(tensor)
    DAMAGE[what](tensor)
    assert digest_tensor(tensor) != before


@pytest.mark.parametrize("value", [0.0, 1.0, float("nan")])
def test_length_shows_where_contents_cannot(value):
    digests = {digest_tensor(torch.full((length,), value)) for length in range(5000)}
    assert len(digests) == 5000


@pytest.mark.slow
def test_no_collision_among_structured_variations():
    """100,000 tensors that differ as mistakes do: each single bit, one-hot, near-equal constants, permutations."""
    seen = set()
    num_words = 1024
    base = bytes_of(4 * num_words).view(torch.int32)
    for bit in range(32):
        for word in range(num_words):
            changed = base.clone()
            changed[word] ^= torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
            seen.add(digest_tensor(changed))
    count = 32 * num_words
    for position in range(30_000):
        sparse = torch.zeros(30_000, dtype=torch.uint8)
        sparse[position] = 1
        seen.add(digest_tensor(sparse))
    count += 30_000
    for number in range(20_000):
        seen.add(digest_tensor(torch.full((64,), number, dtype=torch.int32)))
    count += 20_000
    generator = torch.Generator().manual_seed(1)
    ramp = torch.arange(256, dtype=torch.int16)
    permutations = {tuple(torch.randperm(256, generator=generator).tolist()) for _ in range(20_000)}
    for permutation in permutations:
        seen.add(digest_tensor(ramp[list(permutation)]))
    count += len(permutations)
    assert count > 100_000
    assert len(seen) == count


def test_output_bits_are_balanced():
    """Flipping any one input bit flips each of the 128 output bits in about half of the cases."""
    generator = torch.Generator().manual_seed(2)
    flips = torch.zeros(128)
    num_trials = 2000
    for _ in range(num_trials):
        data = torch.randint(0, 256, (600,), dtype=torch.uint8, generator=generator)
        before = int(digest_tensor(data)[4:], 16)
        at = int(torch.randint(0, 4800, (), generator=generator))
        data[at // 8] ^= 1 << at % 8
        difference = before ^ int(digest_tensor(data)[4:], 16)
        flips += torch.tensor([difference >> bit & 1 for bit in range(128)])
    share = flips / num_trials
    assert share.min() > 0.44
    assert share.max() < 0.56


def test_digests_can_be_read_as_text():
    text = digest_tensor(torch.zeros(3))
    assert text.startswith("vd1:")
    assert len(bytes.fromhex(text[4:])) == 16

"""The digest kernel on a GPU: the host's bits, at the speed of memory, however many tensors; and packing with it."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from tests.reference_digest import lane_sums_numpy
from verifier.plan import chunk_plan
from verifier.plan.chunk_plan import TensorMeta, build_plan
from verifier.plan.digest import Pieces, digest_tensor, digest_tensors, dtype_name
from verifier.plan.digest_definition import BLOCK_BYTES, finish
from verifier.plan.digest_triton import STEP_BYTES, STEPS_PER_UNIT
from verifier.transport.buffer import pack, unpack

pytestmark = pytest.mark.h100(gpus=1)

UNIT_BYTES = STEPS_PER_UNIT * STEP_BYTES
LEAST_SHARE_OF_READING = 0.8
"""Of the rate at which an int64 sum reads the same bytes."""
LEAST_SHARE_OF_COPYING = 0.8
"""Of the rate at which a plain copy moves the same bytes."""
EXPERT_SHAPE = (768, 2048)
SHORTEST_SPIN, LONGEST_SPIN = 10_000_000, 1_000_000_000
"""Cycles of the GPU's clock, 5 ms to half a second: a busy host may need more than the first to name 341 tensors."""


def random_bytes(num_bytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device="cuda")


def sizes() -> list[int]:
    edges = [BLOCK_BYTES, STEP_BYTES, UNIT_BYTES, UNIT_BYTES + STEP_BYTES, 3 * UNIT_BYTES]
    return [1, 2, 3, 4, 5, 513, *(edge + off for edge in edges for off in (-1, 0, 1))]


def test_equals_the_host_at_every_edge() -> None:
    tensors = [random_bytes(num_bytes) for num_bytes in sizes()]
    expected = [digest_tensor(data.cpu()) for data in tensors]
    assert [digest_tensor(data) for data in tensors] == expected
    assert digest_tensors(tensors) == expected


def test_equals_the_reference() -> None:
    data = random_bytes(3 * STEP_BYTES + 17)
    first, second = finish(*lane_sums_numpy(data.cpu()), data.numel())
    assert digest_tensor(data) == f"vd1:{first:016x}{second:016x}"


def test_more_than_four_billion_bytes() -> None:
    data = torch.arange((1 << 32) // 8 + 1001, device="cuda").view(torch.uint8)
    assert digest_tensor(data) == digest_tensor(data.cpu())


@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_views_that_start_anywhere(offset: int) -> None:
    data = random_bytes(STEP_BYTES + 100)[offset:]
    assert digest_tensor(data) == digest_tensor(data.cpu())


def test_many_tensors_of_two_devices() -> None:
    tensors = [torch.randn(n, device="cuda", dtype=torch.bfloat16) for n in (0, 1, 64, 4096, 1_000_003)]
    tensors.append(tensors[-1].cpu())
    assert digest_tensors(tensors) == [digest_tensor(tensor.cpu()) for tensor in tensors]


def test_packing_digests_as_it_copies() -> None:
    """Turned, unaligned, empty and odd-sized tensors of several dtypes, into memory that held something else."""
    whole = torch.randn(3001, 64, device="cuda")
    tensors = {
        "turned": whole.t(), "unaligned": whole.view(-1)[1:100_002], "empty": whole[:0],
        "odd": random_bytes(UNIT_BYTES + 3), "bias": whole[0].double(), "large": whole.bfloat16(),
        "scalar": torch.tensor(7, device="cuda"), "mask": whole[:5] > 0,
    }  # fmt: skip
    metas = [TensorMeta(name=n, dtype=dtype_name(t.dtype), shape=tuple(t.shape)) for n, t in tensors.items()]
    (chunk,) = build_plan(metas, chunk_bytes=1 << 30).chunks
    on_host = pack(chunk, {name: tensor.cpu() for name, tensor in tensors.items()}, None)
    ring = torch.full((3 * chunk.num_bytes,), 255, dtype=torch.uint8, device="cuda")
    packed = pack(chunk, tensors, ring[chunk.num_bytes : 2 * chunk.num_bytes])
    arrived = chunk.pieces.start(packed.buffer)
    torch.cuda.synchronize()
    assert packed.sums is not None
    assert torch.equal(packed.buffer.cpu(), on_host.buffer)
    assert ring[: chunk.num_bytes].eq(255).all()
    assert ring[2 * chunk.num_bytes :].eq(255).all()
    assert packed.digests() == arrived.result() == on_host.digests()
    for name, tensor in unpack(chunk, packed.buffer):
        assert torch.equal(tensor, tensors[name]), name


def test_packing_again_reads_what_lies_there_now() -> None:
    """The same memory with other values, other memory, and one tensor turned; a table and guards are kept between."""
    tensors = {f"experts.{index}": torch.randn(96, 64, device="cuda") for index in range(20)}
    metas = [TensorMeta(name=name, dtype="float32", shape=(96, 64)) for name in tensors]
    (chunk,) = build_plan(metas, chunk_bytes=1 << 30).chunks
    for now in (
        tensors, tensors, {name: tensor.add_(1) for name, tensor in tensors.items()},
        tensors | {"experts.3": torch.randn(96, 64, device="cuda")},
        tensors | {"experts.5": torch.randn(64, 96, device="cuda").t()}, tensors,
    ):  # fmt: skip
        packed = pack(chunk, now, None)
        torch.cuda.synchronize()
        assert packed.digests() == digest_tensors(now.values())
        assert all(torch.equal(tensor, now[name]) for name, tensor in unpack(chunk, packed.buffer))
    assert len(chunk.guards) == 1


@pytest.mark.timed
def test_reads_at_the_speed_of_memory(its_turn, measured) -> None:
    words = torch.randint(-(2**62), 2**62, (1 << 30,), device="cuda")
    piece, data = Pieces((0,), (words.nbytes,)), words.view(torch.uint8)
    digest_s, sum_s, share = paired(lambda: piece.start(data), lambda: words.sum())
    measured(
        digest_gb_s=round(words.nbytes / digest_s / 1e9), int64_sum_gb_s=round(words.nbytes / sum_s / 1e9),
        median_share=round(share, 3),
    )  # fmt: skip
    assert share > LEAST_SHARE_OF_READING


@pytest.mark.timed
def test_a_chunk_of_experts_is_read_and_packed_at_the_speed_of_memory(its_turn, measured) -> None:
    """341 tensors of 3 MiB by one launch each way."""
    tensors = {f"experts.{index}": torch.randn(EXPERT_SHAPE, device="cuda").bfloat16() for index in range(341)}
    metas = [TensorMeta(name=name, dtype="bfloat16", shape=EXPERT_SHAPE) for name in tensors]
    with mock.patch.object(chunk_plan, "END_BYTES", 2 << 30):
        (chunk,) = build_plan(metas, chunk_bytes=2 << 30).chunks
    buffer, other = (torch.empty(chunk.num_bytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    pieces, words = chunk.pieces, buffer.view(torch.int64)
    digest_s, sum_s, reading = paired(lambda: pieces.start(buffer), lambda: words.sum())
    pack_s, copy_s, copying = paired(lambda: pack(chunk, tensors, buffer), lambda: other.copy_(buffer))
    measured(
        digest_gb_s=round(chunk.num_bytes / digest_s / 1e9), int64_sum_gb_s=round(chunk.num_bytes / sum_s / 1e9),
        digest_share=round(reading, 3), pack_gb_s=round(chunk.num_bytes / pack_s / 1e9),
        copy_gb_s=round(chunk.num_bytes / copy_s / 1e9), pack_share=round(copying, 3),
    )  # fmt: skip
    assert reading > LEAST_SHARE_OF_READING
    assert copying > LEAST_SHARE_OF_COPYING


def paired(ours, theirs, rounds: int = 9) -> tuple[float, float, float]:
    """Median seconds of both on the GPU, in turns, and the median of theirs over ours."""
    ours(), theirs()
    pairs = [(seconds(ours), seconds(theirs)) for _ in range(rounds)]
    middle = rounds // 2
    return (
        sorted(own for own, _ in pairs)[middle],
        sorted(other for _, other in pairs)[middle],
        sorted(other / own for own, other in pairs)[middle],
    )


def seconds(function) -> float:
    """What the GPU works on it; a spin before it lets the host come ahead, so that its own time does not count."""
    cycles = SHORTEST_SPIN
    while cycles <= LONGEST_SPIN:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(cycles)
        begin.record()
        function()
        end.record()
        ahead = not begin.query()
        end.synchronize()
        if ahead:
            return begin.elapsed_time(end) / 1e3
        cycles *= 4
    pytest.fail(f"the host did not come ahead of a spin of {LONGEST_SPIN} cycles: this measures the host")

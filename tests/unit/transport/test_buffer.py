"""Packing keeps every bit and dtype, and refuses what departs from the plan."""

from __future__ import annotations

import pytest
import torch

from verifier.errors import ContractError
from verifier.plan.chunk_plan import Chunk, TensorMeta, build_plan
from verifier.plan.digest import digest_tensors, dtype_name
from verifier.transport.buffer import pack, unpack

TENSORS = {
    "bias": torch.tensor([0.1, -0.0, float("nan")]),
    "weight": torch.arange(10, dtype=torch.bfloat16).view(2, 5),
    "scalar": torch.tensor(7, dtype=torch.int64),
    "empty": torch.empty(0, 4),
    "mask": torch.tensor([True, False, True]),
}


def chunk() -> Chunk:
    metas = [TensorMeta(name=n, dtype=dtype_name(t.dtype), shape=tuple(t.shape)) for n, t in TENSORS.items()]
    return build_plan(metas, chunk_bytes=1 << 20).chunks[0]


def raw(tensor: torch.Tensor) -> list[int]:
    return tensor.reshape(-1).view(torch.uint8).tolist()


def test_round_trip_keeps_bits_dtypes_and_order() -> None:
    layout = chunk()
    back = unpack(layout, pack(layout, TENSORS, None).buffer)
    assert [name for name, _ in back] == list(TENSORS)
    for name, tensor in back:
        assert tensor.dtype == TENSORS[name].dtype
        assert tensor.shape == TENSORS[name].shape
        assert raw(tensor) == raw(TENSORS[name])


def test_a_buffer_may_lie_inside_a_greater_one() -> None:
    layout = chunk()
    ring = torch.full((3 * layout.num_bytes,), 255, dtype=torch.uint8)
    packed = pack(layout, TENSORS, ring[layout.num_bytes : 2 * layout.num_bytes])
    assert [raw(tensor) for _, tensor in unpack(layout, packed.buffer)] == [raw(tensor) for tensor in TENSORS.values()]
    assert set(ring[: layout.num_bytes].tolist()) == set(ring[2 * layout.num_bytes :].tolist()) == {255}


def test_views_outlive_the_name_of_the_buffer() -> None:
    layout = chunk()
    buffer = pack(layout, TENSORS, None).buffer
    (_, bias), *_ = unpack(layout, buffer)
    del buffer
    assert torch.equal(bias[:2], TENSORS["bias"][:2])


def test_views_of_equal_tensors_are_at_their_places_and_may_be_written_to() -> None:
    """Experts' gate, up and down, whose places differ by one step; each view is one tensor's bytes and no other's."""
    tensors = {
        f"{expert}.{kind}": torch.full(shape, 10 * expert + number, dtype=torch.bfloat16)
        for expert in range(5)
        for number, (kind, shape) in enumerate({"gate": (4, 3), "up": (4, 3), "down": (3, 4)}.items())
    } | {"norm": torch.ones(3), "last": torch.full((4, 3), 99.0, dtype=torch.bfloat16)}
    metas = [TensorMeta(name=n, dtype=dtype_name(t.dtype), shape=tuple(t.shape)) for n, t in tensors.items()]
    (layout,) = build_plan(metas, chunk_bytes=1 << 20).chunks
    ring = torch.zeros(layout.num_bytes + 32, dtype=torch.uint8)
    packed = pack(layout, tensors, ring[32:])
    views = unpack(layout, packed.buffer)
    assert [name for name, _ in views] == list(tensors)
    for name, view in views:
        assert view.is_contiguous()
        assert view.shape == tensors[name].shape
        assert torch.equal(view, tensors[name])
    for _, view in views:
        view.add_(1)
    assert all(torch.equal(view, tensors[name] + 1) for name, view in unpack(layout, packed.buffer))


def test_packing_into_used_memory_leaves_nothing_of_it() -> None:
    layout = chunk()
    fresh = pack(layout, TENSORS, None)
    used = torch.full((layout.num_bytes,), 255, dtype=torch.uint8)
    again = pack(layout, TENSORS, used)
    assert again.buffer is used
    assert used.tolist() == pack(layout, TENSORS, torch.zeros(layout.num_bytes, dtype=torch.uint8)).buffer.tolist()
    assert again.digests() == fresh.digests() == digest_tensors(TENSORS.values())


def test_non_contiguous_tensors_are_laid_out_row_by_row() -> None:
    turned = torch.arange(6.0).view(2, 3).t()
    (layout,) = build_plan([TensorMeta(name="w", dtype="float32", shape=(3, 2))], chunk_bytes=64).chunks
    ((_, back),) = unpack(layout, pack(layout, {"w": turned}, None).buffer)
    assert torch.equal(back, turned)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"bias": None}, "`bias` is planned for chunk 0 and was not handed over"),
        ({"other": torch.ones(1)}, "`other` was handed over for chunk 0, which does not plan it"),
        ({"bias": torch.ones(2)}, "`bias` is float32 [2], the chunk plan says float32 [3]"),
        ({"bias": torch.ones(3).half()}, "`bias` is float16 [3], the chunk plan says float32 [3]"),
    ],
)
def test_departures_are_refused(change: dict[str, torch.Tensor | None], sentence: str) -> None:
    tensors = {name: tensor for name, tensor in (TENSORS | change).items() if tensor is not None}
    with pytest.raises(ContractError) as caught:
        pack(chunk(), tensors, None)
    assert str(caught.value) == sentence


def test_buffer_of_another_size_is_refused() -> None:
    with pytest.raises(ContractError, match="the plan says"):
        unpack(chunk(), torch.zeros(3, dtype=torch.uint8))

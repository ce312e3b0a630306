from __future__ import annotations

import dataclasses

import pytest
import torch

from verifier.errors import ContractError
from verifier.export.sharding import Box, ParamPlacement, tiling_errors, unshard

ROWS = {"a": (4, 3), "b": (2, 3)}


def _placement(*boxes: Box, dim: int = 0) -> ParamPlacement:
    return ParamPlacement(
        param_name="p",
        global_name="p",
        is_buffer=False,
        dim=dim,
        boxes=boxes,
        source_shapes=ROWS,
        group="p tp 0/1",
        replicated_over=(),
    )


FIRST = _placement(Box("a", 0, 2), Box("b", 1, 2))
LAST = _placement(Box("b", 0, 1), Box("a", 2, 4))
WHOLE = {"a": torch.arange(12.0).view(4, 3), "b": torch.arange(6.0).view(2, 3) + 100}


def test_shard_lays_boxes_end_to_end() -> None:
    assert FIRST.shape == (3, 3)
    assert FIRST.sources == ("a", "b")
    assert FIRST.shard(WHOLE.__getitem__).tolist() == [[0, 1, 2], [3, 4, 5], [103, 104, 105]]


def test_columns_come_out_contiguous() -> None:
    shard = _placement(Box("a", 1, 3), dim=1).shard(WHOLE.__getitem__)
    assert shard.is_contiguous()
    assert shard.tolist() == [[1, 2], [4, 5], [7, 8], [10, 11]]


def test_unshard_is_the_inverse() -> None:
    whole = dict(unshard([(item, item.shard(WHOLE.__getitem__)) for item in (LAST, FIRST)]))
    assert whole.keys() == WHOLE.keys()
    assert all(torch.equal(whole[name], WHOLE[name]) for name in WHOLE)


@pytest.mark.parametrize(
    ("placements", "error"),
    [
        ([FIRST, LAST], None),
        ([], None),
        ([FIRST], "`a`: boxes cover 2 of 4 indices"),
        ([LAST], "`b`: boxes cover 1 of 2 indices"),
        ([FIRST, FIRST], "`a`: overlap or empty box at index 0 (next box begins at 0)"),
        ([_placement(Box("a", 1, 4))], "`a`: hole at index 0 (next box begins at 1)"),
        ([_placement(Box("a", 0, 0), Box("a", 0, 4))], "`a`: overlap or empty box at index 0 (next box begins at 0)"),
        ([_placement(Box("a", 0, 5))], "`a`: boxes cover 5 of 4 indices"),
        ([_placement(Box("a", 0, 4)), _placement(Box("a", 0, 3), dim=1)], "`a` is cut along dims [0, 1] at once"),
    ],
)
def test_tiling(placements: list[ParamPlacement], error: str | None) -> None:
    assert next(iter(tiling_errors(placements).values()), None) == error


def test_a_source_of_another_shape_is_refused() -> None:
    with pytest.raises(ContractError) as caught:
        FIRST.shard(lambda name: WHOLE[name].T)
    assert str(caught.value) == "`a` has shape [3, 4] where the config implies [4, 3]"


def test_sources_of_unequal_dtype_are_refused() -> None:
    with pytest.raises(ContractError) as caught:
        FIRST.shard(lambda name: WHOLE[name].to(torch.bfloat16 if name == "b" else torch.float32))
    assert str(caught.value) == "`p` is made of tensors of unequal dtype: `a` torch.float32, `b` torch.bfloat16"


def test_a_shard_of_another_shape_is_refused() -> None:
    with pytest.raises(ContractError) as caught:
        dict(unshard([(FIRST, torch.zeros(3, 4)), (LAST, torch.zeros(3, 3))]))
    assert str(caught.value) == "`p` (p tp 0/1) has shape [3, 4], its placement says [3, 3]"


def test_a_missing_shard_is_refused() -> None:
    with pytest.raises(ContractError) as caught:
        dict(unshard([(FIRST, torch.zeros(3, 3))]))
    assert str(caught.value) == "`a`: boxes cover 2 of 4 indices"


def test_a_placement_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        FIRST.dim = 1


def test_a_shard_that_is_shifted_is_after_an_export_and_a_load_what_its_file_gives() -> None:
    live = torch.rand(3, 3, generator=torch.Generator().manual_seed(1)) * 1e-3
    shifted = dataclasses.replace(FIRST, offset=-1.0)
    pieces = shifted.undone(live, gradients=False)
    written = {"a": torch.zeros(4, 3), "b": torch.zeros(2, 3)}
    written["a"][:2], written["b"][1:] = pieces[:2], pieces[2:]
    assert torch.equal(shifted.loaded_again(live), shifted.shard(written.__getitem__))
    assert not torch.equal(shifted.loaded_again(live), live), "both are rounded"
    assert FIRST.loaded_again(live) is live

"""Products of bfloat16 by float32, on whatever processor: those of torch's own kernels."""

import pytest
import torch

from verifier.platform import cpu_products


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["mm", "bmm", "addmm", "baddbmm"])
def test_a_product_is_that_of_the_numbers_in_float64_rounded_once(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"mm": ((5, 7), (7, 3)), "bmm": ((2, 5, 7), (2, 7, 3))}
    shapes |= {"addmm": ((3,), *shapes["mm"]), "baddbmm": ((2, 5, 3), *shapes["bmm"])}
    parts = [torch.randint(-8, 9, shape, generator=generator).to(dtype) for shape in shapes[name]]
    scales = {"beta": 0.5, "alpha": 2.0} if name in ("addmm", "baddbmm") else {}
    found = cpu_products._product(name)(*parts, **scales)
    expected = getattr(torch, name)(*(part.double() for part in parts), **scales)
    assert found.dtype == dtype
    assert torch.equal(found, expected.to(dtype))

"""Fresh values of the same kind as the given ones."""

from __future__ import annotations

import pytest
import torch

from breakgraph.verify.call import fresh_like


def fresh(tensor: torch.Tensor) -> torch.Tensor:
    made = fresh_like(tensor, torch.Generator(tensor.device).manual_seed(1))
    assert (made.shape, made.dtype) == (tensor.shape, tensor.dtype)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_floats_keep_mean_and_deviation(dtype: torch.dtype) -> None:
    given = (torch.randn(4000) * 3 + 10).to(dtype)
    made = fresh(given)
    assert not torch.equal(made, given)
    assert float(made.float().mean()) == pytest.approx(10, abs=0.3)
    assert float(made.float().std()) == pytest.approx(3, abs=0.3)


def test_constant_floats_get_a_deviation_and_masks_do_not_spoil_the_mean() -> None:
    assert float(fresh(torch.zeros(4000)).std()) == pytest.approx(1, abs=0.1)
    assert bool(fresh(torch.tensor([0.0, float("-inf"), 1.0])).isfinite().all())


def test_integers_stay_in_range_and_in_order() -> None:
    ids = torch.tensor([5, 900, 3, 17, 20])
    made = fresh(ids)
    assert 3 <= int(made.min()) <= int(made.max()) <= 900
    offsets = fresh(torch.tensor([0, 3, 9, 30], dtype=torch.int32))
    assert (int(offsets[0]), int(offsets[-1])) == (0, 30)
    assert bool((offsets[1:] >= offsets[:-1]).all())


def test_the_others() -> None:
    assert fresh(torch.zeros(100, dtype=torch.bool)).any()
    assert fresh(torch.zeros(3, dtype=torch.complex64)).abs().min() > 0
    assert fresh(torch.zeros(0)).numel() == 0
    assert fresh(torch.tensor(4)).item() == 4
    expanded = torch.ones(1).expand(3)
    assert fresh(expanded) is expanded

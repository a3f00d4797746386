"""What draws classes, and what their labels get of the gradient: the Numba kernels are `kernels.reference`."""

import pytest
import torch

from augment_reduce.kernels import reference
from augment_reduce.kernels.cpu import backend as cpu

F32, F64 = torch.float32, torch.float64


@pytest.mark.parametrize(("n", "S"), [(1, 1), (10, 10), (7, 3), (1000, 1000), (2000, 64), (10**8, 300)])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_draws_are_those_of_the_reference(n, S, dtype):
    uniforms = torch.rand(40, S, dtype=dtype, generator=torch.Generator().manual_seed(S))
    uniforms[0] = 0.0  # the first pick again and again: every later one is replaced
    uniforms[1] = 1.0 - torch.finfo(dtype).eps / 2
    drawn = cpu.draw_without_replacement(uniforms, n)
    assert torch.equal(drawn, reference.draw_without_replacement(uniforms, n))
    assert drawn.min() >= 0
    assert drawn.max() < n
    assert (drawn.sort(dim=1).values.diff(dim=1) > 0).all()


def test_draws_step_over_the_label_as_the_reference_does():
    uniforms, labels = torch.rand(40, 6, dtype=F64, generator=torch.Generator().manual_seed(2)), torch.arange(40) % 9
    drawn = cpu.draw_without_replacement(uniforms, 8, labels)
    assert torch.equal(drawn, reference.draw_without_replacement(uniforms, 8, labels))
    assert not (drawn == labels[:, None]).any()
    assert set(drawn.unique().tolist()) == set(range(9))


def test_uniforms_are_those_of_the_reference_and_even():
    """Mean and neighbours' correlation of 10^6 numbers within 6 standard errors: fails for one seed in 10^8."""
    found = cpu.uniforms(123, 1000, 1000)
    assert torch.equal(found, reference.uniforms(123, 1000, 1000))
    assert not torch.equal(found, cpu.uniforms(124, 1000, 1000))
    assert found.min() >= 0.0
    assert found.max() < 1.0
    centred = found.flatten() - 0.5
    assert abs(float(centred.mean())) < 6 * (1 / 12) ** 0.5 / 1000
    assert abs(float((centred[1:] * centred[:-1]).mean())) < 6 * (1 / 12) / 1000


@pytest.mark.parametrize("row_scale", [3.5, torch.linspace(0.5, 2.0, 7, dtype=torch.float64)], ids=["one", "by row"])
@pytest.mark.parametrize("S", [1, 4])
def test_the_labels_gradient_is_minus_the_sum_of_the_rest(S, row_scale):
    grad = torch.randn(7, S, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = cpu.with_label(grad, row_scale)
    torch.testing.assert_close(found, reference.with_label(grad, row_scale), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(found.sum(dim=1), torch.zeros(7, dtype=torch.float64), rtol=0.0, atol=1e-13)

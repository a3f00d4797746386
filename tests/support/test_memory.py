"""Large arrays on large pages: zeros like any other, given back when nobody looks at them."""

import gc

import pytest
import torch

from augment_reduce.support import memory


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(3, 5), (0, 7), (2_000, 3_001)])
def test_zeros_are_zeros_that_can_be_written(shape, dtype):
    array = memory.zeros(shape, dtype)
    assert array.shape == shape
    assert array.dtype == dtype
    assert array.is_contiguous()
    assert not array.any()
    array += 1
    assert array.all()


def test_large_ones_are_given_back():
    try:
        before = resident()
    except OSError:
        pytest.skip("this system does not say")
    array = memory.zeros((64, 1 << 20), torch.float32)
    view = array[3:]
    array.fill_(1.0)
    held = resident() - before
    del array
    gc.collect()
    assert view[0, 0] == 1.0  # a view keeps them
    del view
    gc.collect()
    assert held > 200e6
    assert resident() - before < 0.2 * held


def test_a_kernel_without_large_pages_has_small_ones(monkeypatch):
    monkeypatch.delattr(memory.mmap, "MADV_HUGEPAGE", raising=False)
    assert not memory.zeros((64, 1 << 18), torch.float32).any()

"""Dense rows are read where they lie, from where a cache line begins: that must not be seen in the results."""

import numpy as np
import pytest

from augment_reduce.kernels import cpu
from augment_reduce.kernels._cpu_batch import read_only
from augment_reduce.kernels._cpu_dense import LANES, before_a_line
from augment_reduce.kernels._cpu_push import AT_A_TIME, push_groups
from augment_reduce.kernels._cpu_scores import pairs_dense
from augment_reduce.kernels._cpu_work import zeros
from augment_reduce.optim import PRIOR_NONE, SECTION4

K, N = 5, 40
SIZES = [1, 15, 16, 17, 32, 48, 100, 208]


def lying(a, offset, dtype):
    """The same numbers, so many numbers into a line, among others that are none."""
    room = zeros(a.size + 4 * LANES, dtype)
    room[:] = np.nan
    found = room[offset : offset + a.size].reshape(a.shape)
    found[...] = a
    return found


def problem(D, dtype, seed=0):
    """Rows, weights, biases, and pairs by class: one class has many, one has none."""
    rng = np.random.default_rng(seed)
    x, w, bias = rng.normal(size=(N, D)), rng.normal(size=(K, D)), rng.normal(size=K)
    sizes = [3, AT_A_TIME + 9, 0, 12, 5]
    at, row = rng.permutation(N), rng.integers(N, size=sum(sizes))
    groups = (
        np.arange(K),
        np.cumsum([0, *sizes]),
        rng.permutation(sum(sizes)).astype(np.uint32),
        row.astype(np.uint32),
    )
    return x.astype(dtype), w.astype(dtype), bias.astype(dtype), at, groups


def by_the_book(x, w):
    """The lanes and the fold of `_cpu_dense`, one number after the other; float32 products are exact in float64."""
    lanes, D = np.zeros(LANES, np.float32), len(x) // LANES * LANES
    for d in range(0, D, LANES):
        lanes = (lanes + x[d : d + LANES].astype(float) * w[d : d + LANES]).astype(np.float32)
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    return lanes[0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("D", SIZES)
def test_scores_are_the_same_wherever_rows_and_weights_lie(D, dtype):
    x, w, bias, at, groups = problem(D, dtype)
    classes, start, order, row = groups
    psi, places = [], set()
    for offset in range(LANES):
        there, out = lying(x, offset, dtype), np.full(len(order), np.nan, dtype)
        places.add(int(before_a_line(there)))
        pairs_dense(0, K, groups, read_only(there), at, lying(w, 3 * offset % LANES, dtype), bias, out)
        psi.append(out)
    assert places == (set(range(LANES)) if D % LANES == 0 else {0})
    assert all(np.array_equal(each, psi[0]) for each in psi)
    k = np.repeat(classes, np.diff(start))
    truth = (x[at[row]].astype(float) * w[k]).sum(1) + bias[k]
    slack = 4 * np.finfo(dtype).eps * (np.abs(x[at[row]].astype(float) * w[k]).sum(1) + np.abs(bias[k]))
    assert (np.abs(psi[0][order] - truth) <= slack).all()


def test_scores_are_those_of_the_lanes():
    x, w, bias, at, (classes, start, order, row) = problem(208, np.float32)
    psi = np.empty(len(order), np.float32)
    pairs_dense(0, K, (classes, start, order, row), read_only(lying(x, 7, np.float32)), at, w, bias, psi)
    k = np.repeat(classes, np.diff(start))
    expected = [bias[c] + by_the_book(x[at[r]], w[c]) for c, r in zip(k, row, strict=True)]
    assert np.array_equal(psi[order], np.array(expected, np.float32))


@pytest.mark.parametrize("D", SIZES)
def test_sums_are_the_same_wherever_rows_lie_and_those_of_one_pair_after_the_other(D):
    """Of plain gradient steps: w += sum of a x, where a product and a sum round apart."""
    x, w, bias, at, groups = problem(D, np.float32)
    _, start, order, row = groups
    grad = np.random.default_rng(1).normal(size=len(order)).astype(np.float32)
    none, index, nowhere = np.empty(0, np.float32), np.empty(0, np.uint32), np.zeros(N, np.int64)
    number = np.float32
    rule = (SECTION4, PRIOR_NONE, *map(number, (1, 0, 0, 0, 0, 0, 1, 1)))  # rate 1 / (1 + sqrt(0))
    expected = w.copy()
    for k in range(K):
        g = np.zeros(D, np.float32)
        for p in range(start[k], start[k + 1]):
            g = g + grad[order[p]] * x[at[row[p]]]
        expected[k] += g
    few = tuple(cpu._buffers(1, D, K, np.dtype(np.float32))[0])
    for offset in range(LANES):
        moved, state = w.copy(), np.zeros_like(w)
        arrays = (moved, state, none.reshape(1, 0), bias, np.zeros(K, number), none, none, number(0))
        there = read_only(lying(x, offset, np.float32))
        csr, sums = (nowhere, nowhere, index, index, none, index), (np.zeros(K, number), np.zeros(K, number))
        push_groups(0, K, groups, csr, there, at, grad, none, arrays, rule, *sums, few)
        assert np.array_equal(moved, expected)

"""Dense rows are read where they lie, from where a cache line begins: that must not be seen in the results."""

import ctypes
import itertools
import mmap
import os

import numpy as np
import pytest
from numba.core.registry import cpu_target

from augment_reduce.kernels.constants import PRIOR_NONE, SECTION4
from augment_reduce.kernels.cpu import arguments
from augment_reduce.kernels.cpu.batch import read_only
from augment_reduce.kernels.cpu.dense import before_a_line
from augment_reduce.kernels.cpu.lanes import LANES, has_fma
from augment_reduce.kernels.cpu.push import AT_A_TIME, push_groups
from augment_reduce.kernels.cpu.rules import kernels_of
from augment_reduce.kernels.cpu.scores import pairs_dense
from augment_reduce.kernels.cpu.work import zeros

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


def by_the_book(x, w, at_once):
    """The lanes and the fold of `kernels.cpu.dense`, one number after the other; products are rounded apart unless the
    processor multiplies and adds at once (those of float32 are exact in float64)."""
    lanes, D = np.zeros(LANES, np.float32), len(x) // LANES * LANES
    for d in range(0, D, LANES):
        products = x[d : d + LANES].astype(float) * w[d : d + LANES]
        lanes = (lanes + (products if at_once else products.astype(np.float32))).astype(np.float32)
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
    at_once = has_fma(cpu_target.target_context)
    expected = [bias[c] + by_the_book(x[at[r]], w[c], at_once) for c, r in zip(k, row, strict=True)]
    assert np.array_equal(psi[order], np.array(expected, np.float32))


def between_walls(a, at_the_end, offset):
    """The same numbers in memory of whose neighbourhood nothing may be read, so many from one of its ends."""
    page = mmap.PAGESIZE
    n_pages = -(-(a.nbytes + LANES * a.itemsize) // page)
    pages = mmap.mmap(-1, (n_pages + 2) * page)
    room = np.frombuffer(pages, np.uint8)
    for wall in (0, n_pages + 1):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(room.ctypes.data + wall * page), page, 0) == 0
    first = page + (n_pages * page - a.nbytes - offset * a.itemsize if at_the_end else offset * a.itemsize)
    found = room[first : first + a.nbytes].view(a.dtype).reshape(a.shape)
    found[...] = a
    return found


@pytest.mark.skipif(os.name != "posix", reason="no walls")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("D", [1, 16, 17, 48])
def test_nothing_is_read_beyond_the_page_of_rows_nor_beside_weights(D, dtype):
    """Whoever does so is ended by the system."""
    rng = np.random.default_rng(D)
    for n_classes in (1, 2, 3):
        x, w, bias = (rng.normal(size=size).astype(dtype) for size in ((3, D), (n_classes, D), n_classes))
        start, pairs = np.arange(n_classes + 1) * 5, 5 * n_classes
        groups = (
            np.arange(n_classes),
            start,
            np.arange(pairs, dtype=np.uint32),
            rng.integers(0, 3, pairs).astype(np.uint32),
        )
        expected = np.empty(pairs, dtype)
        pairs_dense(0, n_classes, groups, read_only(x), np.arange(3), w, bias, expected)
        for x_at_the_end, w_at_the_end, offset in itertools.product((False, True), (False, True), (0, 1, 4, 12, 15)):
            there, weights = between_walls(x, x_at_the_end, offset), between_walls(w, w_at_the_end, 0)
            out = np.empty(pairs, dtype)
            pairs_dense(0, n_classes, groups, read_only(there), np.arange(3), weights, bias, out)
            assert np.array_equal(out, expected)


def test_rows_without_features_have_nothing_before_a_line():
    assert before_a_line(np.empty((3, 0), np.float32)) == 0


@pytest.mark.parametrize("D", SIZES)
def test_sums_are_the_same_wherever_rows_lie_and_those_of_one_pair_after_the_other(D):
    """Of plain gradient steps: w += sum of a x, where a product and a sum round apart."""
    x, w, bias, at, groups = problem(D, np.float32)
    _, start, order, row = groups
    grad = np.random.default_rng(1).normal(size=len(order)).astype(np.float32)
    none, index, nowhere = np.empty(0, np.float32), np.empty(0, np.uint32), np.zeros(N, np.int64)
    number = np.float32
    rule = tuple(map(number, (1, 0, 0, 0, 0, 0, 1, 1)))  # rate 1 / (1 + sqrt(0))
    push = kernels_of(SECTION4, PRIOR_NONE).generated(push_groups, True)
    expected = w.copy()
    for k in range(K):
        g = np.zeros(D, np.float32)
        for p in range(start[k], start[k + 1]):
            g = g + grad[order[p]] * x[at[row[p]]]
        expected[k] += g
    few = tuple(arguments.buffers(1, D, K, np.dtype(np.float32))[0])
    for offset in range(LANES):
        moved, state = w.copy(), np.zeros_like(w)
        arrays = (moved, state, none.reshape(1, 0), bias, np.zeros(K, number), none, none, number(0))
        there = read_only(lying(x, offset, np.float32))
        csr, sums = (nowhere, nowhere, index, index, none, index), (np.zeros(K, number), np.zeros(K, number))
        push(0, K, groups, csr, there, at, grad, none, arrays, rule, *sums, few)
        assert np.array_equal(moved, expected)

"""The Numba kernels against `kernels.reference`: float64 to rounding, float32 as close to the truth as plain torch."""

from __future__ import annotations

import itertools
from copy import deepcopy

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from augment_reduce.kernels import reference
from augment_reduce.kernels.cpu import backend as cpu
from augment_reduce.kernels.rows import DenseRows, SparseRows, as_rows
from augment_reduce.optim import Adam, Prior, SectionFour
from tests.helpers.kernel_steps import (
    F32,
    F64,
    OPTIMIZERS,
    PRIORS,
    SHAPES,
    assert_as_close_to_truth,
    draw_step,
    make,
    make_parameters,
    make_prior,
    name_of,
    push,
    score_scale,
    tensors,
)

pytestmark = pytest.mark.usefixtures("one_numba_thread")


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("shape", SHAPES)
def test_scores_are_those_of_the_reference(shape, dtype, dense):
    X, rng = make(shape, dense=dense)
    step, parameters = draw_step(shape, X, rng, dtype), make_parameters(shape, SectionFour(), rng, dtype)
    weight, bias = parameters.weight, parameters.bias
    for name, classes in (("pair_scores", step["pairs"]), ("shared_scores", step["shared"])):
        plain = getattr(reference, name)(X, step["rows"], classes, weight, bias)
        truth = getattr(reference, name)(X, step["rows"], classes, weight.double(), bias.double())
        found = getattr(cpu, name)(X, step["rows"], classes, weight, bias)
        assert found.dtype == dtype
        assert found.shape == plain.shape
        slack = 4 * torch.finfo(dtype).eps * score_scale(X, step, parameters, classes)
        assert_as_close_to_truth(found, plain, truth, slack)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("optimizer", "prior_name"),
    # Only the paper's rule is used with a prior that acts where gradients are.
    [(rule, name) for rule in OPTIMIZERS for name in PRIORS if name != "touched" or isinstance(rule, SectionFour)],
    ids=lambda each: each if isinstance(each, str) else name_of(each),
)
def test_push_in_float64_is_the_reference_to_rounding(optimizer, prior_name, shared):
    """Three steps in a row, so that a wrong state shows in the weights."""
    for i, shape in enumerate(SHAPES):
        X, rng = make(shape, i, dense=i % 2 == 1)
        prior = make_prior(prior_name, X, F64)
        ours = make_parameters(shape, optimizer, rng, F64)
        theirs = deepcopy(ours)
        for t in range(1, 4):
            step = draw_step(shape, X, rng, F64)
            push(cpu, X, step, ours, optimizer, t, prior, shared=shared, dtype=F64)
            push(reference, X, step, theirs, optimizer, t, prior, shared=shared, dtype=F64)
        for name, expected in tensors(theirs).items():
            # Adagrad turns a sum that almost cancels into a whole step; shared columns are summed in another order.
            torch.testing.assert_close(
                tensors(ours)[name], expected, rtol=1e-11 if shared else 1e-13, atol=1e-12 if shared else 1e-14
            )


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("prior_name", ["unbiased"])  # compiled anew for each; in float64 all are compared
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=name_of)
def test_push_in_float32_is_as_close_to_the_truth_as_the_reference(optimizer, prior_name, shared):
    """Two steps from random weights. Truth: the reference in float64 on the same float32 numbers."""
    for (i, shape), dense in itertools.product(enumerate(SHAPES), (False, True)):
        X, rng = make(shape, i, dense=dense)
        ours = make_parameters(shape, optimizer, rng, F32)
        plain, truth = deepcopy(ours), make_parameters(shape, optimizer, rng, F64)
        truth.weight, truth.bias = ours.weight.double(), ours.bias.double()
        for t in (1, 2):
            step = draw_step(shape, X, rng, F32)
            for kernels, parameters, dtype in ((cpu, ours, F32), (reference, plain, F32), (reference, truth, F64)):
                push(
                    kernels,
                    X,
                    step,
                    parameters,
                    optimizer,
                    t,
                    make_prior(prior_name, X, dtype),
                    shared=shared,
                    dtype=dtype,
                )
        for name, expected in tensors(truth).items():
            slack = 2e-5 * (1 + expected.abs())
            assert_as_close_to_truth(tensors(ours)[name], tensors(plain)[name], expected, slack)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=name_of)
def test_gradients_that_cancel_leave_their_entries_untouched(optimizer):
    """A row twice in the batch, with +0.3 and -0.3 for one class: a fused multiply-add would leave crumbs."""
    for shape in SHAPES[:4]:
        for dense in (False, True):
            X, rng = make(shape, dense=dense)
            parameters = make_parameters(shape, optimizer, rng, F32)
            for state in [*parameters.weight_state, *parameters.bias_state]:
                state += 1
            before = deepcopy(tensors(parameters))
            rows, k, grad = np.array([5, 5]), torch.tensor([[2], [2]]), torch.tensor([[0.3], [-0.3]])
            cpu.push_pairs(X, rows, k, grad, None, parameters, optimizer, 2, None)
            none = (None, None, parameters, optimizer, 2, None)
            cpu.push_shared(X, rows, k[0], grad, torch.tensor([[2], [4]]), torch.zeros(2, 1), *none)
            for name, expected in before.items():
                assert torch.equal(tensors(parameters)[name], expected), name


def test_untouched_entries_keep_their_bits():
    shape = SHAPES[2]
    X, rng = make(shape)
    step, parameters = draw_step(shape, X, rng, F32), make_parameters(shape, Adam(), rng, F32)
    before = deepcopy(parameters.weight)
    push(cpu, X, step, parameters, Adam(), 1, None, shared=False, dtype=F32)
    x, touched = X.dense(step["rows"], F32) != 0, torch.zeros_like(before, dtype=torch.bool)
    for b, classes in enumerate(step["pairs"]):
        touched[classes] |= x[b]
    assert torch.equal(parameters.weight != before, touched)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=name_of)
def test_no_features_at_all(optimizer, shared):
    """D = 0, the synthetic experiment: only biases. And rows without a single feature where there could be 5,003."""
    empty = SparseRows(np.zeros(36, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32), 5003)
    for X, D in ((as_rows(sp.csr_matrix((35, 0))), 0), (DenseRows(np.zeros((35, 0))), 0), (empty, 5003)):
        shape = (16, 4, 50, D, 0.0)
        rng = np.random.default_rng(0)
        prior = Prior.from_counts(2.0, np.zeros(D), 35, F64, of_bias=1.5)
        ours = make_parameters(shape, optimizer, rng, F64)
        theirs = deepcopy(ours)
        for t in (1, 2):
            step = draw_step(shape, X, rng, F64)
            push(cpu, X, step, ours, optimizer, t, prior, shared=shared, dtype=F64)
            push(reference, X, step, theirs, optimizer, t, prior, shared=shared, dtype=F64)
        for name, expected in tensors(theirs).items():
            torch.testing.assert_close(tensors(ours)[name], expected, rtol=1e-13, atol=1e-14)
        args = (X, step["rows"], step["shared"] if shared else step["pairs"], ours.weight, ours.bias)
        name = "shared_scores" if shared else "pair_scores"
        torch.testing.assert_close(getattr(cpu, name)(*args), getattr(reference, name)(*args), rtol=0, atol=0)


def as_stored(X: SparseRows, index, number, tmp_path) -> SparseRows:
    """The same rows in other dtypes, with explicit zeros, in a read-only memory map."""
    extra = sp.csr_matrix((X.values, X.indices, X.indptr), shape=(X.n_rows, X.n_features)).tolil()
    matrix = extra.tocsr()
    arrays = {
        "indptr": matrix.indptr.astype(index),
        "indices": matrix.indices.astype(index),
        "values": matrix.data.astype(number),
    }
    arrays["values"][::5] = 0
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    return SparseRows(*(np.load(tmp_path / f"{n}.npy", mmap_mode="r") for n in arrays), X.n_features)


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("number", [np.float32, np.float64])
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_any_index_and_number_and_memory(index, number, dtype, tmp_path):
    """Data are read as they are: 32 or 64 bit indices, values of another dtype than the weights, read-only maps."""
    shape, optimizer = SHAPES[2], SectionFour()
    sparse, rng = make(shape)
    X = as_stored(sparse, index, number, tmp_path)
    dense = DenseRows(np.asfortranarray(X.dense(np.arange(X.n_rows), F64).numpy().astype(number)))
    dense.values.flags.writeable = False
    step = draw_step(shape, X, rng, dtype)
    for rows in (X, dense):
        ours = make_parameters(shape, optimizer, np.random.default_rng(1), dtype)
        theirs, prior = deepcopy(ours), make_prior("unbiased", rows, dtype)
        tolerance = {"rtol": 2e-5, "atol": 2e-5} if dtype == F32 else {"rtol": 1e-12, "atol": 1e-12}
        for shared in (False, True):
            push(cpu, rows, step, ours, optimizer, 1, prior, shared=shared, dtype=dtype)
            push(reference, rows, step, theirs, optimizer, 1, prior, shared=shared, dtype=dtype)
        torch.testing.assert_close(ours.weight, theirs.weight, **tolerance)
        psi = cpu.pair_scores(rows, step["rows"], step["pairs"], ours.weight, ours.bias)
        torch.testing.assert_close(
            psi, reference.pair_scores(rows, step["rows"], step["pairs"], ours.weight, ours.bias), **tolerance
        )


@pytest.mark.parametrize("dtype", [F32, F64])
def test_where_dense_rows_lie_in_memory_does_not_matter(dtype):
    """Row by row sums begin where a cache line does: the same numbers for rows that begin anywhere in one."""
    shape, found = (13, 5, 7, 96, 0.5), []
    for offset in range(16):
        rows, rng = make(shape, dense=True)
        room = np.empty(rows.values.size + 32, np.float32 if dtype == F32 else np.float64)
        first = -(room.ctypes.data // room.itemsize) % (64 // room.itemsize) + offset
        values = room[first : first + rows.values.size].reshape(rows.values.shape)
        values[:] = rows.values
        X, parameters = DenseRows(values), make_parameters(shape, SectionFour(), rng, dtype)
        step = draw_step(shape, X, rng, dtype)
        push(cpu, X, step, parameters, SectionFour(), 1, None, shared=False, dtype=dtype)
        found.append(parameters.weight.clone())
    assert cpu.few_weights(X, parameters.weight)
    assert found[0].any()
    assert all(torch.equal(found[0], other) for other in found[1:])

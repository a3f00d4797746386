"""Rows that are truly dense, with classes shared by a minibatch: the products of BLAS are the sums of the reference."""

import numba
import pytest
import torch

from augment_reduce.kernels import reference
from augment_reduce.kernels.cpu import backend as cpu
from augment_reduce.kernels.cpu import products
from augment_reduce.kernels.cpu.batch import load
from tests.helpers.kernel_steps import (
    F64,
    OPTIMIZERS,
    PRIORS,
    draw_step,
    make,
    make_parameters,
    make_prior,
    name_of,
    push,
    tensors,
)

# B, C, K, D, share of non-zeros (two of the rows have none): more than a part of rows and of classes; all, most, few
ALL, MOST, FEW = (140, 60, 300, 21, 1.0), (140, 60, 300, 21, 0.8), (140, 60, 300, 21, 0.3)


def problem(shape, optimizer, prior_name):
    X, rng = make(shape, 1, dense=True)
    step = draw_step(shape, X, rng, F64)
    return X, step, make_parameters(shape, optimizer, rng, F64), make_prior(prior_name, X, F64)


def dense_step(shape, optimizer, prior_name, kernels):
    X, step, parameters, prior = problem(shape, optimizer, prior_name)
    if shape is ALL:
        step["rows"][step["rows"] < 2] = 2  # those without features
    psi = kernels.shared_scores(X, step["rows"], step["shared"], parameters.weight, parameters.bias)
    for t in (1, 2):
        push(kernels, X, step, parameters, optimizer, t, prior, shared=True, dtype=F64)
    return {"psi": psi, **tensors(parameters)}


@pytest.mark.parametrize("shape", [ALL, MOST], ids=["all", "most"])
@pytest.mark.parametrize("prior_name", PRIORS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=name_of)
def test_scores_and_steps_are_those_of_the_reference(optimizer, prior_name, shape, monkeypatch):
    used = []
    multiply = products.multiply
    monkeypatch.setattr(products, "multiply", lambda *args: used.append(1) or multiply(*args))
    found = dense_step(shape, optimizer, prior_name, cpu)
    # One product for the scores; in each of the two steps one for the gradient, and one for shares where zeros are.
    assert len(used) == 3 + 2 * (prior_name == "unbiased" and shape is MOST)
    for name, expected in dense_step(shape, optimizer, prior_name, reference).items():
        torch.testing.assert_close(found[name], expected, rtol=1e-11, atol=1e-12, msg=name)


def test_rows_with_few_nonzeros_are_sparse_ones():
    X, step, _, _ = problem(FEW, OPTIMIZERS[0], "none")
    batch = load(X, step["rows"], X.values.dtype, n_classes=0)
    assert not batch.full
    assert batch.csr is not None


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="Numba was given one thread")
def test_products_do_not_depend_on_the_number_of_threads(one_numba_thread):
    one = dense_step(MOST, OPTIMIZERS[2], "unbiased", cpu)
    numba.set_num_threads(2)
    two = dense_step(MOST, OPTIMIZERS[2], "unbiased", cpu)
    for name, expected in one.items():
        assert torch.equal(two[name], expected), name

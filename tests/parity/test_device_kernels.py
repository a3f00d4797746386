"""`kernels.device`, which trains on a GPU, against `kernels.reference`; here on the CPU, with a GPU there."""

from copy import deepcopy

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from augment_reduce import AugmentReduceClassifier
from augment_reduce.kernels import device, reference
from augment_reduce.training import fit as fitting
from tests.helpers.kernel_steps import (
    F32,
    F64,
    OPTIMIZERS,
    PRIORS,
    SHAPES,
    draw_step,
    make,
    make_parameters,
    make_prior,
    name_of,
    push,
    score_scale,
    tensors,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def moved(parameters: reference.Parameters) -> reference.Parameters:
    copy = deepcopy(parameters)
    return fitting.move(copy, DEVICE)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("shape", SHAPES)
def test_scores_are_those_of_the_reference(shape, dtype, dense):
    X, rng = make(shape, dense=dense)
    step, parameters = draw_step(shape, X, rng, dtype), make_parameters(shape, OPTIMIZERS[0], rng, dtype)
    there, held = device.DeviceRows.of(X, DEVICE, dtype), moved(parameters)
    for name, classes in (("pair_scores", step["pairs"]), ("shared_scores", step["shared"])):
        found = getattr(device, name)(there, step["rows"], classes, held.weight, held.bias)
        truth = getattr(reference, name)(X, step["rows"], classes, parameters.weight.double(), parameters.bias.double())
        assert found.dtype == dtype
        assert found.device.type == "cpu"
        slack = 60 * torch.finfo(dtype).eps * score_scale(X, step, parameters, classes)
        assert ((found.double() - truth).abs() <= slack).all()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("prior_name", PRIORS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=name_of)
def test_push_is_the_reference_to_rounding(optimizer, prior_name, shared, monkeypatch):
    """Three steps in a row, so that a wrong state shows in the weights; tiles in several blocks."""
    monkeypatch.setattr(device, "MOST", 3_000)
    for i, shape in enumerate(SHAPES):
        X, rng = make(shape, i, dense=i % 2 == 1)
        prior = make_prior(prior_name, X, F64)
        theirs = make_parameters(shape, optimizer, rng, F64)
        ours, there = moved(theirs), device.DeviceRows.of(X, DEVICE, F64)
        for t in range(1, 4):
            step = draw_step(shape, X, rng, F64)
            push(device, there, step, ours, optimizer, t, prior, shared=shared, dtype=F64)
            push(reference, X, step, theirs, optimizer, t, prior, shared=shared, dtype=F64)
        found = tensors(fitting.move(ours, torch.device("cpu")))
        for name, expected in tensors(theirs).items():
            torch.testing.assert_close(found[name], expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("model", ["softmax", "probit"])
@pytest.mark.parametrize("class_sampling", ["uniform", "frequency-shared"])
def test_a_fit_there_is_a_fit_here(model, class_sampling, monkeypatch):
    """The same classes, the same steps: the same weights to rounding, and back on the CPU when it is done."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((12, 30)) * (rng.random((12, 30)) < 0.3)
    y = rng.integers(12, size=400)
    X = sp.csr_matrix(np.where(rng.random((400, 30)) < 0.5, centres[y] + 0.1 * rng.standard_normal((400, 30)), 0.0))
    options = {"n_sampled_classes": 4, "batch_size": 50, "max_iter": 60, "random_state": 0, "prior_variance": 10.0}
    here = AugmentReduceClassifier(model, class_sampling=class_sampling, device="cpu", **options).fit(X, y)
    monkeypatch.setattr(fitting, "training_device", lambda *_: DEVICE)
    monkeypatch.setattr(fitting, "needs_device_kernels", lambda _: True)
    there = AugmentReduceClassifier(model, class_sampling=class_sampling, **options).fit(X, y)
    np.testing.assert_allclose(there.coef_, here.coef_, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(there.intercept_, here.intercept_, rtol=1e-7, atol=1e-9)
    assert there._fitted.parameters.weight.device.type == "cpu"
    assert abs(there.log_likelihood(X, y) - here.log_likelihood(X, y)) < 1e-9


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_without_a_gpu_device_cuda_says_so():
    with pytest.raises(ValueError, match=r"device='cuda'.*torch sees no CUDA device.*device='cpu'"):
        AugmentReduceClassifier(device="cuda").fit(np.eye(4), [0, 1, 2, 3])


def test_a_device_that_does_not_exist():
    with pytest.raises(ValueError, match="'auto', 'cpu' or 'cuda', found 'tpu'"):
        AugmentReduceClassifier(device="tpu").fit(np.eye(4), [0, 1, 2, 3])

"""Steps on small random rows, for tests of the kernels of every device."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
import torch

from augment_reduce.kernels import reference
from augment_reduce.kernels.rows import DenseRows, Rows, as_rows
from augment_reduce.optim import Adagrad, Adam, Prior, RowOptimizer, RowwiseAdagrad, SectionFour

F32, F64 = torch.float32, torch.float64
OPTIMIZERS = [SectionFour(first_kappa_one=True), SectionFour(every_entry=True), Adagrad(), RowwiseAdagrad(), Adam()]
OPTIMIZERS.append(Adagrad(0.05, bias_scale=3.7))


def name_of(optimizer: RowOptimizer) -> str:
    return optimizer.name + "-every-entry" * (optimizer.name == "section4" and optimizer.n_states == 2)


PRIORS = ["none", "unbiased", "touched"]
# B, C, K, D, share of non-zeros. Even and odd; one of each; few and many non-zeros for D, with D above and below 4,096.
SHAPES = [
    (16, 4, 8, 32, 0.3),
    (13, 5, 7, 919, 0.05),  # row by row: sixteens of features by the four, one by itself, and some
    (12, 3, 40, 4201, 0.005),
    (9, 5, 5, 4153, 0.3),
    (1, 1, 3, 17, 0.5),
    (6, 2, 1, 5, 0.6),
]


def make(shape, seed=0, *, dense=False):
    """Rows (the first two without any feature), and a generator for what else a test draws."""
    B, _, _, D, density = shape
    rng = np.random.default_rng(seed)
    x = np.where(rng.random((2 * B + 3, D)) < density, rng.standard_normal((2 * B + 3, D)), 0.0).astype(np.float32)
    x[:2] = 0
    return as_rows(x if dense else sp.csr_matrix(x)), rng


def draw_step(shape, X, rng, dtype):
    """One minibatch with repeated rows, repeated classes in a row, and labels among the shared classes."""
    B, C, K, _, _ = shape
    rows = rng.integers(0, X.n_rows, B)
    rows[: B // 4] = rows[B // 4 : 2 * (B // 4)]
    rows[-1] = 0
    step = {
        "rows": rows,
        "pairs": torch.from_numpy(rng.integers(0, K, (B, C))),
        "shared": torch.from_numpy(rng.integers(0, K, 3 * C)),
        "own": torch.from_numpy(rng.integers(0, K, (B, 3))),
    }
    for name, size in (("grad", (B, C)), ("shared_grad", (B, 3 * C)), ("own_grad", (B, 3))):
        step[name] = torch.from_numpy(rng.standard_normal(size)).to(dtype)
    for name, size in (("share", (B, C)), ("shared_share", (B, 3 * C)), ("own_share", (B, 3))):
        step[name] = torch.from_numpy(5 * rng.random(size) * (rng.random(size) < 0.7)).to(dtype)
    return step


def make_parameters(shape, optimizer: RowOptimizer, rng, dtype) -> reference.Parameters:
    _, _, K, D, _ = shape
    weight, bias = (torch.from_numpy(rng.standard_normal(s)).to(F32).to(dtype) for s in ((K, D), (K,)))
    return reference.Parameters(weight, bias, optimizer.init_state(weight), optimizer.init_state(bias))


def make_prior(name: str, X: Rows, dtype) -> Prior | None:
    if name == "none":
        return None
    return Prior.from_counts(1.7, X.feature_counts(), X.n_rows, dtype, touched_only=name == "touched", of_bias=0.6)


def push(kernels, X, step, parameters, optimizer, t, prior, *, shared, dtype):
    def value(name):
        return step[name].to(dtype)

    if shared:
        own = (step["own"], value("own_grad"), value("shared_share"), value("own_share"))
        kernels.push_shared(
            X, step["rows"], step["shared"], value("shared_grad"), *own, parameters, optimizer, t, prior
        )
    else:
        pairs = (step["pairs"], value("grad"), value("share"))
        kernels.push_pairs(X, step["rows"], *pairs, parameters, optimizer, t, prior)


def tensors(parameters: reference.Parameters) -> dict[str, torch.Tensor]:
    states = {f"state{i}": s for i, s in enumerate(parameters.weight_state)}
    bias_states = {f"bias_state{i}": s for i, s in enumerate(parameters.bias_state)}
    return {"weight": parameters.weight, "bias": parameters.bias, **states, **bias_states}


def assert_as_close_to_truth(kernel, plain, truth, slack):
    """The kernel may err as much as plain torch at the same dtype, plus `slack`; no more."""
    excess = (kernel.double() - truth).abs() - (plain.double() - truth).abs()
    assert (excess <= slack).all(), f"worst excess {(excess - slack).max():.2e}"


def score_scale(X, step, parameters, classes):
    """sum |x w| + |b|: what the rounding of a score is relative to."""
    size = reference.Parameters(parameters.weight.abs().double(), parameters.bias.abs().double())
    magnitudes = DenseRows(np.abs(X.dense(np.arange(X.n_rows), F64).numpy()))
    score = reference.pair_scores if classes.ndim == 2 else reference.shared_scores
    return score(magnitudes, step["rows"], classes, size.weight, size.bias)

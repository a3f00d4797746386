"""Direct fits: the optimum of the exact objective by preconditioned L-BFGS, for small data.

    maximise  sum_n weight_n log p(y_n | psi_n) - sum_kd w_kd^2 / (2 v) - sum_k b_k^2 / (2 v_0),   psi_n = W z_n + b

The problem is convex. `Basis` rotates the features to the eigenvectors of X'X, where the Hessian is nearly diagonal:
class k's is about p_k (1 - p_k) lambda_r + 1 / v. With that as the initial metric of L-BFGS about twenty evaluations
suffice, for any scales and correlations of the columns. Matrix products are torch's, in one thread, so that
results do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from ..kernels.rows import DenseRows, Rows, SparseRows
from ..model import quadrature
from ..model.mode_grid import ModeGrid
from ..model.noise import Noise

MEMORY = 12  # pairs (step, change of the gradient) that L-BFGS keeps
MOST_ITERATIONS = 1000
PRECISE = 1e-12  # convergence: predicted gain of the next step per row
SMALLEST = 1e-8  # of curvatures


@dataclass
class Basis:
    """Centred rows in the eigenbasis of X'X (of XX' if there are fewer rows than features)."""

    Z: Tensor  # (N, R) float64
    energy: Tensor  # (R,) sum of squares of each column
    mean: Tensor  # (D,) of the columns of X
    to_features: Tensor  # (D, R): weights of x are those of z times its transpose

    @classmethod
    def of(
        cls, X: Rows, rows: np.ndarray, weight: np.ndarray, *, centred: bool, times: np.ndarray | None = None
    ) -> Basis:
        """The basis of columns multiplied by `times` (D,), whose weights have the prior. `weight` (N,): row weights."""
        D = X.n_features
        scale = torch.ones(D, dtype=torch.float64) if times is None else torch.from_numpy(times)
        if isinstance(X, SparseRows) and len(rows) < D:
            return cls._of_wide(_matrix(X)[rows].astype(np.float64), scale)
        dense = X.values[rows].astype(np.float64) if isinstance(X, DenseRows) else _matrix(X)[rows].toarray()
        values = torch.from_numpy(dense.astype(np.float64, copy=False)) * scale
        mean = torch.from_numpy(weight / weight.sum()) @ values if centred else values.new_zeros(D)
        values = values - mean
        if len(rows) < D:
            Z, V = _of_gram(values @ values.T, values)
        else:
            _, V = torch.linalg.eigh(values.T @ values)
            Z = values @ V
        return cls(Z, (Z * Z).sum(0), mean / scale, V * scale[:, None])

    @classmethod
    def _of_wide(cls, matrix: sp.csr_matrix, scale: Tensor) -> Basis:
        """For sparse rows with more features than rows: they stay sparse and are not centred."""
        scaled = (matrix @ sp.diags_array(scale.numpy())).tocsr()
        Z, V = _of_gram(torch.from_numpy((scaled @ scaled.T).toarray()), scaled)
        return cls(Z, (Z * Z).sum(0), torch.zeros_like(scale), V * scale[:, None])

    def some(self, rows: Tensor) -> Basis:
        return replace(self, Z=self.Z[rows])

    def outer(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and biases for X."""
        weight = weight @ self.to_features.T
        return weight, bias - weight @ self.mean


def _matrix(X: SparseRows) -> sp.csr_matrix:
    return sp.csr_matrix((X.values, X.indices, X.indptr), shape=(X.n_rows, X.n_features), copy=False)


def _of_gram(gram: Tensor, values: Any) -> tuple[Tensor, Tensor]:
    """(Z, V) with values = Z V', from values values': directions orthogonal to all rows have no weight."""
    squares, U = torch.linalg.eigh(gram)
    kept = squares > 1e-12 * squares.max().clamp(min=1e-300)
    roots, U = squares[kept].sqrt(), U[:, kept]
    back = values.T @ (U / roots) if isinstance(values, Tensor) else torch.from_numpy(values.T @ (U / roots).numpy())
    return U * roots, back


@dataclass
class Objective:
    """The objective on rows z with labels and weights; see the top of this module."""

    basis: Basis
    labels: Tensor  # (N,) in 0 .. K-1
    weight: Tensor  # (N,) of the rows
    n_classes: int
    variance: float | None  # v; None: no prior
    noise: Noise
    bias_variance: float | None = None  # v_0
    fit_intercept: bool = True
    curvature: Tensor = field(init=False)  # (K,) sum_n weight_n p_nk (1 - p_nk), about
    log_p_and_grad: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = field(init=False)
    minus_log_likelihood: float = 0.0  # at the last evaluation

    def __post_init__(self) -> None:
        if self.noise.conjugate:
            self.log_p_and_grad = softmax
        elif self.noise.smooth_log_concave:
            self.log_p_and_grad = ModeGrid(self.noise)
        else:
            self.log_p_and_grad = partial(quadrature.log_likelihood_and_grad, self.noise)

    def start(self) -> tuple[Tensor, Tensor]:
        """Zero weights, and biases that reproduce class frequencies (for softmax; a good start for others)."""
        W = self.basis.Z.new_zeros(self.n_classes, self.basis.Z.shape[1])
        b = self.basis.Z.new_zeros(self.n_classes)
        if self.fit_intercept and self.bias_variance is None:
            frequency = torch.bincount(self.labels, self.weight, self.n_classes) / self.weight.sum()
            b = frequency.clamp(min=1.0 / (10.0 * len(self.labels))).log()
            b = b - b.mean()
        return W, b

    def __call__(self, W: Tensor, b: Tensor) -> tuple[float, Tensor, Tensor]:
        """(minus the objective, its gradient by W and by b)."""
        psi = torch.addmm(b, self.basis.Z, W.T)
        log_p, grad = self.log_p_and_grad(psi, self.labels)
        size = grad.abs().clamp_(max=1.0)  # p_nk of softmax, 1 - p_nk for the label
        self.curvature = self.weight @ torch.maximum(size * (1.0 - size), 0.05 * size)
        weighted = grad.mul_(self.weight[:, None])  # d (sum of log p) / d psi
        value = self.minus_log_likelihood = -float(self.weight @ log_p)
        grad_W, grad_b = -(weighted.T @ self.basis.Z), -weighted.sum(0)
        if self.variance is not None:
            value += float((W * W).sum()) / (2.0 * self.variance)
            grad_W += W / self.variance
        if self.bias_variance is not None:
            value += float(b @ b) / (2.0 * self.bias_variance)
            grad_b = grad_b + b / self.bias_variance
        return value, grad_W, grad_b if self.fit_intercept else torch.zeros_like(b)

    def metric(self) -> tuple[Tensor, Tensor]:
        """Approximate reciprocals of the Hessian's diagonal."""
        total = self.weight.sum()
        share = (self.curvature / total).clamp(min=SMALLEST)
        of_prior = 0.0 if self.variance is None else 1.0 / self.variance
        energy = self.basis.energy
        if len(energy):  # there may be no features at all
            energy = energy.clamp(min=SMALLEST * float(energy.max()))
        diagonal = torch.outer(share, energy) + of_prior
        return 1.0 / diagonal.clamp(min=1e-300), 1.0 / (share * total)


def softmax(psi: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """log p(y | psi) (N,) and its gradient by psi (N, K); psi is overwritten."""
    of_label = psi.gather(1, labels[:, None])[:, 0]
    top = psi.max(1, keepdim=True).values
    e = psi.sub_(top).exp_()
    total = e.sum(1, keepdim=True)
    grad = e.div_(-total)
    grad.scatter_add_(1, labels[:, None], torch.ones_like(total))
    return of_label - top[:, 0] - total[:, 0].log(), grad


@dataclass
class Solution:
    weight: Tensor  # (K, R)
    bias: Tensor
    values: list[float]  # log likelihood per unit of row weight, after each iteration
    converged: bool


@torch.inference_mode()
def solve(
    objective: Objective, start: tuple[Tensor, Tensor] | None = None, *, precision: float = PRECISE,
    max_iter: int = MOST_ITERATIONS, stop_asked: Callable[[], bool] = lambda: False,
) -> Solution:  # fmt: skip
    """L-BFGS until the predicted gain of the next step is less than `precision` per row."""
    W, b = objective.start() if start is None else start
    value, grad_W, grad_b = objective(W, b)
    total = float(objective.weight.sum())
    pairs: list[tuple[Tensor, Tensor, Tensor, Tensor, float]] = []
    values, converged = [], False
    for _ in range(max_iter):
        step_W, step_b = _direction(pairs, objective.metric(), grad_W, grad_b)
        slope = _dot(step_W, step_b, grad_W, grad_b)
        if slope < precision * total:
            converged = True
            break
        if stop_asked():
            break
        moved = _line_search(objective, W, b, value, step_W, step_b, slope)
        if moved is None:  # converged to rounding
            converged = slope < 1e-6 * total
            break
        new_W, new_b, value, new_grad_W, new_grad_b = moved
        moves = (new_W - W, new_b - b, new_grad_W - grad_W, new_grad_b - grad_b)
        curved = _dot(*moves)
        W, b, grad_W, grad_b = new_W, new_b, new_grad_W, new_grad_b
        if curved > 1e-14 * abs(value):
            pairs = [*pairs[-MEMORY + 1 :], (*moves, curved)]
        values.append(-objective.minus_log_likelihood / total)
    return Solution(W, b, values, converged)


def _dot(a_W: Tensor, a_b: Tensor, c_W: Tensor, c_b: Tensor) -> float:
    return float((a_W * c_W).sum() + a_b @ c_b)


def _direction(pairs: list, metric: tuple[Tensor, Tensor], grad_W: Tensor, grad_b: Tensor) -> tuple[Tensor, Tensor]:
    """The L-BFGS inverse Hessian times the gradient: two-loop recursion (Nocedal 1980)."""
    q_W, q_b, shares = grad_W.clone(), grad_b.clone(), []
    for s_W, s_b, y_W, y_b, curved in reversed(pairs):
        share = _dot(s_W, s_b, q_W, q_b) / curved
        shares.append(share)
        q_W -= share * y_W
        q_b -= share * y_b
    size = 1.0
    if pairs:
        _, _, y_W, y_b, curved = pairs[-1]
        size = curved / _dot(y_W * metric[0], y_b * metric[1], y_W, y_b)
    q_W *= metric[0] * size
    q_b *= metric[1] * size
    for (s_W, s_b, y_W, y_b, curved), share in zip(pairs, reversed(shares), strict=True):
        back = share - _dot(y_W, y_b, q_W, q_b) / curved
        q_W += back * s_W
        q_b += back * s_b
    return q_W, q_b


def _line_search(
    objective: Objective, W: Tensor, b: Tensor, value: float, step_W: Tensor, step_b: Tensor, slope: float
) -> tuple[Tensor, Tensor, float, Tensor, Tensor] | None:
    """Backtracking from a full step until the Armijo condition holds; None if it never does."""
    length = 1.0
    for _ in range(25):
        new_W, new_b = W - length * step_W, b - length * step_b
        new_value, grad_W, grad_b = objective(new_W, new_b)
        if new_value <= value - 1e-4 * length * slope + 1e-13 * abs(value):
            return new_W, new_b, new_value, grad_W, grad_b
        length *= 0.4
    return None

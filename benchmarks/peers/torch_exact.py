"""Exact softmax as one writes it in torch: an embedding of the features, cross entropy over all classes, Adagrad.

Rates (of weights and of biases), decay and eps are those that our estimator would choose for minibatches of at most 512
rows, so that a difference is mostly one of speed. No prior; rows are scored one by one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
import torch.nn.functional as F
from torch import Tensor

from augment_reduce.config.defaults import Shape, default_adagrad, default_batch_size
from augment_reduce.kernels.rows import as_rows
from augment_reduce.model.noise import Gumbel

SCORES = 20_000_000  # held at once when looking


class Linear(torch.nn.Module):
    """Scores of sparse rows; the gradient of the weights is of the features that a minibatch has."""

    def __init__(self, n_features: int, n_classes: int) -> None:
        super().__init__()
        self.weight = torch.nn.EmbeddingBag(n_features, n_classes, mode="sum", sparse=True, include_last_offset=True)
        self.bias = torch.nn.Parameter(torch.zeros(n_classes))
        torch.nn.init.zeros_(self.weight.weight)

    def forward(self, X: sp.csr_matrix) -> Tensor:
        index, offsets = (torch.from_numpy(a.astype(np.int64)) for a in (X.indices, X.indptr))
        return self.weight(index, offsets, per_sample_weights=torch.from_numpy(X.data.astype(np.float32))) + self.bias


def torch_exact(task: Any, looks: list[float], seed: int = 0) -> Iterator[tuple[float, float, np.ndarray]]:
    """(seconds of training, test log likelihood, five guesses of every test row) after so many epochs each."""
    N, K = len(task.y), task.n_classes
    shape = Shape.of(as_rows(task.X), K)
    B = default_batch_size(shape)
    ours = default_adagrad(None, Gumbel(), shape, B)
    model, y = Linear(task.X.shape[1], K), torch.from_numpy(np.asarray(task.y, np.int64))
    half_after = float(ours.half_after or np.inf)
    # Ours is of the sum over all rows, this of the mean over a minibatch: N times less, and so is eps.
    optimizer = torch.optim.Adagrad(
        [{"params": [model.weight.weight]}, {"params": [model.bias], "lr": ours.bias_scale * ours.learning_rate}],
        ours.learning_rate, lr_decay=1.0 / half_after, eps=ours.eps / N,
    )  # fmt: skip
    generator, seconds, done = np.random.default_rng(seed), 0.0, 0
    order = generator.permutation(N)
    for epochs in looks:
        started = time.perf_counter()
        while done < round(epochs * N):
            at = done % N
            rows = order[at : at + B]
            optimizer.zero_grad()
            F.cross_entropy(model(task.X[rows]), y[rows]).backward()
            optimizer.step()
            done += len(rows)
            if done % N == 0:
                order = generator.permutation(N)
        seconds += time.perf_counter() - started
        with torch.no_grad():
            yield seconds, likelihood(model, task), top(model, task.rows_X, min(5, K))


def likelihood(model: Linear, task: Any) -> float:
    block, total = max(1, SCORES // task.n_classes), 0.0
    labels = torch.from_numpy(np.asarray(task.test_y, np.int64))
    for begin in range(0, len(labels), block):
        part = slice(begin, begin + block)
        total -= float(F.cross_entropy(model(task.test_X[part]), labels[part], reduction="sum"))
    return total / len(labels)


def top(model: Linear, X: sp.csr_matrix, n: int) -> np.ndarray:
    block = max(1, SCORES // len(model.bias))
    parts = [model(X[begin : begin + block]).topk(n).indices for begin in range(0, X.shape[0], block)]
    return np.array(torch.cat(parts))

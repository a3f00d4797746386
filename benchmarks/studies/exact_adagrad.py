"""A reference for the defaults: exact models by the same optimiser, rate, prior and minibatches, over all classes.

    python -m benchmarks.studies.exact_adagrad --datasets debian-5k debian-full --variances 3 10 --epochs 16
    python -m benchmarks.studies.exact_adagrad --datasets bibtex omniglot --models probit logistic --epochs 30
    python -m benchmarks.studies.exact_adagrad --tiny

`exact_bar.py` converges to the maximum of the posterior; this uses early stopping. Softmax in closed form, probit and
logistic by quadrature of eq. (5), both gradient and likelihood: no bound is used. Rate, decay, eps and the rate of the
biases are those of `config/defaults.py`. The log likelihood of a tenth of the training rows (of packages, for
debian-deps), held out, is evaluated after every epoch; then all training rows are fitted with the best variance for the
best number of epochs, and the test rows are evaluated at the end and at the epochs of --looks.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from augment_reduce.config.defaults import Shape, default_adagrad, default_batch_size, first_prior_variance
from augment_reduce.kernels.rows import as_rows
from augment_reduce.model import quadrature
from augment_reduce.model.noise import Noise, resolve_noise
from benchmarks.common import SCHEMAS, append
from benchmarks.studies.exact_bar import DATASETS, Objective, Part, load

FIELDS = SCHEMAS["exact_adagrad"]


class Pairs:
    """(row, label) pairs of a part, in minibatches on the device: of each only the features that its rows have."""

    def __init__(self, part: Part, device: torch.device) -> None:
        coo = part.labels.tocoo()
        self.X, self.row, self.label = sp.csr_matrix(part.X), coo.row, coo.col.astype(np.int64)
        self.device = device
        of_row = np.bincount(coo.row, minlength=part.X.shape[0]).astype(np.float64)
        self.counts = np.asarray((sp.diags(of_row) @ (self.X != 0)).sum(0)).ravel()  # pairs that have a feature
        n_nonzero = int((np.diff(self.X.indptr) * of_row).sum())
        agreement = as_rows(self.X).agreement(np.arange(self.X.shape[0]), of_row)
        self.shape = Shape(len(self.row), part.X.shape[1], part.labels.shape[1], n_nonzero, agreement=agreement)

    def minibatch(self, pairs: np.ndarray) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x (B, F) over the features at hand, labels (B,), those features, and the share of the prior of each."""
        x = self.X[self.row[pairs]]
        features, column = np.unique(x.indices, return_inverse=True)
        small = sp.csr_matrix((x.data, column, x.indptr), shape=(len(pairs), len(features)))
        share = np.bincount(column, minlength=len(features)) / self.counts[features] * len(self.row) / len(pairs)
        arrays = small.toarray(), self.label[pairs], features.astype(np.int64), share.astype(np.float32)
        x_, label, features_, share_ = (torch.from_numpy(a).to(self.device) for a in arrays)
        return x_, label, features_, share_


class Model:
    """Weights (D, K), feature by feature, with Adagrad's sums; the move is `optim.RowOptimizer.apply`'s."""

    def __init__(self, pairs: Pairs, noise: Noise, v: float) -> None:
        K, D = pairs.shape.n_classes, pairs.shape.n_features
        self.pairs, self.noise, self.v, self.t = pairs, noise, v, 0
        self.batch_size = default_batch_size(pairs.shape)
        self.rule = default_adagrad(None, noise, pairs.shape, self.batch_size)
        self.weight, self.sums = (torch.zeros(D, K, device=pairs.device) for _ in range(2))
        self.bias, self.bias_sums = (torch.zeros(K, device=pairs.device) for _ in range(2))

    def move(self, w: Tensor, g: Tensor, s: Tensor, share: Tensor | float, scale: float) -> tuple[Tensor, Tensor]:
        s = s + g * g
        h = scale * self.rule.scalars(self.t)[0] / (s.sqrt() + self.rule.eps)
        return (w + h * g) / (1.0 + h * share / self.v), s

    def by_scores(self, psi: Tensor, label: Tensor) -> Tensor:
        """d log p(y | psi) / d psi, (B, K)."""
        if self.noise.name != "softmax":
            return quadrature.log_likelihood_and_grad(self.noise, psi.double(), label)[1].to(psi.dtype)
        grad = torch.softmax(psi, 1).neg_()
        grad[torch.arange(len(label), device=psi.device), label] += 1.0
        return grad

    def look(self, at: Objective) -> tuple[float, float]:
        """Mean log likelihood of a label, and how often the best class is one (a row's only one, but for softmax)."""
        if self.noise.name == "softmax":
            return at.look(self.weight.T, self.bias)
        value, hits = 0.0, 0
        for part in at.blocks(64 * len(self.bias)):
            psi, label = torch.addmm(self.bias, at.X[part], self.weight), at.label[part].long()
            value += float(quadrature.log_likelihood(self.noise, psi.double(), label).sum())
            hits += int((psi.argmax(1) == label).sum())
        return value / len(at.label), hits / len(at.label)

    def epoch(self, rng: np.random.Generator) -> None:
        order = rng.permutation(self.pairs.shape.n_rows)
        for begin in range(0, len(order), self.batch_size):
            self.t += 1
            x, label, features, share = self.pairs.minibatch(order[begin : begin + self.batch_size])
            old = self.weight[features]
            off = self.by_scores(torch.addmm(self.bias, x, old), label) * (len(order) / len(label))
            moved, sums = self.move(old, x.T @ off, self.sums[features], share[:, None], 1.0)
            self.weight[features], self.sums[features] = moved, sums
            c = self.rule.bias_scale
            self.bias, self.bias_sums = self.move(self.bias, off.sum(0), self.bias_sums, 0.0, c)


def run(name: str, noise: Noise, args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    train, test, _ = load(name, args.tiny)
    order = np.random.default_rng(0).permutation(train.X.shape[0])
    n_held = len(order) // 10
    rows: list[dict[str, Any]] = []

    def fit(part: Part, look_at: Objective, v: float, epochs: int, which: str) -> list[tuple[float, float, int]]:
        model, rng, looks, seconds = Model(Pairs(part, device), noise, v), np.random.default_rng(0), [], 0.0
        for epoch in range(1, epochs + 1):
            began = time.perf_counter()
            model.epoch(rng)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds += time.perf_counter() - began
            if which == "test" and epoch != epochs and epoch not in args.looks:
                continue
            value, accuracy = model.look(look_at)
            looks.append((value, v, epoch))
            values = (
                name,
                noise.name,
                v,
                epoch,
                which,
                f"{value:.4f}",
                f"{accuracy:.4f}",
                f"{seconds:.1f}",
                device,
                f"{model.rule.bias_scale:.3g}",
            )
            rows.append({key: str(item) for key, item in zip(FIELDS, values, strict=True)})
            print(*values, flush=True)
        return looks

    kept = train.some(np.sort(order[n_held:]))
    held = Objective(of_seen_labels(train.some(np.sort(order[:n_held])), kept), device)
    default = first_prior_variance(noise, Pairs(kept, device).shape)
    looks = [look for v in args.variances or [default] for look in fit(kept, held, v, args.epochs, "held out")]
    _, v, epoch = max(looks)
    fit(train, Objective(of_seen_labels(test, train), device), v, epoch, "test")
    return rows


def of_seen_labels(part: Part, seen: Part) -> Part:
    """Without the labels that `seen` never has, which no model could know, and the rows that have no others."""
    known = np.asarray(seen.labels.sum(0)).ravel() > 0
    labels = sp.csr_matrix(part.labels.multiply(known))
    labels.eliminate_zeros()
    return Part(part.X, labels).some(np.flatnonzero(np.asarray(labels.sum(1)).ravel() > 0))


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", nargs="+", default=["bibtex"], choices=list(DATASETS))
    parser.add_argument("--models", nargs="+", default=["softmax"])
    parser.add_argument("--variances", nargs="+", type=float, default=[])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument(
        "--looks", nargs="+", type=int, default=[1, 2, 4, 10], help="epochs at which test rows are seen"
    )
    parser.add_argument("--out", default="", help="csv to append to")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(argv)
    if args.tiny:
        args.epochs = 2
    device = torch.device("cuda" if torch.cuda.is_available() and not args.tiny else "cpu")
    torch.set_float32_matmul_precision("high")
    with torch.no_grad():
        models = [resolve_noise(name) for name in args.models]
        rows = [row for name in args.datasets for noise in models for row in run(name, noise, args, device)]
    if args.out:
        append(Path(args.out), rows, FIELDS, device)
    return rows


if __name__ == "__main__":
    main()

"""The optimum of a linear softmax: exact maximum a posteriori, with the prior chosen on held-out rows.

    python -m benchmarks.studies.exact_bar --datasets bibtex omniglot mnist            # on a GPU; slow without
    python -m benchmarks.studies.exact_bar --datasets debian-full --variances 1 3 10   # needs 40 GB of GPU memory
    python -m benchmarks.studies.exact_bar --tiny

Full-batch L-BFGS on  sum_n log softmax_{y_n}(W x_n + b) - (|W|^2 + |b|^2) / (2 v),  every class in every sum. For each
v the log likelihood of a tenth of the training rows (of packages, for debian-deps), held out, is evaluated during the
fit; then the best v is fitted again on all training rows, with the best number of iterations, and the test rows are
evaluated once.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from augment_reduce.data import load_dataset, random_like
from benchmarks.common import SCHEMAS, append

DATASETS: dict[str, tuple[str, dict[str, Any]]] = {
    "mnist": ("mnist", {}),
    "bibtex": ("bibtex", {}),
    "omniglot": ("omniglot", {}),
    "omniglot-1": ("omniglot", {"seed": 1}),  # the splits of the other seeds of the paper's tables
    "omniglot-2": ("omniglot", {"seed": 2}),
    "debian-5k": ("debian-deps", {"min_count": 5}),
    "debian-full": ("debian-deps", {}),
}
FIELDS = SCHEMAS["exact_bar"]
BLOCK = 2**29  # scores at once


@dataclass
class Part:
    """Rows of features, and how often each class is a label of each row."""

    X: sp.csr_matrix
    labels: sp.csr_matrix

    def some(self, which: np.ndarray) -> Part:
        return Part(self.X[which], self.labels[which])


def as_part(split: Any, n_classes: int) -> Part:
    """Rows that come several times, once for each of their labels, are put together again."""
    y = np.asarray(split.y)
    rows = np.arange(len(y)) if split.rows is None else np.asarray(split.rows)
    X = sp.csr_matrix(split.X if split.rows is None else split.features)
    labels = sp.csr_matrix((np.ones(len(y), np.float32), (rows, y)), shape=(X.shape[0], n_classes))
    return Part(X.astype(np.float32), labels)


def load(name: str, tiny: bool) -> tuple[Part, Part, int]:
    source, options = DATASETS[name]
    data = random_like("bibtex", n_rows=300) if tiny else load_dataset(source, **options)
    test = data.test if data.test is not None else data.train
    return as_part(data.train, data.n_classes), as_part(test, data.n_classes), data.n_classes


class Objective:
    """The log posterior of some rows, in blocks that fit the device."""

    def __init__(self, part: Part, device: torch.device) -> None:
        self.X = torch.from_numpy(part.X.toarray()).to(device)
        coo = part.labels.tocoo()
        self.row, self.label, self.count = (torch.from_numpy(a).to(device) for a in (coo.row, coo.col, coo.data))
        self.total = torch.from_numpy(np.asarray(part.labels.sum(1)).ravel()).to(device)
        self.starts = np.searchsorted(coo.row, np.arange(part.X.shape[0] + 1))

    def blocks(self, n_classes: int) -> list[slice]:
        step = max(1, BLOCK // n_classes)
        return [slice(a, min(a + step, len(self.X))) for a in range(0, len(self.X), step)]

    def value_and_grad(self, weight: Tensor, bias: Tensor, v: float) -> tuple[float, Tensor, Tensor]:
        """Minus the log posterior, and its gradients."""
        value = float((weight.square().sum() + bias.square().sum()) / (2.0 * v))
        by_weight, by_bias = weight / v, bias / v
        for part in self.blocks(len(bias)):
            x, n = self.X[part], self.total[part]
            psi = torch.addmm(bias, x, weight.T)
            at = slice(self.starts[part.start], self.starts[part.stop])
            row, label, count = self.row[at].long() - part.start, self.label[at].long(), self.count[at]
            value += float((torch.logsumexp(psi, 1) * n).sum() - (psi[row, label] * count).sum())
            off = torch.softmax(psi, 1).mul_(n[:, None])
            off.index_put_((row, label), -count, accumulate=True)
            by_weight.addmm_(off.T, x)
            by_bias += off.sum(0)
        return value, by_weight, by_bias

    def look(self, weight: Tensor, bias: Tensor) -> tuple[float, float]:
        """Mean log likelihood of a label, and how often the best class is one."""
        value, hits = 0.0, 0.0
        for part in self.blocks(len(bias)):
            psi = torch.addmm(bias, self.X[part], weight.T)
            at = slice(self.starts[part.start], self.starts[part.stop])
            row, label, count = self.row[at].long() - part.start, self.label[at].long(), self.count[at]
            value += float(((psi[row, label] - torch.logsumexp(psi, 1)[row]) * count).sum())
            hits += float(((label == psi.argmax(1)[row]) * count).sum())
        return value / float(self.total.sum()), hits / float((self.total > 0).sum())


def fit(
    train: Objective, look_at: Objective | None, shape: tuple[int, int], v: float, iterations: int, every: int
) -> tuple[Tensor, Tensor, list[tuple[int, float, float]]]:
    """Weights after so many iterations of L-BFGS from zero, and (iteration, log likelihood, accuracy) on the way."""
    weight = torch.zeros(shape, device=train.X.device, requires_grad=True)
    bias = torch.zeros(shape[0], device=train.X.device, requires_grad=True)
    optimiser = torch.optim.LBFGS([weight, bias], max_iter=every, history_size=5, line_search_fn="strong_wolfe")

    def closure() -> float:
        with torch.no_grad():
            value, weight.grad, bias.grad = train.value_and_grad(weight, bias, v)
        return value

    looks = []
    for done in range(every, iterations + 1, every):
        optimiser.step(closure)
        if look_at is not None:
            with torch.no_grad():
                looks.append((done, *look_at.look(weight, bias)))
            if len(looks) > 3 and max(x[1] for x in looks[-3:]) < max(x[1] for x in looks[:-3]):
                break  # it has been getting worse
    return weight, bias, looks


def bar(name: str, args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    train, test, K = load(name, args.tiny)
    shape = (K, train.X.shape[1])
    order = np.random.default_rng(0).permutation(train.X.shape[0])
    n_held = len(order) // 10
    held, kept = (
        Objective(train.some(np.sort(order[:n_held])), device),
        Objective(train.some(np.sort(order[n_held:])), device),
    )
    rows: list[dict[str, Any]] = []

    def add(v: float, look: tuple[int, float, float], which: str, seconds: float) -> None:
        values = (
            name,
            v,
            look[0],
            which,
            f"{look[1]:.4f}",
            f"{look[2]:.4f}",
            f"{seconds:.1f}",
            str(device),
        )
        rows.append(dict(zip(FIELDS, values, strict=True)))
        print(*values, flush=True)

    best = (-np.inf, 0.0, 0)
    for v in args.variances:
        began = time.perf_counter()
        looks = fit(kept, held, shape, v, args.iterations, args.every)[2]
        top = max(looks, key=lambda look: look[1])
        add(v, top, "held out, best moment", time.perf_counter() - began)
        add(v, looks[-1], "held out, last", time.perf_counter() - began)
        best = max(best, (top[1], v, top[0]))
    del kept, held
    whole, unseen = Objective(train, device), Objective(test, device)
    began = time.perf_counter()
    weight, bias, _ = fit(whole, None, shape, best[1], best[2], args.every)
    with torch.no_grad():
        add(best[1], (best[2], *unseen.look(weight, bias)), "test", time.perf_counter() - began)
        add(best[1], (best[2], *whole.look(weight, bias)), "training", time.perf_counter() - began)
    return rows


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", nargs="+", default=["bibtex"], choices=list(DATASETS))
    parser.add_argument("--variances", nargs="+", type=float, default=[0.1, 0.3, 1.0, 3.0, 10.0, 30.0])
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--out", default="", help="csv to append to")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(argv)
    if args.tiny:
        args.variances, args.iterations, args.every = [0.3, 3.0], 12, 4
    device = torch.device("cuda" if torch.cuda.is_available() and not args.tiny else "cpu")
    torch.set_float32_matmul_precision("high")
    rows = [row for name in args.datasets for row in bar(name, args, device)]
    if args.out:
        append(Path(args.out), rows, FIELDS, device)
    return rows


if __name__ == "__main__":
    main()

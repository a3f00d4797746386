"""The optimum of each model on MNIST: exact maxima of the posterior, the prior chosen on held-out or on test rows.

    python -m benchmarks.studies.exact_map --out benchmarks/results/exact_map.csv     # on a GPU: some minutes
    python -m benchmarks.studies.exact_map --tiny

Full-batch L-BFGS in float64 on  sum_n log p(y_n | W x_n + b) - |W|^2 / (2 v) - |b|^2 / (2 c^2 v)  to convergence;
log p of probit and logistic is eq. (5) by the trapezoid rule, c = 7 is the defaults' scale of MNIST's biases. Every v
is fitted without each of three tenths of the training rows, and with all of them. `best_moment` is the best of all
evaluations, 25 iterations apart. The values chosen on test rows are an upper limit only and used nowhere else.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from augment_reduce.data import load_dataset
from benchmarks.common import SCHEMAS, append

VARIANCES = {
    "softmax": (0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 1.0, 3.0),
    "probit": (0.02, 0.03, 0.04, 0.05, 0.07, 0.1, 0.3),
    "logistic": (0.1, 0.2, 0.3, 0.5, 1.5),
}
GRIDS = {"probit": (-9.0, 25.0, 137), "logistic": (-36.0, 40.0, 153)}  # from, to and how many values of eps
BIAS_SCALE = 7.0
BLOCK = 20_000  # rows at once
FIELDS = SCHEMAS["exact_map"]

Rows = tuple[Tensor, Tensor]


def log_p(model: str, psi: Tensor, y: Tensor) -> Tensor:
    """log p(y | psi), eq. (1) or eq. (5)."""
    if model == "softmax":
        return torch.log_softmax(psi, 1).gather(1, y[:, None])[:, 0]
    eps = torch.linspace(*GRIDS[model], dtype=psi.dtype, device=psi.device)
    rivals = torch.ones_like(psi, dtype=torch.bool).scatter(1, y[:, None], False)
    gap = (psi - psi.gather(1, y[:, None]))[rivals].view(len(y), -1)
    z = eps - gap[:, :, None]
    if model == "probit":
        log_f = torch.special.log_ndtr(z).sum(1) - 0.5 * eps.square() - 0.5 * math.log(2.0 * math.pi)
    else:
        log_f = F.logsigmoid(z).sum(1) + F.logsigmoid(eps) + F.logsigmoid(-eps)
    return torch.logsumexp(log_f, 1) + torch.log(eps[1] - eps[0])


def blocks(rows: Rows) -> Iterator[Rows]:
    return zip(rows[0].split(BLOCK), rows[1].split(BLOCK), strict=True)


def look(model: str, rows: Rows, weight: Tensor, bias: Tensor) -> tuple[float, float]:
    """Mean log likelihood, and accuracy."""
    value, hits = 0.0, 0
    with torch.no_grad():
        for x, y in blocks(rows):
            psi = torch.addmm(bias, x, weight.T)
            value += float(log_p(model, psi, y).sum())
            hits += int((psi.argmax(1) == y).sum())
    return value / len(rows[1]), hits / len(rows[1])


def fit(
    model: str, rows: Rows, n_classes: int, v: float, most: int, at: Callable[[Tensor, Tensor], tuple[float, float]]
) -> list[tuple[int, float, float]]:
    """(evaluations, log likelihood, accuracy) on the way to the maximum; the last are there."""
    shape, kind = (n_classes, rows[0].shape[1]), {"dtype": torch.float64, "device": rows[0].device}
    weight, bias = torch.zeros(shape, **kind, requires_grad=True), torch.zeros(n_classes, **kind, requires_grad=True)
    of_bias = BIAS_SCALE**2 * v
    optimiser = torch.optim.LBFGS(
        [weight, bias], max_iter=25, history_size=30, line_search_fn="strong_wolfe", tolerance_change=1e-12
    )
    done, looks, before = 0, [], math.inf

    def closure() -> float:
        nonlocal done
        done += 1
        optimiser.zero_grad()
        value = float((weight.detach().square().sum() / v + bias.detach().square().sum() / of_bias) / 2)
        for x, y in blocks(rows):
            part = -log_p(model, torch.addmm(bias, x, weight.T), y).sum()
            part.backward()
            value += float(part.detach())
        weight.grad += weight.detach() / v
        bias.grad += bias.detach() / of_bias
        return value

    while done < most:
        value = float(optimiser.step(closure))
        looks.append((done, *at(weight.detach(), bias.detach())))
        if before - value < 2e-7 * len(rows[1]):
            break
        before = value
    return looks


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(VARIANCES), choices=list(VARIANCES))
    parser.add_argument("--most", type=int, default=1200, help="evaluations")
    parser.add_argument("--out", default="", help="csv to append to")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() and not args.tiny else "cpu")
    train, test, n_splits = *load(args.tiny, device), 1 if args.tiny else 3
    found: list[dict[str, Any]] = []
    for model in args.models:
        for v in (0.1, 1.0) if args.tiny else VARIANCES[model]:
            for name, kept, seen in (*held_out(train, n_splits), ("test", train, test)):
                began = time.perf_counter()
                looks = fit(
                    model, kept, int(train[1].max()) + 1, v, 30 if args.tiny else args.most,
                    lambda weight, bias, model=model, seen=seen: look(model, seen, weight, bias),
                )  # fmt: skip
                last, best = looks[-1], max(each[1] for each in looks)
                values = (
                    model, v, name, last[0], f"{last[1]:.4f}", f"{last[2]:.4f}", f"{best:.4f}",
                    f"{time.perf_counter() - began:.1f}", str(device),
                )  # fmt: skip
                found.append(dict(zip(FIELDS, values, strict=True)))
                print(*values, flush=True)
                if args.out:
                    append(Path(args.out), found[-1:], FIELDS, device)
    return found


def load(tiny: bool, device: torch.device) -> tuple[Rows, Rows]:
    if tiny:
        rng = np.random.default_rng(0)
        parts = [(rng.normal(size=(60, 5)), rng.integers(0, 3, 60)) for _ in range(2)]
    else:
        data = load_dataset("mnist")
        parts = [(data.train.X, data.train.y), (data.test.X, data.test.y)]
    train, test = (
        (torch.from_numpy(np.asarray(X, np.float64)).to(device), torch.from_numpy(np.asarray(y, np.int64)).to(device))
        for X, y in parts
    )
    return train, test


def held_out(train: Rows, n_splits: int) -> Iterator[tuple[str, Rows, Rows]]:
    """(name, rows to fit, rows to look at): a tenth of the rows each time."""
    for split in range(n_splits):
        order = torch.from_numpy(np.random.default_rng(split).permutation(len(train[1]))).to(train[1].device)
        n = len(order) // 10
        yield (
            f"held out {split}",
            (train[0][order[n:]], train[1][order[n:]]),
            (train[0][order[:n]], train[1][order[:n]]),
        )


if __name__ == "__main__":
    main()

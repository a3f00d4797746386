"""How much a class sampler's estimates vary, at equal cost, on real rows at the start, middle and end of training.

    AUGMENT_REDUCE_DATA=... python -m benchmarks.studies.variance --datasets bibtex omniglot debian-5k --save

One softmax model is trained with the defaults; at each stage every sampler draws many times for the same minibatch at
the same weights, eta at its optimum, so that all that varies is S. Against the full sum:

    scores      E |G^ - G|^2 / |G|^2, G the M step's gradient by the scores of the minibatch
    weights     the same by the weights and biases
    normaliser  mean over rows of E (eta~ / eta - 1)^2

Cost is scores computed for each row (`evaluations`): |S|, for "conditional" its clusters too, for "candidates-shared"
the row's own classes. Milliseconds are of drawing, scoring and learning; not of the push. What a sampler has learned is
as old as it would be: rows were last visited, and clusters made, one epoch before (at the start: after 0.6 of the
first).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from augment_reduce import AugmentReduceClassifier
from augment_reduce.data import load_dataset, random_like
from augment_reduce.kernels.rows import Rows, as_rows
from augment_reduce.model.scores import kernels_for, score
from augment_reduce.sampling import (
    ClassSampler,
    Conditional,
    FeatureCandidates,
    FrequencyPerRow,
    FrequencyShared,
    HardNegativeCache,
    HeadAndTail,
    Minibatch,
    Sampled,
    TrainingData,
    UniformPerRow,
    UniformShared,
)
from benchmarks.common import RESULTS, SCHEMAS, append

DATASETS = {
    "mnist": ("mnist", {}), "bibtex": ("bibtex", {}), "omniglot": ("omniglot", {}),
    "debian-5k": ("debian-deps", {"min_count": 5}),
}  # fmt: skip
SAMPLERS: dict[str, Callable[[], ClassSampler]] = {
    "uniform": UniformPerRow,
    "uniform-shared": UniformShared,
    "frequency": FrequencyPerRow,
    "frequency-shared": FrequencyShared,
    "head-tail-shared": HeadAndTail,
    "batch labels + tail": lambda: HardNegativeCache(memory=0, batch_labels=True),
    "cache-shared": HardNegativeCache,
    "candidates-shared": FeatureCandidates,
    "conditional": Conditional,
}
MEASURES = ("scores", "weights", "normaliser", "ms")


@dataclass
class Truth:
    """The full sums for one minibatch: p (B, K), log eta (B,), and the rows' Gram matrix, 1 added for the bias."""

    p: Tensor
    log_eta: Tensor
    gram: Tensor
    labels: Tensor

    @classmethod
    def of(cls, batch: Minibatch) -> Truth:
        everything = torch.arange(len(batch.parameters.bias))
        psi = batch.kernels.shared_scores(
            batch.X, batch.rows, everything, batch.parameters.weight, batch.parameters.bias
        ).double()
        x = batch.X.dense(batch.rows, torch.float64)
        log_p = torch.log_softmax(psi, dim=1)
        return cls(log_p.exp(), -log_p.gather(1, batch.labels[:, None])[:, 0], x @ x.T + 1.0, batch.labels)

    def gradient(self, off_label: Tensor) -> Tensor:
        """(B, K) by the scores, from the parts of the other classes: the label's is minus their sum."""
        off_label = off_label.scatter(1, self.labels[:, None], 0.0)
        return off_label.scatter(1, self.labels[:, None], -off_label.sum(1, keepdim=True))

    def sizes(self, gradient: Tensor) -> Tensor:
        """Squared norms by the scores and by the weights: |G|^2 and |G^T x|^2."""
        return torch.stack([gradient.square().sum(), (self.gram * (gradient @ gradient.T)).sum()])


def draw(sampler: ClassSampler, batch: Minibatch, size: int, seed: int, truth: Truth) -> tuple[Sampled, Tensor, float]:
    """What was drawn, -omega p_k of it (B, S), and the seconds of drawing and scoring."""
    started = time.perf_counter()
    sampled = sampler.draw_for(batch, size, generator=torch.Generator().manual_seed(seed))
    gap = score(batch.kernels, batch.X, batch.rows, batch.labels, sampled, batch.parameters).gaps().double()
    seconds = time.perf_counter() - started
    grad = -torch.exp(gap + sampled.log_weight.double() - truth.log_eta[:, None])
    return sampled, grad, seconds


def measure(sampler: ClassSampler, batch: Minibatch, size: int, n_draws: int, truth: Truth) -> dict[str, float]:
    full = truth.gradient(-truth.p)
    error, normaliser, seconds = torch.zeros(2, dtype=torch.float64), 0.0, []
    rest = 1.0 - torch.exp(-truth.log_eta)  # what the other classes should add up to, of eta
    for seed in range(n_draws):
        sampled, grad, elapsed = draw(sampler, batch, size, seed, truth)
        estimate = torch.zeros_like(full).scatter_add_(1, sampled.columns(len(grad)), grad)
        error += truth.sizes(truth.gradient(estimate) - full) / n_draws
        normaliser += float((-grad.sum(1) - rest).square().mean()) / n_draws
        seconds.append(elapsed)
    scores, weights = (error / truth.sizes(full)).tolist()
    ms = 1e3 * (float(np.median(seconds)) + learning(sampler, batch, sampled, grad))
    return {"scores": scores, "weights": weights, "normaliser": normaliser, "ms": ms}


def learning(sampler: ClassSampler, batch: Minibatch, sampled: Sampled, grad: Tensor) -> float:
    """Seconds of it; last, since what it learns here is fresher than a real visit would find it."""
    grad = grad.to(batch.parameters.weight.dtype)
    started = time.perf_counter()
    for _ in range(3):
        sampler.observe(batch, sampled, grad)
    return (time.perf_counter() - started) / 3


def extra(sampler: ClassSampler) -> int:
    """Scores for each row beyond |S|."""
    if isinstance(sampler, Conditional):
        return sampler._n_clusters()
    return 2 * sampler.n_own if isinstance(sampler, FeatureCandidates) else 0  # by labels, and by weights


def bound_samplers(counts: np.ndarray, budget: int, X: Rows, labels: np.ndarray) -> dict[str, tuple[ClassSampler, int]]:
    """Every sampler with the |S| that the budget of scores leaves it; those it leaves none are left out."""
    found = {}
    for name, make in SAMPLERS.items():
        sampler = make().bind(counts, kernels_for("cpu").draw_without_replacement)
        size = sampler.size(budget - extra(sampler))
        if size > 0:
            sampler.prepare(TrainingData(X, np.arange(X.n_rows), labels), size)
            found[name] = (sampler, size)
    return found


def look_back(sampler: ClassSampler, batch: Minibatch, size: int, epochs: float) -> None:
    """The visit one epoch ago: clusters are made, hard classes remembered, heavy ones listed when an epoch ended."""
    truth = Truth.of(batch)
    sampled, grad, _ = draw(sampler, batch, size, 10**6, truth)
    sampler.observe(batch, sampled, grad)
    if epochs >= 1.0:
        sampler.end_epoch(batch.parameters, batch.X.n_rows, size)


def load(name: str, n_rows: int, tiny: bool) -> tuple[sp.csr_matrix, np.ndarray]:
    source, settings = DATASETS[name]
    data = random_like("bibtex", n_rows=200) if tiny else load_dataset(source, download=False, **settings)
    X, y = sp.csr_matrix(data.train.X, dtype=np.float32), np.asarray(data.train.y)
    kept = np.random.default_rng(0).permutation(len(y))[:n_rows]
    return X[kept], y[kept]


def stages(epochs: float) -> dict[str, tuple[float, float]]:
    """For each stage the epochs after which samplers look back, and after which they are measured."""
    middle = max(2.0, epochs // 2)
    return {"start": (0.6, 1.0), "middle": (middle - 1, middle), "end": (epochs - 1, epochs)}


def run(name: str, options: argparse.Namespace) -> list[dict[str, object]]:
    X, y = load(name, options.rows, options.tiny)
    clf = AugmentReduceClassifier(warm_start=True, dtype="float32", random_state=0)
    done, lines, rows = 0.0, [], np.arange(min(options.B, len(y)))

    def train_to(epochs: float) -> Minibatch:
        nonlocal done
        if epochs > done:
            clf.set_params(max_epochs=epochs - done).fit(X, y)
        done = max(done, epochs)
        labels = torch.from_numpy(np.searchsorted(clf.classes_, y[rows]))
        return Minibatch(as_rows(X), rows, labels, clf._fitted.parameters, kernels_for("cpu"), 0)

    for stage, (before, at) in stages(options.epochs).items():
        batch = train_to(before)
        counts = clf._fitted.class_counts
        budgets = sorted({min(e, len(counts) // 2) for e in options.evaluations})
        labels = np.searchsorted(clf.classes_, y)
        samplers = {budget: bound_samplers(counts, budget, as_rows(X), labels) for budget in budgets}
        with torch.inference_mode():
            for some in samplers.values():
                for sampler, size in some.values():
                    look_back(sampler, batch, size, before)
        batch = train_to(at)
        with torch.inference_mode():
            truth = Truth.of(batch)
            for budget, some in samplers.items():
                for label, (sampler, size) in some.items():
                    found = measure(sampler, batch, size, options.draws, truth)
                    lines.append(line(name, stage, label, budget, size, found, options.draws))
    return lines


def line(
    dataset: str, stage: str, sampler: str, budget: int, size: int, found: dict[str, float], draws: int
) -> dict[str, object]:
    values = {key: f"{value:.4g}" for key, value in found.items()}
    print(
        f"{dataset:10} {stage:7} {sampler:20} {budget:5} {size:5}  ", *(f"{v:>10}" for v in values.values()), flush=True
    )
    return {
        "dataset": dataset, "stage": stage, "sampler": sampler,
        "evaluations": budget, "S": size, **values, "draws": draws,
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> list[dict[str, object]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", nargs="+", default=["bibtex"], choices=list(DATASETS))
    parser.add_argument("--evaluations", nargs="+", type=int, default=[100, 500], help="scores for each row")
    parser.add_argument("--epochs", type=float, default=10)
    parser.add_argument("--rows", type=int, default=20_000, help="training rows, at most")
    parser.add_argument("--B", type=int, default=128)
    parser.add_argument("--draws", type=int, default=30)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--save", action="store_true", help="append to results/variance.csv")
    options = parser.parse_args(arguments)
    print("dataset, stage, sampler, evaluations, |S|:", ", ".join(MEASURES))
    lines = [found for name in options.datasets for found in run(name, options)]
    if options.save:
        append(RESULTS / "variance.csv", lines, SCHEMAS["variance"])
    return lines


if __name__ == "__main__":
    main()

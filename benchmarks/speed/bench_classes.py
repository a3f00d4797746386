"""A training step against the number of classes K, at fixed B, |S|, D: operations, bytes and time.

    python -m benchmarks.speed.bench_classes --save

Operations and bytes follow from the step and do not depend on K: B (|S|+1) nnz multiply-adds to score and as many to
push, and for each (class, feature) entry touched, weight and state read and written once. Distinct entries touched
are counted: they rise until no two pairs share one, then stay. Time does depend on K, through cache misses alone.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import scipy.sparse as sp
import torch

from augment_reduce.kernels.cpu import backend as cpu
from augment_reduce.kernels.reference import Parameters
from augment_reduce.kernels.rows import as_rows
from augment_reduce.local.base import Clock, LocalStep
from augment_reduce.local.remembered import NaturalGradient
from augment_reduce.model.noise import Gumbel
from augment_reduce.optim import Adagrad
from augment_reduce.sampling import SAMPLERS
from augment_reduce.sharding import Partition
from augment_reduce.support.memory import zeros
from augment_reduce.training.fit import threads
from augment_reduce.training.step import Problem, State, step
from benchmarks.common import report, row


def make_problem(
    n_classes: int, B: int, S: int, D: int, nnz: int, sampling: str, local: LocalStep | None = None,
    partition: Partition | None = None,
) -> tuple[Problem, State]:  # fmt: skip
    """B * 8 random rows with nnz of D features, labels uniform over the classes, Adagrad, float32. Of a partition the
    classes of this rank."""
    generator = np.random.default_rng(0)
    n_rows = 8 * B
    columns = np.concatenate([generator.choice(D, nnz, replace=False) for _ in range(n_rows)])
    values = generator.random(n_rows * nnz, dtype=np.float32)
    X = sp.csr_matrix((values, columns, np.arange(0, n_rows * nnz + 1, nnz)), shape=(n_rows, D))
    n_here = n_classes if partition is None else len(partition.shard)
    weight, bias = zeros((n_here, D), torch.float32), torch.zeros(n_here)
    optimizer, local = Adagrad(), local or NaturalGradient()
    sampler = SAMPLERS[sampling]().bind(np.ones(n_classes), cpu.draw_without_replacement)
    problem = Problem(
        X=as_rows(X), active=np.arange(n_rows), n_rows=n_rows,
        labels=torch.from_numpy(generator.integers(n_classes, size=n_rows)), sample_weight=None,
        method="augment-reduce", noise=Gumbel(), sampler=sampler, n_sampled=sampler.size(S), local=local,
        optimizer=optimizer, prior=None, kernels=cpu, partition=partition,
    )  # fmt: skip
    if partition is None:
        problem.fused = local.fused(cpu, problem.noise, n_classes)
    else:
        problem.shard_pass = local.over_ranks(problem.noise, partition)
    parameters = Parameters(weight, bias, optimizer.init_state(weight), optimizer.init_state(bias))
    return problem, State(parameters, local.init_state(n_rows, torch.float32), Clock(0, 0))


def entries_touched(problem: Problem, state: State, rows: np.ndarray, seed: int) -> int:
    """Distinct (class, feature) entries of one step, from the classes it draws: the bytes it must move, over 16."""
    labels = problem.labels[torch.from_numpy(rows)]
    generator = torch.Generator().manual_seed(seed)
    sampled = problem.sampler.draw(labels, problem.n_sampled, generator=generator, dtype=torch.float32)
    classes = sampled.classes.expand(len(rows), -1) if sampled.shared else sampled.classes
    classes = torch.cat([labels[:, None], classes], 1).numpy()
    X = problem.X
    D = X.n_features
    touched = [
        np.add.outer(classes[i].astype(np.int64) * D, X.indices[X.indptr[n] : X.indptr[n + 1]]).ravel()
        for i, n in enumerate(rows)
    ]
    return len(np.unique(np.concatenate(touched)))


def measure(n_classes: int, sampling: str, options: argparse.Namespace) -> list[dict[str, object]]:
    problem, state = make_problem(n_classes, options.B, options.S, options.D, options.nnz, sampling)
    generator, seconds = torch.Generator(), []
    order = np.random.default_rng(1)
    for t in range(1, options.steps + 1):
        rows = order.choice(problem.n_rows, options.B, replace=False)
        generator.manual_seed(t)
        started = time.perf_counter()
        state, _ = step(problem, state, rows, Clock(t, 1), generator=generator, want_bound=t % 10 == 0)
        seconds.append(time.perf_counter() - started)
    touched = entries_touched(problem, state, rows, seed=1)
    case = f"{sampling} K={n_classes:,} B={options.B} S={options.S} D={options.D} nnz={options.nnz}"
    multiply_adds = 2 * options.B * (options.S + 1) * options.nnz
    return [
        row("classes", case, "ms per step", [1e3 * s for s in seconds[len(seconds) // 4 :]]),
        row("classes", case, "multiply-adds per step", [multiply_adds]),
        row("classes", case, "distinct entries touched", [touched]),
        row("classes", case, "bytes that must move (weight and state, read and write)", [16 * touched]),
    ]


def plot(results: list[dict[str, object]], path: str) -> None:
    """Milliseconds a step against K, a line for each way of drawing, with what fits into a 32 MB cache marked."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    for sampling in ("uniform", "uniform-shared"):
        rows = [r for r in results if r["quantity"] == "ms per step" and str(r["case"]).startswith(f"{sampling} K=")]
        K = [int(str(r["case"]).split("K=")[1].split(" ")[0].replace(",", "")) for r in rows]
        middle, low, high = (np.array([float(str(r[name])) for r in rows]) for name in ("p50", "p20", "p80"))
        if len(rows):
            axes.fill_between(K, low, high, alpha=0.15)
            axes.plot(K, middle, marker="o", label="classes of each row" if sampling == "uniform" else "classes shared")
    full = 2**25 / (2 * 4 * 33)
    axes.axvline(full, color="0.6", linestyle=":")
    above = axes.get_xaxis_transform()  # classes across, the height of the picture upwards
    axes.text(1.1 * full, 0.98, "weights and state\nfill 32 MB", transform=above, color="0.4", va="top", fontsize=8)
    axes.set(xscale="log", yscale="log", xlabel="classes K", ylabel="milliseconds a step", ylim=(0.2, 30))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    figure.savefig(path, dpi=150)


def main(arguments: list[str] | None = None) -> list[dict[str, object]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", nargs="+", type=float, default=[1e3, 1e4, 1e5, 1e6, 1e7])
    parser.add_argument("--B", type=int, default=256)
    parser.add_argument("--S", type=int, default=50)
    parser.add_argument("--D", type=int, default=32)
    parser.add_argument("--nnz", type=int, default=8)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--class-sampling", nargs="+", default=["uniform", "uniform-shared"])
    parser.add_argument("--plot", help="draw time against K into this file")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args(arguments)
    if options.tiny:
        options.classes, options.B, options.S, options.steps = [100, 1000], 8, 3, 4
    with threads(1), torch.inference_mode():
        results = [
            line
            for sampling in options.class_sampling
            for K in options.classes
            for line in measure(int(K), sampling, options)
        ]
    report(results, save=options.save)
    if options.plot:
        plot(results, options.plot)
    return results


if __name__ == "__main__":
    main()

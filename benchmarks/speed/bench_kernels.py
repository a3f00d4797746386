"""Each CPU kernel against plain torch, on the shapes of the paper's datasets.

    python -m benchmarks.speed.bench_kernels                      # all shapes, one thread
    python -m benchmarks.speed.bench_kernels bibtex --threads 2
    python -m benchmarks.speed.bench_kernels --tiny               # seconds; what the tests run

Rows are random with the datasets' number of non-zeros, features drawn by a Zipf law where D is large; the
classes of a row are its label and S others. A line: dataset, kernel, provider, then milliseconds p20 p50 p80.
`step` is score + push of one minibatch; the reference is skipped where its dense arrays would pass 2 GB.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import scipy.sparse as sp
import torch

from augment_reduce.kernels import reference
from augment_reduce.kernels.cpu import backend as cpu
from augment_reduce.kernels.rows import Rows, as_rows
from augment_reduce.optim import OPTIMIZERS, Prior, RowOptimizer


@dataclass(frozen=True)
class Shape:
    B: int
    S: int
    K: int
    D: int
    nnz: int  # non-zeros a row
    N: int  # rows to draw minibatches from: more than fit in cache
    zipf: float = 0.0  # features drawn with probability rank^-zipf


SHAPES = {  # the paper, table 1
    "mnist": Shape(B=500, S=1, K=10, D=784, nnz=150, N=60_000),
    "bibtex": Shape(B=488, S=20, K=146, D=1_836, nnz=68, N=4_880, zipf=0.6),
    "omniglot": Shape(B=541, S=50, K=1_623, D=784, nnz=219, N=25_968),
    "eurlex4k": Shape(B=379, S=50, K=896, D=5_000, nnz=236, N=15_539, zipf=0.5),
    "synthetic": Shape(B=500, S=100, K=9_035, D=0, nnz=0, N=300_000),
    "amazoncat": Shape(B=1_987, S=60, K=2_919, D=203_882, nnz=71, N=40_000, zipf=1.0),
}
TINY = Shape(B=16, S=5, K=40, D=100, nnz=9, N=64, zipf=0.5)


def make_rows(shape: Shape, rng: np.random.Generator) -> Rows:
    """CSR rows of `shape.nnz` distinct features on average; frequent features have any index."""
    if shape.nnz == 0:
        return as_rows(sp.csr_matrix((shape.N, shape.D), dtype=np.float32))
    weight = 1.0 / np.arange(1, shape.D + 1) ** shape.zipf
    name = rng.permutation(shape.D)
    cumulative = np.cumsum(weight / weight.sum())
    draws = shape.nnz
    for _ in range(4):  # repeated features merge: draw as many more as that loses
        trial = np.searchsorted(cumulative, rng.random((200, draws)))
        draws = int(np.ceil(draws * shape.nnz / np.mean([len(np.unique(r)) for r in trial])))
    feature = name[np.minimum(np.searchsorted(cumulative, rng.random((shape.N, draws))), shape.D - 1)]
    values = rng.random(feature.size, dtype=np.float32) + 0.1
    csr = sp.csr_matrix((values, (np.repeat(np.arange(shape.N), draws), feature.ravel())), shape=(shape.N, shape.D))
    csr.sum_duplicates()
    return as_rows(csr)


class Steps:
    """Minibatches of one shape, and the four kernels of one provider as functions of the iteration."""

    def __init__(self, shape: Shape, provider: Any, optimizer: RowOptimizer, prior: float | None, n: int) -> None:
        rng = np.random.default_rng(0)
        self.X, self.provider, self.optimizer = make_rows(shape, rng), provider, optimizer
        weight = torch.from_numpy(np.zeros((shape.K, shape.D), np.float32))  # numpy asks for huge pages, torch does not
        weight.normal_(generator=torch.Generator().manual_seed(0)).mul_(0.01)
        bias = torch.zeros(shape.K)
        self.parameters = reference.Parameters(weight, bias, optimizer.init_state(weight), optimizer.init_state(bias))
        self.prior = (
            prior if prior is None else Prior.from_counts(prior, self.X.feature_counts(), shape.N, weight.dtype)
        )
        self.rows = [rng.choice(shape.N, shape.B, replace=False) for _ in range(n)]
        self.uniforms = torch.from_numpy(rng.random((shape.B, shape.S + 1)))
        self.pairs = [cpu.draw_without_replacement(torch.rand(shape.B, shape.S + 1), shape.K) for _ in range(n)]
        self.shared = [cpu.draw_without_replacement(torch.rand(1, shape.S), shape.K)[0] for _ in range(n)]
        self.grad = torch.from_numpy(rng.standard_normal((shape.B, shape.S + 1), dtype=np.float32))
        self.share = None if prior is None else self.grad.abs()
        self.K = shape.K

    def pair_scores(self, i: int) -> None:
        self.provider.pair_scores(self.X, self.rows[i], self.pairs[i], self.parameters.weight, self.parameters.bias)

    def push_pairs(self, i: int) -> None:
        args = (self.parameters, self.optimizer, i + 1, self.prior)
        self.provider.push_pairs(self.X, self.rows[i], self.pairs[i], self.grad, self.share, *args)

    def shared_scores(self, i: int) -> None:
        self.provider.shared_scores(self.X, self.rows[i], self.shared[i], self.parameters.weight, self.parameters.bias)

    def push_shared(self, i: int) -> None:
        g, labels, c = self.grad, self.pairs[i][:, :1], self.share
        shares = (None, None) if c is None else (c[:, 1:], c[:, :1])
        args = (self.parameters, self.optimizer, i + 1, self.prior)
        self.provider.push_shared(self.X, self.rows[i], self.shared[i], g[:, 1:], labels, g[:, :1], *shares, *args)

    def draw(self, i: int) -> None:
        self.provider.draw_without_replacement(self.uniforms, self.K)


PROVIDERS = {"cpu": cpu, "reference": reference}


def timed(functions: list[Callable[[int], None]], n: int) -> np.ndarray:
    """Milliseconds (len(functions) + 1, n) of the functions called one after the other, and of all together."""
    out = np.zeros((len(functions) + 1, n))
    for i in range(n):
        for j, function in enumerate(functions):
            start = time.perf_counter()
            function(i)
            out[j, i] = (time.perf_counter() - start) * 1e3
    out[-1] = out[:-1].sum(axis=0)
    return out[:, n // 4 :]  # the first calls compile and warm the caches


def bench(name: str, shape: Shape, args: argparse.Namespace) -> Iterator[tuple[str, str, str, np.ndarray]]:
    optimizer = OPTIMIZERS[args.optimizer]()
    for which, provider in PROVIDERS.items():
        n = args.repeats if provider is cpu else max(2, args.repeats // 8)
        if provider is reference and shape.B * (shape.S + 1) * shape.D * 4 > 2e9:
            continue
        steps = Steps(shape, provider, optimizer, args.prior, n)
        for names in (("pair_scores", "push_pairs"), ("shared_scores", "push_shared"), ("draw",)):
            ms = timed([getattr(steps, kernel) for kernel in names], n)
            labels = [*names, f"step {names[0].split('_')[0]}"] if len(names) > 1 else names
            for kernel, row in zip(labels, ms, strict=False):
                yield name, kernel, which, row


def main(argv: list[str] | None = None) -> list[tuple[str, str, str, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="*", default=[], help=f"of {', '.join(SHAPES)}; all if none is named")
    parser.add_argument("--tiny", action="store_true", help="one tiny shape instead")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--optimizer", default="section4", choices=sorted(OPTIMIZERS))
    parser.add_argument("--prior", type=float, default=None, help="prior variance; none by default")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    numba.set_num_threads(args.threads)
    shapes = {"tiny": TINY} if args.tiny else {k: SHAPES[k] for k in args.datasets or SHAPES}
    found = []
    for name, shape in shapes.items():
        for dataset, kernel, provider, ms in bench(name, shape, args):
            p20, p50, p80 = np.percentile(ms, [20, 50, 80])
            print(f"{dataset:10} {kernel:14} {provider:10} {p20:9.3f} {p50:9.3f} {p80:9.3f}", flush=True)
            found.append((dataset, kernel, provider, float(p50)))
    return found


if __name__ == "__main__":
    main()

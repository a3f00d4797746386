"""Test log likelihood by seconds of training of the head, exact and sampled softmax, on a GPU or a few CPU cores.

    python -m benchmarks.speed.head_quality                          # everything; appends to results/head_quality.csv
    python -m benchmarks.speed.head_quality --only words --seconds 20
    python -m benchmarks.speed.head_quality --only words --device cpu --threads 2 --seconds 600 --ours 600
    python -m benchmarks.speed.head_quality --tiny                   # small problems on the CPU: does it run?

    problem    what is learned                                                                        K
    zipf       class k has frequency 1 / k and features N(mu_k, 1): the posterior is a softmax        10^6
    debian     what a Debian package depends on (every pair an example); one hidden layer             31,298
    words      the next word of WordNet's definitions, from the last five; one hidden layer           53,775

All methods share network, minibatches and optimisers (Adam for the network, Adagrad for the output layer), and run as a
CUDA graph on a GPU; times exclude evaluation. Sampled softmax uses our sampler and kernels: the head with its local
parameter set to the logarithm of the sample's own sum (`floor=0`).
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from augment_reduce.nn import AugmentReduceHead
from benchmarks.common import RESULTS, ROOT, SCHEMAS, append
from benchmarks.speed.head_tools import captured, zipf_labels

FIELDS = SCHEMAS["head_quality"]
METHODS = ("exact", "ours", "ours fresh", "sampled softmax", "probit", "logistic")
CPU_LOOKS = (10.0, 20.0, 40.0, 60.0, 90.0, 120.0, 180.0, 240.0, 300.0, 400.0, 600.0, 900.0, 1200.0, 1800.0)


@dataclass
class Problem:
    """`features(rows)` gives the network's input for rows of the training data; `test` is an input with its labels."""

    name: str
    features: Callable[[Tensor], Tensor]
    labels: Tensor
    n_classes: int
    network: Callable[[], nn.Module]
    width: int
    test: tuple[Tensor, Tensor]
    batch: int
    n_sampled: int
    looks: tuple[float, ...]

    @property
    def counts(self) -> Tensor:
        return torch.bincount(self.labels, minlength=self.n_classes)


def precision(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def zipf(device: torch.device, tiny: bool) -> Problem:
    K, N, D, n_test = (300, 4_000, 16, 200) if tiny else (10**6, 4 * 10**6, 64, 4_096)
    generator = torch.Generator(device).manual_seed(0)
    mean = torch.randn(K, D, generator=generator, device=device) * 0.4
    labels = zipf_labels(K, (N + n_test,), device, 1)
    x = torch.empty(N + n_test, D, device=device, dtype=precision(device))
    for part in torch.arange(N + n_test, device=device).split(2**20):
        x[part] = (mean[labels[part]] + torch.randn(len(part), D, generator=generator, device=device)).to(x.dtype)
    test = x[N:].clone(), labels[N:].clone()
    looks = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 40.0, 60.0)
    return Problem(
        "zipf", lambda rows: x[rows], labels[:N], K, nn.Identity, D, test, 64 if tiny else 4096, 32 if tiny else 4096,
        looks,
    )  # fmt: skip


def debian(device: torch.device, tiny: bool) -> Problem:
    from augment_reduce.data import load_dataset

    data = load_dataset("debian-deps", reduction="all")
    assert data.test is not None
    D, hidden = (16, 16) if tiny else (128, 512)
    parts = []
    for split in (data.train, data.test):
        dense = torch.from_numpy(np.log1p(split.features[: 200 if tiny else None].toarray()))
        rows, labels = (torch.from_numpy(np.asarray(a, dtype=np.int64)) for a in (split.rows, split.y))
        kept = rows < len(dense)
        parts.append((dense.to(device, precision(device)), rows[kept].to(device), labels[kept].to(device)))
    (x, rows, labels), (x_test, rows_test, labels_test) = parts
    some = torch.randperm(len(labels_test), generator=torch.Generator().manual_seed(0))[:20_000].to(device)

    def network() -> nn.Module:
        return nn.Sequential(
            nn.Linear(x.shape[1], hidden), nn.LayerNorm(hidden), nn.GELU(), nn.Dropout(0.3), nn.Linear(hidden, D)
        )

    test = x_test[rows_test[some]], labels_test[some]
    return Problem(
        "debian", lambda index: x[rows[index]], labels, 31_298, network, D, test,
        64 if tiny else 1024, 64 if tiny else 2048, (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0, 20.0, 40.0, 60.0),
    )  # fmt: skip


def words(device: torch.device, tiny: bool, folder: str | None) -> Problem:
    sys.path.insert(0, str(ROOT / "examples"))
    from next_word import UNKNOWN, invented, read

    text = invented(5) if tiny else read(folder, 5)
    D, width = (16, 8) if tiny else (128, 64)
    (context, word), (context_test, word_test) = ([a.to(device) for a in part] for part in (text.train, text.test))
    known = word_test != UNKNOWN

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(text.n_words + 1, width)
            nn.init.normal_(self.embedding.weight, std=0.1)
            self.layers = nn.Sequential(nn.Linear(5 * width, 4 * D), nn.GELU(), nn.Dropout(0.2), nn.Linear(4 * D, D))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(self.embedding(x).flatten(1))

    return Problem(
        "words", lambda rows: context[rows], word, text.n_words, Network, D, (context_test[known], word_test[known]),
        64 if tiny else 2048, 64 if tiny else 4096,
        (0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0),
    )  # fmt: skip


class ExactHead(nn.Module):
    """A linear layer and cross entropy, on a GPU in bfloat16, with the dense form of the head's Adagrad."""

    def __init__(self, width: int, counts: Tensor, rate: float) -> None:
        super().__init__()
        K, device = len(counts), counts.device
        self.rate = rate
        self.weight = nn.Parameter(torch.empty(K, width, device=device).uniform_(-(width**-0.5), width**-0.5))
        self.bias = nn.Parameter(torch.log((counts + 1.0) / (counts + 1.0).mean()))
        self.state = [torch.zeros_like(p) for p in (self.weight, self.bias)]
        for i, state in enumerate(self.state):
            self.register_buffer(f"state_{i}", state)

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        if hidden.is_cuda:
            hidden, weight, bias = hidden.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16()
        else:
            weight, bias = self.weight, self.bias
        return F.cross_entropy(F.linear(hidden, weight, bias), target)

    @torch.no_grad()
    def step(self) -> None:
        for parameter, state in zip((self.weight, self.bias), self.state, strict=True):
            grad = parameter.grad
            assert grad is not None
            state.addcmul_(grad, grad)
            parameter.addcdiv_(grad, state.sqrt().add_(1e-10), value=-self.rate)

    def log_prob(self, hidden: Tensor, target: Tensor) -> Tensor:
        psi_y = (hidden * self.weight[target]).sum(1) + self.bias[target]
        total = torch.full_like(psi_y, -torch.inf)
        for w, b in zip(self.weight.split(2**16), self.bias.split(2**16), strict=True):
            total = torch.logaddexp(total, torch.logsumexp(hidden @ w.T + b, dim=1))
        return psi_y - total


class Trainer:
    """One method on one problem; `run(n)` makes n steps."""

    def __init__(self, problem: Problem, method: str, rate: float, device: torch.device) -> None:
        torch.manual_seed(0)
        self.problem, self.method, self.device = problem, method, device
        self.network = problem.network().to(device)
        model = method if method in ("probit", "logistic") else "softmax"
        self.head: Any
        if method == "exact":
            self.head = ExactHead(problem.width, problem.counts, rate)
        else:
            local = "fresh" if method == "ours fresh" else "amortised"
            self.head = AugmentReduceHead(
                problem.width, problem.n_classes, model, n_sampled_classes=problem.n_sampled, local=local,
                class_counts=problem.counts, optimizer="adagrad", learning_rate=rate, device=device,
                floor=0.0 if method == "sampled softmax" else 1.0, in_batch=False,
            )  # fmt: skip
        parameters = list(self.network.parameters())
        fused = {"fused": True, "capturable": True} if device.type == "cuda" else {}
        self.optimiser = torch.optim.Adam(parameters, lr=1e-3, **fused) if parameters else None  # type: ignore[arg-type]
        self.order = torch.zeros(len(problem.labels), dtype=torch.int64, device=device)
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self.generator = torch.Generator(device).manual_seed(1)
        self.left = 0
        self.replay = self._capture() if device.type == "cuda" else self._step

    def _capture(self) -> Callable[[], None]:
        """The step as a CUDA graph, all state put back to where it was before the calls that it takes to make one."""
        kept = [(t, t.clone()) for module in (self.network, self.head) for t in module.state_dict().values()]
        graph = captured(self._step)
        for tensor, value in kept:
            tensor.copy_(value)
        if self.optimiser is not None:
            for state in self.optimiser.state.values():
                for value in state.values():
                    value.zero_()
        self.cursor.zero_()
        return graph.replay

    def _step(self) -> None:
        B = self.problem.batch
        rows = self.order[self.cursor + torch.arange(B, device=self.device)]
        self.cursor += B
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            hidden = self.network(self.problem.features(rows))
        if self.method == "exact":
            self.head.zero_grad(set_to_none=True)
        if self.optimiser is not None:
            self.optimiser.zero_grad(set_to_none=True)
        if self.method == "sampled softmax":
            self.head.local.offset.fill_(-50.0)
            self.head.local.slope.zero_()
        self.head(hidden, self.problem.labels[rows]).backward()
        if self.method == "exact":
            self.head.step()
        if self.optimiser is not None:
            self.optimiser.step()

    def run(self, n: int) -> None:
        for _ in range(n):
            if self.left == 0:
                torch.randperm(len(self.order), generator=self.generator, out=self.order, device=self.device)
                self.cursor.zero_()
                self.left = len(self.order) // self.problem.batch
            self.replay()
            self.left -= 1

    @torch.no_grad()
    def look(self) -> float:
        """Mean test log likelihood, exact."""
        self.network.eval()
        x, y = self.problem.test
        block = 512 if self.method in ("probit", "logistic") else 4096
        total = 0.0
        for xs, ys in zip(x.split(block), y.split(block), strict=True):
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                hidden = self.network(xs)
            total += float(self.head.log_prob(hidden.float(), ys).double().sum())
        self.network.train()
        return total / len(y)


def train(
    trainer: Trainer, seconds: float, until: float = math.inf, max_steps: int = 10**9
) -> list[tuple[float, int, float]]:
    """(seconds trained, steps, test log likelihood) at the problem's looks, up to `seconds` or to a value reached."""
    found = []
    spent, steps = 0.0, 0
    for at in [t for t in trainer.problem.looks if t < seconds] + [seconds]:
        while spent < at and steps < max_steps:
            n = min(20 if trainer.device.type == "cuda" else 1, max_steps - steps)
            began = time.perf_counter()
            trainer.run(n)
            if trainer.device.type == "cuda":
                torch.cuda.synchronize()
            spent += time.perf_counter() - began
            steps += n
        found.append((spent, steps, trainer.look()))
        if found[-1][2] >= until or steps >= max_steps:
            break
    return found


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("zipf", "debian", "words"), default=["zipf", "debian", "words"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS[:4]))
    parser.add_argument("--seconds", type=float, default=60.0, help="of exact softmax")
    parser.add_argument("--ours", type=float, default=10.0, help="seconds of the others")
    parser.add_argument("--sampled", type=int, default=None, help="|S|, instead of the problem's own")
    parser.add_argument("--rates", nargs="+", type=float, default=[0.1], help="of Adagrad")
    parser.add_argument("--folder", default=None, help="where WordNet's definitions are")
    parser.add_argument("--out", default=str(RESULTS / "head_quality.csv"))
    parser.add_argument("--test-rows", type=int, default=None, help="look at these many test rows, drawn once")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=None, help="of the CPU")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(argv)
    device = torch.device("cpu" if args.tiny else args.device)
    if args.threads:
        torch.set_num_threads(args.threads)
    made = {"zipf": lambda: zipf(device, args.tiny), "debian": lambda: debian(device, args.tiny)}
    made["words"] = lambda: words(device, args.tiny, args.folder)
    rows: list[dict[str, Any]] = []
    for name in args.only:
        problem = made[name]()
        problem.n_sampled = args.sampled or problem.n_sampled
        if args.test_rows:
            x, y = problem.test
            some = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))[: args.test_rows].to(device)
            problem.test = x[some], y[some]
        problem.looks = problem.looks if device.type == "cuda" else CPU_LOOKS
        print(f"{name}: {len(problem.labels)} rows, {problem.n_classes} classes", flush=True)
        for method in args.methods:
            for rate in args.rates:
                trainer = Trainer(problem, method, rate, device)
                seconds = args.seconds if method == "exact" else args.ours
                for spent, steps, value in train(trainer, seconds, max_steps=40 if args.tiny else 10**9):
                    row = dict(zip(FIELDS[:7], (name, method, problem.n_classes, problem.width, problem.batch,
                               problem.n_sampled if method != "exact" else "", rate), strict=True))  # fmt: skip
                    rows.append({**row, "seconds": round(spent, 3), "steps": steps, "log_likelihood": round(value, 4)})
                    print(f"  {method:16s} rate {rate:<5} {spent:7.2f} s {steps:7d} steps  {value:9.4f}", flush=True)
                if isinstance(trainer.head, AugmentReduceHead):
                    print(f"    floored {trainer.head.floored_share:.5f}", flush=True)
                del trainer
                gc.collect()
        del problem
        gc.collect()
    if args.out:
        append(Path(args.out), rows, FIELDS, device)
    return rows


if __name__ == "__main__":
    main()

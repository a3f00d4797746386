"""A contrastive loss (InfoNCE) over a whole dataset from small minibatches, by `sampled_bound`.

    python examples/contrastive.py             # error of three losses against the loss over all N negatives

Each row's positive is its second view; its negatives are the second views of all N rows, of which a minibatch shows
B - 1. InfoNCE takes the logarithm of what the minibatch shows, and needs large minibatches for it. The bound needs a
guess of each row's log normaliser instead: remembered for each row (as SogCLR, Yuan et al. 2022, does) or predicted
from the row's features (as NeuCLIP does). `gap` is what is told in training less the exact loss.
"""

from __future__ import annotations

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from augment_reduce.nn import LocalParameters, sampled_bound

D, SCALE = 16, 10.0
MODES = ("remembered", "predicted", "InfoNCE")


def views(n: int) -> tuple[Tensor, Tensor]:
    """Two noisy looks at each of n points, which come in clusters: near negatives are few."""
    g = torch.Generator().manual_seed(0)
    points = torch.randn(n // 10, D, generator=g).repeat(10, 1) + 0.5 * torch.randn(n // 10 * 10, D, generator=g)
    first, second = (points + 0.3 * torch.randn(points.shape, generator=g) for _ in range(2))
    return first, second


def scores(network: nn.Module, first: Tensor, second: Tensor) -> Tensor:
    return SCALE * F.normalize(network(first)) @ F.normalize(network(second)).T


@torch.no_grad()
def exact_loss(network: nn.Module, first: Tensor, second: Tensor) -> float:
    """With every row's second view as a negative."""
    return float(F.cross_entropy(scores(network, first, second), torch.arange(len(first))))


def train(mode: str, first: Tensor, second: Tensor, n_steps: int, B: int) -> dict[str, float]:
    torch.manual_seed(0)
    N = len(first)
    network = nn.Sequential(nn.Linear(D, 64), nn.GELU(), nn.Linear(64, D))
    local = LocalParameters(D, N, mode="persistent" if mode == "remembered" else "amortised", n_rows=N)
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    log_weight = math.log((N - 1) / (B - 1))  # the other rows of the minibatch stand for all others
    told = []
    for _ in range(n_steps):
        rows = torch.randperm(N)[:B]
        psi = scores(network, first[rows], second[rows])
        own = torch.eye(B, dtype=torch.bool)
        at = None if mode == "InfoNCE" else local.at(first[rows], rows if mode == "remembered" else None)
        loss = -sampled_bound(psi.diagonal(), psi, log_weight, own, at).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        told.append(float(loss.detach()))
    late = told[-max(1, n_steps // 5) :]
    exact = exact_loss(network, first, second)
    return {"exact": exact, "told": sum(late) / len(late), "gap": sum(late) / len(late) - exact}


def main(arguments: list[str] | None = None) -> dict[str, dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=2_000)
    args = parser.parse_args(arguments)
    first, second = views(args.rows)
    found = {mode: train(mode, first, second, args.steps, args.batch) for mode in MODES}
    for mode, row in found.items():
        print(f"{mode:12s} exact loss {row['exact']:.3f}, as told in training {row['told']:.3f} ({row['gap']:+.3f})")
    return found


if __name__ == "__main__":
    main()

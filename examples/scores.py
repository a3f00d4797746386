"""What people put between a network and its classes, each trained by `sampled_bound` in a few lines.

    python examples/scores.py                  # every recipe on the same invented rows: exact log p before and after

    cosface, arcface    a margin on the label's cosine, scale 32       temperature    a learned one
    softcap             scores between -30 and 30 by a tanh            tower          classes described by features
    low_rank            a frozen layer and a learned update            positives      several right answers a row

Every recipe gives a function of the rows' features and of some classes to scores (B, S), and one of the labels' own.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from augment_reduce.nn import LocalParameters, SharedSampler, sampled_bound

D = 16


class Rows(NamedTuple):
    x: Tensor
    y: Tensor
    class_features: Tensor  # (K, D), what a tower may know of a class


def rows(n: int, n_classes: int) -> Rows:
    """Classes of unequal frequency around centres; a row is its class's centre and noise."""
    g = torch.Generator().manual_seed(0)
    centres = torch.randn(n_classes, D, generator=g)
    y = torch.multinomial(1.0 / torch.arange(1.0, n_classes + 1), n, replacement=True, generator=g)
    return Rows(centres[y] + 0.5 * torch.randn(n, D, generator=g), y, centres + 0.1 * torch.randn(n_classes, D))


class Recipe(nn.Module):
    """Scores of classes; `margin` changes those of the labels, in training alone."""

    scale = 32.0

    def __init__(self, data: Rows) -> None:
        super().__init__()
        K = len(data.class_features)
        self.trunk = nn.Sequential(nn.Linear(D, 64), nn.GELU(), nn.Linear(64, D))
        self.weight = nn.Parameter(torch.randn(K, D) / D**0.5)

    def rows_of(self, classes: Tensor) -> Tensor:
        return self.weight[classes]

    def shaped(self, psi: Tensor) -> Tensor:
        return psi

    def margin(self, psi_y: Tensor) -> Tensor:
        return psi_y

    def forward(self, h: Tensor, classes: Tensor) -> Tensor:
        return self.shaped(h @ self.rows_of(classes).T)

    def of_labels(self, h: Tensor, y: Tensor) -> Tensor:
        return self.shaped((h * self.rows_of(y)).sum(1))


class CosFace(Recipe):
    """psi_y = s (cos - m), as Wang et al. 2018."""

    def forward(self, h: Tensor, classes: Tensor) -> Tensor:
        return self.scale * F.normalize(h) @ F.normalize(self.rows_of(classes)).T

    def of_labels(self, h: Tensor, y: Tensor) -> Tensor:
        return self.scale * (F.normalize(h) * F.normalize(self.rows_of(y))).sum(1)

    def margin(self, psi_y: Tensor) -> Tensor:
        return psi_y - 0.2 * self.scale


class ArcFace(CosFace):
    """psi_y = s cos(angle + m), as Deng et al. 2019."""

    def margin(self, psi_y: Tensor) -> Tensor:
        return self.scale * torch.cos(torch.acos((psi_y / self.scale).clamp(-0.999, 0.999)) + 0.3)


class Temperature(CosFace):
    def __init__(self, data: Rows) -> None:
        super().__init__(data)
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    @property
    def scale(self) -> Tensor:  # type: ignore[override]
        return self.log_scale.exp()

    def margin(self, psi_y: Tensor) -> Tensor:
        return psi_y


class Softcap(Recipe):
    def shaped(self, psi: Tensor) -> Tensor:
        return 30.0 * torch.tanh(psi / 30.0)


class Tower(Recipe):
    """The rows of a class come from its features: only the sampled ones go through the tower."""

    def __init__(self, data: Rows) -> None:
        super().__init__(data)
        self.weight.requires_grad_(False)
        self.features, self.tower = data.class_features, nn.Sequential(nn.Linear(D, 64), nn.GELU(), nn.Linear(64, D))

    def rows_of(self, classes: Tensor) -> Tensor:
        return self.tower(self.features[classes])


class LowRank(Recipe):
    """weight + B A with the weight frozen, as LoRA; only rows of B that are sampled are read."""

    def __init__(self, data: Rows) -> None:
        super().__init__(data)
        self.weight.requires_grad_(False)
        self.A = nn.Parameter(torch.randn(4, D) / 2.0)
        self.B = nn.Parameter(torch.zeros(len(self.weight), 4))

    def rows_of(self, classes: Tensor) -> Tensor:
        return self.weight[classes] + self.B[classes] @ self.A


class Positives(Recipe):
    """Each row with the next class as a second right answer: the bound of either, averaged (see `bound_of`)."""


RECIPES = {
    "cosface": CosFace, "arcface": ArcFace, "temperature": Temperature, "softcap": Softcap, "tower": Tower,
    "low_rank": LowRank, "positives": Positives,
}  # fmt: skip


def bound_of(recipe: Recipe, sampler: SharedSampler, local: LocalParameters, x: Tensor, y: Tensor) -> Tensor:
    """(B,) the bound of these rows."""
    h = recipe.trunk(x)
    if isinstance(recipe, Positives):  # a pair of row and answer each; scores of the row, drawn once
        answers = torch.cat([y, (y + 1) % sampler.n_classes])
        h = h.repeat(2, 1)
        classes, log_weight = sampler.draw()
        mask = answers[:, None] == classes
    else:
        answers = y
        classes, log_weight, mask = sampler.draw_for(y)  # the labels of the other rows join
    psi_y = recipe.margin(recipe.of_labels(h, answers))
    return sampled_bound(psi_y, recipe(h, classes), log_weight, mask, local.at(h))


@torch.no_grad()
def log_p(recipe: Recipe, data: Rows) -> float:
    """Exact, without the margin."""
    psi = recipe(recipe.trunk(data.x), torch.arange(len(data.class_features)))
    answers = [data.y, (data.y + 1) % psi.shape[1]] if isinstance(recipe, Positives) else [data.y]
    found = torch.stack([psi.log_softmax(1).gather(1, y[:, None])[:, 0] for y in answers])
    return float(found.mean())


def train(name: str, data: Rows, n_steps: int, n_sampled: int, batch: int = 256) -> tuple[float, float]:
    """Exact log p before and after."""
    torch.manual_seed(0)
    K = len(data.class_features)
    recipe = RECIPES[name](data)
    sampler = SharedSampler(K, n_sampled, class_counts=torch.bincount(data.y, minlength=K))
    local = LocalParameters(D, K, mode="log-sum-exp")
    optimizer = torch.optim.Adam([p for p in recipe.parameters() if p.requires_grad], lr=5e-3)
    before = log_p(recipe, data)
    for _ in range(n_steps):
        some = torch.randint(len(data.y), (batch,))
        optimizer.zero_grad()
        (-bound_of(recipe, sampler, local, data.x[some], data.y[some])).mean().backward()
        optimizer.step()
    return before, log_p(recipe, data)


def main(arguments: list[str] | None = None) -> dict[str, tuple[float, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, default=2_000)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--sampled", type=int, default=100)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--only", nargs="+", choices=RECIPES, default=list(RECIPES))
    args = parser.parse_args(arguments)
    data, found = rows(args.rows, args.classes), {}
    for name in args.only:
        found[name] = train(name, data, args.steps, args.sampled)
        print(f"{name:12s} log p {found[name][0]:8.3f} -> {found[name][1]:8.3f}")
    return found


if __name__ == "__main__":
    main()

"""The shortest training loop: a network, the head, one optimiser. Where nn.Linear and cross entropy were, the head is.

python examples/plain_torch.py
"""

from __future__ import annotations

import torch
from torch import nn

from augment_reduce.nn import AugmentReduceHead

N_CLASSES, N_FEATURES, WIDTH = 2_000, 32, 64


def batches(n_steps: int, size: int = 512):
    """Rows scattered about one point for each class; a few classes are much more frequent than the others."""
    generator = torch.Generator().manual_seed(0)
    centres = 2.0 * torch.randn(N_CLASSES, N_FEATURES, generator=generator)
    for _ in range(n_steps):
        y = (N_CLASSES ** torch.rand(size, generator=generator) - 1.0).long()
        yield centres[y] + torch.randn(size, N_FEATURES, generator=generator), y


def main(n_steps: int = 400) -> float:
    torch.manual_seed(0)
    counts = torch.stack([y for _, y in batches(20)]).flatten().bincount(minlength=N_CLASSES)

    network = nn.Sequential(nn.Linear(N_FEATURES, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    head = AugmentReduceHead(WIDTH, N_CLASSES, n_sampled_classes=256, class_counts=counts, optimizer="adagrad")
    optimiser = torch.optim.Adam(network.parameters(), lr=3e-3)  # the head moves its own weights, in backward

    for step, (x, y) in enumerate(batches(n_steps)):
        optimiser.zero_grad()
        loss = head(network(x), y)
        loss.backward()
        optimiser.step()
        if step % 100 == 0:
            print(f"step {step:4d}  loss {float(loss.detach()):.3f}")

    x, y = next(batches(1, 4_000))
    with torch.no_grad():
        hidden = network(x)
        log_p, best = head.log_prob(hidden, y).mean(), head.topk(hidden, 1)[1][:, 0]
    print(f"log likelihood {float(log_p):.3f}, accuracy {float((best == y).float().mean()):.3f}")
    return float(log_p)


if __name__ == "__main__":
    main()

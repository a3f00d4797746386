"""CosFace (scale 32, margin .2) on invented identities: TAR at FAR 1e-3 over identities that were not trained on.

OMP_NUM_THREADS=1 python -m benchmarks.studies.head_faces          # K 10,000, a tenth of the classes a step

full        cross entropy over all classes                     partial-fc     the batch's identities and uniform others
sampled     sampled softmax, uniform, logQ                     sampled-labels the same, labels of the batch joining
ours-*      sampled_bound, labels joining, c by log-sum-exp (lse), kept for each row (rows), or the exact one (oracle);
            -near with the nearest classes of the batch's identities in the sample for certain
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from augment_reduce.nn import LocalParameters, SharedSampler, sampled_bound

SCALE, MARGIN, D, WIDTH, PER = 32.0, 0.2, 64, 128, 12  # PER: rows of an identity
METHODS = ("full", "sampled", "sampled-labels", "partial-fc", "ours-oracle", "ours-lse", "ours-rows", "ours-rows-near")
REFRESH, NEAR = 50, 4  # steps between two looks for near classes, and how many of each


class Faces:
    """x = f(identity + variation), f a fixed random network."""

    def __init__(self, n: int, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.maker = [torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(7)) / 32**0.5,
                      torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(8)) / WIDTH**0.5]  # fmt: skip
        centre = torch.randn(n, 32, generator=g)
        self.y = torch.arange(n).repeat_interleave(PER)
        look = centre[self.y] + 0.55 * torch.randn(n * PER, 32, generator=g)
        self.x = torch.tanh(1.5 * look @ self.maker[0]) @ self.maker[1]


@torch.no_grad()
def tar(network: nn.Module, faces: Faces, far: float = 1e-3) -> float:
    """Share of pairs of one identity whose cosine beats that of all but `far` of the pairs of two."""
    some = torch.arange(len(faces.y)) % PER < 4
    h, y = F.normalize(network(faces.x[some])), faces.y[some]
    cosine, same = h @ h.T, y[:, None] == y
    off = ~torch.eye(len(h), dtype=torch.bool)
    other = cosine[~same]
    threshold = other.kthvalue(int((1.0 - far) * len(other))).values
    return float((cosine[same & off] > threshold).float().mean())


class Trainer:
    def __init__(self, method: str, faces: Faces, n_sampled: int) -> None:
        torch.manual_seed(0)
        self.method, self.faces, self.K = method, faces, int(faces.y.max()) + 1
        self.network = nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, D))
        self.weight = nn.Parameter(torch.randn(self.K, D) / D**0.5)
        joins = method == "sampled-labels" or method.startswith("ours")
        counts = torch.bincount(faces.y, minlength=self.K) if joins else None
        self.sampler = SharedSampler(self.K, n_sampled, "uniform-shared", counts)
        mode = "persistent" if "rows" in method else "log-sum-exp"
        self.local = LocalParameters(D, self.K, mode=mode, n_rows=len(faces.y))
        self.near = torch.full((self.K, NEAR), -1)
        self.optimizer = torch.optim.Adam([*self.network.parameters(), self.weight], lr=2e-3)

    def loss(self, rows: Tensor) -> Tensor:
        y, method = self.faces.y[rows], self.method
        h, w = F.normalize(self.network(self.faces.x[rows])), F.normalize(self.weight)
        psi_y = SCALE * ((h * w[y]).sum(1) - MARGIN)
        if method == "full":
            psi = SCALE * h @ w.T
            return F.cross_entropy(psi.scatter(1, y[:, None], psi_y[:, None]), y)
        if method == "partial-fc":  # no weights: what is not drawn is not there
            classes = torch.unique(torch.cat([y, self.sampler.draw().classes]))
            mask = y[:, None] == classes
            return -sampled_bound(psi_y, SCALE * h @ w[classes].T, 0.0, mask).mean()
        near = self.near[y] if method.endswith("near") else None
        classes, log_weight, mask = self.sampler.draw_for(y, near=near)
        return -sampled_bound(
            psi_y, SCALE * h @ w[classes].T, log_weight, mask, self.normalizer(h, w, psi_y, y, rows)
        ).mean()

    def normalizer(self, h: Tensor, w: Tensor, psi_y: Tensor, y: Tensor, rows: Tensor) -> object:
        if self.method.startswith("sampled"):
            return None
        if "oracle" in self.method:
            psi = (SCALE * h @ w.T).detach()
            return torch.logsumexp(psi.scatter(1, y[:, None], psi_y.detach()[:, None]), 1)
        return self.local.at(h, rows if "rows" in self.method else None)

    @torch.no_grad()
    def look_for_near(self) -> None:
        w = F.normalize(self.weight)
        for part in torch.arange(self.K).split(1000):
            self.near[part] = (w[part] @ w.T).scatter(1, part[:, None], -2.0).topk(NEAR, dim=1).indices

    def run(self, n_steps: int, B: int) -> float:
        g, seconds = torch.Generator().manual_seed(1), 0.0
        order = torch.randperm(len(self.faces.y), generator=g).repeat(1 + n_steps * B // len(self.faces.y))
        for t in range(n_steps):
            begin = time.process_time()
            if self.method.endswith("near") and t % REFRESH == 0:
                self.look_for_near()
            self.optimizer.zero_grad()
            self.loss(order[t * B : (t + 1) * B]).backward()
            self.optimizer.step()
            seconds += time.process_time() - begin
        return 1e3 * seconds / n_steps


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, default=10_000)
    parser.add_argument("--unseen", type=int, default=1_000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    args = parser.parse_args(arguments)
    faces, unseen, found = Faces(args.classes, 0), Faces(args.unseen, 1), {}
    print("method,step,ms_per_step,tar")
    for method in args.methods:
        trainer = Trainer(method, faces, args.classes // 10)
        ms = trainer.run(args.steps, args.batch)
        found[method] = tar(trainer.network, unseen)
        print(f"{method},{args.steps},{ms:.1f},{found[method]:.4f}", flush=True)
    return found


if __name__ == "__main__":
    main()

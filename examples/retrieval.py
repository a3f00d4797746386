"""Retrieval with two towers: which packages will a Debian package depend on? 31,298 to choose from.

    python examples/retrieval.py --epochs 5
    python examples/retrieval.py --tiny                    # a few seconds, on packages invented here

One tower reads the query (name, description, section: a bag of tokens) and gives D numbers; the other holds D numbers
for each item. A query's score for an item is their product, plus the item's bias. The item tower *is* the head's
weight: trained by the head, a few thousand items a step, it is also the index to search afterwards.

Printed: precision at 1 and 5 on held-out packages, and the mean log probability of what they do depend on.
"""

from __future__ import annotations

import argparse
import time
from typing import NamedTuple

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor, nn

from augment_reduce.data import load_dataset
from augment_reduce.nn import AugmentReduceHead


class Pairs(NamedTuple):
    """Queries as rows of token counts, and (query, item) pairs; `relevant` (queries, items) holds them all at once."""

    tokens: sp.csr_matrix
    query: Tensor
    item: Tensor
    relevant: sp.csr_matrix


def read() -> tuple[Pairs, Pairs]:
    data = load_dataset("debian-deps", reduction="all")
    assert data.test is not None
    found = []
    for split in (data.train, data.test):
        query = torch.from_numpy(np.asarray(split.rows))
        found.append(Pairs(split.features.tocsr(), query, torch.from_numpy(split.y), data.relevant(split)))
    return found[0], found[1]


def invented(n: int = 600, n_items: int = 200, n_tokens: int = 80) -> tuple[Pairs, Pairs]:
    """Each token calls for two items; a query has three tokens."""
    rng = np.random.default_rng(0)
    wanted = rng.integers(n_items, size=(n_tokens, 2))
    parts = []
    for size in (n, n // 5):
        token = np.sort(rng.integers(n_tokens, size=(size, 3)), axis=1)
        rows = np.repeat(np.arange(size), 3)
        tokens = sp.csr_matrix((np.ones(3 * size, np.float32), (rows, token.ravel())), shape=(size, n_tokens))
        query, item = np.repeat(np.arange(size), 6), wanted[token].reshape(size, -1).ravel()
        relevant = sp.csr_matrix((np.ones(len(item), bool), (query, item)), shape=(size, n_items))
        parts.append(Pairs(tokens, torch.from_numpy(query), torch.from_numpy(item), relevant))
    return parts[0], parts[1]


class QueryTower(nn.Module):
    def __init__(self, n_tokens: int, features: int) -> None:
        super().__init__()
        self.tokens = nn.EmbeddingBag(n_tokens, 2 * features, mode="sum", sparse=True)
        nn.init.normal_(self.tokens.weight, std=0.1)
        self.layers = nn.Sequential(nn.LayerNorm(2 * features), nn.GELU(), nn.Linear(2 * features, features))

    def forward(self, rows: sp.csr_matrix) -> Tensor:
        device = self.tokens.weight.device
        index, start = (torch.from_numpy(x.astype(np.int64)).to(device) for x in (rows.indices, rows.indptr))
        count = torch.from_numpy(rows.data.astype(np.float32)).to(device)
        return self.layers(self.tokens(index, start[:-1], per_sample_weights=torch.log1p(count)))


@torch.no_grad()
def evaluate(tower: QueryTower, head: AugmentReduceHead, test: Pairs, device: torch.device) -> dict[str, float]:
    hits = {1: 0.0, 5: 0.0}
    log_p = 0.0
    n = test.tokens.shape[0]
    order = torch.argsort(test.query, stable=True)
    query, item = test.query[order], test.item[order]
    for start in range(0, n, 512):
        stop = min(start + 512, n)
        hidden = tower(test.tokens[start:stop])
        best = head.topk(hidden, 5)[1].cpu().numpy()
        right = np.stack([test.relevant[start:stop][np.arange(stop - start), best[:, j]].A1 for j in range(5)], axis=1)
        hits = {k: hits[k] + right[:, :k].sum() / k for k in hits}
        pairs = slice(*np.searchsorted(query.numpy(), [start, stop]))
        log_p += float(head.log_prob(hidden[query[pairs].to(device) - start], item[pairs].to(device)).double().sum())
    return {"P@1": hits[1] / n, "P@5": hits[5] / n, "log_prob": log_p / len(item)}


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="softmax", help="softmax, probit, logistic")
    parser.add_argument("--features", type=int, default=128)
    parser.add_argument("--sampled", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(argv)
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch's sparse Adagrad builds valid tensors; say no more
    if args.tiny:
        args.features, args.sampled, args.batch = 16, 50, 128
    torch.manual_seed(0)
    device = torch.device(args.device)
    train, test = invented() if args.tiny else read()
    n_items = train.relevant.shape[1]
    tower = QueryTower(train.tokens.shape[1], args.features).to(device)
    head = AugmentReduceHead(
        args.features, n_items, args.model, n_sampled_classes=min(args.sampled, n_items), optimizer="adagrad",
        class_counts=torch.bincount(train.item, minlength=n_items), learning_rate=args.rate, device=device,
    )  # fmt: skip
    optimisers = [
        torch.optim.Adagrad(tower.tokens.parameters(), lr=args.rate),
        torch.optim.Adam(tower.layers.parameters(), lr=1e-3),
    ]
    result: dict[str, float] = {}
    began = time.perf_counter()
    for epoch in range(args.epochs):
        for pairs in torch.randperm(len(train.item)).split(args.batch):
            for optimiser in optimisers:
                optimiser.zero_grad()
            head(tower(train.tokens[train.query[pairs].numpy()]), train.item[pairs].to(device)).backward()
            for optimiser in optimisers:
                optimiser.step()
        spent = time.perf_counter() - began
        result = evaluate(tower, head, test, device)
        shown = "  ".join(f"{name} {value:.4f}" for name, value in result.items())
        print(f"epoch {epoch + 1}  {spent:6.1f} s  {shown}  floored {head.floored_share:.4f}", flush=True)
    return result


if __name__ == "__main__":
    main()

"""Next words of WordNet's definitions by how classes are sampled and where c comes from: test nats a word.

    OMP_NUM_THREADS=1 python -m benchmarks.studies.head_words --sampled 16 256 --seeds 0 1 2 \
        --output benchmarks/results/head_words.csv

The network of examples/next_word.py: four words of context, width 64, D 64, B 256; biases start at log frequencies;
Adagrad at .1 on the head's rows and on the embedding, Adam at .001 on the layers, the same minibatches for every
method. Test loss is exact, over 3,000 words that are not the unknown one.

    ours          the head as it is, c linear              lse          c as a log-sum-exp of linear functions
    sampled       sampled softmax on the same classes      *-drawn      without the labels of other rows
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import next_word

from augment_reduce.nn import AugmentReduceHead
from benchmarks.common import SCHEMAS, append

CONTEXT, WIDTH, D, B, N_TEST = 4, 64, 64, 256, 3_000
METHODS = ("ours", "lse", "sampled", "ours-drawn", "lse-drawn", "sampled-drawn")


class Model(nn.Module):
    def __init__(self, text: next_word.Text, method: str, n_sampled: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        K = text.n_words
        self.network = next_word.Network(K, CONTEXT, WIDTH, D)
        kind = method.removesuffix("-drawn")
        self.head = AugmentReduceHead(
            D, K, n_sampled_classes=n_sampled, class_counts=torch.bincount(text.train[1], minlength=K),
            in_batch=kind == method, local="log-sum-exp" if kind == "lse" else "amortised",
            floor=0.0 if kind == "sampled" else 1.0, optimizer="adagrad", learning_rate=0.1,
        )  # fmt: skip
        if kind == "sampled":  # from below, the floor of 0 is the sample's own log Z
            self.head.local.predict = lambda hidden, psi_y: psi_y[None]
        self.of_embedding = torch.optim.Adagrad(self.network.embedding.parameters(), lr=0.1)
        self.of_layers = torch.optim.Adam(self.network.layers.parameters(), lr=1e-3)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.of_embedding.zero_grad()
        self.of_layers.zero_grad()
        self.head(self.network(x), y).backward()
        self.of_embedding.step()
        self.of_layers.step()

    @torch.no_grad()
    def test(self, x: torch.Tensor, y: torch.Tensor) -> float:
        losses = [-self.head.log_prob(self.network(a), b) for a, b in zip(x.split(100), y.split(100), strict=True)]
        return float(torch.cat(losses).mean())


def test_words(text: next_word.Text, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = text.test
    known = (y != 0).nonzero()[:, 0]
    rows = known[torch.randperm(len(known), generator=torch.Generator().manual_seed(1))[:n]]
    return x[rows], y[rows]


def run(text: next_word.Text, method: str, n_sampled: int, seed: int, marks: list[int]) -> list[dict[str, object]]:
    """One training; a row at each of the marked steps."""
    model, (x, y) = Model(text, method, n_sampled, seed), text.train
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    held = test_words(text, N_TEST)
    seconds = 0.0
    rows: list[dict[str, object]] = []
    for t in range(max(marks)):
        some = order[(t * B) % max(1, len(y) - B) :][:B]
        begin = time.process_time()
        model.step(x[some], y[some])
        seconds += time.process_time() - begin
        if t + 1 in marks:
            found: dict[str, object] = {"method": method, "n_sampled": n_sampled, "seed": seed, "step": t + 1}
            found["nats"], found["ms_per_step"] = round(model.test(*held), 4), round(1e3 * seconds / (t + 1), 2)
            found["gap"], found["floored"] = round(float(model.head.running_gap), 4), round(model.head.floored_share, 4)
            rows.append(found)
    return rows


def main(arguments: list[str] | None = None, text: next_word.Text | None = None) -> list[dict[str, object]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="../shared/data/wordnet_glosses")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--sampled", type=int, nargs="+", default=[16, 256])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, nargs="+", default=[3_000, 6_000])
    parser.add_argument("--output", help="a result file to append to, as benchmarks/results/head_words.csv")
    args = parser.parse_args(arguments)
    torch.sparse.check_sparse_tensor_invariants.disable()
    text = text or next_word.read(args.data, CONTEXT)
    rows: list[dict[str, object]] = []
    for seed in args.seeds:
        for size in args.sampled:
            for method in args.methods:
                for row in run(text, method, size, seed, args.steps):
                    print(",".join(map(str, row.values())), flush=True)
                    rows.append(row)
    if args.output:
        append(Path(args.output), rows, SCHEMAS["head_words"])
    return rows


if __name__ == "__main__":
    main()

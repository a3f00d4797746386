"""Next-word prediction over 53,775 words, with four output layers side by side.

    python examples/next_word.py --heads ours exact --seconds 120
    python examples/next_word.py --tiny                                # a few seconds, on words invented here

The text is WordNet's definitions (`load_dataset("wordnet-glosses")`). The network looks at the last few words: their
embeddings, one hidden layer, D numbers. What differs is the output layer and its loss:

    ours        AugmentReduceHead, softmax; --model probit or logistic for the others
    sampled     sampled softmax with the same classes: biased, no bound
    exact       torch.nn.Linear and cross entropy, O(K)
    adaptive    torch.nn.AdaptiveLogSoftmaxWithLoss: a different, clustered model

Printed for each: seconds trained, steps, and the test perplexity over known words, computed exactly.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from augment_reduce.data import TokenLines, load_dataset
from augment_reduce.nn import AugmentReduceHead, SharedSampler
from augment_reduce.nn.functional import linear_sampled_softmax

HEADS = ("ours", "sampled", "exact", "adaptive")
UNKNOWN = 0


class Text(NamedTuple):
    """Contexts (N, n) and next words (N,) of the three parts; word number `n_words` stands before the first word."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    n_words: int


def contexts(lines: TokenLines, n: int, n_words: int) -> tuple[Tensor, Tensor]:
    words = torch.from_numpy(lines.ids.astype(np.int64))
    starts = torch.from_numpy(lines.offsets)
    place = torch.arange(len(words))
    start = starts[torch.searchsorted(starts, place, right=True) - 1]
    before = [torch.where(place - j >= start, words[(place - j).clamp_min(0)], n_words) for j in range(1, n + 1)]
    return torch.stack(before, dim=1), words


def read(folder: str | None, n: int) -> Text:
    data = load_dataset("wordnet-glosses", folder)
    parts = (contexts(part, n, data.n_classes) for part in (data.train, data.validation, data.test))
    return Text(*parts, n_words=data.n_classes)


def invented(n: int, n_words: int = 300, size: int = 6_000) -> Text:
    """A chain in which each word narrows the next down to a few, with frequencies like those of words."""
    generator = torch.Generator().manual_seed(0)
    usual = 1.0 / torch.arange(1, n_words, dtype=torch.float64)
    follow = torch.multinomial(usual, 5 * n_words, replacement=True, generator=generator).reshape(n_words, 5) + 1
    words = [1]
    for pick in torch.randint(5, (size,), generator=generator).tolist():
        words.append(int(follow[words[-1], pick]))
    cut = [0, int(0.8 * size), int(0.9 * size), size]
    parts = [np.array(words[a:b], dtype=np.int32) for a, b in itertools.pairwise(cut)]
    lines = [TokenLines(ids, np.array([0, len(ids)], dtype=np.int64)) for ids in parts]
    return Text(*(contexts(part, n, n_words) for part in lines), n_words=n_words)


class Network(nn.Module):
    """Embeddings of the last n words, one hidden layer, D features out."""

    def __init__(self, n_words: int, n: int, width: int, features: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(n_words + 1, width, sparse=True)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.layers = nn.Sequential(nn.Linear(n * width, 4 * features), nn.GELU(), nn.Linear(4 * features, features))

    def forward(self, context: Tensor) -> Tensor:
        return self.layers(self.embedding(context).flatten(1))


class Head(NamedTuple):
    """What the training loop needs of an output layer. `parameters` are left to an optimiser of the loop's own."""

    loss: Callable[[Tensor, Tensor], Tensor]
    log_prob: Callable[[Tensor, Tensor], Tensor]
    parameters: list[nn.Parameter]


def make_head(name: str, args: argparse.Namespace, counts: Tensor, device: torch.device) -> Head:
    K, D, S = len(counts), args.features, min(args.sampled, len(counts))
    if name == "ours":
        head = AugmentReduceHead(
            D, K, args.model, n_sampled_classes=S, class_counts=counts, local=args.local, optimizer="adagrad",
            learning_rate=args.rate, device=device,
        )  # fmt: skip
        return Head(head, head.log_prob, [])
    if name == "adaptive":
        by_frequency = torch.argsort(counts, descending=True).argsort().to(device)  # it wants frequent classes first
        cutoffs = [k for k in (2_000, 10_000) if k < K - 1] or [K // 2]
        adaptive = nn.AdaptiveLogSoftmaxWithLoss(D, K, cutoffs).to(device)
        return Head(
            lambda h, y: adaptive(h, by_frequency[y]).loss,
            lambda h, y: adaptive(h, by_frequency[y]).output,
            list(adaptive.parameters()),
        )
    linear = nn.Linear(D, K).to(device)
    with torch.no_grad():
        linear.bias.copy_(torch.log((counts + 1.0) / (counts + 1.0).mean()))

    def log_prob(h: Tensor, y: Tensor) -> Tensor:
        return -F.cross_entropy(linear(h), y, reduction="none")

    if name == "exact":
        return Head(lambda h, y: F.cross_entropy(linear(h), y), log_prob, list(linear.parameters()))
    sampler = SharedSampler(K, S, class_counts=counts, device=device)
    return Head(
        lambda h, y: linear_sampled_softmax(h, linear.weight, y, linear.bias, sampler=sampler),
        log_prob,
        list(linear.parameters()),
    )


def minibatches(n: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    while True:
        yield from torch.randperm(n, generator=generator).split(size)


@torch.no_grad()
def perplexity(network: Network, head: Head, part: tuple[Tensor, Tensor], device: torch.device) -> float:
    context, word = part
    known = word != UNKNOWN
    log_p = [
        head.log_prob(network(x.to(device)), y.to(device)).double().sum()
        for x, y in zip(context[known].split(500), word[known].split(500), strict=True)
    ]
    return math.exp(-float(torch.stack(log_p).sum()) / int(known.sum()))


def train(name: str, text: Text, args: argparse.Namespace) -> dict[str, float]:
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    counts = torch.bincount(text.train[1], minlength=text.n_words).double()
    network = Network(text.n_words, text.train[0].shape[1], args.width, args.features).to(device)
    head = make_head(name, args, counts, device)
    optimisers: list[torch.optim.Optimizer] = [
        torch.optim.Adagrad(network.embedding.parameters(), lr=args.rate),
        torch.optim.Adam(network.layers.parameters(), lr=1e-3),
    ]
    if head.parameters:
        optimisers.append(torch.optim.Adagrad(head.parameters, lr=args.rate))
    context, word = (part.to(device) for part in text.train)
    began, spent, steps = time.perf_counter(), 0.0, 0
    for rows in minibatches(len(word), args.batch, torch.Generator().manual_seed(args.seed)):
        for optimiser in optimisers:
            optimiser.zero_grad()
        loss = head.loss(network(context[rows.to(device)]), word[rows.to(device)])
        loss.backward()
        for optimiser in optimisers:
            optimiser.step()
        steps += 1
        if device.type == "cuda" and steps % 100 == 0:
            torch.cuda.synchronize()
        spent = time.perf_counter() - began
        if spent > args.seconds or steps >= args.steps:
            break
    result = {"seconds": spent, "steps": steps, "perplexity": perplexity(network, head, text.test, device)}
    print(f"{name:9s} {spent:7.1f} s {steps:6d} steps   test perplexity {result['perplexity']:8.2f}", flush=True)
    return result


def main(argv: list[str] | None = None) -> dict[str, dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", nargs="+", default=list(HEADS), choices=HEADS)
    parser.add_argument("--model", default="softmax", help="of ours: softmax, probit, logistic")
    parser.add_argument("--local", help="of ours: amortised, log-sum-exp, fresh")
    parser.add_argument("--sampled", type=int, default=2048, help="classes drawn a step")
    parser.add_argument("--features", type=int, default=128)
    parser.add_argument("--width", type=int, default=64, help="of an embedding")
    parser.add_argument("--context", type=int, default=5, help="number of preceding words")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--rate", type=float, default=0.1, help="of Adagrad, for embeddings and output layer")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", default=None, help="where the text is; by default it is looked for or downloaded")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="invented words, for a quick look")
    args = parser.parse_args(argv)
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch's sparse Adagrad builds valid tensors; say no more
    if args.tiny:
        args.features, args.width, args.batch, args.sampled = 16, 8, 64, 32
        args.seconds, args.steps = math.inf, min(args.steps, 150)  # as many on a busy machine
    text = invented(args.context) if args.tiny else read(args.folder and str(Path(args.folder)), args.context)
    return {name: train(name, text, args) for name in args.heads}


if __name__ == "__main__":
    main()

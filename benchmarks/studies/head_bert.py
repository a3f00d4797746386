"""A tiny BERT with 50,000 labels on a CPU: `patch(model)` beside the model as it is, equal steps and equal optimisers.

    OMP_NUM_THREADS=2 python -m benchmarks.studies.head_bert  # columns: method, steps, ms_per_step, held-out nats

Rows are sentences of 12 words; a word votes for labels of its own, frequencies fall as 1 / rank. Biases start at log
frequencies for all. Held-out loss is exact.
"""

from __future__ import annotations

import argparse
import time
import warnings

import torch
import transformers

from augment_reduce.integrations.transformers import patch

WORDS, LENGTH, D = 2_000, 12, 128
RATES = {"adam": 5e-4, "adagrad": 0.05, "rowwise-adagrad": 0.05}  # of the head's own optimiser


def model_of(n_labels: int) -> transformers.BertForSequenceClassification:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=D, num_hidden_layers=2, num_attention_heads=2, intermediate_size=2 * D,
        max_position_embeddings=64, num_labels=n_labels, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def rows(n: int, n_labels: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The label is drawn by frequency; its words from forty that it owns, a third of them at random."""
    g = torch.Generator().manual_seed(seed)
    y = torch.multinomial(1.0 / torch.arange(10.0, n_labels + 10.0), n, replacement=True, generator=g)
    owned = (y[:, None] * 7 + torch.randint(40, (n, LENGTH), generator=g) ** 2) % WORDS
    other = torch.randint(WORDS, (n, LENGTH), generator=g)
    return torch.where(torch.rand(n, LENGTH, generator=g) < 0.33, other, owned), y


@torch.no_grad()
def held_out(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    model.eval()
    losses = [float(model(input_ids=a, labels=b).loss) for a, b in zip(x.split(200), y.split(200), strict=True)]
    model.train()
    return sum(losses) / len(losses)


def train(model: torch.nn.Module, n_steps: int, B: int, n_labels: int, marks: list[int], name: str) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.grad_fn is None], lr=5e-4)
    x, y = rows(n_steps * B, n_labels, 1)
    test = rows(1_000, n_labels, 2)
    model.train()
    seconds = 0.0
    for t in range(n_steps):
        some = slice(t * B, (t + 1) * B)
        begin = time.perf_counter()
        optimizer.zero_grad()
        model(input_ids=x[some], labels=y[some]).loss.backward()
        optimizer.step()
        seconds += time.perf_counter() - begin
        if t + 1 in marks:
            nats = held_out(model, *test)
            print(f"{name},{t + 1},{1e3 * seconds / (t + 1):.1f},{nats:.4f},{seconds:.1f}", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--labels", type=int, default=50_000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--sampled", type=int, default=512)
    parser.add_argument("--steps", type=int, nargs="+", default=[100, 300])
    parser.add_argument("--methods", nargs="+", default=["exact", "dense", *RATES])
    args = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    counts = torch.bincount(rows(200_000, args.labels, 3)[1], minlength=args.labels)
    print("method,step,ms_per_step,held_out_nats,seconds")
    for method in args.methods:
        model = model_of(args.labels)
        model.classifier.bias.data.copy_(torch.log((counts + 1.0) / (counts + 1.0).mean()))
        if method != "exact":
            own = {} if method == "dense" else {"optimizer": method, "learning_rate": RATES[method]}
            patch(model, class_counts=counts, n_sampled_classes=args.sampled, **own)
        train(model, max(args.steps), args.batch, args.labels, args.steps, method)


if __name__ == "__main__":
    main()

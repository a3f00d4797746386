"""A training run over ranks: the head's classes are shared by all of them, and a run that was stopped goes on from its
last checkpoint. The same function runs in one process, under torchrun, and under Ray and Spark (docs/distributed.md).

    python examples/sharded_head.py
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 --monitor-interval 5 examples/sharded_head.py

torchrun starts all ranks again when one has died; `--monitor-interval` seconds give the others time to say which one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

from augment_reduce.nn import AugmentReduceHead, exclude_from_ddp, load_sharded, save_sharded

CONFIG = {
    "checkpoints": None,  # a folder that every rank sees; None: no checkpoints
    "every": 50,  # steps from one checkpoint to the next
    "steps": 400, "batch_size": 512,  # rows of all ranks
    "n_classes": 2_000, "n_features": 32, "width": 64, "n_sampled_classes": 256,
    "timeout": 600.0,  # seconds after which a rank that hangs is an error on the others
}  # fmt: skip


class Network(nn.Module):
    def __init__(self, config: dict[str, Any], group: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        counts = torch.cat([minibatch(config, -1 - t)[1] for t in range(20)]).bincount(minlength=config["n_classes"])
        n, width = config["n_features"], config["width"]
        self.trunk = nn.Sequential(nn.Linear(n, width), nn.GELU(), nn.Linear(width, width))
        self.head = AugmentReduceHead(
            width, config["n_classes"], n_sampled_classes=config["n_sampled_classes"], class_counts=counts,
            optimizer="adagrad", process_group=group,
        )  # fmt: skip

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.head(self.trunk(x), y)


def minibatch(config: dict[str, Any], step: int) -> tuple[Tensor, Tensor]:
    """The rows of all ranks in this step, about one point for each class: they depend on the step alone, so that a
    resumed run sees the rows that it would have seen."""
    centres = torch.randn(config["n_classes"], config["n_features"], generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1_000 + step)
    y = (config["n_classes"] ** torch.rand(config["batch_size"], generator=generator) - 1.0).long()
    return 2.0 * centres[y] + torch.randn(len(y), config["n_features"], generator=generator), y


def train(config: dict[str, Any]) -> float:
    """Train from the last checkpoint, if there is one, to the end; the log likelihood of held-out rows. `config` says
    what differs from `CONFIG`."""
    config = CONFIG | config
    with process_group(config["timeout"]) as group:
        rank, n_ranks = (0, 1) if group is None else (dist.get_rank(), dist.get_world_size())
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        network = Network(config, group).to(device)
        model = network if group is None else DistributedDataParallel(exclude_from_ddp(network))
        optimiser = torch.optim.Adam(network.trunk.parameters(), lr=3e-3)  # the head moves its own rows, in backward

        first = 0
        if config["checkpoints"] and (found := load_sharded(network, config["checkpoints"], optimizer=optimiser)):
            first = found.step
        if rank == 0:
            print(f"starts after step {first}", flush=True)
        for step in range(first, config["steps"]):
            x, y = (part.chunk(n_ranks)[rank].to(device) for part in minibatch(config, step))
            optimiser.zero_grad()
            loss = model(x, y)
            loss.backward()
            optimiser.step()
            if (step + 1) % config["every"] == 0:
                if config["checkpoints"]:
                    save_sharded(network, config["checkpoints"], step + 1, optimizer=optimiser)
                if rank == 0:
                    print(f"step {step + 1}  loss {float(loss.detach()):.3f}", flush=True)

        network.eval()
        with torch.no_grad():
            x, y = (part.chunk(n_ranks)[rank].to(device) for part in minibatch(config, config["steps"]))
            total = network.head.log_prob(network.trunk(x), y).sum()
            if group is not None:
                dist.all_reduce(total)
    value = float(total) / config["batch_size"]
    if rank == 0:
        print(f"held-out log likelihood {value!r}", flush=True)
    return value


@contextlib.contextmanager
def process_group(timeout: float) -> Iterator[Any]:
    """The group of all ranks: the launcher's, or one made from the variables that it has set; None in one process."""
    if dist.is_initialized() or "RANK" not in os.environ:  # Ray has made one
        yield dist.group.WORLD if dist.is_initialized() else None
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(
        store=store_of_this_attempt(), rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=timeout),
    )  # fmt: skip
    yield dist.group.WORLD
    dist.barrier()  # or the first rank to end breaks the connections of the others
    dist.destroy_process_group()


def store_of_this_attempt() -> dist.Store:
    """torchrun on one node keeps its store when it starts the ranks again: what ranks that have died wrote there, such
    as where to connect to them, must not be read. On several nodes set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1."""
    store, _, _ = next(dist.rendezvous("env://"))
    alone = os.environ.get("GROUP_WORLD_SIZE") == "1"  # of several nodes each counts its own restarts
    return dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if alone else "", store)


@record
def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", help="a folder that every rank sees")
    parser.add_argument("--every", type=int, default=CONFIG["every"], help="steps from one checkpoint to the next")
    parser.add_argument("--steps", type=int, default=CONFIG["steps"])
    return train(vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    main()

"""Ranks killed by `kill -9` in mid-step: does training resume by itself, and reach what it reaches undisturbed?

    python -m benchmarks.studies.killed_ranks --output benchmarks/results/killed_ranks.csv

`examples/sharded_head.py` runs under torchrun on two ranks with a checkpoint every few steps. In each attempt one rank
kills itself at a seeded moment: at one of the collectives of a step, or up to 30 ms after it, which may be in a
gradient's all-reduce, in the writing of a checkpoint, or between two steps. torchrun starts all ranks again, three
times a run. Counted are the steps that were lost, and whether the other rank named the one that died; the held-out log
likelihood at the end is compared with that of a run that nobody disturbed: with the same ranks, bit for bit.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from augment_reduce.sharding import Ranks
from benchmarks.common import ROOT, SCHEMAS, Row, kept, markdown

SMALL = {"n_classes": 300, "n_features": 8, "width": 16, "n_sampled_classes": 32, "batch_size": 64, "timeout": 60.0}
MONITOR = 4  # seconds between torchrun's looks: the other rank has time to say who did not answer
KILLS_A_RUN = 3
LIMIT = 300.0  # seconds, of one run


class Kill(NamedTuple):
    """Rank `rank` dies `delay` seconds after it came to collective number `collective` of step `step`."""

    rank: int
    step: int
    collective: int
    delay: float = 0.0


class Outcome(NamedTuple):
    """Of a run: what it reached, after which step each attempt started, and all that was printed."""

    likelihood: float
    starts: list[int]
    output: str


def run(kills: list[Kill], steps: int, every: int, folder: Path, n_ranks: int = 2) -> Outcome:
    """The example under torchrun, with one of these deaths in each attempt. The folder keeps its checkpoints."""
    config = SMALL | {"steps": steps, "every": every, "checkpoints": str(folder)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n_ranks}"]
    command += [f"--max-restarts={len(kills)}", f"--monitor-interval={MONITOR if kills else 0.1}"]
    command += ["-m", "benchmarks.studies.killed_ranks", "--child", json.dumps({"config": config, "kills": kills})]
    found = subprocess.run(
        command, cwd=ROOT, timeout=LIMIT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    said = re.search(r"held-out log likelihood (\S+)", found.stdout)
    if found.returncode or said is None:
        raise RuntimeError(f"Expected a run that ends, found exit code {found.returncode}:\n{found.stdout}")
    return Outcome(float(said[1]), [int(n) for n in re.findall(r"starts after step (\d+)", found.stdout)], found.stdout)


def lost(kill: Kill, starts: list[int], attempt: int) -> int:
    """Steps that were taken before this death and had to be taken again."""
    return kill.step - starts[attempt + 1]


def names_the_dead(output: str, rank: int) -> bool:
    return f"rank {rank} did not answer" in output


# ---- in each rank ----


def child(config: dict[str, Any], kills: list[Kill]) -> None:
    example = load_example()
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if attempt < len(kills) and kills[attempt].rank == int(os.environ["RANK"]):
        die_at(kills[attempt], example)
    example.train(config)


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sharded_head", ROOT / "examples" / "sharded_head.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def die_at(kill: Kill, example: ModuleType) -> None:
    minibatch, named = example.minibatch, Ranks._named
    seen = {"step": -1, "collective": -1}

    def counted(config: dict[str, Any], step: int) -> Any:
        seen.update(step=step, collective=-1)
        return minibatch(config, step)

    def next_collective(ranks: Ranks, what: str) -> Any:
        seen["collective"] += 1
        if (seen["step"], seen["collective"]) == (kill.step, kill.collective):
            threading.Timer(kill.delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
            if not kill.delay:
                signal.pause()
        return named(ranks, what)

    example.minibatch = counted
    mock.patch.object(Ranks, "_named", next_collective).start()


# ---- the study ----


def moments(n: int, steps: int, seed: int = 0) -> list[Kill]:
    """Seeded deaths; every third one at a collective itself."""
    rng = np.random.default_rng(seed)
    return [
        Kill(int(rng.integers(2)), int(rng.integers(steps)), int(rng.integers(6)), 0.03 * rng.random() * (i % 3 > 0))
        for i in range(n)
    ]


def main(arguments: list[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--output", type=Path, help="append to this result file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        given = json.loads(options.child)
        child(given["config"], [Kill(*kill) for kill in given["kills"]])
        return []
    return kept(killed(options.kills, options.steps, options.every), SCHEMAS["killed_ranks"], options.output)


def table(rows: list[Row]) -> str:
    lost_steps = [int(row["lost"]) for row in rows]
    equal = sum(row["log_likelihood"] == row["undisturbed"] for row in rows)
    cells = (
        str(len(rows)), str(len({row["run"] for row in rows})), f"{np.mean(lost_steps):.1f}", str(max(lost_steps)),
        str(sum(row["named"] == "True" for row in rows)), f"{equal} of {len(rows)}",
    )  # fmt: skip
    head = ("killed", "runs", "steps lost: mean", "most", "named by the other rank", "ended bit-equal to undisturbed")
    return markdown(head, [(cells, rows)])


def killed(n_kills: int, steps: int, every: int) -> Any:
    """One row a death."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = run([], steps, every, Path(folder) / "undisturbed").likelihood
        every_kill = moments(n_kills, steps)
        for i in range(0, n_kills, KILLS_A_RUN):
            kills = sorted(every_kill[i : i + KILLS_A_RUN], key=lambda kill: kill.step)
            found = run(kills, steps, every, Path(folder) / str(i))
            for attempt, kill in enumerate(kills):
                yield {
                    "run": i // KILLS_A_RUN, **kill._asdict(), "every": every,
                    "lost": lost(kill, found.starts, attempt), "named": names_the_dead(found.output, kill.rank),
                    "log_likelihood": found.likelihood, "undisturbed": wanted,
                }  # fmt: skip


if __name__ == "__main__":
    main()

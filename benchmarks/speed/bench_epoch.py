"""Seconds per epoch at the paper's settings (table 1 and 2), every dataset shape and method, preset="paper".

    python -m benchmarks.speed.bench_epoch --save                      # one core, all shapes
    python -m benchmarks.speed.bench_epoch --threads 1 2 --crowded --save   # scaling, and what the machine allows of it
    python -m benchmarks.speed.bench_epoch --beside 'their-program {dataset} {method}'

`--beside` runs another program once for every repetition, interleaved, and reads the last number it prints as its
seconds per epoch; compare their ratio. `--crowded` times one thread again while another process runs the same work,
with shared memory bandwidth and caches: twice one thread's time over this is the speed-up of two threads without
waiting. The data are the real ones if available (AUGMENT_REDUCE_DATA), else random rows of the same shape.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys

import numpy as np
import scipy.sparse as sp

from augment_reduce import AugmentReduceClassifier
from augment_reduce.data import DatasetNotFoundError, load_dataset, random_like
from benchmarks.common import ROOT, report, row

# B, |S|, and epochs a repetition: enough steps for a median, few enough to interleave
SHAPES = {
    "mnist": (500, 1, 40.0), "bibtex": (488, 20, 250.0), "omniglot": (541, 50, 10.0), "eurlex-4k": (379, 50, 5.0),
    "synthetic": (500, 100, 6.0), "amazoncat-13k": (1987, 60, 0.05),
}  # fmt: skip
METHODS = {
    "softmax": {"model": "softmax"}, "probit": {"model": "probit"}, "logistic": {"model": "logistic"},
    "one-vs-each": {"method": "one-vs-each"},
}  # fmt: skip


def rows_of(dataset: str, tiny: bool):
    """(X, y, whether they are the real rows)."""
    if tiny:
        dataset = "bibtex" if dataset == "synthetic" else dataset
        return *random_like(dataset, n_rows=1000).train, False
    if dataset == "synthetic":  # no features: one that is always zero, since scikit-learn wants at least one
        y = load_dataset("synthetic", seed=49).train.y
        return sp.csr_matrix((len(y), 1), dtype=np.float32), y, True
    if dataset in ("eurlex-4k", "amazoncat-13k"):
        return *random_like(dataset).train, False
    try:
        return *load_dataset(dataset, download=False).train, True
    except DatasetNotFoundError:
        return *random_like(dataset).train, False


class Ours:
    """One estimator, trained a little further each time it is asked: seconds of training an epoch."""

    def __init__(self, dataset: str, method: str, X, y, threads: int, tiny: bool, sampling: str) -> None:
        B, S, epochs = SHAPES[dataset]
        self.per_epoch = -(-len(y) // B)
        steps = 3 if tiny else max(10, round(epochs * self.per_epoch))
        self.clf = AugmentReduceClassifier(
            preset="paper", batch_size=B, n_sampled_classes=S, max_iter=steps, warm_start=True, n_jobs=threads,
            dtype="float32", random_state=0, class_sampling=sampling, **METHODS[method],
        )  # fmt: skip
        self.X, self.y = X, y
        self.seconds()  # compiles

    def seconds(self) -> float:
        """From the first record of this fit to its last: what a fit does once, however long it is, is not counted."""
        before = len(getattr(self.clf, "history_", {"seconds": []})["seconds"])
        self.clf.fit(self.X, self.y)
        steps, seconds = (np.array(self.clf.history_[name])[[before, -1]] for name in ("iteration", "seconds"))
        return float((seconds[1] - seconds[0]) / (steps[1] - steps[0]) * self.per_epoch)


class Neighbour:
    """Another process that trains on the same data with one thread, for as long as it is let."""

    def __init__(self, dataset: str, method: str, tiny: bool) -> None:
        flags = ["--datasets", dataset, "--methods", method, "--endless", *(["--tiny"] * tiny)]
        command = [sys.executable, "-m", "benchmarks.speed.bench_epoch", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "ready\n":
            raise RuntimeError("The other process did not get ready.")
        self.process.send_signal(signal.SIGSTOP)

    def meanwhile(self, work: Ours) -> float:
        self.process.send_signal(signal.SIGCONT)
        try:
            return work.seconds()
        finally:
            self.process.send_signal(signal.SIGSTOP)

    def leave(self) -> None:
        self.process.kill()
        self.process.communicate()


def train_on(ours: Ours) -> None:
    print("ready", flush=True)
    while True:
        ours.seconds()


def theirs(command: str, dataset: str, method: str) -> float:
    said = subprocess.run(
        command.format(dataset=dataset, method=method), shell=True, check=True, capture_output=True, text=True
    ).stdout
    return float(re.findall(r"[-+.\deE]+", said)[-1])


def times_of(dataset: str, method: str, ours: dict[int, Ours], options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds per epoch by name, all of them in turn."""
    times: dict[str, list[float]] = {}
    neighbour = Neighbour(dataset, method, options.tiny) if options.crowded else None
    try:
        for _ in range(options.repeat):
            for n, one in ours.items():
                times.setdefault(f"s per epoch, {n} thread{'s' * (n > 1)}", []).append(one.seconds())
            if neighbour:
                times.setdefault("s per epoch, 1 thread, crowded", []).append(neighbour.meanwhile(ours[1]))
            if options.beside:
                times.setdefault("s per epoch, beside", []).append(theirs(options.beside, dataset, method))
    finally:
        if neighbour:
            neighbour.leave()
    return times


def ratios(times: dict[str, list[float]]) -> dict[str, list[float]]:
    """Turn by turn: another program's time over ours; what threads gain, and what two processes do together."""
    first = np.array(next(iter(times.values())))
    found = {}
    for name, work in (("beside", None), ("2 threads", 1), ("1 thread, crowded", 2)):
        seconds = times.get(f"s per epoch, {name}")
        if seconds is not None and work is None:
            found["beside / ours, 1st column"] = (np.array(seconds) / first).tolist()
        elif seconds is not None and "s per epoch, 1 thread" in times:
            found[f"gain, {name}"] = (work * np.array(times["s per epoch, 1 thread"]) / np.array(seconds)).tolist()
    return found


def main(arguments: list[str] | None = None) -> list[dict[str, object]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", nargs="+", default=[name for name in SHAPES if name != "amazoncat-13k"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--threads", nargs="+", type=int, default=[1])
    parser.add_argument("--class-sampling", default="uniform")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--beside", help="another program, measured in between")
    parser.add_argument("--crowded", action="store_true", help="also one thread with another process beside it")
    parser.add_argument("--endless", action="store_true", help="be that other process")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to see that it runs")
    parser.add_argument("--save", action="store_true", help="append to results/speed.csv")
    options = parser.parse_args(arguments)
    results = []
    for dataset in options.datasets:
        X, y, real = rows_of(dataset, options.tiny)
        for method in options.methods:
            ours = {n: Ours(dataset, method, X, y, n, options.tiny, options.class_sampling) for n in options.threads}
            if options.endless:
                train_on(ours[1])
            times = times_of(dataset, method, ours, options)
            times |= ratios(times)
            case = f"{dataset} {method}{'' if real else ' (random rows of its shape)'}"
            if options.class_sampling != "uniform":
                case += f" {options.class_sampling}"
            results += [row("epoch", case, quantity, values) for quantity, values in times.items()]
    report(results, save=options.save)
    return results


if __name__ == "__main__":
    main()

"""The fuzzers as a command: see the package's docstring."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import torch
from sklearn.exceptions import ConvergenceWarning

from . import FUZZERS, Failure, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Mutate valid files, and read them.")
    parser.add_argument("formats", nargs="*", metavar="FORMAT", help=f"Of {', '.join(FUZZERS)}; all unless given.")
    parser.add_argument("-n", type=int, default=2000, help="Mutations of each format (2,000).")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="CASE", help="This case alone; its file is kept.")
    parser.add_argument("--memory", type=float, default=4.0, metavar="GB", help="More than this is an error (4).")
    chosen = parser.parse_args()
    limit_memory(int(chosen.memory * 1e9))
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", ConvergenceWarning)  # of the few steps that valid models are trained for
    torch.set_num_threads(1)  # its threads wait longer for each other than small arrays take
    cases = range(chosen.n) if chosen.only is None else range(chosen.only, chosen.only + 1)
    return max(fuzz(name, cases, chosen.seed, keep=chosen.only is not None) for name in chosen.formats or FUZZERS)


def limit_memory(bytes_: int) -> None:
    """So that a file that makes a reader ask for more fails here, and not the machine."""
    try:
        import resource
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (bytes_, resource.getrlimit(resource.RLIMIT_AS)[1]))


def fuzz(name: str, cases: range, seed: int, *, keep: bool) -> int:
    """Run the cases of one format and say how they went; 1 if any failed."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    fuzzer, began, read, failures = FUZZERS[name](folder), time.perf_counter(), 0, 0
    for outcome in run(fuzzer, cases, seed):
        if isinstance(outcome, Failure):
            failures += 1
            shown = "".join(traceback.format_exception(outcome.error)) if keep or failures <= 3 else repr(outcome.error)
            print(f"{name}: case {outcome.case} of seed {seed}: {shown}", file=sys.stderr)
        else:
            read += outcome
    seconds = time.perf_counter() - began
    print(f"{name}: {len(cases):,} cases in {seconds:.1f} s, {read:,} read, {failures:,} failures", flush=True)
    if keep:
        print(f"{name}: the file is in {folder}")
    else:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())

"""Fuzzers of everything that reads a file: seeded mutations of valid files, and what may come of them.

    python -m tests.fuzz                              every format, 2,000 mutations each
    python -m tests.fuzz csv npz -n 100000 --seed 7   more of some
    python -m tests.fuzz csv --seed 7 --only 1234     one of them again, with its traceback and its file

Case i of a seed is always the same, whichever others are run. `tests/fuzz/test_fuzz.py` runs 2,000 of each format.
"""

from .cases import Failure, Fuzzer, run
from .models import ModelFuzzer
from .readers import READERS

FUZZERS: dict[str, type[Fuzzer]] = {"model": ModelFuzzer, **READERS}

__all__ = ["FUZZERS", "Failure", "Fuzzer", "ModelFuzzer", "run"]

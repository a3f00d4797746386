"""2,000 mutations of each format that we read. `python -m tests.fuzz` runs any number of them."""

import subprocess
import sys

import pytest

from tests.fuzz import FUZZERS, Failure, run
from tests.helpers import ROOT

CASES, PARTS = 2000, 2  # two halves, which run side by side


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", FUZZERS)
def test_a_mutated_file_is_refused_in_one_way_or_read_rightly(name, part, tmp_path):
    cases = range(part * CASES // PARTS, (part + 1) * CASES // PARTS)
    outcomes = list(run(FUZZERS[name](tmp_path), cases, seed=0))
    failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    if failures:
        case, error = failures[0]
        raise AssertionError(
            f"{len(failures)} of {len(outcomes)}, first: python -m tests.fuzz {name} --only {case}"
        ) from error
    assert 0 < sum(outcome is True for outcome in outcomes) < len(outcomes)  # some are still right, most are not


def test_the_command_runs_every_format():
    command = [sys.executable, "-m", "tests.fuzz", "-n", "3", "--seed", "5"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert [line.split(":")[0] for line in run.stdout.splitlines()] == list(FUZZERS)
    assert "0 failures" in run.stdout

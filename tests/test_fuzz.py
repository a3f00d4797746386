"""2,000 mutations of each format that we read. `python -m tests.fuzz` runs any number of them."""

import pytest
from fuzz import FUZZERS, Failure, run

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

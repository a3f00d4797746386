"""The study of defaults: it runs on small problems, and its summary says what its rows say."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.common import append, read
from benchmarks.studies import zoo

SMALL = ("iris", "few-rows", "counts-8", "duplicate-rows")  # drawn, or shipped with scikit-learn


@pytest.mark.parametrize("name", SMALL)
def test_a_problem_is_a_function_of_its_seed(name):
    make = {entry.name: entry for entry in zoo.ZOO}[name].make
    one, again, other = make(Path("nowhere"), 0), make(Path("nowhere"), 0), make(Path("nowhere"), 1)
    np.testing.assert_array_equal(one.y, again.y)
    assert len(one.y) != len(other.y) or not np.array_equal(one.y, other.y)
    assert set(one.test_y) <= set(one.y) == set(range(one.n_classes))


def test_problems_are_many_and_in_two_halves():
    halves = [entry.half for entry in zoo.ZOO]
    assert min(halves.count("choose"), halves.count("report")) >= 8
    assert len({entry.name for entry in zoo.ZOO}) == len(halves)


def test_missing_fits_are_made_and_summarised(tmp_path, capsys):
    path = tmp_path / "zoo.csv"
    words = ["--problems", "iris", "few-rows", "--seeds", "0", "1", "--output", str(path)]
    for learners in (["ours-softmax"], ["ours-softmax", "ours-tuned", "sklearn-tuned"]):
        zoo.main([*words, "--learners", *learners])
    rows = read(path)
    assert len(rows) == 2 * 2 * 3  # what was there is not made again
    assert all(-2.0 < float(row["log_likelihood"]) < 0.0 and row["version"] for row in rows)
    capsys.readouterr()
    zoo.main(["--summary", str(path), "--figure", str(tmp_path / "zoo.png")])
    out = capsys.readouterr().out
    assert "| iris (choose) | 105 x 4, 3 |" in out
    assert "report, against sklearn-tuned: regret median" in out
    assert (tmp_path / "zoo.png").stat().st_size > 5_000


def test_a_problem_without_its_files_is_left_out_and_named(tmp_path, capsys):
    zoo.main(["--problems", "bibtex", "--learners", "ours-softmax", "--data", str(tmp_path)])
    assert "bibtex: left out" in capsys.readouterr().out


def test_learners_are_compared_on_seeds_that_both_have(tmp_path):
    path, of = tmp_path / "zoo.csv", dict.fromkeys(zoo.COLUMNS, "1") | {"problem": "p", "half": "report"}
    for learner, seed, log_p, p1 in (
            ("ours-softmax", 0, -1.1, 0.5), ("ours-softmax", 1, -9.0, 0.1), ("ours-tuned", 0, -1.0, 0.6),
            ("pecos", 0, -2.0, 0.45), ("omikuji", 0, -2.0, 0.4),
        ):  # fmt: skip
        row = {"learner": learner, "seed": seed, "log_likelihood": log_p, "precision_at_1": p1}
        append(path, [of | row], zoo.COLUMNS)
    found = zoo.results(path)["p"]
    assert zoo.regret(found, "ours-softmax", "ours-tuned") == pytest.approx(0.1)
    assert zoo.precision_gap(found, zoo.LINEAR) == pytest.approx(0.05)
    assert np.isnan(zoo.precision_gap(found, ("lightgbm",)))
    assert "pecos -2.000 / 0.450" in zoo.summary(path)

"""`augment-reduce reproduce` in miniature: what is measured, files and messages."""

import csv
import errno
import json
import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from augment_reduce.reproduction import evaluate, runner, settings, sources, synthetic, tables
from augment_reduce.reproduction.cells import Cell
from augment_reduce.reproduction.store import Store
from tests.helpers import tiny_studies
from tests.helpers.tiny_studies import command

FOUND = ("mnist", "bibtex", "omniglot", "synthetic")  # the data that `tiny_studies` has


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_studies.install(monkeypatch.setattr)
    yield
    sources.load.cache_clear()


# ---- what is measured ----


def test_moving_average_is_that_of_the_iterations_between_records():
    per_iteration = np.random.default_rng(0).normal(size=60)
    records = np.array([5, 10, 15, 20, 25, 30, 40, 50, 60])
    means = np.array([per_iteration[a:b].mean() for a, b in zip([0, *records[:-1]], records, strict=True)])
    found = evaluate.moving_average(records, means, window=20)
    for t, value in zip(records, found, strict=True):
        np.testing.assert_allclose(value, per_iteration[max(0, t - 20) : t].mean(), rtol=1e-12)


def test_moving_average_passes_over_records_without_a_value():
    records, means = np.array([10.0, 12.0, 20.0, 30.0]), np.array([1.0, np.nan, 3.0, 5.0])
    found = evaluate.moving_average(records, means, window=15)
    np.testing.assert_allclose(found, [1.0, 1.0, (10 * 1.0 + 8 * 3.0) / 18, (8 * 3.0 + 10 * 5.0) / 18])
    assert np.isnan(evaluate.moving_average(np.array([1.0]), np.array([np.nan]))[0])


def test_seconds_per_epoch_leaves_the_start_out():
    iteration = np.arange(1.0, 101.0)
    history = {"iteration": iteration, "epoch": iteration / 10, "seconds": 50.0 + 0.02 * iteration}
    mean, median = evaluate.seconds_per_epoch(history)
    assert mean == pytest.approx(0.2, rel=1e-9)
    assert median == pytest.approx(0.2, rel=1e-9)


def test_floor_and_importance_sampling(monkeypatch):
    source = sources.load(settings.STUDIES["mnist"], None, 0)
    clf = Cell("mnist", "probit", 0).estimator().set_params(max_iter=20).fit(source.X, source.y)
    clf._fitted.parameters.weight.mul_(-40.0)  # far-off rows, so that the floor matters
    found = evaluate.heldout_metrics(clf, source.X_test, source.y_test)
    exact = evaluate.row_log_likelihoods(clf, source.X_test, source.y_test)
    assert found["test_log_likelihood"] == pytest.approx(clf.log_likelihood(source.X_test, source.y_test), abs=1e-12)
    assert found["test_rows_below_floor"] == (exact < -26).sum() > 0
    assert found["test_log_likelihood_floored"] == pytest.approx(np.where(exact < -26, -26, exact).mean(), abs=1e-12)
    assert found["test_log_likelihood"] < found["test_log_likelihood_floored"]
    drawn = clf.log_likelihood(source.X_test, source.y_test, integral="importance")
    assert found["test_log_likelihood_importance"] == pytest.approx(drawn, abs=1e-12)
    assert tables.as_in_paper(found) == found["test_log_likelihood_importance_floored"]


def test_omniglot_is_split_anew_by_every_seed_and_nothing_else_is():
    """The paper does not tell its test drawings: three seeds are to say what that choice is worth."""
    for name, study in settings.STUDIES.items():
        rows = [sources.load(study, None, study.seed_of_rows(seed)) for seed in (0, 1)] if name in FOUND else []
        same = [study.seed_of_rows(seed) for seed in (0, 1)] == [study.data_seed] * 2
        assert same == (name != "omniglot")
        assert not rows or (rows[0].identity == rows[1].identity) == same


@pytest.mark.parametrize("method", ["softmax", "one-vs-each"])
def test_full_bounds_against_plain_sums(method):
    source = sources.load(settings.STUDIES["bibtex"], None, 0)
    clf = Cell("bibtex", method, 0).estimator().set_params(max_iter=30).fit(source.X, source.y)
    psi, y = torch.from_numpy(clf.decision_function(source.X)).double(), torch.from_numpy(source.y)
    gap = psi - psi.gather(1, y[:, None])
    others = ~F.one_hot(y, psi.shape[1]).bool()
    if method == "softmax":
        log_eta = clf._fitted.local["log_eta"].double()
        bound = 1 - log_eta - (1 + (gap.exp() * others).sum(1)) / log_eta.exp()
    else:
        bound = (torch.log(torch.sigmoid(-gap)) * others).sum(1)
    found = evaluate.training_metrics(clf, source.X, source.y)
    assert found["full_bound"] == pytest.approx(float(bound.mean()), rel=1e-6)
    assert found["full_bound"] < found["train_log_likelihood"]


@pytest.mark.parametrize("method", ["softmax", "one-vs-each"])
def test_synthetic_bound_and_errors_against_plain_sums(method):
    source = sources.load(settings.STUDIES["synthetic"], None, 0)
    assert source.X.shape == (207, 1)
    clf = Cell("synthetic", method, 0).estimator().set_params(max_iter=25, n_sampled_classes=3).fit(source.X, source.y)
    b = torch.from_numpy(clf.intercept_).double()
    total = 0.0
    for n, k in enumerate(source.y.tolist()):
        others = torch.arange(len(b)) != k
        if method == "softmax":
            log_eta = float(clf._fitted.local["log_eta"][n])
            total += 1 - log_eta - float(1 + torch.exp(b - b[k])[others].sum()) / np.exp(log_eta)
        else:
            total += float(torch.log(torch.sigmoid(b[k] - b))[others].sum())
    assert synthetic.total_bound(clf, source.y)["bound_total"] == pytest.approx(total, rel=1e-6)
    p = torch.softmax(b, 0).numpy()
    frequency = np.bincount(source.y) / len(source.y)
    found = synthetic.probability_errors(clf, source.y, source.dataset.probabilities)
    assert found["error_to_frequencies"] == pytest.approx(np.abs(p - frequency).mean(), rel=1e-9)
    assert found["error_to_truth"] == pytest.approx(np.abs(p - 1 / 7).mean(), rel=1e-9)
    assert found["frequencies_to_truth"] == pytest.approx(np.abs(frequency - 1 / 7).mean(), rel=1e-9)


def test_same_first_weights_for_all_methods():
    """The paper: the same initialization across all methods. A rate of next to nothing leaves it as it was."""
    source = sources.load(settings.STUDIES["mnist"], None, 0)
    weights = [
        Cell("mnist", method, 5).estimator().set_params(max_iter=1, learning_rate=1e-30).fit(source.X, source.y).coef_
        for method in settings.METHODS
    ]
    assert all(np.array_equal(weights[0], other) for other in weights)
    assert 0.05 < weights[0].std() < 0.2


# ---- the whole command ----


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """`reproduce all`, in miniature, two seeds."""
    folder = tmp_path_factory.mktemp("all")
    with pytest.MonkeyPatch.context() as patch:
        tiny_studies.install(patch.setattr)
        result = command("all", "--iterations", "4", "--seeds", "0,1", "-o", str(folder))
    sources.load.cache_clear()
    assert result.exit_code == 0, result.output
    return folder, result.output


def test_all_runs_every_cell_once(everything):
    folder, output = everything
    records = Store(folder).all_finished()
    full = sorted((r["dataset"], r["method"], r["seed"]) for r in records if r["kind"] == "full")
    reachable = [settings.STUDIES[name] for name in FOUND]
    assert full == sorted((s.name, m, seed) for s in reachable for m in s.methods for seed in (0, 1))
    timed = {(r["dataset"], r["method"]) for r in records if r["kind"] == "timing"}
    assert timed == {
        (f"{name}-shape", m)
        for name in ("eurlex-4k", "amazoncat-13k")
        for m in ("one-vs-each", "softmax", "probit", "logistic")
    }
    assert "Table 3" in output
    assert "bring the files" in output


def test_times_of_two_machines_are_not_averaged(everything):
    folder, _ = everything
    records = Store(folder).all_finished()
    for record in records:
        if record["dataset"] == "mnist" and (record["seed"] == 1 or record["method"] == "exact"):
            record["machine"] = {**record["machine"], "processor": "another"}
            record["metrics"]["seconds_per_epoch"] = 1e6
    elsewhere = [record for record in records if record["machine"]["processor"] == "another" and record["seed"] == 1]
    records = [record for record in records if record not in elsewhere[:2]]  # most methods, then, are on ours
    rows = {(r["dataset"], r["method"]): r for r in tables.table2(records, {}, list(settings.METHODS))}
    assert rows["mnist", "softmax"]["n_seeds"] == 1
    assert rows["mnist", "softmax"]["seconds"] < 1e3
    assert ("mnist", "exact") not in rows
    assert rows["bibtex", "softmax"]["n_seeds"] == 2


def test_json_and_csv(everything):
    folder, _ = everything
    results = json.loads((folder / "results.json").read_text())
    assert results["format"] == "augment-reduce results"
    assert {"table1", "table2", "table3", "bounds", "synthetic", "cells", "versions", "machine"} <= results.keys()
    for name in ("table1", "table2", "table3", "bounds", "synthetic", "cells"):
        with open(folder / f"{name}.csv", newline="") as lines:
            rows = list(csv.DictReader(lines))
        assert len(rows) == len(results[name])
        for text, row in zip(rows, results[name], strict=True):
            assert text == {key: "" if row.get(key) is None else str(row[key]) for key in text}
    by = {(row["dataset"], row["method"]): row for row in results["table3"]}
    row = by["bibtex", "probit"]
    values = [c["metrics"] for c in Store(folder).all_finished() if (c["dataset"], c["method"]) == ("bibtex", "probit")]
    assert row["n_seeds"] == 2
    assert row["log_likelihood"] == pytest.approx(np.mean([v["test_log_likelihood"] for v in values]))
    assert row["as_in_paper_sd"] == pytest.approx(
        np.std([v["test_log_likelihood_importance_floored"] for v in values], ddof=1)
    )
    assert row["difference_log_likelihood"] == pytest.approx(row["as_in_paper"] + 4.184)
    assert by["eurlex-4k", "softmax"]["log_likelihood"] is None
    assert by["eurlex-4k", "softmax"]["note"].startswith("bring the files: http")
    timing = {(row["dataset"], row["method"]): row for row in results["table2"]}
    assert timing["amazoncat-13k", "probit"]["data"] == "random data, same shape"
    assert timing["amazoncat-13k", "probit"]["paper_seconds"] == pytest.approx(2.82 * 3600)
    assert {row["dataset"] for row in results["table1"]} == set(settings.STUDIES)


def test_records_say_what_was_run_and_with_what(everything):
    folder, _ = everything
    record = Store(folder).finished("omniglot.logistic.seed1.iterations4")
    assert record["settings"]["preset"] == "paper"
    assert record["settings"]["n_jobs"] == 1
    assert "entropy_gradient=False" in record["settings"]["local_step"]
    assert {"augment-reduce", "torch", "numba"} <= record["versions"].keys()
    assert record["machine"]["cores"] >= 1
    assert record["data"]["n_train"] == 60
    curves = Store(folder).curves(record["key"])
    assert len(curves["iteration"]) == len(curves["bound"]) == 4


def test_figure_files(everything):
    folder, _ = everything
    assert (folder / "figure2.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "figure2.pdf").read_bytes().startswith(b"%PDF")


def test_second_run_has_nothing_left_to_do(everything, monkeypatch):
    folder, _ = everything
    monkeypatch.setattr(runner, "run_cell", lambda *args, **kwargs: pytest.fail("ran a finished cell again"))
    assert command("all", "--iterations", "4", "--seeds", "0,1", "-o", str(folder)).exit_code == 0
    assert command("report", "--iterations", "4", "-o", str(folder)).exit_code == 0


def test_table2_is_timed_alone_until_there_is_a_full_cell(tmp_path):
    arguments = ("--dataset", "bibtex", "--method", "softmax", "--iterations", "3", "-o", str(tmp_path))
    assert command("table2", *arguments).exit_code == 0
    assert command("table3", *arguments).exit_code == 0
    assert command("table2", *arguments).exit_code == 0
    assert [r["kind"] for r in Store(tmp_path).all_finished()] == ["full", "timing"]
    assert tables.build(Store(tmp_path), 3)["table2"][0]["dataset"] == "mnist"


# ---- bad input ----


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["table9"], "table1, table2, table3"),
        (["table3", "--dataset", "minst"], "Did you mean 'mnist'?"),
        (["table3", "--dataset", "cifar"], "mnist, bibtex, omniglot, eurlex-4k, amazoncat-13k, synthetic"),
        (["table3", "--method", "sgd"], "exact, one-vs-each, sampled-softmax, softmax, probit, logistic"),
        (["table3", "--dataset", "synthetic"], "dataset of table3"),
        (["synthetic", "--method", "probit"], "synthetic: one-vs-each, softmax"),
        (["table3", "--seeds", "0,x"], "whole numbers"),
        (["table3", "--seeds", "-1"], "whole numbers"),
        (["table3", "--dataset", "eurlex-4k"], "Put train.txt, test.txt into eurlex-4k/"),
        (["table3", "--data", "/no/such/folder"], "no folder"),
    ],
)
def test_unknown_names_are_refused_with_the_choices(tmp_path, arguments, told):
    result = command(*arguments, "--iterations", "3", "-o", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert told in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_aliases(tmp_path):
    arguments = ("--dataset", "bibtex", "--method", "ove,augment-reduce", "--iterations", "2", "-o", str(tmp_path))
    assert command("table3", *arguments).exit_code == 0
    assert {r["method"] for r in Store(tmp_path).all_finished()} == {"one-vs-each", "softmax"}


def test_results_of_another_release_are_refused(tmp_path):
    folder = tmp_path / "old"
    Store(folder).open()
    identity = folder / "reproduce.json"
    identity.write_text(json.dumps({**json.loads(identity.read_text()), "written_by": "0.0.7"}))
    result = command("table3", "--dataset", "bibtex", "--iterations", "2", "-o", str(folder))
    assert result.exit_code == 2
    assert "made by augment-reduce 0.0.7" in result.output
    assert "--output" in result.output


def test_folder_with_other_things_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    result = command("table3", "--dataset", "bibtex", "--iterations", "2", "-o", str(tmp_path))
    assert result.exit_code == 2
    assert os.listdir(tmp_path) == ["thesis.tex"]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("I/O error: No space left on device")]
)
def test_full_disk_keeps_finished_cells(tmp_path, monkeypatch, error):
    finish = Store.finish

    def full_after_the_first(self, key, record, curves):
        if any(self.cells.glob("*.json")):
            raise error
        finish(self, key, record, curves)

    monkeypatch.setattr(Store, "finish", full_after_the_first)
    result = command(
        "table3", "--dataset", "bibtex", "--method", "exact,softmax", "--iterations", "2", "-o", str(tmp_path)
    )
    assert result.exit_code == 1
    assert "disk is full" in result.output
    assert "1 finished cells are kept" in result.output
    assert [r["method"] for r in Store(tmp_path).all_finished()] == ["exact"]

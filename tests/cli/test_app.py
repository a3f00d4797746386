"""The command line: files in, models and numbers out."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy import sparse

from augment_reduce import AugmentReduceClassifier
from augment_reduce.cli import options
from augment_reduce.config.validation import METHODS, PRESETS
from augment_reduce.data import FORMATS, REDUCTIONS, read_rows, write_npz
from augment_reduce.model.noise import NOISES
from augment_reduce.optim import OPTIMIZERS
from augment_reduce.reports.metrics import class_codes, expected_calibration_error
from augment_reduce.sampling import SAMPLERS
from tests.helpers.cli_files import QUICK, D, K, done, draw, fill, one_label, refused, svmlight, table


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("cli"))


# ---- fit ----


def test_fit_writes_the_model_that_the_estimator_would_learn(place, tmp_path):
    result = done("fit", place / "train.svm", "-o", tmp_path / "m", *QUICK, "--batch-size", 30, "--seed", 5, "--json")
    summary = json.loads(result.stdout)
    assert result.stdout.count("\n") == 1
    rows = read_rows(place / "train.svm")
    expected = AugmentReduceClassifier(max_epochs=3, batch_size=30, random_state=5, n_jobs=1).fit(rows.X, rows.y)
    loaded = AugmentReduceClassifier.load(tmp_path / "m")
    np.testing.assert_array_equal(loaded.coef_, expected.coef_)
    assert loaded.classes_.tolist() == [f"c{k}" for k in range(K)]
    assert {name: summary[name] for name in ("examples", "features", "classes", "iterations")} == {
        "examples": 300, "features": D, "classes": K, "iterations": 30,
    }  # fmt: skip
    assert summary["bound"] == expected.history_["bound"][-1]
    assert summary["bound_gap"] == expected.history_["bound_gap"][-1]
    assert summary["validation_log_likelihood"] is None


def test_summary_and_progress_for_people(place, tmp_path):
    result = done("fit", place / "train.svm", "-o", tmp_path / "m", "--max-epochs", 3, "--early-stopping")
    for word in ("examples", "300", "classes", "bound", "validation", "written"):
        assert word in result.stdout
    assert "augment-reduce" in result.stderr  # the settings chosen, before training
    assert done("fit", place / "train.svm", "-o", tmp_path / "m", *QUICK).stderr == ""


def test_options_reach_the_estimator(place, tmp_path):
    chosen = (
        "--model", "logistic", "--method", "exact", "--n-sampled-classes", 4, "--class-sampling", "uniform-shared",
        "--batch-size", 64, "--prior-variance", 2.5, "--optimizer", "adam", "--learning-rate", 0.05, "--early-stopping",
        "--validation-fraction", 0.2, "--class-weight", "balanced", "--max-iter", 7, "--n-jobs", 1, "--quiet",
    )  # fmt: skip
    done("fit", place / "train.svm", "-o", tmp_path / "m", *chosen)
    parameters = AugmentReduceClassifier.load(tmp_path / "m").get_params()
    expected = {
        "model": "logistic", "method": "exact", "n_sampled_classes": 4, "class_sampling": "uniform-shared",
        "batch_size": 64, "prior_variance": 2.5, "optimizer": "adam", "learning_rate": 0.05, "early_stopping": True,
        "validation_fraction": 0.2, "class_weight": "balanced", "max_iter": 7, "max_epochs": None, "random_state": 0,
    }  # fmt: skip
    assert {name: parameters[name] for name in expected} == expected


def test_choices_are_those_of_the_library():
    """The command line repeats names so as not to import torch; here the two are held together."""

    def values(choices: type) -> set[str]:
        return {str(choice) for choice in choices}  # type: ignore[attr-defined]

    assert values(options.Models) == set(NOISES)
    assert values(options.Methods) == set(METHODS)
    assert values(options.Presets) == set(PRESETS) - {None}
    assert values(options.Samplings) == {"auto", *SAMPLERS}
    assert values(options.Optimizers) == set(OPTIMIZERS)
    assert values(options.Formats) == {"auto", *FORMATS}
    assert values(options.Reductions) == set(REDUCTIONS)


def test_resume_is_training_that_never_stopped(place, tmp_path):
    data, settings = place / "train.svm", ("--quiet", "--n-jobs", 1, "--batch-size", 32)
    done("fit", data, "-o", tmp_path / "whole", *settings, "--max-iter", 20)
    done("fit", data, "-o", tmp_path / "half", *settings, "--max-iter", 10)
    done("fit", data, "-o", tmp_path / "half", "--resume", tmp_path / "half", "--quiet")
    whole, half = (AugmentReduceClassifier.load(tmp_path / name) for name in ("whole", "half"))
    np.testing.assert_array_equal(half.coef_, whole.coef_)
    assert half.n_iter_ == 20


def test_resume_refuses_another_model_and_other_rows(place, tmp_path):
    model = place / "one.safetensors"
    assert "max-epochs" in refused(
        "fit", place / "train.svm", "-o", tmp_path / "m", "--resume", model, "--model", "probit"
    )
    message = refused("fit", place / "test.svm", "-o", tmp_path / "m", "--resume", model)
    assert "300" in message
    assert "80" in message
    assert not (tmp_path / "m").exists()


def test_min_count_drops_rare_labels(tmp_path):
    data = svmlight(tmp_path / "rare.svm", np.eye(D)[[0, 1, 2, 3, 4, 5, 6]], list("aaabbbc"))
    summary = json.loads(done("fit", data, "-o", tmp_path / "m", *QUICK, "--min-count", 2, "--json").stdout)
    assert (summary["examples"], summary["classes"], summary["dropped_rare"]) == (6, 2, 1)
    assert "Lower --min-count" in refused("fit", data, "-o", tmp_path / "m", *QUICK, "--min-count", 9)


# ---- evaluate ----


def test_evaluate_one_label_a_row(place):
    result = json.loads(done("evaluate", place / "one.safetensors", place / "test.svm", "--json").stdout)
    model, rows = AugmentReduceClassifier.load(place / "one.safetensors"), read_rows(place / "test.svm", n_features=D)
    proba = model.predict_proba(rows.X)
    right = class_codes(rows.y, model.classes_)
    rank = (proba > proba[np.arange(80), right][:, None]).sum(1)
    assert result["rows"] == result["examples"] == 80
    assert result["log_likelihood"] == pytest.approx(np.log(proba[np.arange(80), right]).mean(), rel=1e-5)
    assert result["perplexity"] == pytest.approx(np.exp(-result["log_likelihood"]))
    assert result["accuracy"] == pytest.approx((rank == 0).mean())
    assert result["confidence"] == pytest.approx(proba.max(1).mean(), rel=1e-5)
    assert result["calibration_error"] == pytest.approx(expected_calibration_error(proba.max(1), rank == 0), rel=1e-4)
    for k in (1, 3, 5):
        assert result["precision_at"][str(k)] == pytest.approx((rank < k).mean() / k)


def test_evaluate_sets_of_labels(place):
    """Log likelihood over pairs (or first labels), precision over rows against whole sets, the slow way."""
    model = AugmentReduceClassifier.load(place / "sets.safetensors")
    X, labels = draw(80, 3, n_labels=3)
    log_p = model.predict_log_proba(sparse.csr_matrix(X))
    order = np.argsort(-log_p, axis=1)
    first = labels.argmax(1)
    expected = {"all": (log_p[labels].mean(), labels.sum()), "first": (log_p[np.arange(80), first].mean(), 80)}
    for reduction, (log_likelihood, n_examples) in expected.items():
        arguments = (place / "sets.safetensors", place / "test.txt", "--reduction", reduction, "--json")
        result = json.loads(done("evaluate", *arguments).stdout)
        assert (result["rows"], result["examples"]) == (80, n_examples)
        assert result["log_likelihood"] == pytest.approx(log_likelihood, rel=1e-5)
        pairs = np.argwhere(labels) if reduction == "all" else np.column_stack([np.arange(80), first])
        sure, right = np.exp(log_p.max(1))[pairs[:, 0]], order[pairs[:, 0], 0] == pairs[:, 1]
        assert result["accuracy"] == pytest.approx(right.mean())
        assert result["calibration_error"] == pytest.approx(expected_calibration_error(sure, right), rel=1e-4)
        for k in (1, 3, 5):
            hits = np.take_along_axis(labels, order[:, :k], axis=1).sum(1)
            assert result["precision_at"][str(k)] == pytest.approx((hits / k).mean())
    assert "--reduction" in done("evaluate", "--help").stdout
    assert "reduction" in refused("evaluate", place / "sets.safetensors", place / "test.txt")


def test_evaluate_draws_a_reliability_diagram(place, tmp_path):
    arguments = ("evaluate", place / "one.safetensors", place / "test.svm", "--reliability")
    assert "calibration" in done(*arguments, tmp_path / "p.png").stdout
    with Image.open(tmp_path / "p.png") as picture:
        assert min(picture.size) > 500
    done(*arguments, tmp_path / "p.SVG")
    assert "test.svm" in (tmp_path / "p.SVG").read_text()
    assert ".png" in refused(*arguments, tmp_path / "p.txt")
    assert "Choose another --reliability" in refused(
        "evaluate", place / "one.safetensors", tmp_path / "p.png", "--reliability", tmp_path / "p.png"
    )
    assert sorted(file.name for file in tmp_path.iterdir()) == ["p.SVG", "p.png"]


def test_labels_never_seen_are_refused_or_skipped_and_counted(place, tmp_path):
    X, labels = draw(10, 4)
    data = svmlight(tmp_path / "new.svm", X, [*one_label(labels)[:7], "x", "y", "x"])
    message = refused("evaluate", place / "one.safetensors", data)
    assert "3 of 10" in message
    assert "'x'" in message
    assert "--skip-unseen" in message
    arguments = ("evaluate", place / "one.safetensors", data, "--skip-unseen")
    result = json.loads(done(*arguments, "--json").stdout)
    assert (result["rows"], result["examples"], result["skipped_unseen"]) == (7, 7, 3)
    assert "3 with unseen labels" in done(*arguments).stdout


def test_label_names(place, tmp_path):
    """Names given for label numbers are what the model speaks in; the numbers of a file are translated."""
    names = tmp_path / "names.txt"
    names.write_text("".join(f"name-{k}\n" for k in range(K)))
    reading = ("--reduction", "all", "--label-names", names)
    done("fit", place / "train.txt.gz", "-o", tmp_path / "m", *QUICK, *reading)
    assert set(AugmentReduceClassifier.load(tmp_path / "m").classes_) == {f"name-{k}" for k in range(K)}
    named = json.loads(done("evaluate", tmp_path / "m", place / "test.txt", *reading, "--json").stdout)
    plain = ("evaluate", place / "sets.safetensors", place / "test.txt", "--reduction", "all", "--json")
    assert named["log_likelihood"] == json.loads(done(*plain).stdout)["log_likelihood"]
    names.write_text("only\n")
    assert "--label-names" in refused("fit", place / "train.txt.gz", "-o", tmp_path / "m", *reading)


# ---- predict ----


def test_predict_in_every_layout(place, tmp_path):
    model = AugmentReduceClassifier.load(place / "one.safetensors")
    classes, probabilities = model.predict_topk(read_rows(place / "test.svm", n_features=D).X, 2)
    arguments = ("predict", place / "one.safetensors", place / "test.svm", "--top", 2)

    text = done(*arguments).stdout.splitlines()
    assert len(text) == 80
    assert text[3] == f"3\t{classes[3, 0]} ({probabilities[3, 0]:.1%})  {classes[3, 1]} ({probabilities[3, 1]:.1%})"
    found = json.loads(done(*arguments, "--json").stdout)["predictions"]
    done(*arguments, "-o", tmp_path / "p.jsonl")
    assert [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()] == found
    assert [row["classes"] for row in found] == classes.tolist()
    np.testing.assert_allclose([row["probabilities"] for row in found], probabilities, rtol=1e-5)
    done(*arguments, "-o", tmp_path / "p.csv")
    with open(tmp_path / "p.csv") as lines:
        rows = list(csv.DictReader(lines))
    assert (rows[7]["row"], rows[7]["rank"], rows[7]["class"]) == ("3", "2", classes[3, 1])
    assert float(rows[7]["probability"]) == pytest.approx(probabilities[3, 1], rel=1e-5)
    assert "contradict" in refused(*arguments, "--json", "--layout", "csv")


def test_predict_needs_no_labels_and_no_more_than_all_classes(place, tmp_path):
    bare = tmp_path / "bare.svm"
    bare.write_text("1:1 3:1\n2:1\n")
    found = json.loads(done("predict", place / "one.safetensors", bare, "--top", 50, "--json").stdout)["predictions"]
    assert [len(row["classes"]) for row in found] == [K, K]
    assert sum(found[0]["probabilities"]) == pytest.approx(1.0, abs=1e-5)


# ---- features mean in a new file what they meant in training ----


def test_svmlight_features_count_from_where_they_did_in_training(tmp_path):
    X, labels = draw(300, 5)
    done("fit", svmlight(tmp_path / "a.svm", X, one_label(labels), base=0), "-o", tmp_path / "m", *QUICK)
    few = X[:1].copy()
    few[0, :] = [0, 1, 0, 0, 1, 0, 0, 0]  # neither the first feature, which would tell, nor the last
    test = svmlight(tmp_path / "b.svm", few, ["c0"], base=0)
    found = json.loads(done("predict", tmp_path / "m", test, "--top", 1, "--json").stdout)["predictions"][0]
    model = AugmentReduceClassifier.load(tmp_path / "m")
    del model.feature_names_in_
    assert found["probabilities"][0] == pytest.approx(model.predict_proba(sparse.csr_matrix(few)).max(), rel=1e-5)


def test_more_features_than_in_training_are_refused(place, tmp_path):
    more = tmp_path / "more.svm"
    more.write_text("c0 1:1\nc1 9:1\n")
    for command in ("predict", "evaluate"):
        message = refused(command, place / "one.safetensors", more)
        assert "line 2" in message
        assert "8" in message


def test_csv_columns_are_found_by_name(tmp_path):
    X, labels = draw(200, 6)
    features = [f"f{j}" for j in range(D)]
    train = table(tmp_path / "train.csv", X, one_label(labels), ["label", *features])
    done("fit", train, "-o", tmp_path / "m", *QUICK, "--label-column", "label")
    straight = table(tmp_path / "a.csv", X[:20], one_label(labels)[:20], [*features, "label"])
    shuffled = table(tmp_path / "b.csv", X[:20], one_label(labels)[:20], ["id", "label", *features[::-1]])
    first, second = (json.loads(done("predict", tmp_path / "m", f, "--json").stdout) for f in (straight, shuffled))
    assert first == second
    result = json.loads(done("evaluate", tmp_path / "m", shuffled, "--label-column", "label", "--json").stdout)
    assert result["accuracy"] == np.mean(
        [row["classes"][0] for row in first["predictions"]] == np.array(one_label(labels)[:20])
    )
    assert json.loads(done("evaluate", tmp_path / "m", shuffled, "--json").stdout) == result  # a label is not called id
    two = table(tmp_path / "d.csv", X[:20], one_label(labels)[:20], ["colour", "label", *features[::-1]])
    assert "--label-column" in refused("evaluate", tmp_path / "m", two)  # colour or label?
    lacking = table(tmp_path / "c.csv", X[:3], one_label(labels)[:3], [*features[1:], "label"])
    assert "'f0'" in refused("predict", tmp_path / "m", lacking)


def test_npz(tmp_path):
    X, labels = draw(200, 7)
    write_npz(tmp_path / "train.npz", sparse.csr_matrix(X), labels.argmax(1), class_names=[f"n{k}" for k in range(K)])
    done("fit", tmp_path / "train.npz", "-o", tmp_path / "m", *QUICK)
    result = json.loads(done("evaluate", tmp_path / "m", tmp_path / "train.npz", "--json").stdout)
    assert result["accuracy"] > 0.5
    assert AugmentReduceClassifier.load(tmp_path / "m").classes_[0] == "n0"

"""The demo, on one training package in twenty; and the picture it draws."""

import json
import re
import warnings

import numpy as np
import pytest
from PIL import Image
from sklearn.exceptions import ConvergenceWarning
from typer.testing import CliRunner, Result

from augment_reduce import AugmentReduceClassifier
from augment_reduce.cli import app
from augment_reduce.reports import demo
from augment_reduce.reports.figures import Curve, draw_curves, spread


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, object]:
    folder = tmp_path_factory.mktemp("demo") / "output"  # made by the demo
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)  # its epochs are fits that others follow
        result = CliRunner().invoke(app, ["demo", "--quick", "--n-jobs", "1", "--output-dir", str(folder)])
    assert result.exit_code == 0, result.output
    return result, folder


def number(text: str, name: str) -> float:
    found = re.search(rf"^{name} +(-?[\d.]+)", text, flags=re.MULTILINE)
    assert found, text
    return float(found.group(1))


def test_the_demo_learns_and_says_so(shown):
    """Far better than guessing (log 280 = 5.6) and than always naming libc6 (P@1 about 0.5)."""
    text = shown[0].stdout
    assert number(text, "test log likelihood") > -3.6
    assert 0.75 < number(text, "precision at 1") < 1.0
    assert 0.3 < number(text, "precision at 5") < 0.5
    assert number(text, "bound") < number(text, "exact log likelihood")


def test_the_demo_names_packages_and_probabilities(shown):
    text = shown[0].stdout
    for name, what in demo.SHOWCASE:
        assert f"{name}, {what}, will need" in text.replace("\n", " ")
    assert re.search(r"libc6 \(\d+%\) ✓", text)


def test_the_numbers_are_those_of_the_evaluate_command(shown):
    """The model file, read again and evaluated by another command on the raw files, gives the same numbers."""
    result, folder = shown
    line = next(line for line in result.stdout.splitlines() if "augment-reduce evaluate" in line)
    again = CliRunner().invoke(app, [*line.split()[1:], "--json"])
    found = json.loads(again.stdout)
    assert round(found["log_likelihood"], 3) == number(result.stdout, "test log likelihood")
    assert round(found["precision_at"]["1"], 3) == number(result.stdout, "precision at 1")
    assert round(found["precision_at"]["5"], 3) == number(result.stdout, "precision at 5")
    assert AugmentReduceClassifier.load(folder / "model.safetensors").classes_.dtype.kind == "U"


def test_the_demo_draws_a_picture(shown):
    with Image.open(shown[1] / "bound.png") as picture:
        assert picture.size[0] > 1000
        assert len(picture.convert("RGB").getcolors(maxcolors=1 << 20)) > 50  # lines and letters, not an empty sheet


def test_packages_are_found_by_name():
    data = demo.load_packages(quick=False)
    assert (data.train.n_rows, data.train.n_labels, data.train.labels.nnz) == (41172, 5694, 179284)
    for name, _ in demo.SHOWCASE:
        row = demo.find_package(data.test, name)
        assert row is not None, name
        assert set(demo.features_of(data.test, row)["n"]) <= demo.name_parts(name)
    assert demo.find_package(data.test, "no-such-package") is None


def test_best_precision_is_what_an_oracle_reaches():
    data = demo.load_packages(quick=True)
    sizes = data.test.labels_per_row
    assert demo.best_precision(data.test, 5) == pytest.approx(np.mean([min(n, 5) / 5 for n in sizes]))


# ---- figures ----


def test_labels_are_moved_apart_but_stay_near():
    assert spread([0.0, 5.0, 9.0], apart=1.0, low=0.0, high=10.0) == [0.0, 5.0, 9.0]
    assert spread([5.0, 5.2, 1.0], apart=1.0, low=0.0, high=10.0) == pytest.approx([4.6, 5.6, 1.0])
    assert spread([10.0, 10.0, 10.0], apart=1.0, low=0.0, high=10.0) == pytest.approx([8.0, 9.0, 10.0])
    assert spread([], apart=1.0, low=0.0, high=1.0) == []


def test_pictures_survive_short_histories(tmp_path):
    for y in ([], [-1.0], [float("nan"), -2.0]):
        curves = [Curve("a", range(len(y)), y), Curve("b", range(len(y)), y)]
        draw_curves(tmp_path / "p.svg", curves, title="t", shade=("a", "b"))
        assert "<svg" in (tmp_path / "p.svg").read_text()

"""Cells that are killed, interrupted or fail: what is kept, and that going on ends with the same bits."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from augment_reduce import AugmentReduceClassifier
from augment_reduce.reproduction import cells, runner, sources
from augment_reduce.reproduction.cells import Cell, run_cell
from augment_reduce.reproduction.progress import CellProgress
from augment_reduce.reproduction.store import Store
from tests.helpers import tiny_studies
from tests.helpers.tiny_studies import command, quiet

CLOCK = ("seconds_per_epoch", "seconds_per_epoch_median", "training_seconds")


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_studies.install(monkeypatch.setattr)
    yield
    sources.load.cache_clear()


def timeless(record: dict) -> dict:
    """A cell's numbers without the clock's."""
    metrics = {name: value for name, value in record["metrics"].items() if name not in CLOCK}
    points = [{name: value for name, value in point.items() if name != "seconds"} for point in record["looks"]]
    return {"metrics": metrics, "looks": points, "weights": record["weights_sha256"]}


def run_slowly(folder: Path, *arguments: str) -> subprocess.Popen:
    script = Path(tiny_studies.__file__)
    return subprocess.Popen(
        [sys.executable, str(script), "0.3", *arguments, "--jobs", "1", "--output", str(folder)],
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(condition, process: subprocess.Popen) -> None:
    for _ in range(6000):
        if condition():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    raise AssertionError("nothing happened in ten minutes")


ONE_CELL = ("table3", "--dataset", "bibtex", "--method", "probit", "--iterations", "43")


def test_killed_cell_resumes_to_the_same_bits(tmp_path):
    cell = Cell("bibtex", "probit", 0, asked=43)
    store = Store(tmp_path / "killed")
    process = run_slowly(store.folder, *ONE_CELL)
    wait_for(store.model_path(cell.key).is_file, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert store.finished(cell.key) is None
    reached = AugmentReduceClassifier.load(store.model_path(cell.key)).n_iter_
    assert 0 < reached < 43

    told: list[int] = []
    resumed = run_cell(cell, store.open(), None, lambda done, note: told.append(done))
    assert told[0] == reached  # went on, did not start again
    whole_store = Store(tmp_path / "whole").open()
    whole = run_cell(cell, whole_store, None, quiet)
    assert timeless(resumed) == timeless(whole)
    for name in ("iteration", "bound", "bound_gap"):
        np.testing.assert_array_equal(store.curves(cell.key)[name], whole_store.curves(cell.key)[name])
    assert not any(store.checkpoints.iterdir())


def test_ctrl_c_keeps_what_is_finished_and_says_how_to_go_on(tmp_path):
    folder = tmp_path / "out"
    store = Store(folder)
    process = run_slowly(folder, "table3", "--dataset", "bibtex", "--method", "exact,softmax", "--iterations", "20")
    wait_for(lambda: list(store.checkpoints.glob("*softmax*.safetensors")), process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 130
    assert "1 finished cells are kept" in errors
    assert "1 under way were saved" in errors
    assert "same command goes on" in errors
    assert [r["method"] for r in store.all_finished()] == ["exact"]
    result = command(
        "table3", "--dataset", "bibtex", "--method", "exact,softmax", "--iterations", "20", "-o", str(folder)
    )
    assert result.exit_code == 0
    assert "1 of 2 cells are finished already" in result.output


@pytest.mark.parametrize("stop_at", [1, 4])
def test_interrupted_between_evaluations_resumes_to_the_same_bits(tmp_path, stop_at):
    cell = Cell("mnist", "one-vs-each", 3, asked=30)
    told: list[int] = []

    def interrupt(done: int, note: str) -> None:
        told.append(done)
        if len(told) > stop_at:
            raise KeyboardInterrupt

    store = Store(tmp_path / "a").open()
    with pytest.raises(KeyboardInterrupt):
        run_cell(cell, store, None, interrupt)
    resumed = run_cell(cell, store, None, quiet)
    assert timeless(resumed) == timeless(run_cell(cell, Store(tmp_path / "b").open(), None, quiet))
    assert [point["iteration"] for point in resumed["looks"]] == cell.stops()


def test_interrupted_inside_a_fit_ends_with_the_same_weights(tmp_path, monkeypatch):
    cell = Cell("bibtex", "softmax", 0, asked=50)
    store = Store(tmp_path / "a").open()
    fit = AugmentReduceClassifier.fit

    def stopped_early(self, X, y):
        fit(self.set_params(max_iter=self.max_iter - 1) if self.max_iter > 2 else self, X, y)
        raise KeyboardInterrupt

    monkeypatch.setattr(cells, "warm_up", lambda cell, source: None)
    monkeypatch.setattr(AugmentReduceClassifier, "fit", stopped_early)
    with pytest.raises(KeyboardInterrupt):
        run_cell(cell, store, None, quiet)
    monkeypatch.setattr(AugmentReduceClassifier, "fit", fit)
    assert AugmentReduceClassifier.load(store.model_path(cell.key)).n_iter_ == 2
    resumed = run_cell(cell, store, None, quiet)
    whole = run_cell(cell, Store(tmp_path / "b").open(), None, quiet)
    assert resumed["weights_sha256"] == whole["weights_sha256"]


def test_checkpoint_of_other_data_or_a_broken_one_is_not_used(tmp_path):
    cell, told = Cell("bibtex", "softmax", 0, asked=40), []
    store = Store(tmp_path).open()
    source = sources.load(cell.of, None, 0)
    clf = cell.estimator().set_params(max_iter=4).fit(source.X, source.y)
    cells.checkpoint(cell, clf, [], source, store)
    assert cells.resume(cell, source, store) is not None
    store.save_points(cell.key, {"data": {**source.identity, "labels_crc32": 1}, "looks": []})
    assert cells.resume(cell, source, store) is None
    cells.checkpoint(cell, clf, [], source, store)
    store.model_path(cell.key).write_bytes(b"not a model")
    run_cell(cell, store, None, lambda done, note: told.append(done))
    assert told[0] == 0
    assert store.finished(cell.key) is not None


def test_cells_in_processes_give_the_same_numbers(tmp_path, monkeypatch):
    monkeypatch.undo()  # children of their own know nothing of the miniature: random data in Bibtex's shape instead
    wanted = [Cell("bibtex-shape", method, 0, "timing", 3) for method in ("softmax", "one-vs-each")]
    store = Store(tmp_path / "two").open()
    failures = runner.run(wanted, store, None, jobs=2, progress=CellProgress(quiet=True))
    assert failures.of == {}
    alone = run_cell(wanted[0], Store(tmp_path / "one").open(), None, quiet)
    kept = store.finished(wanted[0].key)
    assert kept["weights_sha256"] == alone["weights_sha256"]
    assert kept["cells_at_once"] == 2


def test_a_cell_that_fails_does_not_stop_the_others(tmp_path, monkeypatch):
    def fails(cell, *args, **kwargs):
        if cell.method == "exact":
            raise MemoryError("too large")
        return run_cell(cell, *args, **kwargs)

    monkeypatch.setattr(runner, "run_cell", fails)
    result = command(
        "table3", "--dataset", "bibtex", "--method", "exact,softmax", "--iterations", "3", "-o", str(tmp_path)
    )
    assert result.exit_code == 1
    assert "bibtex.exact.seed0.iterations3: too large" in result.output
    assert [r["method"] for r in Store(tmp_path).all_finished()] == ["softmax"]

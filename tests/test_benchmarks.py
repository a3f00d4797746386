"""Every benchmark runs on a tiny shape and says what it promises to say."""

import importlib.util
import sys
from pathlib import Path

import pytest

from augment_reduce.data import DatasetNotFoundError, load_dataset

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def benchmark_named(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))

    def load(name: str):
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


def quantities(rows) -> dict[str, float]:
    return {f"{row['case']}: {row['quantity']}": float(row["p50"]) for row in rows}


def test_seconds_per_epoch(benchmark_named):
    rows = benchmark_named("bench_epoch").main(
        ["--tiny", "--datasets", "bibtex", "--methods", "softmax", "probit", "--repeat", "2", "--beside", "echo 7.5"]
    )
    found = quantities(rows)
    assert len(found) == 6  # ours, the other program's, their ratio: twice
    assert all(value > 0 for value in found.values())
    assert sum(value == 7.5 for value in found.values()) == 2


def test_operations_and_bytes_do_not_depend_on_the_number_of_classes(benchmark_named):
    """From ten thousand classes to a million the same multiply-adds; entries touched within the few that still meet."""
    rows = benchmark_named("bench_classes").main(
        [
            "--classes",
            "1e4",
            "1e6",
            "--B",
            "16",
            "--S",
            "10",
            "--D",
            "8",
            "--nnz",
            "4",
            "--steps",
            "4",
            "--class-sampling",
            "uniform",
        ]
    )
    found = [row for row in rows if row["quantity"] == "multiply-adds per step"]
    assert len({row["p50"] for row in found}) == 1
    small, large = (float(row["p50"]) for row in rows if row["quantity"] == "distinct entries touched")
    assert large == 16 * 11 * 4
    assert small > 0.97 * large


def test_time_to_quality(benchmark_named, capsys):
    rows = benchmark_named("bench_quality").main(["--tiny", "--methods", "ours", "exact", "--limit", "50"])
    found = quantities(rows)
    assert {name.split(": ")[1] for name in found} == {"seconds", "log lik", "P@1", "P@5"}
    assert all(value < 0 for name, value in found.items() if name.endswith("log lik"))
    assert "bibtex" in capsys.readouterr().out


def test_peak_memory(benchmark_named):
    rows = benchmark_named("bench_memory").main(["--tiny", "--cases", "MNIST shape, defaults"])
    found = {row["quantity"]: float(row["p50"]) for row in rows}
    assert found["peak, GB"] > found["peak above the data, GB"] >= 0
    assert found["weights, states, local, GB"] == pytest.approx(2 * 4 * 10 * 785 / 1e9 + 200 * 8 / 1e9, rel=1e-6)


def test_ablations_of_the_paper(benchmark_named, tmp_path):
    try:
        load_dataset("bibtex", download=False)
    except DatasetNotFoundError:
        pytest.skip("Bibtex is not here")
    table = tmp_path / "table.csv"
    rows = benchmark_named("ablate_paper").main(
        ["--datasets", "bibtex", "--models", "softmax", "--seeds", "0", "--iterations", "8", "--output", str(table)]
    )
    assert float(rows[0]["against the code"]) == 0.0
    assert len({row["test log likelihood"] for row in rows}) > len(rows) / 2  # the changes do change something
    assert len(table.read_text().splitlines()) == len(rows) + 1

"""The examples and the benchmark of the head, each once on tiny shapes, so that they cannot go stale."""

import csv
import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def load(folder: str, name: str):
    """A script as a module, with its own folder importable, as when it is run."""
    sys.path.insert(0, str(ROOT / folder))
    try:
        spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(ROOT / folder))


def test_next_word():
    """Four output layers learn the same chain: by chance a word's perplexity is 300, its frequency alone gives 80."""
    found = load("examples", "next_word").main(["--tiny", "--steps", "120"])
    assert set(found) == {"ours", "sampled", "exact", "adaptive"}
    assert all(result["perplexity"] < 30.0 for result in found.values())


def test_retrieval():
    found = load("examples", "retrieval").main(["--tiny", "--epochs", "4"])
    assert found["P@1"] > 0.6
    assert found["log_prob"] > -4.0  # by chance -5.3


def test_plain_torch():
    assert load("examples", "plain_torch").main(n_steps=150) > -1.0


@pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in ("lightning", "pytorch_lightning")),
    reason="Lightning is not a dependency; the example says how to install it",
)
def test_lightning_loop():
    load("examples", "plain_torch")
    load("examples", "lightning_loop").main(n_steps=5)


def test_quality_benchmark():
    arguments = ["--tiny", "--out", "", "--only", "zipf", "words", "--seconds", "0.1", "--ours", "0.1", "--methods"]
    rows = load("benchmarks", "head_quality").main([*arguments, "exact", "ours", "sampled softmax", "logistic"])
    assert {row["method"] for row in rows} == {"exact", "ours", "sampled softmax", "logistic"}
    assert all(-8.0 < row["log_likelihood"] < 0.0 for row in rows)


def test_benchmark(tmp_path):
    rows = load("benchmarks", "bench_head").main(["--tiny", "--out", str(tmp_path / "head.csv")])
    assert {row["section"] for row in rows} >= {"steps", "peers"}
    assert not [row for row in rows if "FAILED" in str(row["note"])]
    with (tmp_path / "head.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(rows)

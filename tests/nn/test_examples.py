"""The examples and the benchmark of the head, each once on tiny shapes, so that they cannot go stale."""

import importlib.util
import sys
from importlib import import_module

import pytest

from benchmarks.common import read
from tests.helpers import ROOT


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


@pytest.mark.parametrize("name", ["cosface", "arcface", "temperature", "softcap", "tower", "low_rank", "positives"])
def test_scores(name):
    """Each recipe learns: at first rows are worse than chance (log 200 = 5.3 nats), or no better."""
    found = load("examples", "scores").main(
        ["--classes", "200", "--rows", "2000", "--sampled", "20", "--steps", "120", "--only", name]
    )
    before, after = found[name]
    assert after > before + 2.0
    assert after > -5.0


def test_contrastive():
    """Training tells nearly the exact loss with a normaliser that is remembered or predicted, not with InfoNCE."""
    found = load("examples", "contrastive").main(["--rows", "400", "--steps", "500", "--batch", "16"])
    assert abs(found["remembered"]["gap"]) < 0.1
    assert abs(found["predicted"]["gap"]) < 0.15
    assert found["InfoNCE"]["gap"] < -0.2


def test_next_words_benchmark():
    module = import_module("benchmarks.studies.head_words")
    text = module.next_word.invented(4)
    rows = module.main(["--sampled", "8", "--steps", "60"], text)
    nats = {row["method"]: row["nats"] for row in rows}
    assert set(nats) == set(module.METHODS)
    assert all(0.0 < x < 5.7 for x in nats.values())  # by chance 5.7


def test_faces_benchmark():
    module = import_module("benchmarks.studies.head_faces")
    found = module.main(["--classes", "60", "--unseen", "20", "--batch", "64", "--steps", "40"])
    assert set(found) == set(module.METHODS)
    assert all(0.0 <= tar <= 1.0 for tar in found.values())
    assert found["full"] > 0.02  # by chance .001


@pytest.mark.filterwarnings("ignore")
def test_bert_benchmark(capsys):
    pytest.importorskip("transformers", reason="an optional extra")
    import_module("benchmarks.studies.head_bert").main(
        [
            "--labels",
            "300",
            "--batch",
            "8",
            "--sampled",
            "16",
            "--steps",
            "2",
            "3",
            "--methods",
            "exact",
            "dense",
            "adam",
        ]
    )
    rows = [line.split(",") for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[0] for row in rows] == ["exact", "exact", "dense", "dense", "adam", "adam"]
    assert all(0.0 < float(row[3]) < 8.0 for row in rows)


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
    rows = import_module("benchmarks.speed.head_quality").main(
        [*arguments, "exact", "ours", "sampled softmax", "logistic"]
    )
    assert {row["method"] for row in rows} == {"exact", "ours", "sampled softmax", "logistic"}
    assert all(-8.0 < row["log_likelihood"] < 0.0 for row in rows)


def test_benchmark(tmp_path):
    rows = import_module("benchmarks.speed.bench_head").main(["--tiny", "--out", str(tmp_path / "head.csv")])
    assert {row["section"] for row in rows} >= {"steps", "peers"}
    assert not [row for row in rows if "FAILED" in str(row["note"])]
    assert len(read(tmp_path / "head.csv")) == len(rows)

"""Every benchmark runs on a tiny shape and says what it promises to say."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from augment_reduce import Adagrad, AugmentReduceClassifier
from augment_reduce.data import random_like
from augment_reduce.model.noise import resolve_noise
from augment_reduce.model.quadrature import log_likelihood
from augment_reduce.reproduction import sources
from benchmarks import common


@pytest.fixture
def small_bibtex(monkeypatch):
    """Random rows of its shape, on any machine, to train and to test on."""
    data = random_like("bibtex", n_rows=1500)
    sources.load.cache_clear()
    monkeypatch.setattr(sources, "load_dataset", lambda *a, **b: replace(data, test=data.train))
    yield
    sources.load.cache_clear()


def quantities(rows) -> dict[str, float]:
    return {f"{row['case']}: {row['quantity']}": float(row["p50"]) for row in rows}


def test_seconds_per_epoch():
    rows = import_module("benchmarks.speed.bench_epoch").main(
        ["--tiny", "--datasets", "bibtex", "--methods", "softmax", "probit", "--repeat", "2", "--beside", "echo 7.5"]
    )
    found = quantities(rows)
    assert len(found) == 6  # ours, the other program's, their ratio: twice
    assert all(value > 0 for value in found.values())
    assert sum(value == 7.5 for value in found.values()) == 2


def test_what_two_threads_gain_and_what_two_processes_would():
    flags = [
        "--tiny",
        "--datasets",
        "bibtex",
        "--methods",
        "softmax",
        "--repeat",
        "2",
        "--threads",
        "1",
        "2",
        "--crowded",
    ]
    found = quantities(import_module("benchmarks.speed.bench_epoch").main(flags))
    names = ["s per epoch, 1 thread", "s per epoch, 2 threads", "s per epoch, 1 thread, crowded"]
    names += ["gain, 2 threads", "gain, 1 thread, crowded"]
    assert [key.split(": ")[1] for key in found] == names
    assert all(value > 0 for value in found.values())


def test_operations_and_bytes_do_not_depend_on_the_number_of_classes():
    """From ten thousand classes to a million the same multiply-adds; entries touched within the few that still meet."""
    rows = import_module("benchmarks.speed.bench_classes").main(
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


def test_time_to_quality(capsys):
    rows = import_module("benchmarks.speed.bench_quality").main(
        ["--tiny", "--methods", "ours", "ours probit", "exact", "--limit", "50"]
    )
    found = quantities(rows)
    assert {name.split(": ")[1] for name in found} == {"seconds", "log lik", "P@1", "P@5"}
    assert all(value < 0 for name, value in found.items() if name.endswith("log lik"))
    assert "bibtex" in capsys.readouterr().out


def test_scikit_learn_keeps_to_its_time(capsys):
    rows = import_module("benchmarks.speed.bench_quality").main(
        ["--tiny", "--methods", "scikit-learn tuned", "--limit", "50", "--cap", "0.05"]
    )
    assert rows == []
    assert "not done within 0.05 s" in capsys.readouterr().out


def test_scikit_learn_is_tuned_on_held_out_rows():
    """Labels of pure chance want the strongest prior; labels that follow the features want a weak one."""
    peers = import_module("benchmarks.peers.libraries")
    rng = np.random.default_rng(0)
    X = rng.normal(size=(400, 6))
    chance, clear = rng.integers(3, size=400), (4 * X @ rng.normal(size=(6, 3)) + rng.gumbel(size=(400, 3))).argmax(1)
    C, seconds = peers.tuned_C(SimpleNamespace(X=X, y=chance), cap=1e6, grid=(0.001, 0.1, 10.0))
    assert C == 0.001
    assert 0.0 < seconds < 1e6
    assert peers.tuned_C(SimpleNamespace(X=X, y=clear), cap=1e6, grid=(0.001, 0.1, 10.0))[0] > 0.01
    trained = peers.logistic_regression(
        SimpleNamespace(X=X, y=clear, test_X=X, test_y=clear, rows_X=X), Path(), 1e6, peers.GRID, tuned=True
    )
    assert trained.tuning_seconds > 0.0
    assert -0.6 < peers.likelihood(trained)["log lik"] < 0.0  # guessing: -1.1
    assert (trained.top[:, 0] == clear).mean() > 0.8


def test_likelihoods_of_peers_by_hand():
    """Two labels listed of three, the third floored and counted; marginal scores divided by their sum."""
    peers = import_module("benchmarks.peers.libraries")
    own, total = peers.label_scores([[(2, 0.5), (0, 0.25)], [(1, 0.8)], [(1, 0.8)]], np.array([0, 1, 2]))
    np.testing.assert_array_equal(own, [0.25, 0.8, 0.0])
    np.testing.assert_array_equal(total, [0.75, 0.8, 0.8])
    plain = peers.likelihood(peers.Trained(np.zeros((3, 5)), (own, total), 1.0))
    assert plain == {"log lik": pytest.approx(np.log([0.25, 0.8, 1e-5]).mean()), "rows floored": 1.0}
    divided = peers.likelihood(peers.Trained(np.zeros((3, 5)), (own, total), 1.0, normalised=True))
    expected = {"log lik, normalised scores": pytest.approx(np.log([1 / 3, 1.0, 1e-5]).mean()), "rows floored": 1.0}
    assert divided == expected


def test_peers_that_are_not_installed_are_named(monkeypatch, capsys):
    bench = import_module("benchmarks.speed.bench_quality")
    monkeypatch.delenv("PECOS_PYTHON", raising=False)
    assert bench.main(["--tiny", "--methods", "pecos"]) == []
    assert "pecos is not installed, left out" in capsys.readouterr().out


def test_calibration_of_the_models(tmp_path, capsys):
    bench = import_module("benchmarks.studies.calibration")
    files = ["--results", str(tmp_path), "--figure", str(tmp_path / "reliability.png")]
    models = ["softmax", "exact softmax", "softmax, paper"]
    rows = bench.main(["--tiny", "--datasets", "bibtex", "--models", *models, "--epochs", "3", *files])
    assert [row["model"] for row in rows] == models
    for row in rows:
        assert 0.0 <= float(row["ECE"]) <= 1.0
        # an average of |accuracy - confidence| over bins is at least the difference of the averages
        assert float(row["ECE"]) > abs(float(row["confidence"]) - float(row["accuracy"])) - 1e-4
    assert [row["bound_gap"] == "nan" for row in rows] == [False, True, False]
    bins = [row for row in bench.read(tmp_path / "reliability.csv") if row["model"] == "softmax"]
    assert bench.bins_of(bins).error == pytest.approx(float(rows[0]["ECE"]), rel=1e-4)
    assert (tmp_path / "reliability.png").stat().st_size > 10_000
    again = ["--tiny", "--datasets", "bibtex", "--models", "softmax", "--epochs", "3", *files]
    bench.main([*again, "--sampled", "5"])
    lag = {row["variant"]: row for row in bench.main([*again, "--powers", "0", "3"])}
    assert float(lag["power 3"]["bound_gap"]) > float(lag["power 0"]["bound_gap"])
    exact = float(rows[1]["log_likelihood"])  # no class left out and eta up to date: the exact gradient
    assert float(lag["power 0"]["log_likelihood"]) == pytest.approx(exact, rel=1e-3)
    assert float(lag["power 3"]["log_likelihood"]) != pytest.approx(exact, rel=1e-3)
    capsys.readouterr()
    bench.main(["--draw", *files])
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("| Bibtex | softmax |") for line in lines) == 4  # one, and three with a change
    assert any(line.startswith(r"| Bibtex | softmax | \|S\| = 5 |") for line in lines)


def test_a_fit_done_again_replaces_its_row(tmp_path):
    bench = import_module("benchmarks.studies.calibration")
    path, rest = tmp_path / "calibration.csv", dict.fromkeys(common.SCHEMAS["calibration"], "")
    for value in (1, 2):
        rows = ({"seed": 0, "ECE": value}, {"seed": value, "ECE": 7})
        bench.merge(path, [rest | row for row in rows], ("seed",))
    assert [(row["seed"], row["ECE"]) for row in common.read(path)] == [("0", "2"), ("1", "7"), ("2", "7")]


def test_shared_classes_against_classes_for_each_row(tmp_path, capsys):
    bench = import_module("benchmarks.speed.bench_shared")
    files = ["--results", str(tmp_path / "shared.csv"), "--figure", str(tmp_path / "shared.png")]
    rows = bench.main(["--tiny", "--datasets", "bibtex", "--laws", "uniform", "--limit", "50", *files])
    assert [(row["kind"], row["sampled"]) for row in rows[::2]] == [
        ("for each row", "20"),
        ("shared", "20"),
        ("shared, more", "147"),
    ]
    assert len(rows) == 6
    assert (tmp_path / "shared.png").stat().st_size > 10_000
    assert capsys.readouterr().out.count("| Bibtex, 146 classes | uniform |") == 3


def test_equal_time_is_the_end_of_the_shortest_curve():
    bench = import_module("benchmarks.speed.bench_shared")

    def looks(*pairs: tuple[float, float]) -> list[dict[str, float]]:
        return [{"seconds": s, "epochs": 1.0, "log_likelihood": value} for s, value in pairs]

    curves = {("q", "a"): looks((1, -5.0), (4, -3.0)), ("q", "b"): looks((1, -4.0), (16, -2.0))}
    seconds, values = bench.at_equal_time(curves)
    assert seconds == 4.0
    assert values == {("q", "a"): -3.0, ("q", "b"): pytest.approx(-3.0)}  # half way from 1 to 16, in logarithms


def test_peak_memory():
    rows = import_module("benchmarks.speed.bench_memory").main(["--tiny", "--cases", "MNIST shape, defaults"])
    found = {row["quantity"]: float(row["p50"]) for row in rows}
    assert found["peak, GB"] > found["peak above the data, GB"] >= 0
    assert found["weights, states, local, GB"] == pytest.approx(2 * 4 * 10 * 785 / 1e9 + 200 * 8 / 1e9, rel=1e-6)


def test_mapped_rows_beside_rows_in_memory(monkeypatch):
    from augment_reduce.training import order

    for name in ("BLOCK_BYTES", "BUFFER_BLOCKS", "BUFFER_BATCHES"):  # which it sets
        monkeypatch.setattr(order, name, getattr(order, name))
    rows = import_module("benchmarks.speed.bench_rows").main(["--tiny", "--repeat", "1", "--models", "softmax"])
    found = {row["quantity"]: float(row["p50"]) for row in rows}
    assert {"mapped / memory", "cold / memory"} <= found.keys()
    ratio = found["s per epoch, mapped"] / found["s per epoch, memory"]
    assert found["mapped / memory"] == pytest.approx(ratio, rel=1e-4)


def test_ablations_of_the_paper(small_bibtex, tmp_path):
    table = tmp_path / "table.csv"
    rows = import_module("benchmarks.studies.ablate_paper").main(
        ["--datasets", "bibtex", "--models", "softmax", "--seeds", "0", "--iterations", "8", "--output", str(table)]
    )
    assert float(rows[0]["against_the_code"]) == 0.0
    assert len({row["log_likelihood"] for row in rows}) > len(rows) / 2  # the changes do change something
    assert len(table.read_text().splitlines()) == len(rows) + 1


def test_variance_of_the_samplers():
    bench = import_module("benchmarks.studies.variance")
    rows = bench.main(["--tiny", "--epochs", "3", "--B", "16", "--draws", "3", "--evaluations", "40"])
    assert {row["sampler"] for row in rows} == set(bench.SAMPLERS)
    assert {row["stage"] for row in rows} == {"start", "middle", "end"}
    assert all(float(row[name]) > 0 for row in rows for name in bench.MEASURES)


def test_held_out_rows_choose(tmp_path):
    table = tmp_path / "grid.csv"
    rows = import_module("benchmarks.studies.hold_out").main(
        ["bibtex", "--tiny", "--rates", "0.05", "0.3", "--eps", "1", "--epochs", "2", "--output", str(table)]
    )
    assert len({row["log_likelihood"] for row in rows}) == 2
    assert len(table.read_text().splitlines()) == 3


def test_held_out_rows_are_not_trained_on():
    X, y, X_out, y_out = import_module("benchmarks.studies.hold_out").split("bibtex", tiny=True)
    assert len(y) == 270
    assert 0 < len(y_out) <= 30
    assert np.isin(y_out, y).all()
    trained = {row.tobytes() for row in X.toarray()}
    assert not any(row.tobytes() in trained for row in X_out.toarray())


def test_from_the_papers_preset_to_the_defaults(small_bibtex, tmp_path, capsys):
    module, table = import_module("benchmarks.studies.ablate_defaults"), tmp_path / "table.csv"
    rows = module.main(
        ["--datasets", "bibtex", "--models", "softmax", "--seeds", "0", "--iterations", "6", "--output", str(table)]
    )
    assert [row["step"] for row in rows] == list(module.STEPS)
    assert len({row["log_likelihood"] for row in rows[:4]}) == 4
    module.main(["--table", str(table)])
    assert "| bibtex | softmax |" in capsys.readouterr().out


def test_the_bar_of_exact_softmax(tmp_path):
    rows = import_module("benchmarks.studies.exact_bar").main(["--tiny", "--out", str(tmp_path / "bar.csv")])
    kinds = [row["rows"] for row in rows]
    assert kinds[-2:] == ["test", "training"]
    best = max((row for row in rows if row["rows"] == "held out, best moment"), key=lambda row: row["log_likelihood"])
    assert rows[-2]["v"] in {row["v"] for row in rows}
    assert float(best["log_likelihood"]) < 0


def test_exact_maxima_of_the_three_models(tmp_path):
    rows = import_module("benchmarks.studies.exact_map").main(["--tiny", "--out", str(tmp_path / "map.csv")])
    assert [row["rows"] for row in rows] == 6 * ["held out 0", "test"]
    assert {row["model"] for row in rows} == {"softmax", "probit", "logistic"}
    assert len((tmp_path / "map.csv").read_text().splitlines()) == 13


@pytest.mark.parametrize("model", ["softmax", "probit", "logistic"])
def test_exact_maxima_are_of_the_library_s_likelihood(model):
    """Trapezoids against the library's own quadrature, at gaps up to 25."""
    psi = torch.randn(50, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 4
    y = torch.arange(50) % 10
    expected = log_likelihood(resolve_noise(model), psi, y)
    torch.testing.assert_close(
        import_module("benchmarks.studies.exact_map").log_p(model, psi, y), expected, rtol=1e-8, atol=1e-8
    )


def test_the_bar_of_the_same_optimiser(tmp_path):
    module = import_module("benchmarks.studies.exact_adagrad")
    rows = module.main(["--tiny", "--models", "softmax", "logistic", "--out", str(tmp_path / "bar.csv")])
    assert [row["rows"] for row in rows] == 2 * (["held out"] * 2 + ["test"] * int(rows[-1]["epochs"]))
    assert all(float(row["log_likelihood"]) < 0 for row in rows)


def test_exact_steps_with_all_rows_are_those_of_the_estimator():
    """One epoch of one minibatch: the move of the benchmark's model is the library's, prior and all."""
    module = import_module("benchmarks.studies.exact_adagrad")
    rng = np.random.default_rng(0)
    X = sp.random(30, 8, 0.4, "csr", np.float32, random_state=rng)
    y = np.arange(30) % 4
    part = module.Part(X, sp.csr_matrix((np.ones(30, np.float32), (np.arange(30), y))))
    for name in ("softmax", "probit"):
        model = module.Model(module.Pairs(part, torch.device("cpu")), module.resolve_noise(name), v=0.3)
        model.batch_size = 30
        model.rule = Adagrad(0.4, 0.7, bias_scale=2.3)
        model.epoch(np.random.default_rng(0))
        clf = AugmentReduceClassifier(
            name, method="exact", optimizer=model.rule, prior_variance=0.3, batch_size=30, max_iter=1
        ).fit(X, y)
        weight = model.weight.T.numpy()
        np.testing.assert_allclose(weight - weight.mean(0), clf.coef_, rtol=2e-4, atol=1e-6)
        np.testing.assert_allclose(model.bias.numpy(), clf.intercept_, rtol=2e-4, atol=1e-6)


def test_omniglot_on_other_splits(tmp_path):
    module = import_module("benchmarks.studies.omniglot_splits")
    rows = module.main(["--tiny", "--iterations", "5", "--output", str(tmp_path / "splits.csv")])
    assert [row["method"] for row in rows] == ["softmax", "one-vs-each"]
    assert len((tmp_path / "splits.csv").read_text().splitlines()) == 3


def test_gradients_of_the_bar_are_those_of_its_value():
    """By differences, along random directions."""
    module = import_module("benchmarks.studies.exact_bar")
    part = module.load("bibtex", tiny=True)[0]
    part.X = part.X[:, :30]
    objective = module.Objective(part, torch.device("cpu"))
    objective.X, objective.count, objective.total = (
        t.double() for t in (objective.X, objective.count, objective.total)
    )
    K = part.labels.shape[1]
    generator = torch.Generator().manual_seed(0)
    weight, along = (torch.randn(K, 30, generator=generator, dtype=torch.float64) for _ in range(2))
    bias, along_bias = (torch.randn(K, generator=generator, dtype=torch.float64) for _ in range(2))
    step = 1e-5
    ends = [objective.value_and_grad(weight + s * along, bias + s * along_bias, 0.7)[0] for s in (-step, step)]
    _, by_weight, by_bias = objective.value_and_grad(weight, bias, 0.7)
    slope = float((by_weight * along).sum() + (by_bias * along_bias).sum())
    assert (ends[1] - ends[0]) / (2 * step) == pytest.approx(slope, rel=1e-6)


def test_milliseconds_a_step_by_device():
    rows = import_module("benchmarks.speed.bench_device").main(["--tiny", "--turns", "1"])
    assert [row["quantity"] for row in rows] == ["milliseconds a step"]
    assert float(rows[0]["p50"]) > 0


def test_quality_by_sampled_classes(tmp_path):
    table, picture = tmp_path / "sizes.csv", tmp_path / "sizes.png"
    rows = import_module("benchmarks.studies.sizes").main(
        ["--tiny", "--datasets", "bibtex", "--output", str(table), "--picture", str(picture)]
    )
    assert {row["method"] for row in rows} == {"augment-reduce", "one-vs-each", "sampled-softmax", "exact"}
    assert len(table.read_text().splitlines()) == len(rows) + 1
    assert picture.stat().st_size > 10_000


def test_kernels_side_by_side(capsys):
    found = import_module("benchmarks.speed.bench_kernels").main(["--tiny", "--repeats", "4"])
    kernels = {"pair_scores", "push_pairs", "step pair", "shared_scores", "push_shared", "step shared", "draw"}
    assert {(kernel, provider) for _, kernel, provider, _ in found} == {
        (k, p) for k in kernels for p in ("cpu", "reference")
    }
    assert "tiny" in capsys.readouterr().out


def test_two_checkouts_take_turns():
    module = import_module("benchmarks.speed.bench_checkouts")
    found = quantities(module.main([str(module.OURS), "same", "--cases", "paper bibtex softmax", "--turns", "1"]))
    name = "paper bibtex softmax: processor's seconds, 1 thread"
    assert found[f"{name}, this over same"] == pytest.approx(found[f"{name}, this"] / found[f"{name}, same"], rel=1e-4)


def test_steps_over_ranks():
    rows = import_module("benchmarks.speed.bench_ranks").main(["--tiny"])
    found = quantities(rows)
    assert sum("ms per step" in name for name in found) == 4
    assert sum("times as fast as one process" in name for name in found) == 2
    assert all(value > 0 for value in found.values())


def test_late_ranks():
    rows = import_module("benchmarks.studies.late_ranks").main(
        ["debian-5k", "--tiny", "--ways", "late", "one process", "--epochs", "1"]
    )
    assert [row["ranks"] for row in rows] == [2, 1]
    assert all(float(row["log_likelihood"]) < 0 for row in rows)

"""The estimator inside a process group, as it is used: files, streams, predictions, bytes on the wire, bad input."""

import os
import re
import signal
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch.distributed as dist

from augment_reduce import AugmentReduceClassifier
from augment_reduce.sampling import ClassSampler
from augment_reduce.training import loop
from tests.helpers import ROOT
from tests.helpers.rank_processes import run_on_ranks, try_on_ranks

K = 11


def rows(n=120, n_features=10, n_classes=K, seed=0):
    generator = np.random.default_rng(seed)
    X = generator.standard_normal((n, n_features)).astype(np.float32)
    y = (X[:, :1] @ generator.standard_normal((1, n_classes)) + generator.gumbel(size=(n, n_classes))).argmax(1)
    y[:n_classes] = np.arange(n_classes)
    return X, y


def classifier(group=None, **settings):
    given = {"n_sampled_classes": 4, "max_iter": 40, "batch_size": 32, "prior_variance": 1.0, "random_state": 0}
    return AugmentReduceClassifier(process_group=group, n_jobs=1, **given | settings)


def quiet(function, *arguments, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*arguments, **settings)


# ---- predictions, files, streams ----


def use(group, path):
    """A model that is fitted, asked, saved, loaded, and goes on; and a stream."""
    X, y = rows()
    names = np.array([f"class {k:02d}" for k in y])
    clf = quiet(classifier(group, sync=True).fit, X, names)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    answers = ask(clf, X, names)
    assert np.array_equal(clf.classes_[rank::size], np.unique(names)[rank::size])
    clf.save(path)
    again = AugmentReduceClassifier.load(path, process_group=group, sync=True, warm_start=True)
    answers_again = ask(again, X, names)
    quiet(again.set_params(max_iter=30).fit, X, names)
    stream = classifier(group, sync=True)
    for part in (slice(0, 60), slice(60, 120)):
        quiet(stream.partial_fit, X[part], names[part], classes=np.unique(names))
    late = quiet(classifier(group, max_iter=2000).fit, X, names)
    waits = quiet(classifier(group, max_iter=2000, sync=True).fit, X, names)
    return {
        "answers": answers, "again": answers_again, "coef": clf.coef_, "intercept": clf.intercept_,
        "after 30 more": ask(again, X, names), "stream": ask(stream, X, names),
        "diagnosis": str(clf.diagnose(X, names)), "sparse": ask(clf.sparsify(), X, names),
        "late": late.log_likelihood(X, names) - waits.log_likelihood(X, names),
    }  # fmt: skip


def ask(clf, X, y):
    best, chance = clf.predict_topk(X, 3)
    return {
        "probability": clf.predict_proba(X), "log": clf.predict_log_proba(X), "score": clf.decision_function(X),
        "class": clf.predict(X), "best": best, "chance": chance,
        "numbers": np.array([clf.log_likelihood(X, y), clf.score(X, y)]),
    }  # fmt: skip


def assert_same(found, expected):
    for name, values in expected.items():
        if values.dtype.kind == "f":
            np.testing.assert_allclose(found[name], values, rtol=0, atol=5e-6, err_msg=name)
        else:
            assert np.array_equal(found[name], values), name


def test_a_model_over_ranks_answers_as_the_file_that_it_writes(tmp_path):
    path, (X, y) = tmp_path / "model.safetensors", rows()
    names = np.array([f"class {k:02d}" for k in y])
    found = run_on_ranks(use, 2, tmp_path, path, limit=120)
    alone = AugmentReduceClassifier.load(path)
    assert alone.process_group is None
    expected = ask(alone, X, names)
    plain = quiet(classifier().fit, X, names)
    assert_same(expected, ask(plain, X, names))
    quiet(plain.set_params(warm_start=True, max_iter=30).fit, X, names)
    stream = classifier()
    for part in (slice(0, 60), slice(60, 120)):
        quiet(stream.partial_fit, X[part], names[part], classes=np.unique(names))
    for rank, of_rank in enumerate(found):
        assert_same(of_rank["answers"], expected)
        assert_same(of_rank["again"], expected)
        assert_same(of_rank["after 30 more"], ask(plain, X, names))
        assert_same(of_rank["stream"], ask(stream, X, names))
        np.testing.assert_allclose(of_rank["coef"], alone.coef_[rank::2], atol=2e-6)
        np.testing.assert_allclose(of_rank["intercept"], alone.intercept_[rank::2], atol=2e-6)
        assert of_rank["diagnosis"] == found[0]["diagnosis"]
        assert abs(of_rank["late"]) < 0.005
        assert np.array_equal(of_rank["sparse"]["class"], expected["class"])


# ---- bytes on the wire ----


def bytes_of_steps(group, shapes):
    """For each shape and local step the bytes that a step sends for a row, at most."""
    found, plain = [], loop.step

    def counted(problem, state, rows, *arguments, **settings):
        ranks = problem.partition.ranks
        before = ranks.bytes_sent
        answer = plain(problem, state, rows, *arguments, **settings)
        most.append((ranks.bytes_sent - before) / len(rows))
        return answer

    loop.step = counted
    for n_features, n_classes, n_sampled, local_step, sync in shapes:
        most: list[float] = []
        X, y = rows(160, n_features, n_classes)
        settings = {"n_sampled_classes": n_sampled, "local_step": local_step, "sync": sync, "prior_variance": None}
        quiet(classifier(group, max_iter=20, class_sampling="head-tail-shared", **settings).fit, X, y)
        found.append(max(most))
    return found


def test_a_step_of_a_softmax_sends_twelve_bytes_a_row_whatever_the_shape(tmp_path):
    """Steps that compute the bound included; two numbers a row where they do not."""
    sizes = [(10, 21, 6), (30, 21, 6), (10, 90, 6), (10, 90, 40)]
    ways = [(None, False), (None, True), ("amortised", False)]
    shapes = [(*size, *way) for size in sizes for way in ways]
    for of_rank in run_on_ranks(bytes_of_steps, 2, tmp_path, shapes):
        for way in range(len(ways)):
            of_way = of_rank[way :: len(ways)]
            assert of_way == [of_way[0]] * len(sizes)
            assert 0 < of_way[0] <= 12


def sent_by(clf, X, y):
    """Each answer, and the bytes that this rank sends for a row of it."""
    calls = {
        "class": lambda: clf.predict(X),
        "top": lambda: clf.predict_topk(X, 3)[1],
        "likelihood": lambda: np.array([clf.log_likelihood(X, y)]),
    }
    answers, sent, ranks = {}, {}, clf._fitted.partition.ranks
    for name, call in calls.items():
        before = ranks.bytes_sent
        answers[name] = call()
        sent[name] = (ranks.bytes_sent - before) / len(X)
    return answers, sent


def bytes_of_answers(group, shapes):
    """For each shape, model and answer, the bytes that this rank sends for a row; and the answers."""
    found = []
    for n_features, n_classes, model in shapes:
        X, y = rows(1000, n_features, n_classes)
        clf = quiet(classifier(group, model=model, max_iter=30, class_sampling="head-tail-shared").fit, X, y)
        answers, sent = sent_by(clf, X, y)
        log_p = clf.predict_log_proba(X)
        label = np.searchsorted(clf.classes_, y)
        truth = {
            "class": clf.classes_[log_p.argmax(1)], "top": np.exp(-np.sort(-log_p, axis=1)[:, :3]),
            "likelihood": log_p[np.arange(len(X)), label].mean(keepdims=True),
        }  # fmt: skip
        found.append((sent, answers, truth))
    return found


def test_predictions_send_a_few_numbers_a_row(tmp_path):
    """Two ranks. Softmax: a score and a class for each of the best, 16 bytes, and the log of a sum, 8; whatever K is.
    Probit: twice 16 numbers for every two units of the range of scores; less than the scores of all classes."""
    shapes = [(10, 60, "softmax"), (10, 900, "softmax"), (10, 900, "probit")]
    small, large, probit = zip(*run_on_ranks(bytes_of_answers, 2, tmp_path, shapes, limit=200), strict=True)
    few = 100 / 1000  # of whole calls and blocks: whether rows agree, whether scores are finite
    for of_shape in (small, large):
        for sent, _, _ in of_shape:
            assert 16 <= sent["class"] <= 16 + few
            assert 3 * 16 + 8 <= sent["top"] <= 3 * 16 + 8 + few
            assert 16 <= sent["likelihood"] <= 16 + 3 * few
    for sent, _, _ in probit:
        assert sent["likelihood"] < 8 * 900 / 4
    for _, answers, truth in (*small, *large, *probit):
        assert np.array_equal(answers["class"], truth["class"])
        np.testing.assert_allclose(answers["top"], truth["top"], rtol=1e-5)
        np.testing.assert_allclose(answers["likelihood"], truth["likelihood"], rtol=1e-6)
        for name, of_first in small[0][1].items():
            assert np.array_equal(of_first, small[1][1][name])


# ---- bad input: a clear error on every rank ----


class Drawing(ClassSampler):
    """One of a user's that learns from gradients."""

    name = "drawing"

    def observe(self, minibatch, sampled, grad):
        pass


def refused(group, path):
    """What each bad call says on this rank; the group is as good as new after each."""
    rank, (X, y) = dist.get_rank(group), rows()
    with_nan, other_rows = X.copy(), X.copy()
    with_nan[3, 1], other_rows[0, 0] = np.nan, 5.0
    first = rank == 0
    calls = {
        "nan": lambda: classifier(group).fit(with_nan if first else X, y),
        "K": lambda: classifier(group).fit(X, y if first else np.minimum(y, K - 2)),
        "data": lambda: classifier(group).fit(other_rows if first else X, y),
        "labels": lambda: classifier(group).fit(X, y if first else np.roll(y, 1)),
        "seed": lambda: classifier(group, random_state=rank).fit(X, y),
        "setting": lambda: classifier(group, learning_rate=0.1 * (rank + 1)).fit(X, y),
        "sync": lambda: classifier(group, sync=first).fit(X, y),
        "parameter": lambda: classifier(group, max_iter=-1 if first else 5).fit(X, y),
        "few classes": lambda: classifier(group).fit(X, np.arange(len(y)) % 2),
        "cuda": lambda: classifier(group, device="cuda").fit(X, y),
        "conditional": lambda: classifier(group, class_sampling="conditional").fit(X, y),
        "cache": lambda: classifier(group, class_sampling="cache-shared").fit(X, y),
        "own sampler": lambda: classifier(group, class_sampling=Drawing()).fit(X, y),
        "other group": lambda: classifier(warm_start=True).fit(X, y).set_params(process_group=group).fit(X, y),
        "diverged": lambda: classifier(group, learning_rate=1e35, prior_variance=None, max_iter=200).fit(X, y),
        "no file": lambda: AugmentReduceClassifier.load(path if first else path + "x", process_group=group),
        "prediction": lambda: quiet(classifier(group).fit, X, y).predict(with_nan if first else X),
        "other rows": lambda: quiet(classifier(group).fit, X, y).predict(X[: 5 + rank]),
        "other labels": lambda: quiet(classifier(group).fit, X, y).log_likelihood(X, y if first else np.roll(y, 1)),
        "unknown label": lambda: quiet(classifier(group).fit, X, y).diagnose(X, y + first),
        "save": lambda: quiet(classifier(group).fit, X, y).save("/nowhere/model"),
    }
    said = {}
    for name, call in calls.items():
        try:
            quiet(call)
            said[name] = "nothing"
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    clf = quiet(classifier(group, random_state=None).fit, X, y)  # the first rank's seed
    return said, clf.predict_proba(X[:3])


EXPECTED = {
    "nan": ("NaN", "Rank 0 stopped the checks of fit"),
    "K": ("number of classes K: 11 on rank 0, 10 on rank 1",) * 2,
    "data": ("X (hash): ",) * 2,
    "labels": ("y (hash): ",) * 2,
    "seed": ("random_state: '0' on rank 0, '1' on rank 1",) * 2,
    "setting": ("learning_rate: '0.1' on rank 0, '0.2' on rank 1",) * 2,
    "sync": ("sync: 'True' on rank 0, 'False' on rank 1",) * 2,
    "parameter": ("Expected max_iter", "Rank 0 stopped the checks of fit: ValueError: Expected max_iter"),
    "few classes": ("at least one class a rank",) * 2,
    "cuda": ("device='cuda' is for one process",) * 2,
    "conditional": ("class_sampling='conditional' looks at the weights",) * 2,
    "cache": ("class_sampling='cache-shared' looks at the weights",) * 2,
    "own sampler": ("class_sampling='drawing' looks at the weights",) * 2,
    "other group": ("was one process and this is rank",) * 2,
    "no file": ("No model file at", "No model file at"),
    "prediction": ("NaN", "Rank 0 stopped a prediction"),
    "other rows": ("RankError: Expected all ranks to predict the same rows, found [5, 6, 7]",) * 2,
    "other labels": ("Expected the labels to be the same on every rank, but y (hash)",) * 2,
    "unknown label": ("ValueError", "Rank 0 stopped a prediction: ValueError"),
    "save": ("nowhere", "Rank 0 stopped the saving of a model"),
}


def test_bad_input_is_refused_on_every_rank(tmp_path):
    found = run_on_ranks(refused, 3, tmp_path, str(tmp_path / "none"), limit=120)
    for rank, (said, _) in enumerate(found):
        for name, words in EXPECTED.items():
            assert words[min(rank, 1)] in said[name], (rank, name, said[name])
        assert said["diverged"] == found[0][0]["diverged"]
        assert said["diverged"].startswith("FloatingPointError: After iteration "), said["diverged"]
    assert all(np.array_equal(found[0][1], chance) for _, chance in found)


def killed_in_a_step(group, sync):
    """Rank 1 is killed in its 220th step, when steps no longer wait for their own sums."""
    plain, steps = loop.step, 0

    def step(*arguments, **settings):
        nonlocal steps
        steps += 1
        if steps == 220 and dist.get_rank(group) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(*arguments, **settings)

    loop.step = step
    quiet(classifier(group, max_iter=100_000, sync=sync).fit, *rows())


@pytest.mark.parametrize("sync", [False, True])
def test_the_others_stop_when_a_rank_is_killed(tmp_path, sync):
    first, dead, last = try_on_ranks(killed_in_a_step, 3, tmp_path, sync, limit=120)
    assert dead.code == -signal.SIGKILL
    for one in (first, last):
        assert one.code == 1, one.output
        assert "RankError" in one.error
        assert re.search(r"rank (\d, )*1(, \d)* did not answer", one.error), one.error  # a busy one may be named too


def test_a_group_that_is_none(tmp_path):
    X, y = rows()
    with pytest.raises(TypeError, match=r"Expected process_group to be None, a torch\.distributed\.ProcessGroup"):
        AugmentReduceClassifier(process_group="world").fit(X, y)


def test_the_example_for_torchrun(tmp_path):
    example = ROOT / "examples" / "torchrun_fit.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(example)]
    command += ["--rows", "5000", "--epochs", "1", "--model", str(tmp_path / "model")]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "2,500 classes, 1,250 of them here" in ran.stdout
    assert AugmentReduceClassifier.load(tmp_path / "model").coef_.shape == (2500, 2000)


def one_rank(group):
    X, y = rows()
    clf = quiet(classifier(group).fit, X, y)
    return clf.coef_.shape, clf.predict_proba(X[:5])


def test_a_group_of_one_is_one_process(tmp_path):
    X, y = rows()
    ((shape, chance),) = run_on_ranks(one_rank, 1, tmp_path)
    plain = quiet(classifier().fit, X, y)
    assert shape == plain.coef_.shape
    assert np.array_equal(chance, plain.predict_proba(X[:5]))

"""A fit that was killed goes on from its last checkpoint, and ends with the bits of one that was not."""

import json
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
import scipy.sparse as sp

from augment_reduce import AugmentReduceClassifier
from augment_reduce.persistence import checkpoints
from augment_reduce.persistence.checkpoints import CheckpointError
from augment_reduce.support import atomic

STEPS = {"max_epochs": 4, "batch_size": 32, "prior_variance": 1.0}
KILLED = """
import json, os, signal, sys
import numpy as np
from augment_reduce import AugmentReduceClassifier
from augment_reduce.persistence import tensor_file
from augment_reduce.support import atomic
from augment_reduce.training import loop, prior_search

folder, settings = sys.argv[1], json.loads(sys.argv[2])
rng = np.random.default_rng(0)
N, D, K, every = (3000, 240, 60, 40) if "search" in sys.argv[3:] else (400, 12, 9, 7)
X = rng.normal(size=(N, D)).astype(np.float32)
y = (2.0 * X[:, :12] @ rng.normal(size=(12, K)) + rng.gumbel(size=(N, K))).argmax(1)

def fit(**how):
    return AugmentReduceClassifier(random_state=3, n_jobs=1, **settings).fit(X, y, **how)

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def at_call(module, name, n, before=True, half=False):
    real, calls = getattr(module, name), [0]
    def called(*arguments, **others):
        calls[0] += 1
        if calls[0] == n:
            if half:  # of the bytes
                real(arguments[0], arguments[1][: len(arguments[1]) // 2])
            elif not before:
                real(*arguments, **others)
            die()
        return real(*arguments, **others)
    setattr(module, name, called)

moments = [
    lambda: at_call(loop, "step", 3),  # before the first checkpoint
    lambda: at_call(loop, "step", 12),
    lambda: at_call(tensor_file, "_write", 6, half=True),  # in the middle of a checkpoint, the first of this fit
    lambda: at_call(os, "replace", 2),  # when one is complete, and not yet in its place
    lambda: at_call(os, "replace", 2, before=False),
    lambda: at_call(loop, "step", 1),  # at once
]
if "search" in sys.argv[3:]:
    moments = [
        lambda: at_call(prior_search.Branches, "advance", 2),  # which starts again
        lambda: at_call(os, "replace", 1, before=False),  # it has been written down
        lambda: at_call(loop, "step", 3),
        lambda: at_call(os, "replace", 2),
    ]
    if settings["early_stopping"]:
        moments += [lambda: at_call(loop, "restore_best", 1), lambda: at_call(loop, "restore_best", 1, before=False)]
whole = fit()
for moment in moments:
    child = os.fork()
    if child == 0:
        moment()
        fit(checkpoint=folder, every=every)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    print(os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, sorted(os.listdir(folder)))
clf = fit(checkpoint=folder, every=every)
again = fit(checkpoint=folder, every=every)  # has ended: nothing is trained
same = {name: np.array_equal(whole.history_[name], clf.history_[name], equal_nan=True) for name in whole.history_}
print(json.dumps({
    "coef": bool(np.array_equal(whole.coef_, clf.coef_)),
    "intercept": bool(np.array_equal(whole.intercept_, clf.intercept_)),
    "steps": [whole.n_iter_, clf.n_iter_, again.n_iter_], "ended": bool(np.array_equal(again.coef_, clf.coef_)),
    "history": sorted(name for name in same if not same[name]), "prior": [whole.prior_variance_, clf.prior_variance_],
    "state": all(bool((a == b).all()) for a, b in zip(
        whole._fitted.parameters.weight_state, clf._fitted.parameters.weight_state)),
    "files": sorted(os.listdir(folder)),
}))
"""


def killed(folder, settings, *words):
    """(whether each child was killed, what is left in the folder after it), what came out in the end."""
    command = [sys.executable, "-c", KILLED, str(folder), json.dumps(settings), *words]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    *moments, last = result.stdout.strip().splitlines()
    return moments, json.loads(last)


def check_same(found):
    assert found["coef"]
    assert found["intercept"]
    assert found["state"]
    assert found["ended"]
    assert found["history"] in ([], ["seconds"])
    assert len(set(found["steps"])) == 1
    assert found["prior"][0] == found["prior"][1]
    assert len([name for name in found["files"] if name.startswith("step-")]) == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize(
    "settings",
    [
        {"model": "softmax", "n_sampled_classes": 4, "local_step": "natural-gradient", "optimizer": "adam"},
        {"model": "probit", "n_sampled_classes": 4, "local_step": "newton"},
        {"model": "logistic", "n_sampled_classes": 4, "class_sampling": "cache-shared"},
    ],
)
def test_a_killed_fit_ends_with_the_bits_of_one_that_was_not(settings, tmp_path):
    moments, found = killed(tmp_path / "c", STEPS | settings)
    assert all(moment.startswith("True") for moment in moments), moments
    assert ".part" in moments[2], "killed in the middle of a file"
    assert sum(".part" in moment for moment in moments) < len(moments), "a later writer removes it"
    check_same(found)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("early_stopping", [True, False])
def test_killed_in_the_search_for_the_prior_and_with_early_stopping(early_stopping, tmp_path):
    """Without early stopping the fit goes on from the end of the search's best run, with it from the start."""
    settings = {"max_epochs": 5, "batch_size": 100, "early_stopping": early_stopping, "n_sampled_classes": 20}
    moments, found = killed(tmp_path / "c", settings, "search")
    assert all(moment.startswith("True") for moment in moments), moments
    assert "step-" not in moments[0], "a search leaves nothing before its end"
    assert "step-" in moments[1]
    check_same(found)


# ---- in one process ----


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(1)
    X = rng.normal(size=(300, 10)).astype(np.float32)
    return X, np.array([f"c{k}" for k in (2.0 * X[:, :7] + rng.gumbel(size=(300, 7))).argmax(1)])


def new(**settings):
    return AugmentReduceClassifier(**{"random_state": 0, "n_jobs": 1, "n_sampled_classes": 4} | STEPS | settings)


class Stop(Exception):
    pass


def stopped(clf, rows, folder, monkeypatch, at=25, **how):
    """A fit that ends by an error after that many iterations."""
    from augment_reduce.training import loop

    def step(problem, state, order, clock, **others):
        if clock.iteration > at:
            raise Stop
        return real(problem, state, order, clock, **others)

    real = loop.step
    with monkeypatch.context() as patch:
        patch.setattr(loop, "step", step)
        with pytest.raises(Stop):
            clf.fit(*rows, checkpoint=folder, every=10, **how)
    return folder


def files(folder):
    return sorted(path.name for path in folder.glob("step-*"))


def test_the_last_two_are_kept_and_each_is_a_model_file(rows, tmp_path, monkeypatch):
    folder = stopped(new(), rows, tmp_path / "c", monkeypatch)
    assert files(folder) == ["step-000000000010.safetensors", "step-000000000020.safetensors"]
    for name in files(folder):
        loaded = AugmentReduceClassifier.load(folder / name)
        assert loaded.predict(rows[0]).shape == (300,)
        assert loaded.n_iter_ == int(name[5:17])
    assert not any(b"\x80\x04" in path.read_bytes()[:4] for path in folder.iterdir()), "no pickle"


def test_a_fit_that_has_ended_is_returned_and_nothing_is_trained(rows, tmp_path, monkeypatch):
    first = new().fit(*rows, checkpoint=tmp_path / "c", every=10)
    from augment_reduce.training import loop

    monkeypatch.setattr(loop, "step", None)
    again = new(n_jobs=2, verbose=0).fit(*rows, checkpoint=tmp_path / "c", every=3)
    np.testing.assert_array_equal(first.coef_, again.coef_)
    np.testing.assert_array_equal(first.history_["bound"], again.history_["bound"])
    assert again.predict(rows[0]).tolist() == first.predict(rows[0]).tolist()


def test_without_a_seed_the_fit_goes_on_with_the_one_it_drew(rows, tmp_path, monkeypatch):
    folder = stopped(new(random_state=None), rows, tmp_path / "c", monkeypatch)
    seed = AugmentReduceClassifier.load(folder / files(folder)[-1])._fitted.seed
    assert new(random_state=None).fit(*rows, checkpoint=folder)._fitted.seed == seed


def test_an_earlier_fit_of_the_same_estimator_leaves_no_trace(rows, tmp_path, monkeypatch):
    folder = stopped(new(), rows, tmp_path / "c", monkeypatch)
    used = new().fit(-rows[0], rows[1])
    used.coef_ += 1.0
    np.testing.assert_array_equal(used.fit(*rows, checkpoint=folder).coef_, new().fit(*rows).coef_)


@pytest.mark.parametrize("damage", ["cut", "empty", "changed", "gone"])
def test_a_damaged_last_checkpoint_is_said_and_the_one_before_it_is_used(damage, rows, tmp_path, monkeypatch):
    folder = stopped(new(), rows, tmp_path / "c", monkeypatch)
    last = folder / files(folder)[-1]
    content = last.read_bytes()
    if damage == "gone":
        last.unlink()
    else:
        middle = len(content) // 2
        changed = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        last.write_bytes({"cut": content[:middle], "empty": b"", "changed": changed}[damage])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        clf = new().fit(*rows, checkpoint=folder, every=10)
    said = [str(w.message) for w in said if w.category is RuntimeWarning]
    assert ["iteration 10" in message for message in said] == ([] if damage == "gone" else [True])
    np.testing.assert_array_equal(clf.coef_, new().fit(*rows).coef_)


def test_no_checkpoint_that_can_be_read_is_an_error_and_not_a_new_fit(rows, tmp_path, monkeypatch):
    folder = stopped(new(), rows, tmp_path / "c", monkeypatch)
    for name in files(folder):
        (folder / name).write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="None of the 2 checkpoints"):
        new().fit(*rows, checkpoint=folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda X, y: (X * np.float32(1.000001), y, {}), "other features, labels or weights"),
        (lambda X, y: (X, np.roll(y, 1), {}), "other features, labels or weights"),
        (lambda X, y: (X[:-1], y[:-1], {}), "rows 300, now 299"),
        (lambda X, y: (X[:, :-1], y, {}), "features 10, now 9"),
        (lambda X, y: (X, np.where(y == "c0", "c1", y), {}), "classes 7, now 6"),
        (lambda X, y: (X, np.char.replace(y, "c0", "b0"), {}), "other features, labels or weights"),
        (lambda X, y: (X.astype(np.float64), y, {}), "dtype float32, now float64"),
        (lambda X, y: (sp.csr_matrix(X), y, {}), "other features, labels or weights"),
        (lambda X, y: (X, y, {"max_epochs": 5}), "max_epochs 4, now 5"),
        (lambda X, y: (X, y, {"random_state": 1}), "random_state 0, now 1"),
        (lambda X, y: (X, y, {"model": "probit"}), "model .*softmax.*probit"),
        (lambda X, y: (X, y, {"class_weight": {"c0": 2.0}}), "class_weight"),
    ],
)
def test_another_fit_is_refused_and_changes_nothing(change, said, rows, tmp_path, monkeypatch):
    folder = stopped(new(), rows, tmp_path / "c", monkeypatch)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    X, y, settings = change(*rows)
    clf = new(**settings)
    with pytest.raises(CheckpointError, match=said):
        clf.fit(X, y, checkpoint=folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert not hasattr(clf, "classes_")


def test_other_weights_another_release_and_a_damaged_description_are_refused(rows, tmp_path, monkeypatch):
    folder = stopped(new(), rows, tmp_path / "c", monkeypatch)
    with pytest.raises(CheckpointError, match="weights of the rows"):
        new().fit(*rows, sample_weight=np.full(300, 2.0), checkpoint=folder)
    text = (folder / "fit.json").read_text()
    (folder / "fit.json").write_text(text.replace('"version": "', '"version": "0.0.'))
    with pytest.raises(CheckpointError, match=r"release 0\.0\."):
        new().fit(*rows, checkpoint=folder)
    for damaged in (text[:-20], "[]", ""):
        (folder / "fit.json").write_text(damaged)
        with pytest.raises(CheckpointError, match="does not say"):
            new().fit(*rows, checkpoint=folder)
    (folder / "fit.json").unlink()
    with pytest.raises(CheckpointError, match=r"no fit\.json"):
        new().fit(*rows, checkpoint=folder)


def test_two_fits_do_not_share_a_folder(rows, tmp_path):
    with checkpoints.locked(checkpoints.made(tmp_path / "c")), pytest.raises(CheckpointError, match="Another fit"):
        new().fit(*rows, checkpoint=tmp_path / "c")


@pytest.mark.parametrize("every", [0, -1, 2.5, True, "10"])
def test_every_is_a_number_of_iterations(every, rows, tmp_path):
    with pytest.raises(ValueError, match="whole number of iterations"):
        new().fit(*rows, checkpoint=tmp_path / "c", every=every)
    assert not (tmp_path / "c").exists()


def test_what_makes_no_sense_is_refused(rows, tmp_path):
    with pytest.raises(ValueError, match="name its folder"):
        new().fit(*rows, every=10)
    with pytest.raises(ValueError, match="warm_start=False"):
        new(warm_start=True).fit(*rows).fit(*rows, checkpoint=tmp_path / "c")
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="found a file"):
        new().fit(*rows, checkpoint=tmp_path / "file")
    with pytest.raises(FileNotFoundError, match="make it first"):
        new().fit(*rows, checkpoint=tmp_path / "no" / "such")


def test_a_place_without_room_is_refused_before_training(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(atomic, "_free_bytes", lambda folder: 1000)
    with pytest.raises(OSError, match="MB needed"):
        new().fit(*rows, checkpoint=tmp_path / "c")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_place_that_cannot_be_written_is_refused_before_training(rows, tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c").chmod(0o500)
    with pytest.raises(PermissionError, match="Cannot write"):
        new().fit(*rows, checkpoint=tmp_path / "c")


def test_a_disk_that_fills_up_is_said_and_costs_no_fit(rows, tmp_path, monkeypatch):
    calls, real = [], checkpoints.saving.save

    def save(estimator, path):
        calls.append(path)
        if len(calls) in (2, 3):
            raise OSError(28, "No space left on device", str(path))
        real(estimator, path)

    monkeypatch.setattr(checkpoints.saving, "save", save)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        clf = new().fit(*rows, checkpoint=tmp_path / "c", every=10)
    messages = [str(w.message) for w in said if w.category is RuntimeWarning]
    assert all(f"after iteration {n}: " in m and "No space left" in m for n, m in zip((20, 30), messages, strict=True))
    np.testing.assert_array_equal(clf.coef_, new().fit(*rows).coef_)
    assert files(tmp_path / "c")[-1] == f"step-{clf.n_iter_:012d}.safetensors"


def test_a_fit_without_steps_is_written_at_its_end(rows, tmp_path):
    small = AugmentReduceClassifier(random_state=0)
    first = small.fit(*rows, checkpoint=tmp_path / "c", every=1)
    assert len(files(tmp_path / "c")) == 2, "the prior, then the optimum"
    again = AugmentReduceClassifier(random_state=0).fit(*rows, checkpoint=tmp_path / "c")
    np.testing.assert_array_equal(first.coef_, again.coef_)
    assert again.temperature_ == first.temperature_


def test_by_default_ten_minutes_pass_between_two(rows, tmp_path, monkeypatch):
    written, now = [], [0.0]
    monkeypatch.setattr(checkpoints.time, "monotonic", lambda: now[0])

    def save(estimator, path):
        written.append(estimator._fitted.clock.iteration)

    monkeypatch.setattr(checkpoints.saving, "save", save)
    from augment_reduce.training import loop

    def step(problem, state, order, clock, **others):
        now[0] += 100.0
        return real(problem, state, order, clock, **others)

    real = loop.step
    monkeypatch.setattr(loop, "step", step)
    clf = new().fit(*rows, checkpoint=tmp_path / "c")
    assert written == [*range(6, clf.n_iter_ + 1, 6), *([clf.n_iter_] if clf.n_iter_ % 6 else [])] or written == [
        *range(6, clf.n_iter_ + 1, 6), clf.n_iter_
    ]  # fmt: skip

"""Interrupted fits over ranks resume from their checkpoints: on the same number of ranks, another, or one process."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from augment_reduce import AugmentReduceClassifier
from augment_reduce.local import crossed_shards
from augment_reduce.persistence import rank_files
from augment_reduce.training import loop
from augment_reduce.training.step import settle
from tests.helpers.rank_processes import run_on_ranks

K, N, D = 13, 150, 8
BASE = {"n_sampled_classes": 6, "batch_size": 32, "prior_variance": 1.0, "random_state": 0, "n_jobs": 1}
WAIT = 5  # first steps that wait for their own sums; by default 200
SETTINGS: dict[str, dict[str, Any]] = {
    "late": {"max_iter": 40, "dtype": "float64"},
    "late, drawn for each row": {"class_sampling": "uniform", "max_iter": 40},
    "late, amortised": {"local_step": "amortised", "max_iter": 40},
    "newton": {"model": "probit", "local_step": "newton", "sync": True, "max_iter": 40, "dtype": "float64"},
    "best so far": {"early_stopping": True, "optimizer": "adam", "sync": True, "max_iter": 40},
}
EVERY = 10


def rows(n_classes: int = K) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    X = generator.standard_normal((N, D))
    y = (2.0 * X @ generator.standard_normal((D, n_classes)) + generator.gumbel(size=(N, n_classes))).argmax(1)
    y[:n_classes] = np.arange(n_classes)
    return X, np.array([f"class {k:02d}" for k in y])


def fit(group: Any, settings: dict[str, Any], folder: Path | None = None, **how: Any) -> AugmentReduceClassifier:
    crossed_shards.EARLY = WAIT
    X, y = how.pop("rows", rows())
    clf = AugmentReduceClassifier(process_group=group, **BASE | settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", "the fit ended|not converged")
        return clf.fit(X, y, checkpoint=folder, every=None if folder is None else EVERY)


def numbers(clf: AugmentReduceClassifier) -> dict[str, Any]:
    """Weights and optimiser state of all classes, q, and the history without seconds."""
    fitted = clf._fitted
    whole = (lambda x: x) if fitted.partition is None else fitted.partition.whole
    found = {f"weight_state {i}": whole(x).numpy() for i, x in enumerate(fitted.parameters.weight_state)}
    found |= {"weight": whole(fitted.parameters.weight).numpy(), "bias": whole(fitted.parameters.bias).numpy()}
    found |= {f"local {name}": x.numpy() for name, x in fitted.local.items()}
    own = ("seconds", "floor_hits") if "amortised" in str(clf.local_step) else ("seconds",)  # of each rank alone
    found |= {name: column for name, column in clf.history_.items() if name not in own}
    return found | {"iterations": clf.n_iter_, "probability": clf.predict_proba(rows()[0][:9])}


class Stop(Exception):
    pass


def stopped(group: Any, settings: dict[str, Any], folder: Path) -> None:
    """A fit that raises an exception some steps after a checkpoint."""
    real, last = loop.step, settings["max_iter"] - 5

    def step(problem: Any, state: Any, order: Any, clock: Any, **others: Any) -> Any:
        if clock.iteration > last:
            raise Stop
        return real(problem, state, order, clock, **others)

    loop.step = step  # type: ignore[assignment]
    try:
        with pytest.raises(Stop):
            fit(group, settings, folder)
    finally:
        loop.step = real


# ---- the same number of ranks: bit for bit; another: up to rounding ----


def on_two(group: Any, place: Path) -> dict[str, dict[str, Any]]:
    """Each fit uninterrupted, and interrupted and resumed; a copy of the checkpoints is kept for other ranks."""
    found = {}
    for name, settings in SETTINGS.items():
        found[name] = numbers(fit(group, settings))
        stopped(group, settings, place / name)
        if dist.get_rank(group) == 0:
            shutil.copytree(place / name, place / f"{name}, stopped")
        again = numbers(fit(group, settings, place / name))
        assert again.keys() == found[name].keys()
        for what, values in found[name].items():
            assert np.array_equal(again[what], values, equal_nan=True), (name, what)
        ended = numbers(fit(group, settings, place / name))  # without training
        assert np.array_equal(ended["weight"], again["weight"])
        assert np.array_equal(ended["probability"], again["probability"])
    found["from one process"] = numbers(fit(group, SETTINGS["newton"], place / "one process"))
    return found


SAME_ON_OTHERS = [name for name in SETTINGS if "amortised" not in name]  # the floor is of each rank's part of a sum


def go_on(group: Any, place: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for name in SAME_ON_OTHERS:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            loaded = at_load(group, SETTINGS[name], place / f"{name}, stopped")
            found[name] = numbers(fit(group, SETTINGS[name], place / f"{name}, stopped")) | {"loaded": loaded}
    return found


def at_load(group: Any, settings: dict[str, Any], folder: Path) -> np.ndarray:
    """The weights from which a fit resumes, after the gradient of the late step is applied."""
    real, found = loop.step, []

    def step(problem: Any, state: Any, order: Any, clock: Any, **others: Any) -> Any:
        state.clock = clock
        settle(problem, state)
        weight = state.parameters.weight.clone()
        found.append(weight if problem.partition is None else problem.partition.whole(weight))
        raise Stop

    loop.step = step  # type: ignore[assignment]
    try:
        with pytest.raises(Stop):
            fit(group, settings, folder)
    finally:
        loop.step = real
    return found[0].numpy()


def test_a_stopped_fit_goes_on_wherever_it_is_started_again(tmp_path):
    place = tmp_path / "checkpoints"
    place.mkdir()
    stopped(None, SETTINGS["newton"], place / "one process")
    expected = run_on_ranks(on_two, 2, tmp_path, place, limit=300)[0]
    for folder in place.iterdir():
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert not any(path.read_bytes()[:2] in (b"PK", b"\x80\x04", b"\x80\x05") for path in files), "no pickle"
        assert {path.suffix for path in files} <= {".json", ".safetensors", ""}
        assert len([path for path in folder.iterdir() if path.name.startswith("step-")]) == 2
    one = place / "late, stopped" / "step-000000000030"
    assert json.loads((one / "manifest.json").read_text())["tensors"]["late.rows"][0] == "torch.int64"
    sizes = [path.stat().st_size for path in one.glob("shard-*")]
    assert len(sizes) == 2
    one = AugmentReduceClassifier.load(place / "newton" / "step-000000000040")  # a model, like the file of one process
    np.testing.assert_allclose(one.predict_proba(rows()[0][:9]), expected["newton"]["probability"], atol=1e-12)
    for name in SAME_ON_OTHERS:
        shutil.copytree(place / f"{name}, stopped", place / "alone" / f"{name}, stopped")
    found = run_on_ranks(go_on, 3, tmp_path, place, limit=300)
    alone = go_on(None, place / "alone")
    for name in SAME_ON_OTHERS:
        late, rounding = name.startswith("late"), 1e-9 if "float64" in SETTINGS[name].values() else 2e-5
        for of_rank in found if late else (*found, alone):  # one process has no late steps
            for what in ("weight", "bias", "probability"):
                np.testing.assert_allclose(
                    of_rank[name][what], expected[name][what], rtol=0, atol=rounding, err_msg=f"{name}, {what}"
                )
        np.testing.assert_allclose(alone[name]["loaded"], found[0][name]["loaded"], rtol=0, atol=rounding, err_msg=name)
        assert alone[name]["iterations"] == expected[name]["iterations"]
    np.testing.assert_allclose(expected["from one process"]["weight"], expected["newton"]["weight"], atol=1e-9)


# ---- refused and skipped checkpoints ----


def other_calls(group: Any, place: Path) -> dict[str, str]:
    """The error or warning of each call on this rank; the process group remains usable after each."""
    settings, (X, y), rank = SETTINGS["newton"], rows(), dist.get_rank(group)
    stopped(group, settings, place / "c")
    if rank == 0:
        for name in ("cut", "lost", "changed", "hopeless", "folder"):
            shutil.copytree(place / "c", place / name)
            last, before = sorted(place.joinpath(name).glob("step-*"))[::-1]
            shard = last / "shard-00002-model-00001-of-00001.safetensors"
            data = shard.read_bytes()
            if name == "lost":
                shard.unlink()
            else:
                shard.write_bytes(data[:-9] if name != "changed" else data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
            if name == "hopeless":
                (before / "manifest.json").write_text("{")
        (place / "folder" / "fit.json").unlink()
    dist.barrier()
    calls = {
        **{name: lambda name=name: fit(group, settings, place / name) for name in ("cut", "lost", "changed")},
        "hopeless": lambda: fit(group, settings, place / "hopeless"),
        "folder": lambda: fit(group, settings, place / "folder"),
        "K": lambda: fit(group, settings, place / "c", rows=rows(K - 1)),
        "data": lambda: fit(group, settings, place / "c", rows=(X + 1.0, y)),
        "parameter": lambda: fit(group, settings | {"tol": 0.5}, place / "c"),
        "differ": lambda: fit(group, settings, place / ("c" if rank else "d")),
        "every": lambda: classifier_of(group, settings).fit(X, y, checkpoint=place / "c", every=0),
        "no folder": lambda: fit(group, settings, place / "no" / "c"),
    }
    return {name: said(call) for name, call in calls.items()}


def classifier_of(group: Any, settings: dict[str, Any]) -> AugmentReduceClassifier:
    return AugmentReduceClassifier(process_group=group, **BASE | settings)


def said(call: Any) -> str:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            call()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return next((str(w.message) for w in found if "checkpoint" in str(w.message)), "nothing")


EXPECTED = {
    "cut": "Going on from the checkpoint of iteration 20: the last one cannot be read.",
    "lost": "has lost its file shard-00002",
    "changed": "is damaged: its checksum is another",
    "hopeless": "None of the 2 checkpoints",
    "folder": "has checkpoints but no fit.json",
    "K": "classes 13, now 12",
    "data": "other features, labels or weights",
    "parameter": "tol 0.0001, now 0.5",
    "differ": "checkpoint: ",
    "every": "whole number of iterations",
    "no folder": "make it first",
}


def test_damage_and_other_fits_are_told_on_every_rank(tmp_path):
    found = run_on_ranks(other_calls, 2, tmp_path, tmp_path, limit=200)
    for name, words in EXPECTED.items():
        for rank in range(2):
            assert words in found[rank][name], (rank, name, found[rank][name])


def full_disk(group: Any, place: Path) -> tuple[dict[str, Any], dict[str, Any], list[str], list[str]]:
    """Rank 1 cannot write the second and the third checkpoint."""
    real, calls = rank_files._digests, []

    def digests(ranks: Any, folder: Path) -> dict[str, str]:
        calls.append(folder)
        if len(calls) in (2, 3) and ranks.rank == 1:
            raise OSError(28, "No space left on device", str(folder))
        return real(ranks, folder)

    whole = numbers(fit(group, SETTINGS["newton"]))
    rank_files._digests = digests
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        clf = fit(group, SETTINGS["newton"], place / "c")
    messages = [str(w.message) for w in found if "No checkpoint" in str(w.message)]
    return whole, numbers(clf), messages, sorted(path.name for path in (place / "c").iterdir())


def test_a_rank_whose_disk_is_full_costs_no_fit(tmp_path):
    for whole, found, messages, files in run_on_ranks(full_disk, 2, tmp_path, tmp_path, limit=120):
        assert np.array_equal(whole["weight"], found["weight"])
        assert all(
            f"after iteration {n}: " in message and "No space left" in message
            for n, message in zip((20, 30), messages, strict=True)
        )
        assert files == ["fit.json", "lock", "step-000000000010", "step-000000000040"]

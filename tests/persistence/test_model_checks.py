"""A model file that says something impossible is refused, and the entry is named; whoever made its checksum."""

import json
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from safetensors.torch import save_file as save_with_safetensors

from augment_reduce import Adam, AugmentReduceClassifier, ModelFileError, Newton, StepSize
from augment_reduce.persistence.files import FORMAT, fingerprint, load_model, pack_names, unpack_names
from augment_reduce.persistence.tensor_file import TensorFileError, read_file, save_file
from augment_reduce.support.layout import Entry, LayoutError, check
from tests.fuzz.models import D, K, N, valid_models
from tests.helpers.user_noises import Laplace

OLD = Path(__file__).parent / "old_models"


@pytest.fixture(scope="module")
def models():
    return valid_models()


@pytest.fixture
def signed(models, tmp_path):
    """A file of one of the valid models, changed, with a right checksum."""

    def write(change, model="plain"):
        models[model].save(tmp_path / "valid")
        description, tensors = load_model(tmp_path / "valid")
        change(description, tensors)
        text = json.dumps(description, sort_keys=True)
        header = {"format": FORMAT, "version": "1", "description": text, "sha256": fingerprint(text, tensors)}
        save_file(tensors, tmp_path / "m", header)
        return tmp_path / "m"

    return write


# ---- what is refused ----


def entry(name, value):
    return lambda description, tensors: description.update({name: value})


def parameter(name, value):
    return lambda description, tensors: description["parameters"].update({name: value})


def array(name, change):
    return lambda description, tensors: tensors.update({name: change(tensors[name])})


def number(name, at, value):
    def put(tensor):
        changed = tensor.clone()
        changed[at] = value
        return changed

    return array(name, put)


def without(name):
    return lambda description, tensors: (tensors if name in tensors else description).pop(name)


def deep(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


# (model, change, what the message must name)
REFUSED = {
    "more features than columns": ("plain", entry("n_features", 10**6), "n_features: expected 5, .* found 1000000"),
    "fewer features": ("plain", entry("n_features", D - 1), "n_features"),
    "features as text": ("plain", entry("n_features", "5"), "n_features"),
    "features as a bool": ("plain", entry("n_features", True), "n_features"),
    "no features": ("plain", without("n_features"), "n_features"),
    "foreign entry": ("plain", entry("device", "cuda"), "description: .*'device'"),
    "weight in one dimension": ("plain", array("weight", lambda w: w[:, 0].contiguous()), "weight"),
    "weight of one class": ("plain", array("weight", lambda w: w[:1].clone()), "weight"),
    "weight of whole numbers": ("plain", array("weight", torch.Tensor.long), "weight"),
    "weight of bools": ("plain", array("weight", torch.Tensor.bool), "weight"),
    "weight of another float": ("plain", array("weight", torch.Tensor.double), "bias: .*float64"),
    "weight transposed": ("plain", array("weight", lambda w: w.T.contiguous()), "n_features"),
    "weight of more classes": ("plain", array("weight", lambda w: torch.cat([w, w])), "bias: .*14"),
    "NaN among the weights": ("plain", number("weight", (2, 3), np.nan), r"weight: .*finite.* nan at \[2, 3\]"),
    "infinite bias": ("plain", number("bias", 4, np.inf), r"bias: .*inf at \[4\]"),
    "no bias": ("plain", without("bias"), "bias: .*none"),
    "biases in two dimensions": ("plain", array("bias", lambda b: b[:, None].clone()), "bias"),
    "an extra array": ("plain", lambda d, t: t.update(more=torch.zeros(2)), "more: expected no such array"),
    "an extra group": ("plain", lambda d, t: t.update({"more.so": torch.zeros(2)}), "more.so"),
    "state of another shape": ("plain", array("weight_state.0", lambda s: s[:, :2].clone()), "weight_state.0"),
    "state below zero": ("plain", number("weight_state.0", (0, 0), -1.0), "weight_state.0"),
    "state of a bias missing": ("cached", without("bias_state.1"), "weight_state"),
    "state of another number": ("cached", lambda d, t: t.update({"weight_state.7": t.pop("weight_state.1")}), "te.1"),
    "counts of other classes": ("plain", array("class_counts", lambda c: c[:3].clone()), "class_counts"),
    "counts below zero": ("plain", number("class_counts", 0, -1.0), "class_counts"),
    "counts that do not add up": ("plain", entry("rows_seen", N + 1), "class_counts: .*61"),
    "rows seen below zero": ("plain", entry("rows_seen", -1), "rows_seen"),
    "feature counts of float": ("plain", array("feature_counts", torch.Tensor.double), "feature_counts"),
    "more of a feature than rows": ("plain", number("feature_counts", 1, N + 1), "feature_counts"),
    "a short column": ("plain", array("history.bound", lambda h: h[1:].clone()), "history"),
    "no column": ("plain", without("history.seconds"), "history.seconds"),
    "NaN as an iteration": ("plain", number("history.iteration", 0, np.nan), "history.iteration"),
    "iterations to come": ("plain", number("history.iteration", 0, 1e9), "history.iteration"),
    "clock of four": ("plain", entry("clock", [1, 1, 1, 1]), "clock"),
    "clock below zero": ("plain", entry("clock", [-1, 0]), "clock"),
    "clock of floats": ("plain", entry("clock", [3.5, 0]), "clock"),
    "more epochs than steps": ("plain", entry("clock", [3, 9]), "clock"),
    "clock of 10**400": ("plain", entry("clock", [10**400, 1]), "clock"),
    "seed of 40 bits": ("plain", entry("seed", 2**40), "seed"),
    "seed as text": ("plain", entry("seed", "0"), "seed"),
    "infinite best": ("plain", entry("best_validation", 1e999), "description: .*Infinity"),
    "best as text": ("plain", entry("best_validation", "-1"), "best_validation"),
    "flag as a number": ("plain", entry("sparse", 1), "sparse"),
    "deep nesting": ("plain", entry("seed", deep(200)), "seed"),
    "best weights of another shape": ("pointed", array("best.weight", lambda w: w[:3].clone()), "best.weight"),
    "best weights without biases": ("pointed", without("best.bias"), "best.bias"),
    "names of fewer classes": ("cached", array("classes.values", lambda c: c[:3].clone()), "classes: expected 7"),
    "names twice": ("cached", number("classes.values", 0, 3.0), "classes: .*ascending"),
    "names not in order": ("cached", array("classes.values", lambda c: c.flip(0)), "classes: .*ascending"),
    "a NaN for a name": ("cached", number("classes.values", 6, np.nan), "classes"),
    "names of another type": ("cached", entry("classes_dtype", "<i8"), "classes.values"),
    "text as numbers": ("plain", entry("classes_dtype", "<i8"), "classes"),
    "wide text": ("cached", entry("classes_dtype", "<U999999999"), "classes.values"),
    "no numpy dtype": ("plain", entry("classes_dtype", "V1000000000"), "classes"),
    "an end that goes back": ("plain", number("classes.ends", 1, 3), "classes.ends"),
    "an end below zero": ("plain", number("classes.ends", 0, -5), "classes.ends"),
    "ends beyond the text": ("plain", number("classes.ends", -1, 10**6), "classes.ends"),
    "ends of float": ("plain", array("classes.ends", torch.Tensor.double), "classes.ends"),
    "names that are not UTF-8": ("plain", number("classes.text", 3, 255), "classes.text"),
    "text without ends": ("plain", without("classes.ends"), "classes.ends"),
    "fewer feature names": ("plain", lambda d, t: t.update(pack_names("features", np.array(["a"]))), "features: .* 5"),
    "names twice over": ("plain", lambda d, t: t.update({"classes.values": torch.arange(K)}), "classes"),
    "log eta in two dimensions": ("plain", array("local.log_eta", lambda s: s[:, None].clone()), "local.log_eta"),
    "fewer visits than rows": ("plain", array("local.visits", lambda s: s[1:].clone()), "local.visits"),
    "visits below zero": ("plain", number("local.visits", 0, -1), "local.visits"),
    "visits of int64": ("plain", array("local.visits", torch.Tensor.long), "local.visits"),
    "an infinite log eta": ("plain", number("local.log_eta", 5, np.inf), "local.log_eta"),
    "a precision of zero": ("cached", number("local.precision", 5, 0.0), "local.precision"),
    "local state of nobody": ("plain", lambda d, t: t.update({"local.x": torch.zeros(N)}), "local"),
    "slopes of other features": ("clusters", array("local.slope", lambda s: s[:, :2].clone()), "local.slope"),
    "a class that is not there": ("cached", number("sampler.remembered", (0, 0), K), "sampler.remembered"),
    "a class below zero": ("cached", number("sampler.remembered", (0, 0), -1), "sampler.remembered"),
    "a listed class that is not there": ("pointed", number("sampler.listed", (0, 0), K), "sampler.listed"),
    "lists of fewer features": ("pointed", array("sampler.counts", lambda c: c[:2].clone()), "sampler.counts"),
    "lists of no feature but counts": ("pointed", array("sampler.listed", lambda c: c[:0].clone()), "sampler.counts"),
    "a part without classes": ("clusters", array("sampler.part", torch.zeros_like), "sampler.part"),
    "a part that is not there": ("clusters", number("sampler.part", 0, 99), "sampler.part"),
    "parts of other features": ("clusters", array("sampler.weight", lambda w: w[:, :1].clone()), "sampler.weight"),
    "an unknown parameter": ("plain", parameter("learning_speed", 1.0), "parameters: .*'learning_speed'"),
    "a parameter beyond its range": ("plain", parameter("prior_variance", -1.0), "prior_variance"),
    "a parameter of another type": ("plain", parameter("max_iter", "many"), "max_iter"),
    "a list as a parameter": ("plain", parameter("optimizer", ["adam"]), "optimizer"),
    "an optimizer that is none": ("plain", parameter("optimizer", "sgd"), "optimizer"),
    "a number beyond 64 bits": ("plain", parameter("batch_size", 10**400), "batch_size"),
    "a tolerance that is text": ("plain", parameter("tol", "x"), "tol"),
    "a flag that is text": ("plain", parameter("early_stopping", "yes"), "early_stopping"),
    "a seed that is text": ("plain", parameter("random_state", "0"), "random_state"),
    "an unknown class": ("plain", parameter("optimizer", {"known": "Popen", "fields": {}}), "optimizer: .*'Popen'"),
    "a class that stands elsewhere": (
        "plain", parameter("optimizer", {"known": "UniformShared", "fields": {}}), "optimizer: .*'UniformShared'"
    ),
    "an unknown field": (
        "plain", parameter("optimizer", {"known": "Adam", "fields": {"shell": "ls"}}), "optimizer: .*shell"
    ),
    "a field of another type": (
        "plain", parameter("optimizer", {"known": "Adam", "fields": {"beta1": "x"}}), "optimizer: .*Adam.beta1"
    ),
    "a field beyond its range": (
        "plain", parameter("optimizer", {"known": "Adam", "fields": {"beta1": 2.0}}), "optimizer: .*beta1"
    ),
    "a billion nodes": (
        "plain", parameter("local_step", {"known": "Newton", "fields": {"n_nodes": 10**9}}), "local_step: .*n_nodes"
    ),
    "class weights that are none": ("plain", parameter("class_weight", {"pairs": [["a", -1.0]]}), "class_weight"),
    "class weights of lists": ("plain", parameter("class_weight", {"pairs": [[[], 1.0]]}), "class_weight"),
    "class weights not in pairs": ("plain", parameter("class_weight", {"pairs": [["a"]]}), "class_weight"),
}  # fmt: skip


@pytest.mark.parametrize("fault", REFUSED)
def test_what_cannot_be_is_refused_by_name(fault, signed):
    model, change, named = REFUSED[fault]
    path = signed(change, model)
    with pytest.raises(ModelFileError, match=named) as caught:
        AugmentReduceClassifier.load(path)
    assert str(path) in str(caught.value)


HEADERS = {
    "no header at all": lambda data: data[:5],
    "a header longer than the file": lambda data: (2**60).to_bytes(8, "little") + data[8:],
    "a header of no bytes": lambda data: bytes(8) + data[8:],
    "not UTF-8": lambda data: data[:40] + b"\xff" + data[41:],
    "not JSON": lambda data: data.replace(b'{"__metadata__"', b'["__metadata__"', 1),
    "deep": lambda data: (200_000).to_bytes(8, "little") + b"[" * 200_000,
    "an array twice": lambda data: data.replace(b'"bias"', b'"weight"', 1),
    "an unknown type": lambda data: data.replace(b'"F32"', b'"F3X"', 1),
    "holes": lambda data: data.replace(b'"data_offsets":[0,', b'"data_offsets":[8,', 1),
    "more than its arrays": lambda data: data + b"\0",
}


@pytest.mark.parametrize("fault", HEADERS)
def test_a_damaged_header_is_refused(fault, models, tmp_path):
    models["plain"].save(tmp_path / "m")
    (tmp_path / "m").write_bytes(HEADERS[fault]((tmp_path / "m").read_bytes()))
    with pytest.raises(ModelFileError, match="not a whole model file"):
        AugmentReduceClassifier.load(tmp_path / "m")


def test_a_description_that_says_a_thing_twice_is_refused(models, tmp_path):
    models["plain"].save(tmp_path / "valid")
    description, tensors = load_model(tmp_path / "valid")
    text = json.dumps(description).replace('"seed"', '"seed": 1, "seed"', 1)
    header = {"format": FORMAT, "version": "1", "description": text, "sha256": fingerprint(text, tensors)}
    save_file(tensors, tmp_path / "m", header)
    with pytest.raises(ModelFileError, match="'seed' occurs twice"):
        AugmentReduceClassifier.load(tmp_path / "m")


# ---- what is not taken from a file ----


def test_threads_and_device_come_from_the_loader(models, signed):
    def foreign(description, tensors):
        description["parameters"] |= {"n_jobs": 10**6, "device": "cuda"}

    path = signed(foreign)
    loaded = AugmentReduceClassifier.load(path)
    assert (loaded.n_jobs, loaded.device) == (None, "auto")
    chosen = AugmentReduceClassifier.load(path, n_jobs=1, device="cpu", verbose=2)
    assert (chosen.n_jobs, chosen.device, chosen.verbose) == (1, "cpu", 2)
    with pytest.raises(TypeError, match="'threads' is no parameter"):
        AugmentReduceClassifier.load(path, threads=1)


def test_what_belongs_to_the_machine_is_not_written(models, tmp_path):
    models["plain"].save(tmp_path / "m")
    description, _ = load_model(tmp_path / "m")
    assert "n_jobs" not in description["parameters"]
    assert "device" not in description["parameters"]


# ---- what still works ----

DATA = np.random.default_rng(0)
NAMED_X = DATA.normal(size=(40, 3)).astype(np.float32)
DATA.normal(size=(3, 4))  # what the labels of these files were made with
SPARSE_X = sp.csr_matrix((DATA.random((60, 12)) < 0.3).astype(np.float32))
EXPECTED = {
    "named": [[0.287617, 0.070652, 0.067565, 0.574166], [0.246334, 0.143424, 0.235438, 0.374804]],
    "pointed": [[0.066491, 0.077773, 0.133557], [0.114754, 0.122634, 0.031808]],
    "cached": [[0.133804, 0.126978, 0.154647], [0.136344, 0.122152, 0.156062]],
    "clustered": [[0.086481, 0.090053, 0.145304], [0.081944, 0.117439, 0.148887]],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_files_of_the_first_release_are_read_and_go_on(name):
    model = AugmentReduceClassifier.load(OLD / f"{name}.safetensors")
    X = NAMED_X if name == "named" else SPARSE_X
    if name == "named":
        assert model.feature_names_in_.tolist() == ["a", "b", "ç"]
        assert model.class_weight == {"ant": 2.0, "bee": 1.0, "cat": 1.0, "dög": 1.5}
        del model.feature_names_in_
    found = model.predict_proba(X[:2])[:, : len(EXPECTED[name][0])]
    np.testing.assert_allclose(found, EXPECTED[name], atol=2e-6)
    before = model.n_iter_
    y = model.classes_[np.arange(X.shape[0]) % len(model.classes_)]
    model.set_params(warm_start=True, max_iter=2, n_jobs=1).fit(X, y)
    assert before < model.n_iter_ <= before + 2  # one had early stopping


@pytest.mark.parametrize("model", ["plain", "pointed", "cached", "clusters", "section 4", "stream"])
def test_everything_comes_back_and_is_written_the_same_again(model, models, tmp_path):
    models[model].save(tmp_path / "one")
    loaded = AugmentReduceClassifier.load(tmp_path / "one")
    loaded.save(tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert loaded.classes_.dtype == models[model].classes_.dtype
    assert type(loaded.coef_) is type(models[model].coef_)


def test_a_noise_of_ones_own_is_given_again(tmp_path):
    X = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    y = np.arange(40) % 3
    clf = AugmentReduceClassifier(Laplace(), max_iter=3, n_jobs=1, local_step=Newton(StepSize(1.0, 0.7))).fit(X, y)
    clf.save(tmp_path / "m")
    with pytest.raises(ModelFileError, match=r"load\(path, model=\.\.\.\)"):
        AugmentReduceClassifier.load(tmp_path / "m")
    back = AugmentReduceClassifier.load(tmp_path / "m", model=Laplace(), n_jobs=1)
    assert np.array_equal(back.predict_proba(X), clf.predict_proba(X))
    assert back.local_step == Newton(StepSize(1.0, 0.7))


@pytest.mark.parametrize("dtype", [np.float32, torch.float64, "float64"])
def test_a_dtype_given_as_an_object_is_kept_by_name(dtype, tmp_path):
    X = np.random.default_rng(0).normal(size=(20, 3))
    clf = AugmentReduceClassifier(max_iter=2, dtype=dtype, n_jobs=1).fit(X, np.arange(20) % 2)
    clf.save(tmp_path / "m")
    back = AugmentReduceClassifier.load(tmp_path / "m")
    assert back.dtype in ("float32", "float64")
    assert back.dtype in str(dtype)
    assert back.coef_.dtype == clf.coef_.dtype


@pytest.mark.parametrize(
    "names", [np.array([3, 9], ">i4"), np.array([2**63, 2**63 + 5], np.uint64), np.array([0.5, 2], np.float16)]
)
def test_class_names_of_rare_types(names):
    back = unpack_names("n", pack_names("n", names), names.dtype.str)
    assert back.dtype == names.dtype
    assert back.tolist() == names.tolist()


def test_the_weights_of_a_model_that_diverged_are_not_written(models, tmp_path):
    X = np.random.default_rng(0).normal(size=(20, 3))
    clf = AugmentReduceClassifier(max_iter=2, n_jobs=1).fit(X, np.arange(20) % 3)
    clf._fitted.parameters.weight[1, 2] = np.nan
    with pytest.raises(ValueError, match=r"cannot be saved: weight: .* nan at \[1, 2\].*diverged"):
        clf.save(tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_a_parameter_that_cannot_be_loaded_is_not_written(models, tmp_path):
    X = np.random.default_rng(0).normal(size=(20, 3))
    clf = AugmentReduceClassifier(max_iter=2, n_jobs=1).fit(X, np.arange(20) % 3)
    with pytest.raises(ValueError, match=r"cannot be saved: Expected max_iter.*change it back"):
        clf.set_params(max_iter=-1).save(tmp_path / "m")


def test_an_optimizer_that_was_exchanged_is_no_reason_to_refuse(models, tmp_path):
    X = np.random.default_rng(0).normal(size=(20, 3))
    clf = AugmentReduceClassifier(max_iter=2, warm_start=True, n_jobs=1).fit(X, np.arange(20) % 3)
    clf.set_params(optimizer=Adam()).save(tmp_path / "m")
    loaded = AugmentReduceClassifier.load(tmp_path / "m")
    assert np.array_equal(loaded.coef_, clf.coef_)
    with pytest.raises(ValueError, match="cannot go on"):
        loaded.fit(X, np.arange(20) % 3)


# ---- the format ----


def test_the_safetensors_package_reads_what_we_write_and_we_what_it_writes(tmp_path):
    arrays = {
        "b": torch.arange(5, dtype=torch.uint8), "a": torch.randn(3, 4), "empty": torch.zeros(0, 7),
        "half": torch.randn(3).half(), "flags": torch.tensor([True, False]), "one": torch.tensor(2.5),
        "whole": torch.arange(6).reshape(2, 3), "double": torch.randn(2).double(), "brain": torch.randn(3).bfloat16(),
    }  # fmt: skip
    save_file(arrays, tmp_path / "ours", {"key": "wért"})
    theirs = load_file(tmp_path / "ours")
    with safe_open(tmp_path / "ours", framework="pt") as file:
        assert file.metadata() == {"key": "wért"}
    save_with_safetensors(arrays, tmp_path / "theirs", {"key": "wért"})
    metadata, ours = read_file(tmp_path / "theirs")
    assert metadata == {"key": "wért"}
    assert theirs.keys() == ours.keys() == arrays.keys()
    for name, array_ in arrays.items():
        assert torch.equal(theirs[name], array_), name
        assert torch.equal(ours[name], array_), name
        assert ours[name].dtype == array_.dtype


def test_bytes_that_are_no_bools_are_refused(tmp_path):
    save_file({"a": torch.tensor([True])}, tmp_path / "m", {})
    data = bytearray((tmp_path / "m").read_bytes())
    data[-1] = 7
    (tmp_path / "m").write_bytes(data)
    with pytest.raises(TensorFileError, match="other bytes than 0 and 1"):
        read_file(tmp_path / "m")


def test_a_description_that_no_reader_would_take_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr("augment_reduce.persistence.tensor_file.LARGEST_HEADER", 200)
    with pytest.raises(ValueError, match="at most 200 bytes"):
        save_file({"a": torch.zeros(1)}, tmp_path / "m", {"key": "x" * 300})


def test_layouts_bind_sizes_by_name():
    layout = {"a": Entry("weights", ("N", "D?x")), "b": Entry("int32", ("N",), 0, "D")}
    sizes = {"D": 3}
    check({"a": torch.zeros(2, 0), "b": torch.tensor([0, 2], dtype=torch.int32)}, layout, sizes, torch.float32)
    assert sizes["N"] == 2
    for a, b in ((torch.zeros(2, 4), [0, 2]), (torch.zeros(1, 3), [0, 2]), (torch.zeros(2, 3), [0, 3])):
        with pytest.raises(LayoutError):
            check({"a": a, "b": torch.tensor(b, dtype=torch.int32)}, layout, {"D": 3}, torch.float32)


@pytest.mark.parametrize("place", ["", ".", "no folder/m", "m" * 256, "pipe"])
def test_a_place_that_cannot_be_is_refused_before_any_work(place, models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pipe").symlink_to("/dev/null")
    monkeypatch.setattr("augment_reduce.persistence.saving.contents", None)
    with pytest.raises((OSError, ValueError), match=r"empty|folder|too long|device"):
        models["plain"].save(place)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]

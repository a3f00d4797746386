"""A model file is whole or refused; training that went through a file is training that did not."""

import json
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from augment_reduce import Adagrad, AugmentReduceClassifier, FrequencyShared, ModelFileError, Newton, StepSize
from augment_reduce.persistence.files import FORMAT_VERSION, load_model, pack_names, save_model, unpack_names
from tests.helpers.user_noises import Laplace


def rows(seed=0, n=120, classes=("ant", "bee", "cat", "dög")):
    generator = np.random.default_rng(seed)
    X = generator.normal(size=(n, 3)).astype(np.float32)
    y = np.array(classes)[(X @ generator.normal(size=(3, len(classes)))).argmax(1)]
    return X, y


def small(**parameters):
    settings = {"max_iter": 25, "batch_size": 16, "n_sampled_classes": 2, "random_state": 3, **parameters}
    return AugmentReduceClassifier(**settings)


@pytest.mark.parametrize("model", ["softmax", "probit"])
@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_save_load_continue_is_bit_equal_to_no_interruption(model, optimizer, tmp_path):
    X, y = rows()
    whole = small(model=model, optimizer=optimizer, max_iter=50, prior_variance=2.0).fit(X, y)
    half = small(model=model, optimizer=optimizer, prior_variance=2.0, warm_start=True).fit(X, y)
    half.save(tmp_path / "half.safetensors")
    resumed = AugmentReduceClassifier.load(tmp_path / "half.safetensors").fit(X, y)
    assert resumed.n_iter_ == 50
    assert np.array_equal(resumed.coef_, whole.coef_)
    assert np.array_equal(resumed.intercept_, whole.intercept_)
    for name, value in whole._fitted.local.items():
        assert torch.equal(resumed._fitted.local[name], value)


def test_everything_comes_back(tmp_path):
    X, y = rows()
    import scipy.sparse as sp

    clf = small(
        class_sampling=FrequencyShared(power=0.5, uniform_share=0.2), optimizer=Adagrad(learning_rate=0.05),
        class_weight={"ant": 2.0, "bee": 1.0, "cat": 1.0, "dög": 1.0}, prior_variance=np.float32(3.0),
    ).fit(sp.csr_matrix(X), y)  # fmt: skip
    clf.save(tmp_path / "m")
    back = AugmentReduceClassifier.load(tmp_path / "m")
    assert list(back.classes_) == ["ant", "bee", "cat", "dög"]
    assert back.optimizer == Adagrad(learning_rate=0.05)
    assert (back.class_sampling.power, back.class_sampling.uniform_share) == (0.5, 0.2)
    assert back.class_weight == clf.class_weight
    assert back.history_.keys() == clf.history_.keys()
    assert np.array_equal(back.history_["bound"], clf.history_["bound"])
    assert np.array_equal(back.predict_proba(X), clf.predict_proba(X))


def test_feature_names_are_kept(tmp_path):
    pd = pytest.importorskip("pandas", reason="column names come from pandas")
    X, y = rows()
    clf = small().fit(pd.DataFrame(X, columns=["a", "b", "ç"]), y)
    clf.save(tmp_path / "m")
    assert list(AugmentReduceClassifier.load(tmp_path / "m").feature_names_in_) == ["a", "b", "ç"]


@pytest.mark.parametrize(
    "names",
    [
        np.array([3, 5, 9]), np.array([0.5, 1.5]), np.array([False, True]), np.array(["x", "", "日本"]),
        np.array(["a", "b"], dtype=object), np.array([1, 2], dtype=np.uint16),
    ],
    ids=lambda a: a.dtype.str,
)  # fmt: skip
def test_class_names_of_any_type_survive(names):
    back = unpack_names("n", pack_names("n", names), names.dtype.str)
    assert back.dtype == names.dtype
    assert back.tolist() == names.tolist()


def test_own_noise_is_given_again(tmp_path):
    X, y = rows()
    clf = small(model=Laplace(), local_step=Newton(StepSize(1.0, 0.7))).fit(X, y)
    clf.save(tmp_path / "m")
    with pytest.raises(ModelFileError, match=r"load\(path, model=\.\.\.\)"):
        AugmentReduceClassifier.load(tmp_path / "m")
    back = AugmentReduceClassifier.load(tmp_path / "m", model=Laplace())
    assert np.array_equal(back.predict_proba(X), clf.predict_proba(X))
    assert back.local_step == Newton(StepSize(1.0, 0.7))


def saved(tmp_path):
    X, y = rows()
    clf = small().fit(X, y)
    clf.save(tmp_path / "m")
    return tmp_path / "m"


@pytest.mark.parametrize("kept", [0, 7, 100, -1])
def test_a_truncated_file_is_refused(kept, tmp_path):
    path = saved(tmp_path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ModelFileError, match="not a whole model file"):
        AugmentReduceClassifier.load(path)


def test_a_changed_byte_is_refused(tmp_path):
    path = saved(tmp_path)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match="checksum"):
        AugmentReduceClassifier.load(path)


def test_a_hand_edited_description_is_refused(tmp_path):
    from safetensors import safe_open

    path = saved(tmp_path)
    with safe_open(path, framework="pt") as file:
        header = file.metadata()
    description = json.loads(header["description"])
    description["parameters"]["model"] = "probit"
    save_file(load_file(path), path, metadata={**header, "description": json.dumps(description)})
    with pytest.raises(ModelFileError, match="changed after it was saved"):
        AugmentReduceClassifier.load(path)


def test_another_version_or_another_kind_of_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("augment_reduce.persistence.files.FORMAT_VERSION", FORMAT_VERSION + 1)
    save_model(tmp_path / "new", {"a": 1}, {"w": torch.zeros(2)})
    monkeypatch.undo()
    with pytest.raises(ModelFileError, match=f"version '{FORMAT_VERSION + 1}'"):
        load_model(tmp_path / "new")
    save_file({"w": torch.zeros(2)}, tmp_path / "other")
    with pytest.raises(ModelFileError, match="not one of augment-reduce"):
        load_model(tmp_path / "other")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_model(tmp_path / "nowhere")


def test_a_kill_in_the_middle_of_a_save_leaves_the_old_file_whole(tmp_path):
    """The process dies (os._exit) after half of the new bytes are written; the old model still loads."""
    path = tmp_path / "model"
    save_model(path, {"which": "old"}, {"w": torch.zeros(1000)})
    script = textwrap.dedent(
        f"""
        import os, torch
        import augment_reduce.persistence.files as files
        def half(tensors, path, metadata):
            open(path, "wb").write(b"x" * 500)
            os._exit(9)
        files.save_file = half
        files.save_model({str(path)!r}, {{"which": "new"}}, {{"w": torch.ones(1000)}})
        """
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 9
    description, tensors = load_model(path)
    assert description == {"which": "old"}
    assert tensors["w"].sum() == 0


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere to write model"):
        save_model(tmp_path / "nowhere" / "model", {}, {"w": torch.zeros(1)})


def test_a_failing_save_leaves_nothing_behind(tmp_path, monkeypatch):
    def full_disk(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("augment_reduce.persistence.files.save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save_model(tmp_path / "model", {}, {"w": torch.zeros(1)})
    assert os.listdir(tmp_path) == []

"""Model files whose entries are changed one by one and whose checksum is then made anew, as anybody can."""

from __future__ import annotations

import copy
import functools
import json
import math
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch

from augment_reduce import (
    Adam,
    AugmentReduceClassifier,
    FeatureCandidates,
    ModelFileError,
    Reparameterised,
    SectionFour,
    StepSize,
)
from augment_reduce.persistence.files import FORMAT, FORMAT_VERSION, fingerprint, load_model
from augment_reduce.persistence.tensor_file import DTYPES, save_file

from .cases import Fuzzer, expect, mutated_bytes

N, D, K = 60, 5, 7
DEEP: Any = []
for _ in range(300):
    DEEP = [DEEP]
VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 7, 255, 10**6, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 10**400, -(10**400),
    0.0, -0.0, 0.5, 1.5, 1e-320, 1e308, -1e308, "", "x", "auto", "all", "adam", "softmax", "logistic", "exact", "paper",
    "frequency", "uniform", "newton", "<U1", "<U999999999", "|O", "<f8", "|b1", "inf", [], [0], [1, 2, 3], {}, {"a": 1},
    {"object": "x"}, {"object": 3}, {"number": "inf"}, {"number": "nan"}, {"number": "1"}, {"pairs": [[1, 2]]},
    {"pairs": [[[], 2]]}, {"pairs": 3}, {"known": "Adam", "fields": {}}, {"known": "Newton", "fields": {"n_nodes": 9}},
    {"known": "Newton", "fields": {"n_nodes": 10**9}}, {"known": "StepSize", "fields": {"scale": "x"}},
    {"known": "os.system", "fields": {}}, {"known": [], "fields": []}, {"known": "Gumbel", "fields": {"a": 1}},
    {"known": "FrequencyPerRow", "fields": {}}, {"known": "FeatureCandidates", "fields": {"n_own": 10**12}}, DEEP,
)  # fmt: skip
TEXTS = [json.dumps(value) for value in VALUES]  # made anew each time: what stands in a description is changed
ODD = (0.0, -0.0, 1.0, -1.0, 0.5, math.nan, math.inf, -math.inf, 1e30, -1e30, 1e-45, 2.0**31, 2.0**53, K, K - 1, D, N)


@functools.cache
def valid_models() -> dict[str, AugmentReduceClassifier]:
    """Small models that between them have everything that a file can hold."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(N, D)).astype(np.float32)
    rows = sp.csr_matrix(np.where(X > 0.4, X, 0.0).astype(np.float32))
    y = np.arange(N) % K
    names = np.array([f"class {k} ä" for k in range(K)])
    quick: dict[str, Any] = {"max_iter": 6, "batch_size": 16, "random_state": 3, "n_jobs": 1}
    own = {"n_sampled_classes": 4, "warm_start": True, **quick}
    plain = AugmentReduceClassifier(class_weight={str(name): 1.5 for name in names}, **quick).fit(X, names[y])
    plain.feature_names_in_ = np.array([f"x{d}" for d in range(D)], dtype=object)
    pointed = AugmentReduceClassifier(
        class_sampling=FeatureCandidates(2, 3), early_stopping=True, optimizer=Adam(), **own
    ).fit(rows, y)
    run = pointed._fitted.run
    run.best, run.best_parameters = -1.5, (pointed._fitted.parameters.weight.clone(), torch.zeros(K))
    cached = {"class_sampling": "cache-shared", "local_step": "newton", "model": "probit", "dtype": "float64"}
    clusters = {"class_sampling": "conditional", "local_step": "amortised", "model": "logistic"}
    return {
        "plain": plain,
        "pointed": pointed,
        "cached": AugmentReduceClassifier(optimizer="adam", **cached, **own).fit(X, y * 1.0),
        "clusters": AugmentReduceClassifier(optimizer="rowwise-adagrad", **clusters, **own).fit(X, names[y]).sparsify(),
        "section 4": AugmentReduceClassifier(
            model="logistic", local_step=Reparameterised(StepSize(0.05, 0.5)), class_sampling="uniform",
            optimizer=SectionFour(every_entry=True), prior_variance=2.0, **own,
        ).fit(rows, y),
        "stream": AugmentReduceClassifier(class_sampling="frequency", **own).partial_fit(X, names[y], classes=names),
    }  # fmt: skip


class ModelFuzzer(Fuzzer):
    """Every outcome is a ModelFileError that names the file, or a model that predicts and can go on."""

    name = "model"
    suffix = ".safetensors"

    def prepare(self) -> None:
        self.valid = []
        for name, model in valid_models().items():
            path = self.folder / f"{name}{self.suffix}"
            model.save(path)
            self.valid.append((path.read_bytes(), *load_model(path)))
        rng = np.random.default_rng(1)
        self.X = rng.normal(size=(N, D)).astype(np.float32)
        self.rows = sp.csr_matrix(np.where(self.X > 0.4, self.X, 0.0).astype(np.float32))

    def write(self, rng: random.Random) -> Path:
        whole, description, tensors = rng.choice(self.valid)
        path = self.path()
        if rng.random() < 0.05:  # damage, which the checksum finds
            path.write_bytes(mutated_bytes(rng, whole, 2))
            return path
        description, tensors = copy.deepcopy(description), dict(tensors)
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            if rng.random() < 0.4:
                change_description(rng, description)
            else:
                change_tensors(rng, tensors)
        self.sign(rng, path, description, tensors)
        return path

    def sign(self, rng: random.Random, path: Path, description: Any, tensors: dict[str, torch.Tensor]) -> None:
        """Write the file with a right checksum; now and then with something odd about its header."""
        text = json.dumps(description, sort_keys=True)
        if rng.random() < 0.05:
            text = rng.choice((text[:-1], "[]", "3", "NaN", text.replace("{", "{" + '"seed": 1, ', 1), "[" * 10**5))
        header = {"format": FORMAT, "version": str(FORMAT_VERSION), "description": text}
        header["sha256"] = fingerprint(text, tensors)
        save_file(tensors, path, header)
        if rng.random() < 0.05:
            data = bytearray(path.read_bytes())
            data[:8] = rng.choice((0, 1, 2**62, len(data))).to_bytes(8, "little")
            path.write_bytes(data)

    def check(self, path: Path) -> bool:
        try:
            model = AugmentReduceClassifier.load(path)
        except ModelFileError as error:
            expect(str(path) in str(error), error)
            return False
        assert model.n_features_in_ == D
        assert model.n_jobs is None
        assert model.device == "auto"
        if hasattr(model, "feature_names_in_"):
            assert len(model.feature_names_in_) == D
            del model.feature_names_in_  # rows here have no names
        self.predict(model)
        self.go_on(model)
        return True

    def predict(self, model: AugmentReduceClassifier) -> None:
        """The probabilities of all classes, best first."""
        X = self.X[:2]
        scores = self.scores(model, X)
        if scores is None:
            return
        best, probabilities = model.predict_topk(X, len(model.classes_))
        assert np.array_equal(np.sort(best, axis=1), np.tile(model.classes_, (len(X), 1)))
        assert np.isfinite(probabilities).all()
        assert (np.diff(probabilities, axis=1) <= 1e-9).all()
        assert (probabilities >= 0.0).all()
        if np.abs(scores).max() < 1e9:  # beyond that quadrature finds no place to look
            np.testing.assert_allclose(probabilities.sum(axis=1), 1.0, atol=1e-6)

    def scores(self, model: AugmentReduceClassifier, X: np.ndarray) -> np.ndarray | None:
        """Finite, or refused where weights are so large that they cannot be."""
        try:
            scores = model.decision_function(X)
        except ValueError as error:
            largest = max(abs(model.coef_).max(), abs(model.intercept_).max())
            expect("Expected finite scores" in str(error) and largest > 1e15, error)
            return None
        assert np.isfinite(scores).all()
        return scores

    def go_on(self, model: AugmentReduceClassifier) -> None:
        """One more step, as the file says. Settings that make no sense for these rows are refused in a sentence."""
        y = model.classes_[np.arange(N) % len(model.classes_)]
        model.set_params(warm_start=True, max_iter=1, max_epochs=None, verbose=0, n_jobs=1)
        X: Any = self.rows if "listed" in model._fitted.sampler else self.X
        try:
            with np.errstate(over="ignore"), warnings.catch_warnings():  # a learning rate beyond float32: they diverge
                if model._fitted.torn:
                    warnings.filterwarnings("ignore", "Going on: an exception ended a fit", RuntimeWarning)
                model.fit(X, y)
        except (ValueError, FloatingPointError, MemoryError) as error:
            expect(str(error).endswith((".", ".)", "are not in class_weight")), error)
            return
        self.scores(model, self.X)


def change_description(rng: random.Random, description: dict[str, Any]) -> None:
    """One value, anywhere in it, exchanged, dropped or added."""
    table: Any = description
    while True:
        inner = [value for value in (table.values() if isinstance(table, dict) else table) if value]
        inner = [value for value in inner if isinstance(value, dict | list) and len(value) < 100]
        if not inner or rng.random() < 0.3:
            break
        table = rng.choice(inner)
    keys = list(table) if isinstance(table, dict) else list(range(len(table)))
    if not keys:
        return
    key = rng.choice(keys)
    match rng.randrange(8):
        case 0:
            del table[key]
        case 1 if isinstance(table, dict):
            table[rng.choice(("x", "n_jobs", "device", "path", "known", "fields", ""))] = json.loads(rng.choice(TEXTS))
        case 2 if isinstance(table, list):
            table.append(json.loads(rng.choice(TEXTS)))
        case 3 if isinstance(table[key], int | float):
            table[key] = table[key] * rng.choice((-1, 2, 1000)) + rng.choice((-1, 0, 1))
        case _:
            table[key] = json.loads(rng.choice(TEXTS))


def change_tensors(rng: random.Random, tensors: dict[str, torch.Tensor]) -> None:
    """One array with another shape, type or number in it; or dropped, renamed, doubled."""
    name = rng.choice(list(tensors))
    tensor = tensors[name].clone()
    match rng.randrange(10):
        case 0:
            del tensors[name]
        case 1:
            tensors[rng.choice((name + "2", name.upper(), "x", "local.visits", "weight_state.1", "best.bias"))] = tensor
        case 2:
            other = rng.choice(list(tensors))
            tensors[name], tensors[other] = tensors[other], tensors[name]
        case 3:
            tensors[name] = tensor.to(rng.choice(list(DTYPES.values())))
        case 4:
            tensors[name] = another_shape(rng, tensor)
        case _ if tensor.numel() and tensor.dtype != torch.bool:
            flat = tensor.reshape(-1)
            for _ in range(rng.randint(1, 3)):
                value = rng.choice((*ODD, rng.gauss(0.0, 100.0)))
                flat[rng.randrange(len(flat))] = torch.tensor(value, dtype=torch.float64).to(tensor.dtype)
            tensors[name] = tensor


def another_shape(rng: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    match rng.randrange(6):
        case 0:
            return tensor[: len(tensor) // 2] if tensor.ndim else tensor
        case 1:
            return torch.cat([tensor, tensor]) if tensor.ndim else tensor
        case 2:
            return tensor[..., : tensor.shape[-1] // 2].contiguous() if tensor.ndim else tensor
        case 3:
            return tensor.T.contiguous() if tensor.ndim == 2 else tensor[None]
        case 4:
            return tensor.reshape(-1)
        case _:
            return tensor[:0] if tensor.ndim else tensor

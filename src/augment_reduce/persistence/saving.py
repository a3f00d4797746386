"""Save and load an estimator: its parameters, arrays, counters and names.

Parameters are stored as JSON (`encoding`). Objects of user-defined classes cannot be; they are passed again to `load`.
Settings of the machine (`FROM_THE_LOADER`) are neither stored nor read.

A file may come from anywhere, and anybody can compute its checksum: `model_checks` validates all of it before use.
`save` runs the same checks before writing, so that every saved file can be loaded.
"""

from __future__ import annotations

import inspect
import itertools
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from .._version import __version__
from ..config.features import FeatureScaling
from ..kernels.protocol import Parameters
from ..local.base import Clock
from ..sharding import Partition
from ..support.atomic import target_of
from ..training.cross_validation import Found
from ..training.fitted import TORN, Fitted
from ..training.loop import HISTORY, Plan, Window
from . import rank_files
from .encoding import EncodingError, decode, encode
from .files import ModelFileError, load_model, pack_names, save_model, unpack_names
from .model_checks import BEST, LATER, check_contents, check_description

FROM_THE_LOADER = ("n_jobs", "device", "process_group", "sync")
GIVEN_AGAIN = ("model", "optimizer", "local_step", "class_sampling")  # may be user-defined objects


class Estimator(Protocol):
    """The attributes of an estimator that this module reads and writes."""

    classes_: np.ndarray
    n_features_in_: int
    feature_names_in_: np.ndarray
    _fitted: Fitted

    def get_params(self, deep: bool = True) -> dict[str, Any]: ...
    @classmethod
    def _get_param_names(cls) -> list[str]: ...
    def _publish(self) -> None: ...
    def sparsify(self) -> Any: ...


Loaded = TypeVar("Loaded", bound=Estimator)


# ---- save ----


def save(estimator: Estimator, path: str | os.PathLike[str]) -> None:
    target_of(path)  # refuses folders and missing folders before any work
    description, tensors = checked_contents(estimator)
    if estimator._fitted.torn:
        warnings.warn(f"Saving to {path}: {TORN}", RuntimeWarning, stacklevel=3)
    save_model(path, description, tensors)


def checked_contents(estimator: Estimator, n_classes: int | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`contents`, validated as on loading. `n_classes`: the number on all ranks, if the classes are sharded."""
    description, tensors = contents(estimator)
    own = {name: getattr(estimator, name) for name in GIVEN_AGAIN if "object" in _table(description, name)}
    try:
        check_contents(description, tensors, _parameters(type(estimator), description["parameters"], own), n_classes)
    except ValueError as error:
        raise ValueError(
            f"This model cannot be saved: {error}. If training diverged, fit again with a lower learning_rate; if a "
            "parameter was changed since, change it back."
        ) from error
    return description, tensors


def _table(description: dict[str, Any], name: str) -> dict[str, Any]:
    found = description["parameters"].get(name)
    return found if isinstance(found, dict) else {}


def contents(estimator: Estimator) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description and the arrays of a fitted estimator."""
    fitted: Fitted = estimator._fitted
    weight = (
        fitted.parameters.weight if fitted.sparse_weight is None else torch.from_numpy(fitted.sparse_weight.toarray())
    )
    tensors = {
        "weight": weight.cpu(),
        "bias": fitted.parameters.bias.cpu(),
        "class_counts": torch.from_numpy(fitted.class_counts),
        "feature_counts": torch.from_numpy(fitted.feature_counts),
        **{f"weight_state.{i}": s.cpu() for i, s in enumerate(fitted.parameters.weight_state)},
        **{f"bias_state.{i}": s.cpu() for i, s in enumerate(fitted.parameters.bias_state)},
        **{f"local.{name}": value for name, value in fitted.local.items()},
        **{f"late.{name}": value for name, value in fitted.late.items()},
        **{f"sampler.{name}": value for name, value in fitted.sampler.items()},
        **{f"history.{name}": torch.tensor(fitted.run.history[name], dtype=torch.float64) for name in HISTORY},
        **pack_names("classes", estimator.classes_),
        **({} if fitted.scaling is None else fitted.scaling.tensors("scaling.")),
        **{name: kept.cpu() for name, kept in zip(BEST, fitted.run.best_parameters or (), strict=False)},
    }
    parameters = estimator.get_params(deep=False)
    description = {
        "written_by": __version__,
        "parameters": {name: encode(name, parameters[name]) for name in parameters if name not in FROM_THE_LOADER},
        "n_features": estimator.n_features_in_,
        "classes_dtype": estimator.classes_.dtype.str,
        "clock": [fitted.clock.iteration, fitted.clock.epoch],
        "seed": fitted.seed,
        "bytes_needed": fitted.bytes_needed,
        "rows_seen": fitted.rows_seen,
        "stream_steps": fitted.stream_steps,
        "stopped_early": fitted.run.stopped_early,
        "best_validation": fitted.run.best if math.isfinite(fitted.run.best) else None,
        "without_gain": fitted.run.without_gain,
        "sparse": fitted.sparse_weight is not None,
        "torn": fitted.torn,
        "plan": fitted.run.plan,  # of an interrupted fit, like the window
        "window": [fitted.run.window.bound.hex(), fitted.run.window.rows, fitted.run.window.floor_hits],
        "factor": fitted.factor,
        "found": None if fitted.found is None else encode_found(fitted.found),
        "centred": fitted.centred,
        "converged": fitted.converged,
        "training_seconds": fitted.run.seconds,
        "fit_seconds": fitted.seconds,
    }
    if hasattr(estimator, "feature_names_in_"):
        tensors.update(pack_names("features", estimator.feature_names_in_))
    return description, tensors


def gathered(fitted: Fitted) -> Fitted:
    """A model of all classes on the first rank, gathered from all ranks; empty on the others."""
    partition, parameters = fitted.partition, fitted.parameters
    assert partition is not None
    if fitted.sparse_weight is not None:
        parameters = replace(parameters, weight=torch.from_numpy(fitted.sparse_weight.toarray()))
    whole_of, best = partition.whole_on_first, fitted.run.best_parameters
    whole = Parameters(
        whole_of(parameters.weight), whole_of(parameters.bias), [whole_of(each) for each in parameters.weight_state],
        [whole_of(each) for each in parameters.bias_state],
    )  # fmt: skip
    run = replace(fitted.run, best_parameters=best and (whole_of(best[0]), whole_of(best[1])))
    sparse = None if fitted.sparse_weight is None else sp.csr_matrix(whole.weight.numpy())
    return replace(fitted, parameters=whole, sparse_weight=sparse, run=run, partition=None, class_mean=None)


def shared_out(fitted: Fitted, partition: Partition) -> None:
    """Keep this rank's rows of a model of all classes."""
    own, parameters = partition.own, fitted.parameters
    fitted.parameters = Parameters(
        own(parameters.weight), own(parameters.bias), [own(each) for each in parameters.weight_state],
        [own(each) for each in parameters.bias_state],
    )  # fmt: skip
    if fitted.sparse_weight is not None:
        fitted.sparse_weight = partition.shard.of(fitted.sparse_weight)
        fitted.parameters.weight = parameters.weight
    if fitted.run.best_parameters is not None:
        fitted.run.best_parameters = (own(fitted.run.best_parameters[0]), own(fitted.run.best_parameters[1]))
    fitted.partition = partition


# ---- load ----


def load(cls: type[Loaded], path: str | os.PathLike[str], objects: dict[str, Any]) -> Loaded:
    names = cls._get_param_names()
    for name in objects:
        if name not in names:
            raise TypeError(f"{name!r} is no parameter of {cls.__name__}; expected some of {', '.join(names)}.")
    description, tensors = load_model(path) if not os.path.isdir(path) else _of_folder(Path(path))
    parameters = _checked(cls, path, objects, description, tensors)
    estimator = cls(**parameters | objects)
    estimator.classes_ = unpack_names("classes", tensors, description["classes_dtype"])
    estimator.n_features_in_ = description["n_features"]
    if "features.text" in tensors:
        estimator.feature_names_in_ = unpack_names("features", tensors, "O")
    estimator._fitted = _fitted(LATER | description, tensors)
    estimator._publish()
    return estimator.sparsify() if description["sparse"] else estimator


def _of_folder(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(description, arrays) of a checkpoint written over ranks."""
    manifest, tensors = rank_files.read_alone(path)
    if not isinstance(manifest.get("description"), dict):
        raise ModelFileError(f"{path} is no checkpoint of a fit: its manifest has no description of a model.")
    return manifest["description"], {name: x for name, x in tensors.items() if not name.startswith("late.")}


def load_fitted(estimator: Estimator, path: str | os.PathLike[str]) -> Fitted:
    """The training state in a file that `save` wrote for an estimator with the same parameters and classes."""
    return fitted_of(estimator, path, *load_model(path))


def fitted_of(
    estimator: Estimator, path: str | os.PathLike[str], description: dict[str, Any], tensors: dict[str, Tensor],
    n_classes: int | None = None,
) -> Fitted:  # fmt: skip
    """The training state from the contents of `path`; `n_classes`: the number on all ranks, if the classes are
    sharded."""
    own = {name: getattr(estimator, name) for name in GIVEN_AGAIN}
    _checked(type(estimator), path, own, description, tensors, n_classes)
    classes = unpack_names("classes", tensors, description["classes_dtype"])
    if not np.array_equal(classes, estimator.classes_):
        raise ModelFileError(f"{path}: expected the classes of this fit, found others.")
    return _fitted(LATER | description, tensors)


def _checked(
    cls: type[Estimator], path: str | os.PathLike[str], objects: dict[str, Any], description: dict[str, Any],
    tensors: dict[str, Tensor], n_classes: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The parameters of a file, after validating its contents."""
    try:
        check_description(description)
        parameters = _parameters(cls, description["parameters"], objects)
        check_contents(description, tensors, parameters, n_classes)
    except (ValueError, TypeError, ArithmeticError, RecursionError) as error:
        raise ModelFileError(f"{path}: {str(error).removesuffix('.')}.") from error
    return parameters


def _parameters(cls: type[Estimator], found: dict[str, Any], objects: dict[str, Any]) -> dict[str, Any]:
    """The file's parameters, those of `GIVEN_AGAIN` as passed to `load`; the constructor's defaults for all others.

    Other parameters passed to `load` are validated by `fit`.
    """
    signature = inspect.signature(cls).parameters
    defaults = {name: signature[name].default for name in cls._get_param_names()}
    parameters = {name: value for name, value in defaults.items() if value is not inspect.Parameter.empty}
    for name, value in found.items():
        if name not in defaults:
            raise EncodingError(f"parameters: expected some of {', '.join(defaults)}, found {name[:60]!r}")
        if name not in FROM_THE_LOADER and name not in objects:
            parameters[name] = decode(name, value)
    return parameters | {name: objects[name] for name in GIVEN_AGAIN if name in objects}


def _fitted(description: dict[str, Any], tensors: dict[str, Tensor]) -> Fitted:
    states = ([tensors[name] for name in _numbered(kind, tensors)] for kind in ("weight_state", "bias_state"))
    fitted = Fitted(
        Parameters(tensors["weight"], tensors["bias"], *states),
        seed=description["seed"],
        bytes_needed=description["bytes_needed"],
        clock=Clock(*description["clock"]),
        local=_named("local.", tensors),
        late=_named("late.", tensors),
        sampler=_named("sampler.", tensors),
        rows_seen=description["rows_seen"],
        stream_steps=description["stream_steps"],
        class_counts=tensors["class_counts"].numpy(),
        feature_counts=tensors["feature_counts"].numpy(),
    )
    history = {name: column.tolist() for name, column in _named("history.", tensors).items()}
    missing = [math.nan] * len(history["iteration"])
    fitted.run.history = {name: history.get(name, missing[:]) for name in HISTORY}
    fitted.run.stopped_early = description["stopped_early"]
    fitted.torn = description["torn"]
    fitted.factor, fitted.centred = float(description["factor"]), description["centred"]
    fitted.converged = description["converged"]
    fitted.found = None if description["found"] is None else decode_found(description["found"])
    if "scaling.scale" in tensors:
        fitted.scaling = FeatureScaling.from_tensors(_named("scaling.", tensors))
    fitted.run.plan = None if description["plan"] is None else Plan(*description["plan"])
    bound, n_rows, floor_hits = description["window"]
    fitted.run.window = Window(float.fromhex(bound), n_rows, floor_hits)
    spent, elapsed = description["training_seconds"], fitted.run.history["seconds"]
    fitted.run.seconds = (elapsed[-1] if elapsed else 0.0) if spent is None else float(spent)
    fitted.seconds.update(description["fit_seconds"])
    best = description["best_validation"]
    fitted.run.best = -math.inf if best is None else float(best)
    fitted.run.without_gain = description["without_gain"]
    if BEST[0] in tensors:
        fitted.run.best_parameters = (tensors[BEST[0]], tensors[BEST[1]])
    return fitted


def encode_found(found: Found) -> dict[str, Any]:
    """JSON has no NaN: the loss is null if nothing was evaluated."""
    loss = found.loss if math.isfinite(found.loss) else None
    numbers = {name: float(getattr(found, name)) for name in ("variance", "factor", "rate", "noise_scale")}
    return vars(found) | numbers | {"loss": loss}


def decode_found(entry: dict[str, Any]) -> Found:
    return Found(**entry | {"loss": math.nan if entry["loss"] is None else entry["loss"]})


def _named(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _numbered(kind: str, tensors: Mapping[str, Tensor]) -> list[str]:
    """`kind.0`, `kind.1` and so on, as many as there are one after the other."""
    return list(itertools.takewhile(tensors.__contains__, (f"{kind}.{i}" for i in itertools.count())))

"""The commands' work: files in, a model file or numbers out. (`app` parses, `show` prints.)

Imported only when a command runs, so that `--help` stays quick.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import sparse

from ..data import DataFileError, MappedData
from ..data.convert import convert_rows
from ..data.mapped_writer import check_new_folder
from ..estimator import AugmentReduceClassifier
from ..persistence.outputs import check_output, save_or_rescue
from ..reports.metrics import Reliability, class_codes, perplexity, precision_at, reliability_curve
from .reading import FileRows, Reading, described, feature_names, read_file, read_mapped, without_labels
from .writing import model_bytes

PRECISION_AT = (1, 3, 5)
PREDICT_BLOCK = 4096  # rows predicted between two writes
RESUME_MAY_CHANGE = ("max_iter", "max_epochs", "learning_rate", "n_jobs")


# ---- fit ----


def fit_file(
    data: Path, output: Path, reading: Reading, parameters: dict[str, Any], *, resume: Path | None, min_count: int
) -> dict[str, Any]:
    """Fit to the examples of a file, or resume a saved model, and save the model. Returns the summary."""
    check_output(output, [data])
    model = _new_model(parameters) if resume is None else _resumed_model(resume, parameters)
    known, X, y, n_rare = None if resume is None else model, None, None, 0
    if data.is_dir():
        X, n_examples, names, space = _mapped(data, reading, known, min_count, model)
    else:
        source = read_file(data, reading, known)
        rows, y, n_rare = _frequent(source, min_count)
        X, n_examples, names = source.features(rows), len(y), feature_names(source.found)
        space = model_bytes(model, X, y)
    if resume is not None:
        _check_same_rows(model, data, n_examples)
    check_output(output, [data], needed_bytes=space)
    started = time.perf_counter()
    with _known_names_unchecked():
        model.fit(X, y)
    seconds = time.perf_counter() - started
    if resume is None and names is not None:
        model.feature_names_in_ = np.asarray(names, dtype=object)
    save_or_rescue(model, output)
    return _summary(model, output, n_examples, seconds) | {"dropped_rare": n_rare}


def _mapped(
    data: Path, reading: Reading, known: AugmentReduceClassifier | None, min_count: int, model: AugmentReduceClassifier
) -> tuple[MappedData, int, Sequence[str] | None, int]:  # fmt: skip
    """(a folder of rows, their number, names of their features, bytes of a model of them)."""
    if min_count > 1:
        raise ValueError(f"Rare labels of {data} are dropped when it is converted: pass min_count to convert.")
    rows = read_mapped(data, reading, known)
    if rows.classes is None:
        raise without_labels(data)
    return rows, len(rows), feature_names(described(rows)), model_bytes(model, rows.X, rows.classes)


# ---- convert ----


def convert_file(
    data: Path, output: Path, reading: Reading, *, n_features: int | None, min_count: int
) -> dict[str, Any]:
    """Convert a file to a folder of mapped rows. Returns the summary."""
    check_new_folder(output)
    started = time.perf_counter()
    rows = convert_rows(
        data, output, reading.format, n_features=n_features,
        zero_based="auto" if reading.zero_based is None else reading.zero_based,
        label_column=-1 if reading.label_column is None else reading.label_column,
        ignore_columns=reading.ignore_columns, header="auto" if reading.header is None else reading.header,
        keep_index=reading.keep_index, reduction=reading.reduction, min_count=min_count,
        label_names=reading.label_names,
    )  # fmt: skip
    return {
        "folder": str(output),
        "rows": len(rows),
        "features": rows.X.shape[1],
        "entries": rows.X.nnz,
        "classes": 0 if rows.classes is None else len(rows.classes),
        "bytes": sum(file.stat().st_size for file in output.iterdir()),
        "seconds": time.perf_counter() - started,
    }


def _new_model(parameters: dict[str, Any]) -> AugmentReduceClassifier:
    given = {name: value for name, value in parameters.items() if value is not None}
    model = AugmentReduceClassifier(**given)
    model._checked_noise()  # invalid parameters are refused before a large file is read
    return model


def _resumed_model(path: Path, parameters: dict[str, Any]) -> AugmentReduceClassifier:
    """The saved model, ready to resume; only length, learning rate and threads may change."""
    model = AugmentReduceClassifier.load(path)
    own = model.get_params(deep=False)
    quiet_ones = ("verbose", "random_state")
    for name, value in parameters.items():
        if value is not None and name not in (*RESUME_MAY_CHANGE, *quiet_ones) and value != own[name]:
            allowed = ", ".join("--" + name.replace("_", "-") for name in RESUME_MAY_CHANGE)
            raise ValueError(
                f"--resume goes on with the settings of {path}, which has {name}={own[name]!r}; {name}={value!r} "
                f"would be another model. Leave it out, or fit anew. What may change: {allowed}."
            )
    changes = {name: parameters[name] for name in RESUME_MAY_CHANGE if parameters.get(name) is not None}
    if "max_iter" in changes or "max_epochs" in changes:
        changes = {"max_iter": None, "max_epochs": None} | changes
    return model.set_params(warm_start=True, verbose=parameters["verbose"], **changes)


def _check_same_rows(model: AugmentReduceClassifier, data: Path, n_rows: int) -> None:
    """Refuse other rows than those of training: q is stored for each row."""
    known = {len(values) for values in model._fitted.local.values()}
    if known and known != {n_rows}:
        raise DataFileError(
            data,
            expected=f"the {known.pop():,} examples that the model was trained on",
            found=f"{n_rows:,}",
            advice="--resume goes on with the same data; give the same file, --reduction and --min-count.",
        )


def _frequent(source: FileRows, min_count: int) -> tuple[npt.NDArray[np.intp], np.ndarray, int]:
    """The examples whose label occurs at least `min_count` times, and the number of the others."""
    if min_count <= 1:
        return source.rows, source.y, 0
    _, codes, counts = np.unique(source.y, return_inverse=True, return_counts=True)
    kept = counts[codes] >= min_count
    if not kept.any():
        raise ValueError(
            f"Expected labels with at least {min_count} examples (--min-count), but the most frequent of "
            f"{len(counts):,} has {counts.max(initial=0)}. Lower --min-count."
        )
    return source.rows[kept], source.y[kept], int((~kept).sum())


@contextlib.contextmanager
def _known_names_unchecked() -> Iterator[None]:
    """No warning of scikit-learn about missing feature names: they were checked while reading."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="X does not have valid feature names")
        yield


def _summary(model: AugmentReduceClassifier, output: Path, n_examples: int, seconds: float) -> dict[str, Any]:
    history = model.history_
    bound, gap = _last(history["bound"]), _last(history["bound_gap"])
    return {
        "model": str(output),
        "examples": n_examples,
        "features": model.n_features_in_,
        "classes": len(model.classes_),
        "iterations": model.n_iter_,
        "epochs": _last(history["epoch"]),
        "seconds": seconds,
        "bound": bound,
        "bound_gap": gap,
        "validation_log_likelihood": _last(history["validation_log_likelihood"]),
        "stopped_early": model._fitted.run.stopped_early,
        "bytes": output.stat().st_size,
    }


def _last(values: np.ndarray) -> float | None:
    """The last entry that is not NaN."""
    measured = values[~np.isnan(values)]
    return float(measured[-1]) if len(measured) else None


# ---- predict and evaluate ----


def load_for_prediction(path: Path, n_jobs: int | None) -> AugmentReduceClassifier:
    model = AugmentReduceClassifier.load(path)
    return model if n_jobs is None else model.set_params(n_jobs=n_jobs)


def predict_blocks(
    model: AugmentReduceClassifier, X: Any, top: int
) -> Iterator[tuple[int, np.ndarray, npt.NDArray[np.floating]]]:
    """(first row, classes, probabilities), a block of rows at a time, best class first."""
    for start in range(0, X.shape[0], PREDICT_BLOCK):
        with _known_names_unchecked():
            classes, probabilities = model.predict_topk(X[start : start + PREDICT_BLOCK], top)
        yield start, classes, probabilities


def evaluate_file(
    model_path: Path,
    data: Path,
    reading: Reading,
    *,
    skip_unseen: bool,
    n_jobs: int | None,
    reliability: Path | None = None,
) -> dict[str, Any]:
    """Log likelihood, accuracy and calibration over examples, precision at k over rows."""
    if reliability is not None:
        check_picture(reliability, [model_path, data])
    model = load_for_prediction(model_path, n_jobs)
    source = read_file(data, reading, model)
    codes = class_codes(source.y, model.classes_)
    seen = codes >= 0
    _check_seen(seen, source, data, skip_unseen)
    rows, example_row = np.unique(source.rows[seen], return_inverse=True)
    X, codes = source.features(rows), codes[seen]
    with _known_names_unchecked():
        log_likelihood = model.log_likelihood(source.features(source.rows[seen]), model.classes_[codes])
    top, confidence = _best(model, X)
    guessed = top[example_row, 0] == codes
    bins = reliability_curve(confidence[example_row], guessed)
    if reliability is not None:
        _draw_reliability(reliability, data, model_path, bins)
    return {
        "model": str(model_path),
        "data": str(data),
        "rows": len(rows),
        "examples": len(codes),
        "log_likelihood": log_likelihood,
        "perplexity": perplexity(log_likelihood),
        "accuracy": float(guessed.mean()),
        "confidence": float(confidence[example_row].mean()),
        "calibration_error": bins.error,
        "precision_at": {str(k): p for k, p in precision_at(top, _relevant(source, rows, model), PRECISION_AT).items()},
        "skipped_unseen": int((~seen).sum()),
        "classes": len(model.classes_),
    }


def _check_seen(seen: npt.NDArray[np.bool_], source: FileRows, data: Path, skip_unseen: bool) -> None:
    """Refuse unseen labels unless they may be skipped, and a file with unseen labels only."""
    if not seen.all() and not skip_unseen:
        at = int(np.flatnonzero(~seen)[0])
        raise ValueError(
            f"{data}: {int((~seen).sum()):,} of {len(seen):,} examples have a label that the model has never seen; the "
            f"first is {source.y[at].item()!r}, in row {source.rows[at]}. They have no probability under this model. "
            "Pass --skip-unseen to leave them out and count them, or fit on data that has these labels."
        )
    if not seen.any():
        raise ValueError(
            f"{data}: none of the {len(seen):,} examples has a label that the model knows. Is it the right file?"
        )


def _best(model: AugmentReduceClassifier, X: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The numbers of the most probable classes of each row, and the probability of the first."""
    k_max = min(max(PRECISION_AT), len(model.classes_))
    blocks = [(classes, probabilities[:, 0]) for _, classes, probabilities in predict_blocks(model, X, k_max)]
    classes, first = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    return class_codes(classes, model.classes_), first.astype(np.float64)


def check_picture(path: Path, inputs: Sequence[Path]) -> None:
    """Refuse an invalid picture file before any work is done."""
    from ..reports.figures import SUFFIXES

    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"Expected --reliability to name a {', '.join(SUFFIXES)} file, but found {path.name!r}.")
    check_output(path, inputs, "--reliability")


def _draw_reliability(path: Path, data: Path, model_path: Path, bins: Reliability) -> None:
    from ..reports.figures import Reliable, draw_reliability
    from ..support.atomic import replaced_atomically

    with replaced_atomically(path) as temporary:
        draw_reliability(
            temporary, {data.name: [Reliable(model_path.name, bins)]}, title="How sure, how right",
            subtitle=f"{bins.count.sum():,} examples; beside the name, the error", format=path.suffix[1:].lower(),
        )  # fmt: skip


def _relevant(source: FileRows, rows: npt.NDArray[np.intp], model: AugmentReduceClassifier) -> sparse.csr_matrix:
    """(len(rows), K) boolean: the true classes of each row."""
    codes = class_codes(source.pair_y, model.classes_)
    at = np.searchsorted(rows, source.pair_rows).clip(max=len(rows) - 1)
    known = (codes >= 0) & (rows[at] == source.pair_rows)
    shape = (len(rows), len(model.classes_))
    return sparse.csr_matrix((np.ones(int(known.sum()), bool), (at[known], codes[known])), shape=shape)

"""Files for the command line to read, models of them, and calling it."""

import gzip
from pathlib import Path

import numpy as np
from typer.testing import CliRunner, Result

from augment_reduce.cli import app

K, D = 6, 8
QUICK = ("--quiet", "--n-jobs", "1", "--max-epochs", "3")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def done(*arguments: object) -> Result:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result


def refused(*arguments: object, code: int = 2) -> str:
    """The one paragraph on standard error of a command that must not work."""
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def draw(n: int, seed: int, n_labels: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """(N, D) zeros and ones, and (N, K) booleans: the classes of the highest noisy utilities."""
    weight = 2.0 * np.random.default_rng(99).normal(size=(K, D))
    rng = np.random.default_rng(seed)
    X = (rng.random((n, D)) < 0.4).astype(np.float32)
    order = np.argsort(-(X @ weight.T + rng.gumbel(size=(n, K))), axis=1)
    sizes = rng.integers(1, n_labels + 1, size=n)
    labels = np.zeros((n, K), bool)
    for row, (best, size) in enumerate(zip(order, sizes, strict=True)):
        labels[row, best[:size]] = True
    return X, labels


def svmlight(path: Path, X: np.ndarray, y: list[str], base: int = 1) -> Path:
    rows = (" ".join([name, *(f"{j + base}:1" for j in np.flatnonzero(x))]) for x, name in zip(X, y, strict=True))
    path.write_text("\n".join(rows) + "\n")
    return path


def xml(path: Path, X: np.ndarray, labels: np.ndarray) -> Path:
    def numbers(row: np.ndarray) -> str:
        return ",".join(map(str, np.flatnonzero(row)))

    rows = (f"{numbers(t)} " + " ".join(f"{j}:1" for j in np.flatnonzero(x)) for x, t in zip(X, labels, strict=True))
    text = f"{len(X)} {D} {K}\n" + "\n".join(rows) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def table(path: Path, X: np.ndarray, y: list[str], names: list[str]) -> Path:
    """A csv file whose columns stand in the order of `names` (f0, f1, …, label, and columns of dashes)."""
    lines = [",".join(names)]
    for x, name in zip(X, y, strict=True):
        cells = {f"f{j}": str(value) for j, value in enumerate(x)} | {"label": name}
        lines.append(",".join(cells.get(column, "-") for column in names))
    path.write_text("\n".join(lines) + "\n")
    return path


def one_label(labels: np.ndarray) -> list[str]:
    return [f"c{k}" for k in labels.argmax(1)]


def fill(folder: Path) -> Path:
    """One label a row (train.svm, test.svm), sets of labels (train.txt.gz, test.txt), a model of each."""
    for name, n, seed in (("train", 300, 0), ("test", 80, 1)):
        X, labels = draw(n, seed)
        svmlight(folder / f"{name}.svm", X, one_label(labels))
    xml(folder / "train.txt.gz", *draw(300, 2, n_labels=3))
    xml(folder / "test.txt", *draw(80, 3, n_labels=3))
    done("fit", folder / "train.svm", "-o", folder / "one.safetensors", *QUICK)
    done("fit", folder / "train.txt.gz", "-o", folder / "sets.safetensors", "--reduction", "all", *QUICK)
    return folder

"""The command line when something is wrong, and as a program of its own."""

import errno
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from augment_reduce import AugmentReduceClassifier
from augment_reduce._version import __version__
from tests.helpers.cli_files import QUICK, done, draw, fill, one_label, refused, run, svmlight


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("cli"))


# ---- what goes wrong ----


def test_bad_input_is_refused_before_anything_is_written(place, tmp_path):
    data, output = place / "train.svm", tmp_path / "m"
    bad = tmp_path / "bad.svm"
    bad.write_text("c0 1:1\nc1 2:oops\n")
    assert "line 2" in refused("fit", bad, "-o", output)
    assert "nothing there" in refused("fit", tmp_path / "absent.svm", "-o", output)
    assert "softmax only" in refused("fit", data, "-o", output, "--model", "probit", "--method", "one-vs-each")
    assert "Expected --prior-variance to be" in refused("fit", data, "-o", output, "--prior-variance", "-1")
    assert "Both --max-iter and --max-epochs" in refused("fit", data, "-o", output, "--max-iter", 3, "--max-epochs", 3)
    one = tmp_path / "one.svm"
    one.write_text("c0 1:1\nc0 2:1\n")
    assert "two classes" in refused("fit", one, "-o", output)
    assert not output.exists()


def test_the_output_is_checked_before_training(place, tmp_path):
    data = place / "train.svm"
    assert "no folder" in refused("fit", data, "-o", tmp_path / "absent" / "m")
    assert "is a folder" in refused("fit", data, "-o", tmp_path)
    own = svmlight(tmp_path / "own.svm", *(lambda X, t: (X, one_label(t)))(*draw(20, 8)))
    before = own.read_bytes()
    assert "destroy" in refused("fit", own, "-o", own)
    assert "destroy" in refused("predict", place / "one.safetensors", own, "-o", own)
    assert own.read_bytes() == before


def test_a_folder_that_may_not_be_written(place, tmp_path, monkeypatch):
    def forbidden(**_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", forbidden)
    assert "Read-only" in refused("fit", place / "train.svm", "-o", tmp_path / "m")


def test_names_of_any_legal_length_are_written_and_longer_ones_refused_before_training(place, tmp_path, monkeypatch):
    data, longest = place / "train.svm", tmp_path / ("m" * 255)
    done("fit", data, "-o", longest, *QUICK)
    assert AugmentReduceClassifier.load(longest).n_iter_ > 0
    assert os.listdir(tmp_path) == [longest.name]
    monkeypatch.setattr(AugmentReduceClassifier, "fit", None)
    assert "too long" in refused("fit", data, "-o", tmp_path / ("m" * 256))
    os.mkfifo(tmp_path / "pipe")
    assert "FIFO" in refused("fit", data, "-o", tmp_path / "pipe")
    assert "is a folder" in refused("fit", data, "-o", "")


def test_room_for_the_model_is_asked_for_before_training(place, tmp_path, monkeypatch):
    monkeypatch.setattr(AugmentReduceClassifier, "fit", None)
    monkeypatch.setattr("augment_reduce.support.atomic._free_bytes", lambda folder: 100)
    message = refused("fit", place / "train.svm", "-o", tmp_path / "m", code=1)
    assert "No space left on device" in message
    assert str(tmp_path / "m") in message


def test_a_model_that_cannot_be_written_where_it_should_is_written_elsewhere(place, tmp_path, monkeypatch):
    """The disk is full when training has ended: the model is not lost."""
    real, output = AugmentReduceClassifier.save, tmp_path / "full" / "m.safetensors"
    output.parent.mkdir()
    monkeypatch.chdir(tmp_path)

    def save(self, path):
        if Path(path).parent.name == "full":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        real(self, path)

    monkeypatch.setattr(AugmentReduceClassifier, "save", save)
    (tmp_path / "m-rescued.safetensors").write_text("another file")
    message = refused("fit", place / "train.svm", "-o", output, *QUICK, code=1)
    assert f"{output}: No space left on device." in message
    rescued = tmp_path / "m-rescued1.safetensors"
    assert str(rescued) in message
    assert AugmentReduceClassifier.load(rescued).classes_.tolist() == ["c0", "c1", "c2", "c3", "c4", "c5"]
    assert (tmp_path / "m-rescued.safetensors").read_text() == "another file"

    def nowhere(self, path):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(AugmentReduceClassifier, "save", nowhere)
    assert "the model is lost" in refused("fit", place / "train.svm", "-o", output, *QUICK, code=1)


def test_predictions_may_go_to_a_device_or_a_pipe(place, tmp_path):
    arguments = ("predict", place / "one.safetensors", place / "test.svm", "-o")
    done(*arguments, "/dev/null")
    assert Path("/dev/null").is_char_device()
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor(1) as other:
        read = other.submit((tmp_path / "pipe").read_text)
        done(*arguments, tmp_path / "pipe", "--layout", "csv")
        assert read.result().startswith("row,rank,class,probability\n")
    assert os.listdir(tmp_path) == ["pipe"]


def test_model_files_that_are_none(place, tmp_path):
    assert "No model file" in refused("predict", tmp_path / "absent", place / "test.svm")
    cut = tmp_path / "cut"
    cut.write_bytes((place / "one.safetensors").read_bytes()[:-20])
    assert "not a whole model file" in refused("evaluate", cut, place / "test.svm")


def test_failures_while_running_exit_with_1(place, tmp_path, monkeypatch):
    for error, words in (
        (MemoryError("This fit needs about 9 GB"), "9 GB"),
        (FloatingPointError("the weights have diverged"), "diverged"),
        (RuntimeError("a [bug]"), "--debug"),
    ):

        def fit(self: object, X: object, y: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(AugmentReduceClassifier, "fit", fit)
        assert words in refused("fit", place / "train.svm", "-o", tmp_path / "m", code=1)
    result = run("fit", place / "train.svm", "-o", tmp_path / "m", "--debug")
    assert result.exit_code == 1
    assert "Traceback" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_wrong_usage_exits_with_2(place):
    for arguments in (
        ["fit", place / "train.svm"],
        ["fit", "--nonsense"],
        ["fly"],
        ["fit", "x", "-o", "y", "--model", "z"],
    ):
        result = run(*arguments)
        assert result.exit_code == 2
        assert "Traceback" not in result.output


# ---- as a program of its own ----


def test_help_teaches_and_imports_nothing_heavy():
    code = (
        "import sys\nfrom augment_reduce.cli import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "finally:\n    heavy = {'torch', 'sklearn', 'numba', 'matplotlib', 'numpy'} & set(sys.modules)\n"
        "    assert not heavy, heavy\n"
    )
    for arguments in (["--help"], ["fit", "--help"], ["evaluate", "--help"], ["--version"]):
        shown = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
        assert (shown.returncode, shown.stderr) == (0, "")
        if arguments[-1] == "--help":
            assert "augment-reduce" in shown.stdout
        else:
            assert shown.stdout == f"augment-reduce {__version__}\n"


def test_every_command_shows_an_example():
    for command in ("fit", "predict", "evaluate", "demo"):
        assert f"augment-reduce {command} " in done(command, "--help").stdout.split("Example")[1]


def test_control_c_says_that_nothing_was_written(place, tmp_path):
    program = Path(sys.executable).parent / "augment-reduce"
    command = [program, "fit", place / "train.svm", "-o", tmp_path / "m", "--max-epochs", "1000000", "--n-jobs", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert process.stderr.readline() != ""  # the settings: training is about to start
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)  # if it compiles for the first time it ends that first
    assert process.returncode == 130
    assert out == ""
    assert err.rstrip().endswith("nothing was written.")
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []

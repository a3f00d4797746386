"""Compiled kernels on disk: never from other sources, never from others' hands, never a reason for a fit to fail."""

from __future__ import annotations

import ast
import hashlib
import importlib
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numba
import numpy as np
import pytest

import augment_reduce
from augment_reduce import kernels
from augment_reduce.kernels import cache

SOURCES = Path(augment_reduce.__file__).parent


def doubled(a):
    total = a.dtype.type(0)
    for i in range(a.shape[0]):
        total += 2 * a[i]
    return total


def new_process():
    """The kernel as a process that has just started sees it."""
    return cache.cached_njit(nogil=True)(doubled)


def call(kernel):
    """(sum, loaded from disk?)"""
    total = kernel(np.arange(4.0))
    return float(total), sum(kernel.stats.cache_hits.values()) == 1


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where kernels are kept; forgotten by this process after the test."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cache, "_FOLDERS", None)
    monkeypatch.setattr(cache, "_WARNED", False)
    return tmp_path / f"{cache.FOLDER}-{cache.sources_digest()[:16]}-{os.getuid()}"


def looked_for_again(monkeypatch):
    monkeypatch.setattr(cache, "_FOLDERS", None)
    monkeypatch.setattr(cache, "_WARNED", False)


def test_what_one_process_compiled_the_next_one_loads(folder):
    assert call(new_process()) == (12.0, False)
    assert call(new_process()) == (12.0, True)
    assert new_process()(np.arange(4)) == 12  # another signature is another file
    assert len(list(folder.glob("*.kernel"))) == 2
    assert not list(folder.glob(".*"))


CHECKSUM = slice(len(cache.HEADER), len(cache.HEADER) + 32)
DAMAGE = {
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "cut in the header": lambda content: content[:9],
    "other bytes": lambda content: np.random.default_rng(0).bytes(len(content)),
    "one bit": lambda content: content[:-40] + bytes([content[-40] ^ 1]) + content[-39:],
    "another pickle": lambda content: cache.HEADER + hashlib.sha256(b"N.").digest() + b"N.",
    "not a pickle": lambda content: cache.HEADER + hashlib.sha256(b"\xff").digest() + b"\xff",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_compiled_again_and_repaired(folder, damage, monkeypatch):
    call(new_process())
    (file,) = folder.glob("*.kernel")
    file.write_bytes(damage(file.read_bytes()))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert call(new_process()) == (12.0, False)
    assert len(said) <= 1
    assert cache.read_trusted(file) is not None
    assert call(new_process()) == (12.0, True)


class Hostile:
    """What a pickle may do when it is loaded."""

    ran = False

    def __reduce__(self):
        return setattr, (Hostile, "ran", True)


def planted(file):
    payload = pickle.dumps(Hostile())
    file.write_bytes(cache.HEADER + hashlib.sha256(payload).digest() + payload)


@pytest.mark.parametrize("way", ["folder for all", "folder for the group", "file for all", "link", "another's"])
def test_what_others_may_write_is_never_loaded(folder, way, monkeypatch):
    call(new_process())
    (file,) = folder.glob("*.kernel")
    planted(file)
    if way == "folder for all":
        folder.chmod(0o777)
    elif way == "folder for the group":
        folder.chmod(0o775)
    elif way == "file for all":
        file.chmod(0o666)
    elif way == "link":
        file.rename(folder.parent / "elsewhere")
        file.symlink_to(folder.parent / "elsewhere")
    else:
        monkeypatch.setattr(cache, "trusted_users", lambda: frozenset({os.getuid() + 1}))
    looked_for_again(monkeypatch)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert call(new_process()) == (12.0, False)
    assert not Hostile.ran
    assert len(said) == (1 if way in ("folder for all", "folder for the group", "another's") else 0)
    file.unlink()
    planted(file)  # as its owner: what Numba does too
    file.chmod(0o644)
    folder.chmod(0o755)
    monkeypatch.undo()
    assert cache.read_trusted(file) is not None


def test_a_folder_that_is_a_link_is_not_used(folder, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.warns(RuntimeWarning, match="no folder to keep"):
        assert call(new_process()) == (12.0, False)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_without_any_folder_kernels_are_compiled_with_one_warning(folder, tmp_path, monkeypatch):
    """A read-only file system, a user without a home: no place can be made, or none can be written to."""
    (tmp_path / "file").touch()
    for places in ([], [(tmp_path / "file" / "below", "", True)]):
        monkeypatch.setattr(cache, "candidates", lambda places=places: iter(places))
        looked_for_again(monkeypatch)
        with pytest.warns(RuntimeWarning, match="NUMBA_CACHE_DIR"):
            assert call(new_process()) == (12.0, False)
        assert call(new_process()) == (12.0, False)  # a second warning would be an error
        assert new_process().stats.cache_path is None


def test_what_can_only_be_read_is_read_and_the_next_folder_is_written_to(folder, tmp_path, monkeypatch):
    """An image that was built by root, with kernels, and runs as somebody else."""
    call(new_process())
    other = tmp_path / "other"
    monkeypatch.setattr(cache, "candidates", lambda: iter([(tmp_path, f"-{os.getuid()}", True), (other, "", True)]))
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: may(path, mode) and Path(path) != folder)
    looked_for_again(monkeypatch)
    assert call(new_process()) == (12.0, True)
    new_process()(np.arange(4))
    assert len(list(folder.glob("*.kernel"))) == len(list(other.glob("*/*.kernel"))) == 1


def test_the_folder_of_temporary_files_is_the_last_choice_and_is_said(folder, monkeypatch, tmp_path):
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setattr(cache.tempfile, "gettempdir", lambda: str(tmp_path))
    *_, (last, _, lasts) = cache.candidates()
    assert last == tmp_path
    assert not lasts
    monkeypatch.setattr(cache, "candidates", lambda: iter([(tmp_path, "-7", False)]))
    with pytest.warns(RuntimeWarning, match="a restart may empty"):
        call(new_process())


def test_a_user_without_a_home_and_without_temporary_files_has_the_package_alone(monkeypatch):
    def nowhere(*_):
        raise RuntimeError("Could not determine home directory.")

    def nothing():
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(cache.Path, "home", nowhere)
    monkeypatch.setattr(cache.tempfile, "gettempdir", nothing)
    assert [base.name for base, _, _ in cache.candidates()] == ["__pycache__"]


@pytest.mark.parametrize("where", ["mkstemp", "write", "replace"])
def test_a_full_disk_is_one_warning_and_leaves_nothing(folder, where, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    class Full:
        write = flush = staticmethod(full)

        def __init__(self, handle, mode):
            self.handle = handle

        def __enter__(self):
            return self

        def __exit__(self, *error):
            os.close(self.handle)

    at = {"mkstemp": (cache.tempfile, "mkstemp", full), "replace": (cache.os, "replace", full)}
    monkeypatch.setattr(*at.get(where, (cache.os, "fdopen", Full)))
    with pytest.warns(RuntimeWarning, match=r"No space left.*NUMBA_CACHE_DIR"):
        assert call(new_process()) == (12.0, False)
    assert call(new_process()) == (12.0, False)  # a second warning would be an error
    assert list(folder.iterdir()) == []


def test_files_that_changed_while_the_process_runs_are_not_mixed_up(folder, monkeypatch):
    monkeypatch.setattr(cache, "source_modules", lambda: ["augment_reduce"])  # other sources than at the start
    assert call(new_process()) == (12.0, False)
    assert not list(folder.glob("*.kernel"))


def test_folders_of_old_sources_are_removed_but_for_a_few(folder, tmp_path):
    for i in range(7):
        old = tmp_path / f"{cache.FOLDER}-{i:016x}-{os.getuid()}"
        old.mkdir()
        os.utime(old, (i, i))
    (tmp_path / "another").mkdir()
    (tmp_path / f"{cache.FOLDER}-{0:016x}-{os.getuid() + 1}").mkdir()  # another user's
    call(new_process())
    left = {path.name.split("-")[3] for path in tmp_path.glob(f"{cache.FOLDER}-*-{os.getuid()}")} - {folder.name}
    assert left == {f"{i:016x}" for i in range(3, 7)} | {cache.sources_digest()[:16]}
    assert len(list(tmp_path.iterdir())) == 7


@pytest.mark.parametrize("name", ["versions", "flags", "sources"])
def test_the_key_holds_versions_settings_and_sources(name, folder, monkeypatch):
    call(new_process())
    if name == "versions":
        monkeypatch.setattr(cache.scipy, "__version__", "another")
    elif name == "flags":
        monkeypatch.setattr(numba.config, "LOOP_VECTORIZE", 12345)
    else:
        monkeypatch.setattr(cache, "sources_digest", lambda: "another")
    monkeypatch.setattr(cache, "environment", cache.environment.__wrapped__)
    kernel = new_process()
    signature = numba.typeof(np.arange(4.0))
    assert kernel._cache.load_overload((signature,), kernel.targetctx) is None


# ---- the sources of the key ----


def modules():
    for path in SOURCES.rglob("*.py"):
        yield ".".join(path.relative_to(SOURCES).with_suffix("").parts), ast.parse(path.read_text())


def is_for_types(node):
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imported_by(name, tree):
    """Modules of this package that it imports anything from."""
    folder = name.split(".")[:-1]
    for_types = {id(each) for node in ast.walk(tree) if is_for_types(node) for each in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level and id(node) not in for_types:
            base = folder[: len(folder) - (node.level - 1)]
            yield ".".join([*base, *(node.module.split(".") if node.module else [])])


def compiles_something(tree):
    found = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("numba", "cache")
        for alias in node.names
    }
    return bool(found & {"njit", "jit", "vectorize", "guvectorize", "intrinsic", "overload", "cached_njit"})


def test_the_digest_covers_every_module_that_compiles_and_what_it_imports():
    """Whoever adds a kernel module, or takes a constant from elsewhere, has to name it in `cache`."""
    covered = {name.removeprefix("augment_reduce.") for name in cache.source_modules()}
    compiles = 0
    for name, tree in modules():
        if name == "kernels.cache" or not compiles_something(tree):
            continue
        compiles += 1
        assert name in covered, f"{name} compiles, but its source is not part of the cache's key"
        missing = set(imported_by(name, tree)) - covered - {"kernels.cache"}
        assert not missing, f"{name} imports from {missing}, which is not part of the cache's key"
    assert compiles > 15


def test_numbas_own_cache_is_used_nowhere():
    for name, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.keyword) and node.arg == "cache" and isinstance(node.value, ast.Constant):
                assert node.value.value is not True, name


SHUFFLES = """
import numpy as np
from augment_reduce.kernels.cpu import order
found, expected = np.arange(50), np.arange(50)
order.shuffle(7, found)
order.shuffle.py_func(7, expected)
print(found.tolist() == expected.tolist(), sum(order.shuffle.stats.cache_hits.values()), *found)
"""


def run(code, **environment):
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", code], capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_changed_function_is_seen_by_kernels_of_other_files(tmp_path):
    """`shuffle` is made of `uniform` of another file. With NUMBA_CACHE_DIR it went on with the old one."""
    ignored = shutil.ignore_patterns("__pycache__", "debian_deps", "reproduction", "cli")
    shutil.copytree(SOURCES, tmp_path / "augment_reduce", ignore=ignored)
    there = {"PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    right, loaded, *before = run(SHUFFLES, **there)
    assert (right, loaded) == ("True", "0")
    file = tmp_path / "augment_reduce" / "kernels" / "cpu" / "classes.py"
    line = "    return np.float64(z >> np.uint64(11)) * 2.0**-5"
    text = file.read_text()
    assert line + "3" in text
    file.write_text(text.replace(line + "3", line + "4"))
    right, loaded, *after = run(SHUFFLES, **there)
    assert (right, loaded) == ("True", "0")
    assert after != before
    file.write_text(text)
    right, loaded, *again = run(SHUFFLES, **there)
    assert (right, loaded, again) == ("True", "1", before)


def test_compiled_functions_have_names_of_their_own():
    """Numba links cached kernels by qualified name: two functions of one name, compiled on two days, get mixed up."""
    found = 0
    for path in sorted((Path(kernels.__file__).parent / "cpu").glob("*.py")):
        module = importlib.import_module(f"{kernels.__name__}.cpu.{path.stem}")
        compiled = [f.py_func for f in vars(module).values() if hasattr(f, "py_func")]
        names = [f.__qualname__ for f in compiled if f.__module__ == module.__name__]
        assert len(set(names)) == len(names), path.stem
        found += len(names)
    assert found > 50


# ---- the decorator ----


def test_without_the_compiler_a_kernel_is_python_and_writes_no_file(folder, monkeypatch):
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    assert new_process()(np.arange(4.0)) == 12.0
    assert not [*folder.rglob("*.kernel")]


def test_a_function_with_free_variables_is_refused():
    two = 2

    def times(a):
        return two * a

    with pytest.raises(TypeError, match="free variables"):
        cache.cached_njit()(times)


def test_time_spent_compiling_is_counted_by_thread(folder):
    before = cache.compile_seconds()
    began = time.perf_counter()
    call(new_process())
    assert 0.0 < cache.compile_seconds() - before <= time.perf_counter() - began
    others: list[float] = []
    thread = threading.Thread(target=lambda: others.append(cache.compile_seconds()))
    thread.start()
    thread.join()
    assert others == [0.0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_that_is_forked_while_another_thread_compiles_can_compile(folder):
    began = threading.Event()

    def slow_compile():
        with cache.global_compiler_lock:
            began.set()
            time.sleep(0.3)

    thread = threading.Thread(target=slow_compile)
    thread.start()
    began.wait()
    child = os.fork()
    if child == 0:
        os._exit(0 if call(new_process())[0] == 12.0 else 1)
    assert ended(child) == 0
    thread.join()


def ended(child, patience=120.0):
    """Its exit code; one that hangs is killed."""
    until = time.monotonic() + patience
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return "hangs"


FITS = """
import sys
import numpy as np
from augment_reduce import Adagrad, AugmentReduceClassifier, SectionFour
rules = {"adagrad": Adagrad(0.1), "section4": SectionFour(0.02)}
X, y = np.random.default_rng(0).normal(size=(60, 5)).astype(np.float32), np.arange(60) % 7
for name in sys.argv[1:]:
    clf = AugmentReduceClassifier(preset="paper", optimizer=rules[name], batch_size=20, max_iter=9, random_state=0)
    print(name, clf.fit(X, y).coef_.sum(0).tolist())
"""


def test_functions_generated_from_one_source_are_not_taken_for_each_other(tmp_path):
    """Two rules, each compiled by a process of its own, at the same time, and run by a third that loads both."""

    def fitted(folder, *names):
        command = [sys.executable, "-W", "ignore", "-c", FITS, *names]
        environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / folder)}
        found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return found.stdout.splitlines()

    alone = [*fitted("first", "adagrad"), *fitted("second", "section4")]
    (second,) = (tmp_path / "second").iterdir()
    for kernel in (tmp_path / "first").glob("*/*.kernel"):
        if not (second / kernel.name).exists():
            shutil.copy(kernel, second)
    assert fitted("second", "adagrad", "section4") == alone

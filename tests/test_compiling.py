"""Compiled kernels: kept on disk, loaded by the next process, forgotten when their sources change."""

import importlib
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from augment_reduce import kernels
from augment_reduce.kernels import forget_stale, warm
from augment_reduce.kernels.rows import SparseRows

F32 = torch.float32
ROWS = SparseRows(np.array([0, 1], np.int32), np.zeros(1, np.int32), np.ones(1, np.float32), 3)


SECOND_PROCESS = """
import numpy as np, torch
from augment_reduce.kernels import warm, _cpu_push
from augment_reduce.kernels.rows import SparseRows
X = SparseRows(np.zeros(2, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32), 3)
assert not warm.is_compiled(torch.float32)
seconds = warm.warm_up(X, torch.float32)
assert warm.is_compiled(torch.float32) and not warm.is_compiled(torch.float32, shared=True)
misses = sum(sum(k.stats.cache_misses.values()) for k in (_cpu_push.push_groups, _cpu_push.push_biases))
print(misses, seconds)
"""


def test_a_second_process_loads_what_the_first_compiled():
    warm.warm_up(ROWS, F32)
    assert warm.is_compiled(F32)
    done = subprocess.run([sys.executable, "-c", SECOND_PROCESS], capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == "0", "the disk cache was not used"


def test_warm_up_says_that_it_compiles_only_if_that_takes_long(monkeypatch):
    X, said = ROWS, []
    monkeypatch.setattr(warm, "_small_step", lambda *_: time.sleep(0.2))
    assert warm.warm_up(X, notify=lambda: said.append("compiling"), patience=0.01) >= 0.2
    assert said == ["compiling"]
    warm.warm_up(X, notify=lambda: said.append("again"), patience=60)
    assert said == ["compiling"]


def test_compiled_functions_have_names_of_their_own():
    """Numba links cached kernels by qualified name: two functions of one name, compiled on two days, get mixed up."""
    found = 0
    for path in sorted(Path(kernels.__file__).parent.glob("_cpu_*.py")):
        module = importlib.import_module(f"{kernels.__name__}.{path.stem}")
        compiled = [f.py_func for f in vars(module).values() if hasattr(f, "py_func")]
        names = [f.__qualname__ for f in compiled if f.__module__ == module.__name__]
        assert len(set(names)) == len(names), path.stem
        found += len(names)
    assert found > 50


def test_what_was_compiled_from_other_sources_is_forgotten(tmp_path):
    """A change in any of the files, not only the kernel's own; and nothing is removed while none has changed."""
    folder = tmp_path / "kernels"
    (folder / "__pycache__").mkdir(parents=True)
    for name in ("kernels/_cpu_one.py", "kernels/_cpu_two.py", "optim.py", "noise.py", "gaussian.py"):
        (tmp_path / name).write_text("x = 1")
    index = folder / "__pycache__" / "_cpu_one.kernel-1.nbi"
    index.touch()
    assert forget_stale(folder)
    assert not index.exists()
    index.touch()
    assert not forget_stale(folder)
    assert index.exists()
    for changed in ("kernels/_cpu_two.py", "optim.py", "gaussian.py"):
        (tmp_path / changed).write_text("x = 2")
        assert forget_stale(folder)
        assert not index.exists()
        index.touch()

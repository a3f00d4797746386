"""Kernels are Python that Numba compiles: under a debugger, with NUMBA_DISABLE_JIT=1, they make the same numbers."""

import os
import subprocess
import sys

import numpy as np

from tests.helpers import ROOT
from tests.helpers.uncompiled_fits import cases, fits


def test_fits_without_the_compiler_are_those_with_it(tmp_path):
    file = tmp_path / "fits.npz"
    command = [sys.executable, "-m", "tests.helpers.uncompiled_fits", str(file)]
    run = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NUMBA_DISABLE_JIT": "1"}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    compiled = fits()
    assert len(compiled) == len(list(cases()))
    with np.load(file) as uncompiled:
        assert set(uncompiled.files) == set(compiled)
        for name, expected in compiled.items():
            rounding = 100 * np.finfo(expected.dtype).eps * np.abs(expected).max()
            np.testing.assert_allclose(uncompiled[name], expected, rtol=0.0, atol=rounding, err_msg=name)

"""What the Numba kernels do not depend on (threads, other fits, K), and what they refuse."""

from __future__ import annotations

import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numba
import numpy as np
import pytest
import scipy.sparse as sp
import torch

from augment_reduce import AugmentReduceClassifier
from augment_reduce.kernels import reference
from augment_reduce.kernels.cpu import backend as cpu
from augment_reduce.kernels.cpu.work import WORK, run, split
from augment_reduce.kernels.rows import SparseRows
from augment_reduce.optim import Adagrad, SectionFour
from tests.helpers.kernel_steps import (
    F32,
    F64,
    SHAPES,
    draw_step,
    make,
    make_parameters,
    make_prior,
    push,
    tensors,
)

pytestmark = pytest.mark.usefixtures("one_numba_thread")


def busy_steps(dense: bool, n_steps: int = 3) -> dict[str, torch.Tensor]:
    """Both shapes of a step, large enough to be split among threads."""
    shape = (200, 30, 60, 900, 0.2 if dense else 0.08)
    X, rng = make(shape, 3)
    optimizer, parameters = Adagrad(), make_parameters(shape, Adagrad(), rng, F32)
    prior = make_prior("unbiased", X, F32)
    out = {}
    for t in range(1, n_steps + 1):
        step = draw_step(shape, X, rng, F32)
        out[f"psi{t}"] = cpu.pair_scores(X, step["rows"], step["pairs"], parameters.weight, parameters.bias)
        push(cpu, X, step, parameters, optimizer, t, prior, shared=False, dtype=F32)
        out[f"shared psi{t}"] = cpu.shared_scores(X, step["rows"], step["shared"], parameters.weight, parameters.bias)
        push(cpu, X, step, parameters, optimizer, t, prior, shared=True, dtype=F32)
    uniforms = torch.from_numpy(rng.random((2000, 50)))
    return {**out, **tensors(parameters), "draws": cpu.draw_without_replacement(uniforms, 10_000)}


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="Numba was given one thread")
@pytest.mark.parametrize("dense", [False, True])
def test_results_do_not_depend_on_the_number_of_threads(dense):
    one = busy_steps(dense)
    numba.set_num_threads(2)
    assert len(split(100, lambda: np.full(100, 10_000))) == 3  # it is split at all
    two = busy_steps(dense)
    for name, expected in one.items():
        assert torch.equal(two[name], expected), name


def test_two_fits_at_once_do_not_meet():
    """Scratch belongs to the calling thread."""
    expected = busy_steps(False), busy_steps(True)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            for found, one in zip(pool.map(busy_steps, (False, True)), expected, strict=True):
                for name in one:
                    assert torch.equal(found[name], one[name]), name


def test_a_loaded_minibatch_is_not_taken_for_another():
    """The push finds again what the scores loaded: only for the same rows of the same data in the same dtype."""
    shape = SHAPES[1]
    X, rng = make(shape)
    Y, _ = make(shape, 1)
    step, parameters = draw_step(shape, X, rng, F64), make_parameters(shape, SectionFour(), rng, F64)
    other = draw_step(shape, X, rng, F64)
    weight, bias = parameters.weight, parameters.bias
    for data, rows, pairs in (
        (X, step["rows"], step["pairs"]),
        (Y, step["rows"], step["pairs"]),
        (X, other["rows"], step["pairs"]),
        (X, other["rows"], other["pairs"]),
        (X, other["rows"][:5], other["pairs"][:5]),
        (Y, other["rows"][:5], other["pairs"][:5, :2]),
    ):
        for dtype in (F64, F32, F64):
            args = (data, rows, pairs, weight.to(dtype), bias.to(dtype))
            tolerance = 1e-12 if dtype == F64 else 1e-4
            torch.testing.assert_close(cpu.pair_scores(*args), reference.pair_scores(*args), rtol=0, atol=tolerance)


def test_more_weights_than_32_bits_count(tmp_path):
    """K x D = 2.8e9, in files of which only the touched pages exist; rows of the last classes are stepped."""
    K, D, optimizer = 70_000, 40_000, Adagrad()
    files = [np.memmap(tmp_path / name, np.float32, "w+", shape=(K, D)) for name in ("weight", "state")]
    weight, state = (torch.from_numpy(f) for f in files)
    assert weight.numel() > 2**31
    large = reference.Parameters(weight, torch.zeros(K), [state], [torch.zeros(K)])
    chosen = torch.tensor([3, K - 2, K - 1])
    small = reference.Parameters(torch.zeros(3, D), torch.zeros(3), [torch.zeros(3, D)], [torch.zeros(3)])
    rng = np.random.default_rng(0)
    feature = np.sort(np.stack([rng.choice(D, 30, replace=False) for _ in range(12)]), axis=1)
    feature[:, -1] = D - 1
    X = SparseRows(np.arange(13) * 30, feature.ravel(), rng.standard_normal(360).astype(np.float32), D)
    rows, pairs, grad = np.arange(12), torch.from_numpy(rng.integers(0, 3, (12, 2))), torch.ones(12, 2)
    labels, none = pairs[:, :1], (None, None)
    for t in (1, 2):
        for p, name, kernels in ((small, torch.arange(3), reference), (large, chosen, cpu)):
            kernels.push_pairs(X, rows, name[pairs], grad, None, p, optimizer, t, None)
            kernels.push_shared(X, rows, name[:2], grad, name[labels], grad[:, :1], *none, p, optimizer, t, None)
    torch.testing.assert_close(large.weight[chosen], small.weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(large.weight_state[0][chosen], small.weight_state[0], rtol=1e-5, atol=1e-6)
    psi = cpu.pair_scores(X, rows, chosen[pairs], large.weight, large.bias)
    expected = reference.pair_scores(X, rows, pairs, small.weight, small.bias)
    torch.testing.assert_close(psi, expected, rtol=1e-5, atol=1e-5)


def extra_bytes(K: int, D: int) -> tuple[int, int]:
    """Peak allocation of a later step, and all scratch held, for weights (K, D)."""
    WORK.forget()
    shape = (64, 11, K, D, 0.02)
    X, rng = make((64, 11, K, D, 0.02))
    optimizer = SectionFour()
    zeros = [torch.zeros(K, D) for _ in range(2)]
    parameters = reference.Parameters(zeros[0], torch.zeros(K), [zeros[1]], [torch.zeros(K)])
    peak = 0
    for t in range(1, 6):
        step = draw_step(shape, X, rng, F32)
        tracemalloc.start()
        for shared in (False, True):
            name, classes = ("shared_scores", "shared") if shared else ("pair_scores", "pairs")
            getattr(cpu, name)(X, step["rows"], step[classes], parameters.weight, parameters.bias)
            push(cpu, X, step, parameters, optimizer, t, None, shared=shared, dtype=F32)
        peak = max(peak, tracemalloc.get_traced_memory()[1]) if t > 1 else 0
        tracemalloc.stop()
    return peak, sum(a.nbytes for a in WORK.arrays.values())


def test_a_step_needs_memory_for_the_minibatch_only():
    """Nothing grows with K; nothing of size K x D, K or D is allocated in a step."""
    peak_small, scratch_small = extra_bytes(3_000, 400)
    peak_large, scratch_large = extra_bytes(60_000, 400)
    assert peak_large < 1.1 * peak_small + 10_000
    assert peak_large < 200_000  # scores (64, 11) and (64, 33), and small change
    assert scratch_large < 1.1 * scratch_small + 100_000
    assert scratch_large < 60_000 * 400 * 4 / 50


@pytest.mark.parametrize("bad", [-1, 8])
def test_what_lies_outside_is_refused(bad):
    """Compiled code does not check bounds, so its callers do."""
    shape, optimizer = SHAPES[0], SectionFour()
    X, rng = make(shape)
    step, parameters = draw_step(shape, X, rng, F32), make_parameters(shape, optimizer, rng, F32)
    weight, bias = parameters.weight, parameters.bias
    step["pairs"][3, 1] = step["shared"][2] = bad
    with pytest.raises(IndexError, match=r"classes in \[0, 8\)"):
        cpu.pair_scores(X, step["rows"], step["pairs"], weight, bias)
    with pytest.raises(IndexError, match=r"classes in \[0, 8\)"):
        cpu.shared_scores(X, step["rows"], step["shared"], weight, bias)
    with pytest.raises(IndexError, match=r"classes in \[0, 8\)"):
        push(cpu, X, step, parameters, optimizer, 1, None, shared=False, dtype=F32)
    with pytest.raises(IndexError, match=r"classes in \[0, 8\)"):
        push(cpu, X, step, parameters, optimizer, 1, None, shared=True, dtype=F32)
    good = torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(IndexError, match="rows in"):
        cpu.pair_scores(X, np.array([X.n_rows if bad > 0 else -1]), good, weight, bias)
    wide = SparseRows(np.array([0, 1]), np.array([32 if bad > 0 else -1]), np.ones(1, np.float32), 32)
    with pytest.raises(ValueError, match="feature indices"):
        cpu.pair_scores(wide, np.array([0]), good, weight, bias)
    with pytest.raises(ValueError, match="contiguous"):
        cpu.pair_scores(X, step["rows"], step["pairs"], weight.T, bias)
    with pytest.raises(ValueError, match="at most n=4"):
        cpu.draw_without_replacement(torch.rand(2, 5), 4)


MISFITS = {
    "weights of fewer columns than features": lambda a: a | {"weight": a["weight"][:, :4].contiguous()},
    "biases of fewer classes": lambda a: a | {"bias": a["bias"][:3]},
    "biases of another type": lambda a: a | {"bias": a["bias"].double()},
    "weights in one dimension": lambda a: a | {"weight": a["weight"][:, 0].contiguous()},
    "weights of whole numbers": lambda a: a | {"weight": a["weight"].long(), "bias": a["bias"].long()},
    "more rows than lines of classes": lambda a: a | {"rows": np.append(a["rows"], 0)},
    "rows in two dimensions": lambda a: a | {"rows": a["rows"][:, None]},
    "fewer values than indices": lambda a: a | {"X": replace(a["X"], values=a["X"].values[:-1])},
    "fewer entries than rows say": lambda a: a | {"X": replace(a["X"], indptr=a["X"].indptr + 10)},
    "a row that ends before it begins": lambda a: a | {"X": replace(a["X"], indptr=a["X"].indptr[::-1].copy())},
    "a row beyond the entries": lambda a: a | {"X": replace(a["X"], indptr=beyond(a["X"].indptr))},
}


def beyond(indptr):
    indptr = indptr.copy()
    indptr[1:-1] = 10**6
    return indptr


@pytest.mark.parametrize("misfit", MISFITS)
def test_arrays_that_do_not_belong_together_are_refused(misfit):
    """A weight matrix of four columns, read at the places of more features, gave scores made of foreign memory."""
    shape, optimizer = SHAPES[0], Adagrad()
    X, rng = make(shape)
    step, parameters = draw_step(shape, X, rng, F32), make_parameters(shape, optimizer, rng, F32)
    right = {"X": X, "rows": np.arange(16) + 3, "weight": parameters.weight, "bias": parameters.bias}
    calls = ("pair_scores", "pairs"), ("shared_scores", "shared")
    for name, classes in calls:
        getattr(cpu, name)(right["X"], right["rows"], step[classes], right["weight"], right["bias"])
    wrong = MISFITS[misfit](right)
    for name, classes in calls:
        if name == "shared_scores" and misfit.startswith("more rows"):
            continue  # whose lines are the rows
        with pytest.raises(ValueError, match="Expected"):
            getattr(cpu, name)(wrong["X"], wrong["rows"], step[classes], wrong["weight"], wrong["bias"])


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    "part", ["state", "state of another type", "no state", "bias_state", "grad", "own_grad", "share", "prior", "rows"]
)
def test_a_push_of_arrays_that_do_not_belong_together_is_refused(shared, part):
    shape, optimizer = SHAPES[0], Adagrad()
    X, rng = make(shape)
    step, p = draw_step(shape, X, rng, F32), make_parameters(shape, optimizer, rng, F32)
    prior = make_prior("unbiased", X, F32)
    match part:
        case "state":
            p.weight_state = [p.weight_state[0][:, :3].contiguous()]
        case "state of another type":
            p.weight_state = [p.weight_state[0].double()]
        case "no state":
            p.weight_state = []
        case "bias_state":
            p.bias_state = [p.bias_state[0][:2]]
        case "prior":
            prior = replace(prior, inverse_counts=prior.inverse_counts[:5])
        case "rows":
            step["rows"] = step["rows"][:-1]
        case _:
            for name in (part, f"shared_{part}"):
                if name in step:
                    step[name] = step[name][:, :-1].contiguous()
    if part == "own_grad" and not shared:
        return
    before = p.weight.clone()
    with pytest.raises(ValueError, match="Expected"):
        push(cpu, X, step, p, optimizer, 1, prior, shared=shared, dtype=F32)
    assert torch.equal(p.weight, before)


def test_own_rows_labels_and_scales_of_other_lengths_are_refused():
    X, _ = make(SHAPES[0])
    weight, bias = torch.zeros(8, 32), torch.zeros(8)
    pairs = torch.zeros(3, 1, dtype=torch.int64)
    cpu.pair_scores(X, np.arange(2), pairs, weight, bias, np.array([0, 1, 1]))
    for own_rows in (np.array([0, 1, 2]), np.array([0, -1, 1]), np.array([0, 1])):
        with pytest.raises(ValueError, match="Expected"):
            cpu.pair_scores(X, np.arange(2), pairs, weight, bias, own_rows)
    with pytest.raises(ValueError, match="row_scale"):
        cpu.with_label(torch.zeros(4, 3), torch.ones(3))
    with pytest.raises(ValueError, match="labels"):
        cpu.draw_without_replacement(torch.rand(4, 2), 9, torch.zeros(3, dtype=torch.int64))


def test_a_matrix_whose_rows_lie_elsewhere_is_refused_by_the_estimator():
    X = sp.random(20, 30, density=0.3, format="csr", dtype=np.float32, random_state=0)
    clf = AugmentReduceClassifier(max_iter=2, n_jobs=1).fit(X, np.arange(20) % 3)
    X.indptr[5:9] = 10**7
    with pytest.raises(ValueError, match="indptr of the CSR matrix"):
        clf.predict(X)


def test_threads_that_outlive_an_interrupted_call_have_its_scratch_for_themselves():
    """The next call gets other memory: those that go on write into what they were given."""
    written = WORK.array("scratch of a test", 8, np.float64)
    handed_out, done = threading.Event(), threading.Event()

    def interrupted(lo, hi, scratch):
        if lo == 0:
            raise KeyboardInterrupt
        handed_out.wait(60)
        scratch[:] = 7.0
        done.set()

    with pytest.raises(KeyboardInterrupt):
        run(interrupted, [0, 1, 2], (), [(written,), (written,)])
    fresh = WORK.array("scratch of a test", 8, np.float64)
    handed_out.set()
    assert done.wait(60)
    assert written.tolist() == [7.0] * 8
    assert fresh.tolist() == [0.0] * 8

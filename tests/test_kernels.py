"""The Numba kernels against `kernels.reference`: float64 to rounding, float32 as close to the truth as plain torch."""

from __future__ import annotations

import importlib.util
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path

import numba
import numpy as np
import pytest
import scipy.sparse as sp
import torch

from augment_reduce.kernels import cpu, reference
from augment_reduce.kernels._cpu_work import WORK, split
from augment_reduce.kernels.rows import DenseRows, Rows, SparseRows, as_rows
from augment_reduce.optim import Adagrad, Adam, Prior, RowOptimizer, RowwiseAdagrad, SectionFour

F32, F64 = torch.float32, torch.float64
OPTIMIZERS = [SectionFour(first_kappa_one=True), SectionFour(every_entry=True), Adagrad(), RowwiseAdagrad(), Adam()]
OPTIMIZERS.append(Adagrad(0.05, bias_scale=3.7))


def name_of(optimizer: RowOptimizer) -> str:
    return optimizer.name + "-every-entry" * (optimizer.name == "section4" and optimizer.n_states == 2)


PRIORS = ["none", "unbiased", "touched"]
# B, C, K, D, share of non-zeros. Even and odd; one of each; few and many non-zeros for D, with D above and below 4,096.
SHAPES = [
    (16, 4, 8, 32, 0.3),
    (13, 5, 7, 901, 0.05),
    (12, 3, 40, 4201, 0.005),
    (9, 5, 5, 4153, 0.3),
    (1, 1, 3, 17, 0.5),
    (6, 2, 1, 5, 0.6),
]


@pytest.fixture(autouse=True)
def _one_numba_thread():
    before = numba.get_num_threads()
    numba.set_num_threads(1)
    yield
    numba.set_num_threads(before)


def make(shape, seed=0, *, dense=False):
    """Rows (the first two without any feature), and a generator for what else a test draws."""
    B, _, _, D, density = shape
    rng = np.random.default_rng(seed)
    x = np.where(rng.random((2 * B + 3, D)) < density, rng.standard_normal((2 * B + 3, D)), 0.0).astype(np.float32)
    x[:2] = 0
    return as_rows(x if dense else sp.csr_matrix(x)), rng


def draw_step(shape, X, rng, dtype):
    """One minibatch with repeated rows, repeated classes in a row, and labels among the shared classes."""
    B, C, K, _, _ = shape
    rows = rng.integers(0, X.n_rows, B)
    rows[: B // 4] = rows[B // 4 : 2 * (B // 4)]
    rows[-1] = 0
    step = {
        "rows": rows,
        "pairs": torch.from_numpy(rng.integers(0, K, (B, C))),
        "shared": torch.from_numpy(rng.integers(0, K, 3 * C)),
        "own": torch.from_numpy(rng.integers(0, K, (B, 3))),
    }
    for name, size in (("grad", (B, C)), ("shared_grad", (B, 3 * C)), ("own_grad", (B, 3))):
        step[name] = torch.from_numpy(rng.standard_normal(size)).to(dtype)
    for name, size in (("share", (B, C)), ("shared_share", (B, 3 * C)), ("own_share", (B, 3))):
        step[name] = torch.from_numpy(5 * rng.random(size) * (rng.random(size) < 0.7)).to(dtype)
    return step


def make_parameters(shape, optimizer: RowOptimizer, rng, dtype) -> reference.Parameters:
    _, _, K, D, _ = shape
    weight, bias = (torch.from_numpy(rng.standard_normal(s)).to(F32).to(dtype) for s in ((K, D), (K,)))
    return reference.Parameters(weight, bias, optimizer.init_state(weight), optimizer.init_state(bias))


def make_prior(name: str, X: Rows, dtype) -> Prior | None:
    if name == "none":
        return None
    return Prior.from_counts(1.7, X.feature_counts(), X.n_rows, dtype, touched_only=name == "touched")


def push(kernels, X, step, parameters, optimizer, t, prior, *, shared, dtype):
    def value(name):
        return step[name].to(dtype)

    if shared:
        own = (step["own"], value("own_grad"), value("shared_share"), value("own_share"))
        kernels.push_shared(
            X, step["rows"], step["shared"], value("shared_grad"), *own, parameters, optimizer, t, prior
        )
    else:
        pairs = (step["pairs"], value("grad"), value("share"))
        kernels.push_pairs(X, step["rows"], *pairs, parameters, optimizer, t, prior)


def tensors(parameters: reference.Parameters) -> dict[str, torch.Tensor]:
    states = {f"state{i}": s for i, s in enumerate(parameters.weight_state)}
    bias_states = {f"bias_state{i}": s for i, s in enumerate(parameters.bias_state)}
    return {"weight": parameters.weight, "bias": parameters.bias, **states, **bias_states}


def assert_as_close_to_truth(kernel, plain, truth, slack):
    """The kernel may err as much as plain torch at the same dtype, plus `slack`; no more."""
    excess = (kernel.double() - truth).abs() - (plain.double() - truth).abs()
    assert (excess <= slack).all(), f"worst excess {(excess - slack).max():.2e}"


def score_scale(X, step, parameters, classes):
    """sum |x w| + |b|: what the rounding of a score is relative to."""
    size = reference.Parameters(parameters.weight.abs().double(), parameters.bias.abs().double())
    magnitudes = DenseRows(np.abs(X.dense(np.arange(X.n_rows), F64).numpy()))
    score = reference.pair_scores if classes.ndim == 2 else reference.shared_scores
    return score(magnitudes, step["rows"], classes, size.weight, size.bias)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("shape", SHAPES)
def test_scores_are_those_of_the_reference(shape, dtype, dense):
    X, rng = make(shape, dense=dense)
    step, parameters = draw_step(shape, X, rng, dtype), make_parameters(shape, SectionFour(), rng, dtype)
    weight, bias = parameters.weight, parameters.bias
    for name, classes in (("pair_scores", step["pairs"]), ("shared_scores", step["shared"])):
        plain = getattr(reference, name)(X, step["rows"], classes, weight, bias)
        truth = getattr(reference, name)(X, step["rows"], classes, weight.double(), bias.double())
        found = getattr(cpu, name)(X, step["rows"], classes, weight, bias)
        assert found.dtype == dtype
        assert found.shape == plain.shape
        slack = 4 * torch.finfo(dtype).eps * score_scale(X, step, parameters, classes)
        assert_as_close_to_truth(found, plain, truth, slack)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("prior_name", PRIORS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=name_of)
def test_push_in_float64_is_the_reference_to_rounding(optimizer, prior_name, shared):
    """Three steps in a row, so that a wrong state shows in the weights."""
    for i, shape in enumerate(SHAPES):
        X, rng = make(shape, i, dense=i % 2 == 1)
        prior = make_prior(prior_name, X, F64)
        ours = make_parameters(shape, optimizer, rng, F64)
        theirs = deepcopy(ours)
        for t in range(1, 4):
            step = draw_step(shape, X, rng, F64)
            push(cpu, X, step, ours, optimizer, t, prior, shared=shared, dtype=F64)
            push(reference, X, step, theirs, optimizer, t, prior, shared=shared, dtype=F64)
        for name, expected in tensors(theirs).items():
            # Adagrad turns a sum that almost cancels into a whole step; shared columns are summed in another order.
            torch.testing.assert_close(
                tensors(ours)[name], expected, rtol=1e-11 if shared else 1e-13, atol=1e-12 if shared else 1e-14
            )


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("prior_name", PRIORS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=name_of)
def test_push_in_float32_is_as_close_to_the_truth_as_the_reference(optimizer, prior_name, shared):
    """Two steps from random weights. Truth: the reference in float64 on the same float32 numbers."""
    for i, shape in enumerate(SHAPES):
        X, rng = make(shape, i, dense=i % 2 == 0)
        ours = make_parameters(shape, optimizer, rng, F32)
        plain, truth = deepcopy(ours), make_parameters(shape, optimizer, rng, F64)
        truth.weight, truth.bias = ours.weight.double(), ours.bias.double()
        for t in (1, 2):
            step = draw_step(shape, X, rng, F32)
            for kernels, parameters, dtype in ((cpu, ours, F32), (reference, plain, F32), (reference, truth, F64)):
                push(
                    kernels,
                    X,
                    step,
                    parameters,
                    optimizer,
                    t,
                    make_prior(prior_name, X, dtype),
                    shared=shared,
                    dtype=dtype,
                )
        for name, expected in tensors(truth).items():
            slack = 2e-5 * (1 + expected.abs())
            assert_as_close_to_truth(tensors(ours)[name], tensors(plain)[name], expected, slack)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=name_of)
def test_gradients_that_cancel_leave_their_entries_untouched(optimizer):
    """A row twice in the batch, with +0.3 and -0.3 for one class: a fused multiply-add would leave crumbs."""
    for shape in SHAPES[:4]:
        for dense in (False, True):
            X, rng = make(shape, dense=dense)
            parameters = make_parameters(shape, optimizer, rng, F32)
            for state in [*parameters.weight_state, *parameters.bias_state]:
                state += 1
            before = deepcopy(tensors(parameters))
            rows, k, grad = np.array([5, 5]), torch.tensor([[2], [2]]), torch.tensor([[0.3], [-0.3]])
            cpu.push_pairs(X, rows, k, grad, None, parameters, optimizer, 2, None)
            none = (None, None, parameters, optimizer, 2, None)
            cpu.push_shared(X, rows, k[0], grad, torch.tensor([[2], [4]]), torch.zeros(2, 1), *none)
            for name, expected in before.items():
                assert torch.equal(tensors(parameters)[name], expected), name


def test_untouched_entries_keep_their_bits():
    shape = SHAPES[2]
    X, rng = make(shape)
    step, parameters = draw_step(shape, X, rng, F32), make_parameters(shape, Adam(), rng, F32)
    before = deepcopy(parameters.weight)
    push(cpu, X, step, parameters, Adam(), 1, None, shared=False, dtype=F32)
    x, touched = X.dense(step["rows"], F32) != 0, torch.zeros_like(before, dtype=torch.bool)
    for b, classes in enumerate(step["pairs"]):
        touched[classes] |= x[b]
    assert torch.equal(parameters.weight != before, touched)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=name_of)
def test_no_features_at_all(optimizer, shared):
    """D = 0, the synthetic experiment: only biases. And rows without a single feature where there could be 5,003."""
    empty = SparseRows(np.zeros(36, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32), 5003)
    for X, D in ((as_rows(sp.csr_matrix((35, 0))), 0), (DenseRows(np.zeros((35, 0))), 0), (empty, 5003)):
        shape = (16, 4, 50, D, 0.0)
        rng = np.random.default_rng(0)
        prior = Prior.from_counts(2.0, np.zeros(D), 35, F64)
        ours = make_parameters(shape, optimizer, rng, F64)
        theirs = deepcopy(ours)
        for t in (1, 2):
            step = draw_step(shape, X, rng, F64)
            push(cpu, X, step, ours, optimizer, t, prior, shared=shared, dtype=F64)
            push(reference, X, step, theirs, optimizer, t, prior, shared=shared, dtype=F64)
        for name, expected in tensors(theirs).items():
            torch.testing.assert_close(tensors(ours)[name], expected, rtol=1e-13, atol=1e-14)
        args = (X, step["rows"], step["shared"] if shared else step["pairs"], ours.weight, ours.bias)
        name = "shared_scores" if shared else "pair_scores"
        torch.testing.assert_close(getattr(cpu, name)(*args), getattr(reference, name)(*args), rtol=0, atol=0)


def as_stored(X: SparseRows, index, number, tmp_path) -> SparseRows:
    """The same rows in other dtypes, with explicit zeros, in a read-only memory map."""
    extra = sp.csr_matrix((X.values, X.indices, X.indptr), shape=(X.n_rows, X.n_features)).tolil()
    matrix = extra.tocsr()
    arrays = {
        "indptr": matrix.indptr.astype(index),
        "indices": matrix.indices.astype(index),
        "values": matrix.data.astype(number),
    }
    arrays["values"][::5] = 0
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    return SparseRows(*(np.load(tmp_path / f"{n}.npy", mmap_mode="r") for n in arrays), X.n_features)


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("number", [np.float32, np.float64])
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_any_index_and_number_and_memory(index, number, dtype, tmp_path):
    """Data are read as they are: 32 or 64 bit indices, values of another dtype than the weights, read-only maps."""
    shape, optimizer = SHAPES[2], SectionFour()
    sparse, rng = make(shape)
    X = as_stored(sparse, index, number, tmp_path)
    dense = DenseRows(np.asfortranarray(X.dense(np.arange(X.n_rows), F64).numpy().astype(number)))
    dense.values.flags.writeable = False
    step = draw_step(shape, X, rng, dtype)
    for rows in (X, dense):
        ours = make_parameters(shape, optimizer, np.random.default_rng(1), dtype)
        theirs, prior = deepcopy(ours), make_prior("unbiased", rows, dtype)
        tolerance = {"rtol": 2e-5, "atol": 2e-5} if dtype == F32 else {"rtol": 1e-12, "atol": 1e-12}
        for shared in (False, True):
            push(cpu, rows, step, ours, optimizer, 1, prior, shared=shared, dtype=dtype)
            push(reference, rows, step, theirs, optimizer, 1, prior, shared=shared, dtype=dtype)
        torch.testing.assert_close(ours.weight, theirs.weight, **tolerance)
        psi = cpu.pair_scores(rows, step["rows"], step["pairs"], ours.weight, ours.bias)
        torch.testing.assert_close(
            psi, reference.pair_scores(rows, step["rows"], step["pairs"], ours.weight, ours.bias), **tolerance
        )


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


def test_the_benchmark_runs_on_a_tiny_shape(capsys):
    path = Path(__file__).resolve().parents[1] / "benchmarks" / "bench_kernels.py"
    spec = importlib.util.spec_from_file_location("bench_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    found = module.main(["--tiny", "--repeats", "4"])
    kernels = {"pair_scores", "push_pairs", "step pair", "shared_scores", "push_shared", "step shared", "draw"}
    assert {(kernel, provider) for _, kernel, provider, _ in found} == {
        (k, p) for k in kernels for p in ("cpu", "reference")
    }
    assert "tiny" in capsys.readouterr().out

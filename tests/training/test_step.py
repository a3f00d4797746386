"""One step: its gradient is unbiased for the bound at the q it holds, weights of rows are repetitions of rows,
and it allocates nothing that grows with K x D."""

import math
import tracemalloc

import numpy as np
import pytest
import torch

from augment_reduce.kernels import reference
from augment_reduce.kernels.cpu import backend as cpu
from augment_reduce.kernels.reference import Parameters
from augment_reduce.kernels.rows import DenseRows, SparseRows
from augment_reduce.local.base import Clock, StepSize
from augment_reduce.local.remembered import NaturalGradient, Newton
from augment_reduce.model import bounds
from augment_reduce.model.gaussian import gaussian_nodes
from augment_reduce.model.noise import Gumbel, Logistic, Normal
from augment_reduce.optim import Adagrad, RowOptimizer
from augment_reduce.sampling import ClassSampler, FrequencyShared, UniformPerRow
from augment_reduce.training.step import Problem, State, step
from tests.helpers import rng
from tests.helpers.enumerate_draws import COUNTS, LOOKING, K, Script, every_draw

D = 3


class Plain(RowOptimizer):
    """w <- w + g: the weights after one step from zero are the gradient."""

    n_states = 0

    def apply(self, w, g, c, state, t, prior):
        w += g


class Fixed(ClassSampler):
    def __init__(self, *sampled):
        super().__init__()
        self.queue = list(sampled)

    def draw(self, labels, size, *, generator, dtype):
        return self.queue.pop(0)


def problem_for(
    noise, local, sampler, *, labels, method="augment-reduce", kernels=reference, optimizer=None, weight=None
):
    X = DenseRows(torch.randn(len(labels), D, dtype=torch.float64, generator=rng(9)).numpy())
    return Problem(
        X=X, active=np.arange(len(labels)), n_rows=len(labels), labels=torch.tensor(labels), sample_weight=weight,
        method=method, noise=noise, sampler=sampler, n_sampled=2, local=local, optimizer=optimizer or Plain(),
        prior=None, kernels=kernels,
    )  # fmt: skip


def fresh(seed=4):
    weight = torch.randn(K, D, dtype=torch.float64, generator=rng(seed))
    return Parameters(weight, torch.randn(K, dtype=torch.float64, generator=rng(seed + 1)))


def gradient_after_step(problem, local_state):
    """The weight change of one step of the plain optimiser on row 0."""
    parameters = fresh()
    before = parameters.weight.clone()
    state = State(parameters, {k: v.clone() for k, v in local_state.items()}, Clock(5, 2))
    step(problem, state, np.array([0]), Clock(5, 2), generator=rng(0))
    return parameters.weight - before


@pytest.mark.parametrize("name", ["uniform", "uniform-shared", "frequency", "frequency-shared", *LOOKING])
@pytest.mark.parametrize("model", ["softmax", "probit", "logistic"])
def test_weight_gradient_is_unbiased_for_the_bound_at_the_q_held(model, name, monkeypatch):
    """Over every draw: the mean weight gradient of a step is autograd's, of the full-sum bound with the old q."""
    label = 1
    noise = {"softmax": Gumbel(), "probit": Normal(), "logistic": Logistic()}[model]
    local = NaturalGradient(floor=False) if model == "softmax" else Newton()
    local_state = local.init_state(1, torch.float64)
    local_state["visits"] += 3
    if model == "softmax":
        local_state["log_eta"] += 0.4
    mean = torch.zeros(K, D, dtype=torch.float64)
    for probability, sampled in every_draw(name, label, Script(monkeypatch)):
        problem = problem_for(noise, local, Fixed(sampled), labels=[label])
        mean += probability * gradient_after_step(problem, local_state)

    parameters = fresh()
    weight = parameters.weight.requires_grad_()
    psi = torch.from_numpy(problem.X.values) @ weight.T + parameters.bias
    gap = (psi - psi[:, label : label + 1])[:, [k for k in range(K) if k != label]]
    zero = torch.zeros((), dtype=torch.float64)
    if model == "softmax":
        full = bounds.softmax_bound(gap, zero, local_state["log_eta"])
    else:
        full = bounds.noise_bound(noise, gap, zero, gaussian_nodes(local_state["mu"], local_state["precision"], 5))
    (expected,) = torch.autograd.grad(full.sum(), weight)
    torch.testing.assert_close(mean, expected, rtol=1e-10, atol=1e-11)


def test_sharing_the_sample_with_the_e_step_is_biased(monkeypatch):
    """The paper's order (E step first, same classes) does not have that property: alpha = 1 is sampled softmax."""
    label, local = 1, NaturalGradient(StepSize(1.0, 0.0), uses_updated=True, floor=False)
    state = local.init_state(1, torch.float64)
    mean = torch.zeros(K, D, dtype=torch.float64)
    for probability, sampled in every_draw("uniform", label, Script(monkeypatch)):
        problem = problem_for(Gumbel(), local, Fixed(sampled), labels=[label])
        mean += probability * gradient_after_step(problem, state)
    parameters = fresh()
    weight = parameters.weight.requires_grad_()
    psi = torch.from_numpy(problem.X.values) @ weight.T + parameters.bias
    (exact,) = torch.autograd.grad(torch.log_softmax(psi, 1)[0, label], weight)
    assert (mean - exact).abs().max() > 0.01


@pytest.mark.parametrize("kernels", [reference, cpu], ids=["reference", "cpu"])
def test_first_visit_draws_a_second_independent_sample(kernels):
    """On a first visit eta comes from classes drawn for that alone, never from those of the M step."""
    sampler = UniformPerRow().bind(COUNTS.numpy(), kernels.draw_without_replacement)
    drawn = []
    original = sampler.draw
    sampler.draw = lambda *args, **kw: drawn.append(original(*args, **kw)) or drawn[-1]
    local = NaturalGradient()
    problem = problem_for(Gumbel(), local, sampler, labels=[0, 1, 2])
    state = State(fresh(), local.init_state(3, torch.float64), Clock(1, 1))
    step(problem, state, np.array([0, 1, 2]), Clock(1, 1), generator=rng(0))
    assert len(drawn) == 2
    assert state.local["visits"].tolist() == [2, 2, 2]
    step(problem, state, np.array([0, 1]), Clock(2, 1), generator=rng(1))
    assert len(drawn) == 3


def test_weighted_gradient_is_the_repeated_rows_gradient():
    """Rows with weights 1, 3 give the gradient of those rows written out 1 and 3 times."""
    sampler = UniformPerRow().bind(COUNTS.numpy(), reference.draw_without_replacement)
    sampler.draw = lambda labels, size, **kw: _all_others(labels)
    twice = problem_for(
        Gumbel(), None, sampler, labels=[0, 3], method="sampled-softmax", weight=torch.tensor([1.0, 3.0]).double()
    )
    parameters, before = fresh(), fresh().weight
    step(twice, State(parameters, {}, Clock(1, 1)), np.array([0, 1]), Clock(1, 1), generator=rng(0))
    weighted = parameters.weight - before
    repeated = problem_for(Gumbel(), None, sampler, labels=[0, 3, 3, 3], method="sampled-softmax")
    repeated.X = DenseRows(twice.X.values[[0, 1, 1, 1]])
    parameters = fresh()
    step(repeated, State(parameters, {}, Clock(1, 1)), np.arange(4), Clock(1, 1), generator=rng(0))
    torch.testing.assert_close(weighted, parameters.weight - before, rtol=1e-12, atol=1e-12)


def _all_others(labels):
    from augment_reduce.sampling import Sampled

    others = torch.tensor([[k for k in range(K) if k != y] for y in labels.tolist()])
    return Sampled(others, torch.zeros((), dtype=torch.float64), None, distinct=True)


def test_diverged_weights_are_an_error_not_a_nan():
    sampler = UniformPerRow().bind(COUNTS.numpy(), reference.draw_without_replacement)
    problem = problem_for(Gumbel(), NaturalGradient(), sampler, labels=[0])
    parameters = fresh()
    parameters.weight[0] = math.inf
    with pytest.raises(FloatingPointError, match=r"After iteration 7.*learning_rate"):
        step(
            problem,
            State(parameters, NaturalGradient().init_state(1, torch.float64), Clock(7, 1)),
            np.array([0]),
            Clock(8, 1),
            generator=rng(0),
        )


@pytest.mark.parametrize("sampler_class", [UniformPerRow, FrequencyShared])
@pytest.mark.parametrize("model", ["softmax", "probit"])
def test_a_step_allocates_nothing_of_size_k_times_d(model, sampler_class):
    """20,000 classes x 500 features are 40 MB a matrix; a step may take 3 MB beyond the touched rows' own."""
    n_classes, n_features, B, nnz = 20_000, 500, 64, 10
    generator = np.random.default_rng(0)
    X = SparseRows(
        np.arange(0, (B + 1) * nnz, nnz), generator.integers(n_features, size=B * nnz).astype(np.int32),
        np.ones(B * nnz, dtype=np.float32), n_features,
    )  # fmt: skip
    weight, bias = torch.zeros(n_classes, n_features), torch.zeros(n_classes)
    optimizer = Adagrad()
    parameters = Parameters(weight, bias, optimizer.init_state(weight), optimizer.init_state(bias))
    noise = Gumbel() if model == "softmax" else Normal()
    local = NaturalGradient() if model == "softmax" else Newton()
    sampler = sampler_class().bind(np.ones(n_classes), cpu.draw_without_replacement)
    problem = Problem(
        X=X, active=np.arange(B), n_rows=B, labels=torch.from_numpy(generator.integers(n_classes, size=B)),
        sample_weight=None, method="augment-reduce", noise=noise, sampler=sampler,
        n_sampled=20, local=local, optimizer=optimizer, prior=None, kernels=cpu,
    )  # fmt: skip
    state = State(parameters, local.init_state(B, torch.float32), Clock(1, 1))
    step(problem, state, np.arange(B), Clock(1, 1), generator=rng(0))  # compiles
    torch_bytes = _torch_bytes_allocated(lambda: step(problem, state, np.arange(B), Clock(1, 1), generator=rng(1)))
    tracemalloc.start()
    step(problem, state, np.arange(B), Clock(1, 1), generator=rng(2))
    numpy_peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert numpy_peak < 3e6
    assert torch_bytes < 3e6


def _torch_bytes_allocated(work) -> int:
    """The largest single allocation torch's allocator reports during `work`."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        work()
    return max((event.self_cpu_memory_usage for event in record.events()), default=0)

"""A step in one pass makes the numbers of the verbs one at a time, to the last bit; or changes nothing."""

import copy

import numpy as np
import pytest
import torch

from augment_reduce.kernels.cpu import backend as cpu
from augment_reduce.kernels.cpu.few_weights import ROWS_AT_ONCE
from augment_reduce.kernels.reference import Parameters
from augment_reduce.kernels.rows import DenseRows
from augment_reduce.local.base import Clock
from augment_reduce.model.compiled import compiled
from augment_reduce.optim import Adagrad, Prior, SectionFour
from augment_reduce.sampling import Sampled, UniformPerRow
from augment_reduce.training.step import Problem, State, step
from tests.helpers.compiled_rules import RULES, generator

N, B, D, K = 400, ROWS_AT_ONCE + 21, 19, 7
PAPER = [name for name, (_, rule) in RULES.items() if rule.uses_updated]


def problem_and_state(name, optimizer, with_prior, weighted, dtype=torch.float32):
    noise, rule = RULES[name]
    noise = compiled(noise)
    rule, X = rule.on(cpu, noise), DenseRows(torch.randn(N, D, generator=generator(1), dtype=dtype).numpy())
    weight, bias = (torch.randn(*shape, generator=generator(2), dtype=dtype) for shape in ((K, D), (K,)))
    parameters = Parameters(weight, bias, optimizer.init_state(weight), optimizer.init_state(bias))
    prior = Prior.from_counts(1.3, X.feature_counts(), N, dtype, of_bias=0.7) if with_prior else None
    labels = torch.randint(K, (N,), generator=generator(3))
    problem = Problem(
        X=X, active=np.arange(N), n_rows=N, labels=labels,
        sample_weight=torch.rand(N, generator=generator(4), dtype=dtype) if weighted else None,
        method="augment-reduce", noise=noise,
        sampler=UniformPerRow().bind(np.ones(K, np.int64), cpu.draw_without_replacement), n_sampled=3, local=rule,
        optimizer=optimizer, prior=prior, kernels=cpu,
    )  # fmt: skip
    return problem, State(parameters, rule.init_state(N, dtype), Clock(0, 0))


def with_fused_step(problem, state):
    fused = problem.local.fused_step(
        cpu, problem.noise, problem.X, problem.labels, state.parameters, problem.optimizer, problem.prior
    )
    assert fused is not None
    problem.fused_step = fused


def numbers(state):
    parameters = state.parameters
    return [parameters.weight, parameters.bias, *parameters.weight_state, *parameters.bias_state, *state.local.values()]


@pytest.mark.parametrize(
    ("optimizer", "with_prior"),
    [(SectionFour(first_kappa_one=True), False), (SectionFour(), True), (Adagrad(bias_scale=2.0), True)],
    ids=str,
)
@pytest.mark.parametrize("name", PAPER)
def test_one_pass_is_the_verbs_one_at_a_time(name, optimizer, with_prior):
    found = []
    for fused in (False, True):
        problem, state = problem_and_state(name, optimizer, with_prior, weighted=with_prior)
        if fused:
            with_fused_step(problem, state)
        bounds = []
        for t in (1, 2, 3):
            rows = np.sort(np.random.default_rng(t).permutation(N)[: B - t])
            state, info = step(problem, state, rows, Clock(t, t), generator=generator(t), want_bound=t > 1)
            bounds.append(info.bound)
        assert bounds[0] is None
        found.append([*numbers(state), *bounds[1:]])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", PAPER)
def test_a_step_whose_scores_are_not_finite_changes_nothing(name):
    problem, state = problem_and_state(name, SectionFour(), with_prior=False, weighted=False)
    problem.X.values[ROWS_AT_ONCE + 5, 2] = np.inf  # in the second block of rows
    with_fused_step(problem, state)
    before = copy.deepcopy(numbers(state))
    with pytest.raises(FloatingPointError, match="After iteration 0: The scores stopped being finite"):
        step(problem, state, np.arange(B), Clock(1, 1), generator=generator(1))
    assert all(torch.equal(one, other) for one, other in zip(numbers(state), before, strict=True))
    assert not state.mark.torn
    problem.X.values[ROWS_AT_ONCE + 5, 2] = 0.0  # and leaves no sums behind
    other_problem, other = problem_and_state(name, SectionFour(), with_prior=False, weighted=False)
    other_problem.X.values[ROWS_AT_ONCE + 5, 2] = 0.0
    for p, s in ((problem, state), (other_problem, other)):
        step(p, s, np.arange(B), Clock(1, 1), generator=generator(1))
    assert torch.equal(state.parameters.weight, other.parameters.weight)


def test_classes_and_rows_that_do_not_exist_are_refused():
    problem, state = problem_and_state("paper softmax", SectionFour(), with_prior=False, weighted=False)
    with_fused_step(problem, state)
    with pytest.raises(IndexError, match=r"Expected rows in \[0, 400\), found 3 to 400"):
        problem.fused_step.by_rows.refuse(np.array([3, N]), np.zeros((2, 1), np.int64))
    bad = Sampled(torch.full((B, 3), K), torch.zeros(()), None, distinct=True)
    problem.sampler.draw_for = lambda *_, **__: bad
    with pytest.raises(IndexError, match=r"Expected classes in \[0, 7\), found 7 to 7"):
        step(problem, state, np.arange(B), Clock(1, 1), generator=generator(1))
    assert not state.mark.torn

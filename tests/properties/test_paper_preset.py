"""Fed the authors' own minibatches, classes and noise, preset="paper" walks where their code walked, to 1e-12."""

import numpy as np
import pytest
import scipy.io
import torch

from augment_reduce.config.defaults import resolve_local, resolve_optimizer
from augment_reduce.kernels import reference
from augment_reduce.kernels.cpu import backend as cpu
from augment_reduce.kernels.reference import Parameters
from augment_reduce.kernels.rows import as_rows
from augment_reduce.local.base import Clock
from augment_reduce.model.noise import Gumbel, Normal
from augment_reduce.sampling import ClassSampler, Sampled
from augment_reduce.training.step import Problem, State, step
from tests.helpers import SHARED

ORACLE = SHARED / "oracle"
pytestmark = pytest.mark.skipif(not ORACLE.is_dir(), reason="recorded runs of the authors' code are not at hand")


class Recorded(ClassSampler):
    """Hands out the classes that the authors' code drew, one iteration after another."""

    name = "recorded"

    def __init__(self, negatives, n_classes, size):
        super().__init__()
        self.negatives, self.n_classes, self.at = negatives, n_classes, 0
        self.log_weight = torch.tensor(np.log((n_classes - 1) / size))

    def draw(self, labels, size, *, generator, dtype):
        self.at += 1
        return Sampled(torch.from_numpy(self.negatives[self.at - 1]), self.log_weight, None, distinct=True)


class RecordedNormal(Normal):
    """Normal noise whose draws are the recorded ones: local, global, local, global, ..."""

    def __init__(self, draws):
        self.draws = iter(draws)

    def variational_family(self):
        return self

    def rsample(self, shape, *, generator, dtype=torch.float32, device="cpu"):
        return next(self.draws).reshape(shape)


def replay(name, kernels, sparse):
    record = scipy.io.loadmat(ORACLE / f"oracle_{name}.mat")
    N, K, size = (int(record[key].item()) for key in ("N", "K", "ns"))
    X = record["X"]
    if sparse:
        import scipy.sparse as sp

        X = sp.csr_matrix(X)
    noise = Gumbel()
    if name == "probit_ar":
        pairs = zip(record["noise_local"], record["noise_global"], strict=True)
        noise = RecordedNormal(torch.from_numpy(draw.copy()) for pair in pairs for draw in pair)
    method = "one-vs-each" if name == "ove" else "augment-reduce"
    local = resolve_local(None, noise, method, "paper")
    optimizer = resolve_optimizer(None, None, "paper", N, N)
    weight = torch.from_numpy(record["w0"].T.copy())
    bias = torch.from_numpy(record["b0"][0].copy())
    parameters = Parameters(weight, bias, optimizer.init_state(weight), optimizer.init_state(bias))
    problem = Problem(
        X=as_rows(X), active=np.arange(N), n_rows=N, labels=torch.from_numpy(record["Y"][:, 0].astype(np.int64) - 1),
        sample_weight=None, method=method, noise=noise, sampler=Recorded(record["neg"].astype(np.int64) - 1, K, size),
        n_sampled=size, local=local, optimizer=optimizer, prior=None, kernels=kernels,
    )  # fmt: skip
    state = State(parameters, local.init_state(N, torch.float64) if local else {}, Clock(0, 0))
    return record, problem, state


def assert_same(actual, recorded):
    np.testing.assert_allclose(actual.numpy(), recorded, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kernels", [reference, cpu], ids=["reference", "cpu"])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("name", ["softmax_ar", "ove", "probit_ar"])
def test_every_iteration_equals_the_authors_code(name, kernels, sparse):
    record, problem, state = replay(name, kernels, sparse)
    for t in range(1, 21):
        clock = Clock(t, int(record["epoch"][0, t - 1]))
        rows = record["batch"][t - 1].astype(np.int64) - 1
        state, _ = step(problem, state, rows, clock, generator=torch.Generator(), want_bound=name != "probit_ar")
        if name == "softmax_ar":
            assert_same(state.local["log_eta"].exp() - 1.0, record["eta"][t - 1])
        if name == "probit_ar":
            assert_same(state.local["mu"], record["mu"][t - 1])
            assert_same(state.local["gamma"], record["u_std"][t - 1])
            assert_same(torch.nn.functional.softplus(state.local["gamma"]), record["std"][t - 1])
        if t in (1, 2, 5, 20):
            assert_same(state.parameters.weight.T, record[f"w_it{t}"])
            assert_same(state.parameters.bias, record[f"b_it{t}"][0])
            assert_same(state.parameters.weight_state[0].T, record[f"Gtw_it{t}"])
            assert_same(state.parameters.bias_state[0], record[f"Gtb_it{t}"][0])

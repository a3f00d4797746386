"""What a user passes in is a recipe: a fit never writes to it, so several estimators may share one."""

import copy
import pickle
import threading

import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.base import clone

from augment_reduce import (
    Adagrad,
    Adam,
    Amortised,
    AugmentReduceClassifier,
    ClassSampler,
    CrossFitted,
    FrequencyShared,
    Grid,
    HardNegativeCache,
    NaturalGradient,
    Newton,
    Reparameterised,
    RowwiseAdagrad,
    SectionFour,
)
from augment_reduce.kernels.cpu import backend as cpu
from augment_reduce.sampling import SAMPLERS, Conditional, Sampled
from tests.helpers import ROOT

OTHERS = {"n_sampled_classes": 6, "batch_size": 30, "max_iter": 25, "random_state": 0, "prior_variance": 2.0}


def data(seed=0, N=150, D=12, K=20):
    rng = np.random.default_rng(seed)
    X = sparse.random(N, D, 0.3, "csr", random_state=rng, data_rvs=rng.standard_normal)
    X = sparse.csr_matrix(X[rng.integers(0, N // 2, N)])  # rows come twice, on average
    y = (X @ rng.standard_normal((D, K)) + rng.gumbel(size=(N, K))).argmax(1)
    y[:K] = np.arange(K)
    return X, y


def fitted_with(sampler, seed=0, **settings):
    return AugmentReduceClassifier(class_sampling=sampler, **OTHERS | settings).fit(*data(seed))


def parts():
    """(parameter, object) of every part that a user may pass in."""
    yield from (("class_sampling", cls()) for cls in SAMPLERS.values())
    yield from (("optimizer", one) for one in (Adagrad(0.3), RowwiseAdagrad(0.3), Adam(0.05), SectionFour(0.1)))
    yield from (("local_step", one) for one in (CrossFitted(), NaturalGradient(), Newton(), Reparameterised()))
    yield from (("local_step", one) for one in (Amortised(), Grid()))


@pytest.mark.parametrize(("name", "part"), list(parts()), ids=lambda value: type(value).__name__)
def test_a_fit_writes_to_nothing_that_was_passed_in(name, part):
    before = copy.deepcopy(vars(part))
    assert not any(isinstance(value, np.ndarray | torch.Tensor) for value in before.values())
    clf = AugmentReduceClassifier(**OTHERS | {name: part}, early_stopping=True, warm_start=True)
    X, y = data()
    clf.fit(X, y).fit(X, y)
    clf.set_params(early_stopping=False).partial_fit(X[:50], y[:50])
    clf.predict_proba(X[:3])
    assert getattr(clf, name) is part
    assert vars(part) == before


@pytest.mark.parametrize("name", SAMPLERS)
def test_estimators_that_share_a_sampler_fit_as_each_with_its_own(name):
    """In turns, and with other numbers of rows and classes between."""
    shared = SAMPLERS[name]()
    first, second = fitted_with(shared), fitted_with(shared, 1, warm_start=True)
    X, y = data(1)
    other = AugmentReduceClassifier(class_sampling=shared, **OTHERS).fit(X[:60, :7], y[:60] % 9)
    again = second.fit(X, y)  # goes on after the other
    own = fitted_with(SAMPLERS[name](), 1, warm_start=True).fit(X, y)
    np.testing.assert_array_equal(first.coef_, fitted_with(SAMPLERS[name]()).coef_)
    np.testing.assert_array_equal(again.coef_, own.coef_)
    assert len(other.classes_) == 9


@pytest.mark.parametrize("name", SAMPLERS)
def test_estimators_that_share_a_sampler_may_fit_at_the_same_time(name):
    shared, found = SAMPLERS[name](), {}
    alone = {seed: fitted_with(SAMPLERS[name](), seed, n_jobs=1).coef_ for seed in range(4)}
    ready = threading.Barrier(4)

    def work(seed):
        ready.wait()
        found[seed] = fitted_with(shared, seed, n_jobs=1).coef_

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(4):
        np.testing.assert_array_equal(found[seed], alone[seed])


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_bound_sampler_is_another_object_and_its_state_can_be_restored(name):
    recipe = SAMPLERS[name]()
    counts = np.arange(1.0, 21.0)
    bound = recipe.bind(counts, cpu.draw_without_replacement)
    assert bound is not recipe
    assert (bound.n_classes, recipe.n_classes) == (20, 0)
    state = fitted_with(recipe)._fitted.sampler
    bound.load_state_dict(copy.deepcopy(state), same_rows=True)
    assert bound.state_dict().keys() == state.keys()
    assert all(torch.equal(bound.state_dict()[key], value) for key, value in state.items())


def test_parameters_survive_clone_and_pickle_without_tables():
    X, y = data()
    clf = AugmentReduceClassifier(class_sampling=HardNegativeCache(memory=3), **OTHERS).fit(X, y)
    small = len(pickle.dumps(HardNegativeCache(memory=3)))
    for other in (clone(clf), pickle.loads(pickle.dumps(clf))):
        sampler = other.get_params()["class_sampling"]
        assert vars(sampler) == vars(HardNegativeCache(memory=3))
        assert len(pickle.dumps(sampler)) == small
        np.testing.assert_array_equal(other.fit(X, y).coef_, clf.coef_)


class Rare(ClassSampler):
    """A user's own: draws for each row, with weights of a table that it makes in `bind`."""

    name = "rare"

    def __init__(self, power):
        self.power = power

    def bind(self, class_counts, draw_without_replacement):
        bound = super().bind(class_counts, draw_without_replacement)
        bound.chance = torch.from_numpy((class_counts + 1.0) ** self.power)
        return bound

    def draw(self, labels, size, *, generator, dtype):
        chance = self.chance.repeat(len(labels), 1).scatter_(1, labels[:, None], 0.0)
        classes = torch.multinomial(chance, size, replacement=True, generator=generator)
        log_q = torch.log(chance.gather(1, classes) / chance.sum(1, keepdim=True))
        return Sampled(classes, (-log_q - np.log(size)).to(dtype), None, distinct=False)


def test_a_sampler_of_the_users_own_is_a_recipe_too():
    sampler = Rare(-0.5)
    clf = fitted_with(sampler)
    assert vars(sampler) == {"power": -0.5}
    np.testing.assert_array_equal(clf.coef_, fitted_with(Rare(-0.5)).coef_)
    assert np.abs(clf.coef_ - fitted_with(Rare(0.0)).coef_).max() > 1e-3


def test_the_sampler_of_the_docs_draws_what_it_says():
    """E[omega_k] = 1 for every class but the label, from 20,000 draws: within six standard errors of each mean."""
    text = (ROOT / "docs" / "samplers.md").read_text(encoding="utf-8")
    names = {}
    blocks = [block.split("```")[0] for block in text.split("```python\n")[1:]]
    exec(next(block for block in blocks if "class Power(ClassSampler)" in block), names)
    counts = np.array([5.0, 1.0, 9.0, 0.0, 3.0])
    sampler = names["Power"](0.75).bind(counts, cpu.draw_without_replacement)
    generator = torch.Generator().manual_seed(0)
    drawn = sampler.draw(torch.tensor([2]), 20_000, generator=generator, dtype=torch.float64)
    omega = drawn.log_weight.exp().masked_fill(drawn.mask[0], 0.0)
    mean = torch.zeros(5, dtype=torch.float64).index_add_(0, drawn.classes, omega)
    expected = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    error = 6.0 * torch.sqrt((1.0 / sampler.q - 1.0) / 20_000)
    assert ((mean - expected).abs() <= error).all()
    assert fitted_with(names["Power"](0.75)).n_iter_ == 25


def test_bind_has_to_return_a_copy():
    class InPlace(FrequencyShared):
        def bind(self, class_counts, draw_without_replacement):
            super().bind(class_counts, draw_without_replacement)
            return self

    with pytest.raises(TypeError, match=r"InPlace\.bind to return a copy.*return it\."):
        fitted_with(InPlace())


def test_what_depends_on_the_number_of_classes_is_asked_of_a_copy():
    sampler = Conditional()
    assert sampler.for_classes(10_000).bytes(5, 7) == 8 * (128 * 7 + 32 * 10_000)
    assert sampler.n_classes == 0

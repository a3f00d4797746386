"""Seeds of steps and what follows from them: the same one by one or all at once, in torch or compiled."""

import numpy as np
import pytest
import torch
from scipy.special import logit, ndtri

from augment_reduce import seeds
from augment_reduce.kernels import reference
from augment_reduce.kernels._cpu_draws import LEAST, _logistic_quantiles, _normal_quantiles, standard_draws
from augment_reduce.noise import Logistic, Normal
from augment_reduce.seeds import StepGenerators, draw_seed, mix, mix_all


def mixed_by_hand(seed, stream, count):
    """splitmix64's finaliser thrice, in Python's own integers."""
    mask = 2**64 - 1
    z = seed & mask
    for part in (stream, count, 0):
        z = (z + 0x9E3779B97F4A7C15 * (part + 1)) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        z ^= z >> 31
    return z >> 1


@pytest.mark.parametrize("seed", [0, 7, -1, 2**63, 2**64 - 1, 2**70 + 3])
def test_seeds_are_what_they_always_were_and_the_same_all_at_once(seed):
    for turns in (range(1, 2), range(5, 70), range(10**12, 10**12 + 3)):
        expected = [mixed_by_hand(seed, 2, t) for t in turns]
        assert mix_all(seed, 2, turns).tolist() == expected
        assert [mix(seed, 2, t) for t in turns] == expected
    assert mix_all(seed, 2, range(0)).shape == (0,)


def test_seeds_of_neighbouring_steps_have_nothing_in_common():
    """Half of the 63 bits differ between neighbours, give or take: mean of 1,000 pairs within 6 standard errors."""
    flips = [bin(mix(0, 2, t) ^ mix(0, 2, t + 1)).count("1") for t in range(1000)]
    assert abs(np.mean(flips) - 31.5) < 6 * np.sqrt(63 / 4 / 1000)
    assert len({mix(s, 2, t) for s in range(50) for t in range(50)}) == 2500


@pytest.mark.parametrize("n", [1, 3])
def test_seeds_drawn_all_at_once_are_those_of_the_generators(n):
    """Seeds of all sizes: torch's generator looks at the lowest 32 bits."""
    of_steps = np.concatenate([mix_all(5, 2, range(200)), [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1]])
    one = torch.Generator()
    expected = [[draw_seed(generator) for _ in range(n)] for generator in StepGenerators(one, of_steps)]
    assert StepGenerators(one, of_steps).draw_seeds(n).tolist() == expected
    assert StepGenerators(one, of_steps[:0]).draw_seeds(n).shape == (0, n)
    assert seeds._known_generator()


def test_a_generator_that_is_none_we_know_is_asked(monkeypatch):
    of_steps, one = mix_all(5, 2, range(20)), torch.Generator()
    expected = StepGenerators(one, of_steps).draw_seeds(3)
    monkeypatch.setattr(seeds, "_known_generator", lambda: False)
    assert np.array_equal(StepGenerators(one, of_steps).draw_seeds(3), expected)
    assert StepGenerators(one, of_steps[:0]).draw_seeds(3).shape == (0, 3)


def test_quantiles_are_right_from_end_to_end():
    """To 2e-14 of themselves (where a logistic's is near zero, of one), across the seams of the polynomials too."""
    tails = np.concatenate([[0.0, 2.0**-60], 2.0 ** np.linspace(-54, -1, 4001), np.linspace(0.1499, 0.1501, 2001)])
    u = np.concatenate([tails, 1.0 - tails[tails >= 2.0**-53]])
    x = np.empty_like(u)
    _normal_quantiles(u, x)
    np.testing.assert_allclose(x, ndtri(np.maximum(u, LEAST)), rtol=2e-14, atol=1e-300)
    _logistic_quantiles(u, x)
    np.testing.assert_allclose(x, logit(np.maximum(u, LEAST)), rtol=2e-14, atol=2e-14)


@pytest.mark.parametrize(("family", "normal"), [(Normal(), True), (Logistic(), False)])
def test_compiled_draws_are_those_in_torch_whoever_makes_which(family, normal):
    expected = family.rsample((101,), generator=torch.Generator().manual_seed(9), dtype=torch.float64).numpy()
    seed, found = draw_seed(torch.Generator().manual_seed(9)), np.empty(101)
    for lo, hi in ((0, 40), (40, 41), (41, 101)):
        standard_draws(normal, seed, lo, found[lo:hi])
    whole = np.empty(101)
    standard_draws(normal, seed, 0, whole)
    assert np.array_equal(found, whole)
    np.testing.assert_allclose(found, expected, rtol=2e-14, atol=2e-14)
    quantile = ndtri if normal else logit
    np.testing.assert_allclose(expected, quantile(reference.uniforms(seed, 1, 101)[0].numpy()), rtol=1e-14, atol=1e-14)

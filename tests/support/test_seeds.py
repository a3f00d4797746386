"""Seeds of steps and what follows from them: the same in torch or compiled."""

import numpy as np
import pytest
import torch
from scipy.special import logit, ndtri

from augment_reduce.kernels import reference
from augment_reduce.kernels.cpu.draws import LEAST, _logistic_quantiles, _normal_quantiles, standard_draws
from augment_reduce.model.noise import Logistic, Normal
from augment_reduce.support.seeds import draw_seed, mix


@pytest.mark.parametrize(
    ("seed", "of_first", "of_late"),
    [
        (0, 3793352183285307871, 6960327213164953012),
        (7, 7828897789589763040, 1267470844626992123),
        (-1, 5160507109295640211, 1086533730630552257),
        (2**63, 5810456256497827214, 8262028447928793885),
        (2**64 - 1, 5160507109295640211, 1086533730630552257),
        (2**70 + 3, 6505279622251698896, 7913250536776194519),
    ],
)
def test_seeds_are_what_they_always_were(seed, of_first, of_late):
    """Of steps 1 and 10^12: models on disk go on with them."""
    assert mix(seed, 2, 1) == of_first
    assert mix(seed, 2, 10**12) == of_late


def test_seeds_of_neighbouring_steps_have_nothing_in_common():
    """Half of the 63 bits differ between neighbours, give or take: mean of 1,000 pairs within 6 standard errors."""
    flips = [bin(mix(0, 2, t) ^ mix(0, 2, t + 1)).count("1") for t in range(1000)]
    assert abs(np.mean(flips) - 31.5) < 6 * np.sqrt(63 / 4 / 1000)
    assert len({mix(s, 2, t) for s in range(50) for t in range(50)}) == 2500


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

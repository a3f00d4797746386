"""The paper's settings and the numbers it printed: table 1, 2, 3 and section 4.1, nothing computed.

Its step sizes, its initial weights and its minibatch order are the estimator's `preset="paper"`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

FLOOR = -26.0  # the authors' code clips test log likelihoods at this value
N_EVALUATIONS = 20  # evaluations of the test rows during training, evenly spaced
MOVING_AVERAGE = 100  # iterations, figure 2


@dataclass(frozen=True)
class Method:
    """A column of the paper's tables, as settings of the estimator."""

    name: str
    title: str
    model: str
    method: str
    n_evaluations: int = N_EVALUATIONS  # fewer if an evaluation takes an integral for each row


METHODS = {
    row.name: row
    for row in (
        Method("exact", "exact softmax", "softmax", "exact"),
        Method("one-vs-each", "one-vs-each", "softmax", "one-vs-each"),
        Method("sampled-softmax", "sampled softmax", "softmax", "sampled-softmax"),
        Method("softmax", "A&R softmax", "softmax", "augment-reduce"),
        Method("probit", "A&R probit", "probit", "augment-reduce", n_evaluations=10),
        Method("logistic", "A&R logistic", "logistic", "augment-reduce", n_evaluations=10),
    )
}
METHOD_ALIASES = {"augment-reduce": "softmax", "ove": "one-vs-each"}
WITHOUT_EXACT = tuple(name for name in METHODS if name != "exact")


@dataclass(frozen=True)
class Study:
    """A row of the paper's table 1: the data, the minibatch sizes, how long; and which methods are run on it."""

    name: str
    title: str
    n_train: int
    n_test: int
    n_features: int
    n_classes: int
    batch_size: int
    n_sampled_classes: int
    iterations: int
    timing_iterations: int  # enough for table 2
    methods: tuple[str, ...] = tuple(METHODS)
    data_seed: int = 0
    splits_anew: bool = False  # each seed draws its own test rows; the paper does not say which they were
    of_shape: str | None = None  # the study whose shape these random data have, for timing only

    def seed_of_rows(self, seed: int) -> int:
        """The seed of the rows of a cell with that seed: if splits are drawn, seeds differ in them, too."""
        return seed if self.splits_anew else self.data_seed


STUDIES = {
    row.name: row
    for row in (
        #     name              title            N_train    N_test   D        K      |B|    |S|  iterations  timing
        Study("mnist",         "MNIST",           60_000,  10_000,     784,     10,   500,   1,  35_000,     600),
        Study("bibtex",        "Bibtex",           4_880,   2_413,   1_836,    148,   488,  20,   5_000,     200),
        Study("omniglot",      "Omniglot",        25_968,   6_492,     784,  1_623,   541,  50,  45_000,     192,
              splits_anew=True),
        Study("eurlex-4k",     "EURLex-4K",       15_539,   3_809,   5_000,    896,   379,  50, 100_000,     205,
              methods=WITHOUT_EXACT),
        Study("amazoncat-13k", "AmazonCat-13K", 1_186_239, 306_782, 203_882,  2_919, 1_987, 60,   5_970,      60,
              methods=WITHOUT_EXACT),
        Study("synthetic",     "synthetic",      300_000,       0,       0,  9_035,   500, 100, 500_000,   1_200,
              methods=("one-vs-each", "softmax"), data_seed=49),  # the draw of that seed has 9,035 classes
    )
}  # fmt: skip
REAL = ("mnist", "bibtex", "omniglot", "eurlex-4k", "amazoncat-13k")

# Table 3: test log likelihood, accuracy.
TABLE3: dict[str, dict[str, tuple[float, float]]] = {
    "mnist": {
        "exact": (-0.261, 0.927), "one-vs-each": (-0.276, 0.919), "softmax": (-0.271, 0.924),
        "probit": (-0.302, 0.918), "logistic": (-0.287, 0.917),
    },
    "bibtex": {
        "exact": (-3.188, 0.361), "one-vs-each": (-3.300, 0.352), "softmax": (-3.036, 0.361),
        "probit": (-4.184, 0.346), "logistic": (-3.151, 0.353),
    },
    "omniglot": {
        "one-vs-each": (-5.667, 0.179), "softmax": (-5.171, 0.201), "probit": (-7.350, 0.178),
        "logistic": (-5.395, 0.184),
    },
    "eurlex-4k": {
        "one-vs-each": (-4.241, 0.247), "softmax": (-4.593, 0.207), "probit": (-4.193, 0.263),
        "logistic": (-4.299, 0.226),
    },
    "amazoncat-13k": {
        "one-vs-each": (-3.880, 0.388), "softmax": (-3.795, 0.420), "probit": (-3.593, 0.411),
        "logistic": (-4.081, 0.350),
    },
}  # fmt: skip

# Table 2, and section 4.1 for the synthetic data: seconds per epoch, one core.
_HOUR, _MINUTE = 3600.0, 60.0
TABLE2: dict[str, dict[str, float]] = {
    "mnist": {"one-vs-each": 0.336, "softmax": 0.337, "probit": 0.431, "logistic": 0.511},
    "bibtex": {"one-vs-each": 0.181, "softmax": 0.188, "probit": 0.244, "logistic": 0.246},
    "omniglot": {"one-vs-each": 4.47, "softmax": 4.65, "probit": 5.63, "logistic": 5.57},
    "eurlex-4k": {"one-vs-each": 5.54, "softmax": 5.65, "probit": 6.46, "logistic": 6.23},
    "amazoncat-13k": {
        "one-vs-each": 2.80 * _HOUR, "softmax": 2.80 * _HOUR, "probit": 2.82 * _HOUR, "logistic": 2.91 * _HOUR,
    },
    "synthetic": {"one-vs-each": 0.189 * _MINUTE, "softmax": 0.196 * _MINUTE},
}  # fmt: skip

# Section 4.1: bound summed over all rows, mean absolute error of the probabilities.
SYNTHETIC: dict[str, tuple[float, float]] = {"one-vs-each": (-1.40e9, 3.65e-6), "softmax": (-2.62e6, 3.00e-6)}

TARGETS = {
    "table1": "statistics of the data",
    "table2": "seconds per epoch",
    "table3": "test log likelihood and accuracy",
    "figure2": "the bound against wall-clock time",
    "synthetic": "section 4.1: no covariates, 9,035 classes",
    "all": "everything above",
    "report": "the tables, figures and page again, from the cells that are finished",
}


def shape_of(study: Study) -> Study:
    """The substitute for a study without files: random data of its shape, enough to be timed."""
    return Study(
        f"{study.name}-shape", f"{study.title} (random data of its shape)", study.n_train, 0, study.n_features,
        study.n_classes, study.batch_size, study.n_sampled_classes, study.iterations, study.timing_iterations,
        methods=study.methods, of_shape=study.name,
    )  # fmt: skip


def study_named(name: str) -> Study:
    """A study by its name, or its substitute by that name with `-shape`."""
    if name in STUDIES:
        return STUDIES[name]
    return shape_of(STUDIES[name.removesuffix("-shape")])


def chosen(names: Sequence[str], among: Iterable[str], what: str) -> list[str]:
    """`names` in canonical spelling, without repeats; an unknown one is refused with the choices."""
    known = list(among)
    found: dict[str, None] = {}
    for name in names:
        key = name.strip().lower().replace("_", "-")
        key = METHOD_ALIASES.get(key, key) if what == "method" else key
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"Expected a {what} among {', '.join(known)}, but found {name!r}.{hint}")
        found[key] = None
    return list(found)

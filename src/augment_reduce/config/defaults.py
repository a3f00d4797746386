"""Default settings and presets: every rule in one place.

`resolve` turns the estimator's parameters, some of them None, and the shape of the data into `Settings` with no
None left. `verbose` prints them; every one can be set by hand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..local.amortised import Amortised
from ..local.base import LocalStep, StepSize
from ..local.cross_fitting import CrossFitted
from ..local.grid import Grid
from ..local.remembered import NaturalGradient, Newton, Reparameterised
from ..model.noise import Gumbel, Noise
from ..optim import OPTIMIZERS, Adagrad, RowOptimizer, SectionFour
from ..sampling import AllClasses, ClassSampler, FeatureCandidates, HeadAndTail, UniformPerRow, resolve_sampler
from .shape import Shape

MOST_SHARED = 1000  # classes shared by a minibatch, by default
MOST_STEPS = 20_000  # by default
FIRST_SCALE = 16.0  # variance of the scores at which the search for the prior starts
WORTH_MERGING = 1.5  # mean number of duplicates of a row from which duplicate rows are grouped
FEWEST_TO_HALVE = 4  # sampled classes, from which cross-fitting has a useful bound
LBFGS = "lbfgs"
OF_STEPS = {  # parameters of minibatch training only, and their defaults
    "optimizer": None, "learning_rate": None, "max_iter": None, "max_epochs": None, "batch_size": None,
    "n_sampled_classes": None, "class_sampling": "auto", "local_step": None, "early_stopping": False,
    "init_scale": None, "warm_start": False,
}  # fmt: skip
MOST_PAIRS = {"softmax": 5_000_000, "probit": 60_000, "logistic": 60_000}  # rows times classes, for a direct fit
MOST_NUMBERS, MOST_COLUMNS, MOST_PRODUCTS = 10_000_000, 1_200, 40_000_000
MOST_BASIS = 50_000_000  # numbers in the orthogonal basis of wide data: 400 MB
LOCAL_STEPS: dict[str, type[LocalStep]] = {
    cls.name: cls for cls in (NaturalGradient, Reparameterised, Newton, Amortised, CrossFitted, Grid)
}


@dataclass(frozen=True)
class Settings:
    """All settings of a fit, resolved."""

    method: str
    noise: Noise
    sampler: ClassSampler
    n_sampled_classes: int
    batch_size: int
    max_iter: int
    optimizer: RowOptimizer
    local: LocalStep | None
    prior_variance: float | None
    intercept_prior_variance: float | None  # None: no prior on the intercepts
    fit_intercept: bool
    prior_touched_only: bool
    init_scale: tuple[float, float]  # standard deviation of the initial weights and of the initial biases
    dtype: torch.dtype
    direct: bool = False  # solved by L-BFGS instead of minibatch steps
    prior_of_x: bool = True  # prior_variance is about weights of X, not of scaled features

    def describe(self) -> str:
        """The settings in one line, for `verbose`."""
        prior = "none" if self.prior_variance is None else f"{self.prior_variance:g}"
        if self.direct:
            return f"model {self.noise.name}, optimum by L-BFGS, all classes and rows, prior variance {prior}"
        faster = f", of biases {self.optimizer.bias_scale:.3g} times that" if self.optimizer.bias_scale != 1.0 else ""
        words = {
            "model": self.noise.name,
            "method": self.method,
            "classes": f"{self.n_sampled_classes} by {self.sampler.name}",
            "batch": f"{self.batch_size:,}",
            "iterations": f"{self.max_iter:,}",
            "optimizer": f"{self.optimizer.name} (rate {getattr(self.optimizer, 'learning_rate', 0.0):g}{faster})",
            "local step": self.local.name if self.local else "none",
            "prior variance": prior,
        }
        return ", ".join(f"{key} {value}" for key, value in words.items())


def default_sampler(shape: Shape, *, may_take_all: bool = True) -> str:
    """All classes up to 2,000; above, shared samples of the frequent classes (always) and a few of the others.

    Up to 2,000 classes the full sum takes seconds (Omniglot, 1,623 classes: four times the time of 500 shared ones) and
    has no sampling noise, worth 0.05 nat there (docs/studies.md). Sparse rows add candidate classes.
    If `n_sampled_classes` is set, or the method is defined by sampling, classes are always sampled. The variances of
    the samplers are in docs/samplers.md.
    """
    if may_take_all and shape.n_classes <= 2 * MOST_SHARED:
        return AllClasses.name
    if shape.n_classes <= 500:
        return UniformPerRow.name
    a_row = shape.n_nonzero / max(1, shape.n_rows)
    says_something = shape.sparse and 1.0 <= a_row <= 0.2 * shape.n_features
    return FeatureCandidates.name if says_something else HeadAndTail.name


def default_n_sampled(shape: Shape, sampler: ClassSampler) -> int:
    """About the square root of K, in [20, 100], for each row; ten times that where the minibatch shares the draw.

    Four times if rows have candidate classes too: on debian-deps (5,694 classes, ten epochs) 300 shared classes then
    end 0.05 % behind 750, in 0.57 of the time (docs/studies.md).
    """
    per_row = int(min(max(20.0, math.sqrt(shape.n_classes)), 100.0))
    if isinstance(sampler, FeatureCandidates):
        return 4 * per_row
    return min(10 * per_row, MOST_SHARED) if sampler.shared else per_row


def default_batch_size(shape: Shape, sampler: ClassSampler | None = None) -> int:
    """A hundredth of the rows, in [32, 512]: at least a hundred steps an epoch unless the data are tiny.

    Up to 1,024 for grouped duplicate rows (with shared classes): a group costs little more than one row, and carries
    little more information (docs/studies.md).
    """
    together = sampler is not None and sampler.shared and shape.repeats >= WORTH_MERGING
    most = 1024 if together else 512
    return int(min(max(32, shape.n_rows // 100), most, max(1, shape.n_rows)))


def default_epochs(shape: Shape) -> int:
    """10 epochs; more for short epochs, or if there are fewer weights than rows and thus little overfitting.

    At most MOST_STEPS steps for many rows. The learning rate decays over the epochs (`default_adagrad`), so more epochs
    are not always better.
    """
    if shape.n_rows > 20_000:
        return min(50, max(3, MOST_STEPS * 512 // shape.n_rows)) if few_weights(shape) else 10
    return 30 if shape.n_rows > 2_000 else 100


def few_weights(shape: Shape) -> bool:
    """Fewer weights than rows: little to overfit."""
    return shape.n_classes * shape.n_features <= shape.n_rows


def default_adagrad(rate: float | None, noise: Noise, shape: Shape, batch_size: int) -> Adagrad:
    """Adagrad with rate 2.2 Var(noise) / sqrt(m + agreement^2) and eps N / (2 B).

    Adagrad's first step moves each of a row's m weights by the rate, whatever the gradient. Another row's score changes
    by sqrt(m) times that if features have random signs, by the agreement (`Shape.agreement`) if they do not. The eps,
    half of one row's gradient, damps the first step of a tiny gradient; without it rarely drawn classes would jump. The
    rate is halved after a fifth of the default epochs (a tenth with fewer weights than rows) and decays like 1 / t
    (docs/studies.md); in a stream it is constant. Features are scaled (`features`).
    """
    if rate is None:
        per_row = max(1.0, shape.n_nonzero / max(1, shape.n_rows))
        moved = math.sqrt(per_row + shape.agreement**2)
        rate = min(2.2 * deviation(noise) ** 2 / moved, 0.3 if shape.stream else 2.0)
    per_epoch = shape.n_rows / batch_size
    share = 0.1 if few_weights(shape) else 0.2
    half_after = None if shape.stream else share * default_epochs(shape) * per_epoch
    return Adagrad(rate, 0.5 * per_epoch, half_after, bias_scale=default_bias_scale(shape))


def default_bias_scale(shape: Shape) -> float:
    """The learning rate of biases over that of weights: the agreement of rows, at least 1.

    A step moves the weights of all features of a row. If a feature mostly has one sign (counts, pixels), the scores of
    other rows with this feature move in the same direction, whatever their label. The bias has to compensate, which at
    the rate of a single weight takes too long: a faster bias gains 0.23 nat on held-out rows of Omniglot. If rows share
    few features, a faster bias only adds noise; with fewer weights than rows the square root is enough
    (docs/studies.md). In a stream it is 1, since parts of it would have different agreements.
    """
    if shape.stream or shape.agreement <= 1.0:  # one part of a stream may be a single row
        return 1.0
    return math.sqrt(shape.agreement) if few_weights(shape) else shape.agreement


def first_prior_variance(noise: Noise, shape: Shape) -> float:
    """The start of the search for the prior variance, and its value if there is no search: the scores of rows with m
    features of size one then have 16 times the variance of Gumbel noise over that of this noise.
    """
    per_row = max(1.0, shape.n_nonzero / max(1, shape.n_rows))
    return FIRST_SCALE / per_row * relative_variance(noise)


def relative_variance(noise: Noise) -> float:
    """Variance of the noise over that of the Gumbel: the square of how much larger scores of this model are."""
    return (deviation(noise) / deviation(Gumbel())) ** 2


def is_small(noise: Noise, shape: Shape) -> bool:
    """Whether a direct fit (L-BFGS on the exact objective) takes a second or two."""
    N, K, R = shape.n_rows, shape.n_classes, min(shape.n_rows, shape.n_features)
    if MOST_PAIRS.get(noise.name, MOST_PAIRS["probit"] if noise.smooth_log_concave else 0) < N * K:
        return False
    fits = N * R <= MOST_NUMBERS and R <= MOST_COLUMNS and shape.n_features * R <= MOST_BASIS
    return fits and N * K * (R + 20) <= MOST_PRODUCTS


def solves_directly(parameters: dict[str, object], noise: Noise, shape: Shape) -> bool:
    """If optimizer="lbfgs"; or if the data are small and no parameter of minibatch training was set."""
    if is_lbfgs(parameters["optimizer"]):
        return not shape.stream
    untouched = all(equals_default(parameters.get(name), default) for name, default in OF_STEPS.items())
    possible = parameters["method"] in ("augment-reduce", "exact") and parameters["preset"] is None
    return untouched and possible and not shape.stream and is_small(noise, shape)


def is_lbfgs(optimizer: object) -> bool:
    return isinstance(optimizer, str) and optimizer == LBFGS


def equals_default(value: object, default: object) -> bool:
    """Equality for values of any type: arrays cannot be compared with `==`."""
    return value is default or (isinstance(value, (str, bool, np.bool_)) and value == default)


def scales_features(parameters: dict[str, object]) -> bool:
    """ "auto": unless a preset, a learning rate or an optimiser object is given, which refer to unscaled features."""
    wanted = parameters.get("feature_scaling", "auto")
    if wanted != "auto":
        return bool(wanted)
    own = isinstance(parameters["optimizer"], RowOptimizer) or parameters["learning_rate"] is not None
    return parameters["preset"] is None and not own


def deviation(noise: Noise) -> float:
    """Standard deviation of the noise; that of the Gumbel for user-defined noises, which need not have one."""
    return {"probit": 1.0, "logistic": math.pi / math.sqrt(3.0)}.get(noise.name, math.pi / math.sqrt(6.0))


def resolve_optimizer(
    optimizer: str | RowOptimizer | None, learning_rate: float | None, preset: str | None, n_rows: int, batch_size: int,
    adagrad: Adagrad | None = None,
) -> RowOptimizer:  # fmt: skip
    """The optimiser of that name (`adagrad`: with the default rates), the object given, or the preset's."""
    if isinstance(optimizer, RowOptimizer):
        return optimizer
    if preset is not None and optimizer is None:
        rate = 0.02 if learning_rate is None else learning_rate
        if preset == "paper":
            return SectionFour(learning_rate=rate, first_kappa_one=True)
        return SectionFour(learning_rate=rate, every_entry=True)
    name = "adagrad" if optimizer is None or is_lbfgs(optimizer) else optimizer
    if not isinstance(name, str) or name not in OPTIMIZERS:
        raise ValueError(
            f"Expected optimizer to be one of {', '.join(map(repr, (*OPTIMIZERS, LBFGS)))} or a RowOptimizer object, "
            f"found {optimizer!r}."
        )
    if name == Adagrad.name:
        return adagrad if adagrad is not None else Adagrad(eps=n_rows / batch_size)
    cls = OPTIMIZERS[name]
    return cls() if learning_rate is None else cls(learning_rate=learning_rate)  # type: ignore[call-arg]


def without_biases(optimizer: RowOptimizer) -> RowOptimizer:
    if not isinstance(optimizer, Adagrad):
        raise ValueError(
            f"fit_intercept=False needs optimizer='adagrad' or 'lbfgs'; found {optimizer.name!r}, which has one rate "
            "for weights and biases. Leave optimizer=None."
        )
    return replace(optimizer, bias_scale=0.0)


def default_local_step(noise: Noise, shape: Shape | None, n_sampled: int) -> str:
    """Cross-fitting, on a grid unless q has a closed form. With fewer than four sampled classes: remembered per row, or
    predicted (amortised) in streams.

    Up to 20,000 rows are visited 30 times or more, often enough for a remembered q; with ten visits it always lags
    behind the weights, and a predicted q does not. The q of a probit depends on the label's score too strongly to be
    predicted, so it is remembered (Newton). docs/studies.md compares them.
    """
    if n_sampled >= FEWEST_TO_HALVE:
        return CrossFitted.name if noise.conjugate else Grid.name
    few_visits = shape is not None and (shape.stream or shape.n_rows > 20_000)
    if few_visits and noise.name in ("softmax", "logistic"):
        return Amortised.name
    return NaturalGradient.name if noise.conjugate else Newton.name


def resolve_local(
    local_step: str | LocalStep | None, noise: Noise, method: str, preset: str | None,
    shape: Shape | None = None, sampler: ClassSampler | None = None, n_sampled: int = 1,
) -> LocalStep | None:  # fmt: skip
    """The local step of a model: the one given, the preset's, or `default_local_step`.

    With all classes in the sum nothing is random: the E step uses alpha = 1, and the M step uses the q it found.
    For softmax that is the exact gradient of log p.
    """
    if method != "augment-reduce":
        if local_step is not None:
            raise ValueError(
                f"local_step={local_step!r} has no meaning for method={method!r}, which keeps nothing per row. "
                "Leave local_step=None, or use method='augment-reduce'."
            )
        return None
    softmax = noise.conjugate
    if isinstance(local_step, LocalStep):
        chosen: LocalStep = local_step
    elif local_step is None and preset == "paper":
        # The published numbers come from step sizes by epoch, without the gradient of the entropy.
        if softmax:
            return NaturalGradient(StepSize(1.0, 0.9, "epoch"), uses_updated=True, floor=False)
        return Reparameterised(StepSize(0.001, 0.9, "epoch"), uses_updated=True, entropy_gradient=False)
    elif local_step is None and preset == "paper-text":
        if softmax:
            return NaturalGradient(StepSize(1.0, 0.9, "iteration"), uses_updated=True, floor=False)
        return Reparameterised(StepSize(0.01, 0.9, "iteration"), uses_updated=True)
    elif local_step is None and isinstance(sampler, AllClasses):
        if softmax:
            return NaturalGradient(StepSize(1.0, 0.0, "visits"), uses_updated=True, floor=False)
        chosen = Grid()
    else:
        name = default_local_step(noise, shape, n_sampled) if local_step is None else local_step
        if not isinstance(name, str) or name not in LOCAL_STEPS:
            raise ValueError(
                f"Expected local_step to be one of {', '.join(map(repr, LOCAL_STEPS))} or a LocalStep object, "
                f"found {local_step!r}."
            )
        chosen = LOCAL_STEPS[name]()
    if isinstance(chosen, Grid):
        all_classes = isinstance(sampler, AllClasses)
        chosen = chosen.resolved(may_halve=n_sampled >= FEWEST_TO_HALVE, all_classes=all_classes)
    if isinstance(chosen, NaturalGradient) and not softmax:
        raise ValueError(
            f"local_step='natural-gradient' is the softmax's closed form; the model is {noise.name!r}. "
            f"Use {Newton.name!r} or {Reparameterised.name!r}."
        )
    if chosen.takes_halves and n_sampled < 2 and not isinstance(sampler, AllClasses):
        raise ValueError(
            f"local_step={chosen.name!r} needs at least 2 sampled classes, one for each half; here |S| is {n_sampled} "
            "(n_sampled_classes, and at most the classes other than the label). Leave local_step=None."
        )
    return chosen


def resolve(parameters: dict[str, object], noise: Noise, shape: Shape, x_dtype: torch.dtype) -> Settings:
    """All settings, from the estimator's parameters (as `get_params()` returns them) and the shape of the data."""
    get = parameters.get
    method, preset = str(get("method")), get("preset")
    assert preset is None or isinstance(preset, str)
    sampling = get("class_sampling")
    if method == "exact":
        recipe: ClassSampler = AllClasses()
    elif isinstance(sampling, str) and sampling == "auto":
        may_take_all = method == "augment-reduce" and get("n_sampled_classes") is None
        recipe = resolve_sampler("uniform" if preset else default_sampler(shape, may_take_all=may_take_all))
    else:
        recipe = resolve_sampler(sampling)  # type: ignore[arg-type]
    sampler = recipe.for_classes(shape.n_classes)
    asked = get("n_sampled_classes")
    n_sampled = default_n_sampled(shape, sampler) if asked is None else int(asked)  # type: ignore[call-overload]
    batch_size = get("batch_size")
    B = default_batch_size(shape, sampler) if batch_size is None else min(int(batch_size), shape.n_rows)  # type: ignore[call-overload]
    per_epoch = -(-shape.n_rows // B)
    max_iter, max_epochs = get("max_iter"), get("max_epochs")
    if max_iter is None:
        epochs = default_epochs(shape) if max_epochs is None else float(max_epochs)  # type: ignore[arg-type]
        max_iter = math.ceil(epochs * per_epoch)
    init = (0.1, 0.001) if preset else (0.0, 0.0)
    if get("init_scale") is not None:
        init = (float(get("init_scale")), float(get("init_scale")))  # type: ignore[arg-type]
    prior = get("prior_variance")
    if isinstance(prior, str):
        prior = None if preset else first_prior_variance(noise, shape)
    of_intercept = prior if preset else get("intercept_prior_variance")
    fit_intercept = bool(get("fit_intercept", True))
    adagrad = default_adagrad(get("learning_rate"), noise, shape, B)  # type: ignore[arg-type]
    optimizer = resolve_optimizer(
        get("optimizer"), get("learning_rate"), preset, shape.n_rows, B, adagrad  # type: ignore[arg-type]
    )  # fmt: skip
    if not fit_intercept:
        optimizer = without_biases(optimizer)
    return Settings(
        method=method,
        noise=noise,
        sampler=sampler,
        n_sampled_classes=sampler.size(n_sampled),
        batch_size=B,
        max_iter=int(max_iter),  # type: ignore[call-overload]
        optimizer=optimizer,
        local=resolve_local(get("local_step"), noise, method, preset, shape, sampler, sampler.size(n_sampled)),  # type: ignore[arg-type]
        prior_variance=None if prior is None else float(prior),  # type: ignore[arg-type]
        intercept_prior_variance=None if of_intercept is None else float(of_intercept),  # type: ignore[arg-type]
        fit_intercept=fit_intercept,
        prior_touched_only=preset == "paper",
        init_scale=init,
        dtype=resolve_dtype(get("dtype"), x_dtype),
        prior_of_x=not isinstance(get("prior_variance"), str),
    )


def resolve_dtype(dtype: object, x_dtype: torch.dtype) -> torch.dtype:
    """The dtype of the weights. None: float32 for float32 features, else float64."""
    if dtype is None:
        return torch.float32 if x_dtype == torch.float32 else torch.float64
    name = dtype_name(dtype)
    if name not in ("float32", "float64"):
        raise ValueError(f"Expected dtype to be None, 'float32' or 'float64', found {dtype!r}.")
    return torch.float32 if name == "float32" else torch.float64


def dtype_name(dtype: object) -> str:
    """The name of a dtype of numpy or torch, or of a name itself."""
    return str(dtype).removeprefix("torch.").removeprefix("<class 'numpy.").removesuffix("'>")

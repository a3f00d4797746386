"""What is chosen when the user chooses nothing, and the presets: every rule in one place.

`resolve` turns the estimator's parameters, some of them None, and the shape of the data into `Settings` with nothing
left open. Shown when `verbose`; any of them can be set by hand instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from .amortised import Amortised
from .crossed import CrossFitted
from .kernels.rows import Rows, SparseRows
from .local import LocalStep, NaturalGradient, Newton, Reparameterised, StepSize
from .noise import Gumbel, Noise
from .optim import OPTIMIZERS, Adagrad, RowOptimizer, SectionFour
from .sampler import AllClasses, ClassSampler, FeaturePointed, HeadAndTail, UniformPerRow, resolve_sampler

MOST_SHARED = 1000  # classes that a minibatch shares by default
MOST_STEPS = 20_000  # by default
FIRST_SCALE = 16.0  # of scores' variance
WORTH_MERGING = 1.5  # rows with the same features, on average, from which they are kept together and scored once
FEWEST_TO_HALVE = 4  # classes of which two halves say enough about the rest
LBFGS = "lbfgs"
OF_STEPS = {  # parameters that have a meaning for steps only, and their defaults
    "optimizer": None, "learning_rate": None, "max_iter": None, "max_epochs": None, "batch_size": None,
    "n_sampled_classes": None, "class_sampling": "auto", "local_step": None, "early_stopping": False,
    "init_scale": None, "warm_start": False,
}  # fmt: skip
MOST_PAIRS = {"softmax": 5_000_000, "probit": 60_000, "logistic": 60_000}  # of rows and classes
MOST_NUMBERS, MOST_COLUMNS, MOST_PRODUCTS = 10_000_000, 1_200, 40_000_000
MOST_BASIS = 50_000_000  # numbers of the basis that very many columns are rotated to: 400 MB
LOCAL_STEPS: dict[str, type[LocalStep]] = {
    cls.name: cls for cls in (NaturalGradient, Reparameterised, Newton, Amortised, CrossFitted)
}


@dataclass(frozen=True)
class Shape:
    """What the rules look at."""

    n_rows: int
    n_features: int
    n_classes: int
    n_nonzero: int
    stream: bool = False  # whether these rows are a part of many, and will not come again
    sparse: bool = False  # whether a row says which features it has
    agreement: float = 0.0  # how far one row's step takes another's score: see `Rows.agreement`
    repeats: float = 1.0  # how many rows have the same features, on average

    @classmethod
    def of(
        cls, X: Rows, n_classes: int, active: np.ndarray | None = None, weight: np.ndarray | None = None, *,
        stream: bool = False,
    ) -> Shape:  # fmt: skip
        """Of these rows, or of those that are active."""
        active = np.arange(X.n_rows) if active is None else active
        n_nonzero = X.n_nonzero * len(active) // X.n_rows
        sparse, agreement, repeats = isinstance(X, SparseRows), X.agreement(active, weight), X.repeats(active)
        return cls(len(active), X.n_features, n_classes, n_nonzero, stream, sparse, agreement, repeats)

    def without(self, n_held_out: int) -> Shape:
        """Of the rows that are trained on where so many are held out."""
        if not n_held_out:
            return self
        left = self.n_rows - n_held_out
        return replace(self, n_rows=left, n_nonzero=self.n_nonzero * left // self.n_rows)


@dataclass(frozen=True)
class Settings:
    """Every choice of a fit, made."""

    method: str
    noise: Noise
    sampler: ClassSampler
    n_sampled_classes: int
    batch_size: int
    max_iter: int
    optimizer: RowOptimizer
    local: LocalStep | None
    prior_variance: float | None
    intercept_prior_variance: float | None  # None: the intercepts are free
    fit_intercept: bool
    prior_touched_only: bool
    init_scale: tuple[float, float]  # standard deviation of the first weights, and of the first biases
    dtype: torch.dtype
    direct: bool = False  # solved by L-BFGS, not by steps
    prior_of_x: bool = True  # whether the variance is of weights of X, not of features in units of their own

    def describe(self) -> str:
        """One line for people."""
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
    """Up to 2,000 classes all of them, above that a sample for the minibatch: the frequent ones always, others by luck.

    Below that the sum over all is still a matter of seconds (Omniglot, 1,623 classes: some four times the time of 500
    shared ones) and leaves nothing to chance: worth 0.05 nat there (docs/studies.md). Where rows are sparse each has
    the classes besides at which its features point. Who asks for a number of classes, or for a method that is about
    sampling, gets a sample. `docs/samplers.md` has the variances behind it.
    """
    if may_take_all and shape.n_classes <= 2 * MOST_SHARED:
        return AllClasses.name
    if shape.n_classes <= 500:
        return UniformPerRow.name
    a_row = shape.n_nonzero / max(1, shape.n_rows)
    says_something = shape.sparse and 1.0 <= a_row <= 0.2 * shape.n_features
    return FeaturePointed.name if says_something else HeadAndTail.name


def default_n_sampled(shape: Shape, sampler: ClassSampler) -> int:
    """About the square root of K, in [20, 100], for each row; ten times that where the minibatch shares the draw.

    Four times where each row has the classes besides that its features point at: on debian-deps (5,694 classes, ten
    epochs) 300 shared ones then end 0.05 % behind 750, and in 0.57 of their time (docs/studies.md).
    """
    per_row = int(min(max(20.0, math.sqrt(shape.n_classes)), 100.0))
    if isinstance(sampler, FeaturePointed):
        return 4 * per_row
    return min(10 * per_row, MOST_SHARED) if sampler.shares else per_row


def default_batch_size(shape: Shape, sampler: ClassSampler | None = None) -> int:
    """A hundredth of the rows, in [32, 512]: at least a hundred steps an epoch unless the data are tiny.

    Up to 1,024 where rows with the same features come together, which takes classes that a minibatch shares: scored
    once, they cost little more than one row, and say little more (docs/studies.md).
    """
    together = sampler is not None and sampler.shares and shape.repeats >= WORTH_MERGING
    most = 1024 if together else 512
    return int(min(max(32, shape.n_rows // 100), most, max(1, shape.n_rows)))


def default_epochs(shape: Shape) -> int:
    """10 epochs, more where they are short, or where there are fewer weights than rows and so nothing to overfit.

    No more than MOST_STEPS of them where rows are many. The rate falls over them (`default_adagrad`), so more of them
    is not simply better.
    """
    if shape.n_rows > 20_000:
        return min(50, max(3, MOST_STEPS * 512 // shape.n_rows)) if few_weights(shape) else 10
    return 30 if shape.n_rows > 2_000 else 100


def few_weights(shape: Shape) -> bool:
    """Fewer weights than rows: next to nothing to overfit."""
    return shape.n_classes * shape.n_features <= shape.n_rows


def default_adagrad(rate: float | None, noise: Noise, shape: Shape, batch_size: int) -> Adagrad:
    """A rate of 2.2 variances of the noise over sqrt(m + agreement^2), and an eps of half of N / B.

    Adagrad's first step moves each of a row's m weights by the rate, whatever the gradient. Another row's score moves
    by sqrt(m) of that where features disagree, and by the agreement (`Shape.agreement`) where they do not. The eps,
    half of one row's gradient, keeps it from that full step where the first gradient is tiny: rarely drawn classes
    would jump. The rate is halved after a fifth of the usual epochs, after a tenth where noise is all there is to fear,
    and so on like 1 / t (docs/studies.md); in a stream, which has no end, it stays. Features are in units of their own
    (`features`).
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
    """How many times the rate of a weight a bias has: as far as one row's step takes another's score, at least 1.

    A step moves the weights of all features that a row has. Other rows have some of them too, and where a feature has
    mostly one sign (counts, pixels) their scores go along, whatever their label. The bias has to take that back, and
    with the rate of a single weight it never does in time: worth 0.23 nat on held-out rows of Omniglot. Where rows have
    little in common a faster bias is only a noisier one; with fewer weights than rows, and epochs enough to get there
    anyway, the square root of that does (docs/studies.md). In a stream, whose parts would not agree on it, 1.
    """
    if shape.stream or shape.agreement <= 1.0:  # a part of a stream may be a single row
        return 1.0
    return math.sqrt(shape.agreement) if few_weights(shape) else shape.agreement


def first_prior_variance(noise: Noise, shape: Shape) -> float:
    """Where the search for the prior's variance begins, and what is taken where nothing can be searched: scores of
    rows of m features of size one then have 16 times the variance of a Gumbel's noise over that of this noise.
    """
    per_row = max(1.0, shape.n_nonzero / max(1, shape.n_rows))
    return FIRST_SCALE / per_row * relative_variance(noise)


def relative_variance(noise: Noise) -> float:
    """Of the noise, over that of the Gumbel: scores of a model with this noise are as many times as large, squared."""
    return (deviation(noise) / deviation(Gumbel())) ** 2


def is_small(noise: Noise, shape: Shape) -> bool:
    """Whether the optimum of the exact objective is a matter of a second or two (`direct`)."""
    N, K, R = shape.n_rows, shape.n_classes, min(shape.n_rows, shape.n_features)
    if MOST_PAIRS.get(noise.name, MOST_PAIRS["probit"] if noise.smooth_log_concave else 0) < N * K:
        return False
    fits = N * R <= MOST_NUMBERS and R <= MOST_COLUMNS and shape.n_features * R <= MOST_BASIS
    return fits and N * K * (R + 20) <= MOST_PRODUCTS


def solves_directly(parameters: dict[str, object], noise: Noise, shape: Shape) -> bool:
    """By optimizer="lbfgs"; or where nothing was asked for that has a meaning for steps only and the data are small."""
    if is_lbfgs(parameters["optimizer"]):
        return not shape.stream
    untouched = all(is_the_same(parameters.get(name), default) for name, default in OF_STEPS.items())
    possible = parameters["method"] in ("augment-reduce", "exact") and parameters["preset"] is None
    return untouched and possible and not shape.stream and is_small(noise, shape)


def is_lbfgs(optimizer: object) -> bool:
    return isinstance(optimizer, str) and optimizer == LBFGS


def is_the_same(value: object, default: object) -> bool:
    """Whatever the value may be: arrays cannot be compared with `==`."""
    return value is default or (isinstance(value, (str, bool, np.bool_)) and value == default)


def scales_features(parameters: dict[str, object]) -> bool:
    """ "auto": unless a preset, a rate or an optimiser was asked for, which are about the features as they are."""
    wanted = parameters.get("feature_scaling", "auto")
    if wanted != "auto":
        return bool(wanted)
    own = isinstance(parameters["optimizer"], RowOptimizer) or parameters["learning_rate"] is not None
    return parameters["preset"] is None and not own


def deviation(noise: Noise) -> float:
    """Standard deviation of the noise; for a user's own, which need not have one, that of the Gumbel."""
    return {"probit": 1.0, "logistic": math.pi / math.sqrt(3.0)}.get(noise.name, math.pi / math.sqrt(6.0))


def resolve_optimizer(
    optimizer: str | RowOptimizer | None, learning_rate: float | None, preset: str | None, n_rows: int, batch_size: int,
    adagrad: Adagrad | None = None,
) -> RowOptimizer:  # fmt: skip
    """The optimiser by its name, with `adagrad` for the one that has rules of its own; or the paper's."""
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
    """q from the other half of the classes just drawn. With fewer than four: remembered, or in streams predicted.

    Up to 20,000 rows are visited 30 times and more, and then a q for each of them can be kept; with ten visits it is
    always behind the weights, and one predicted from the features is not. A probit's depends on the label's score too
    bluntly for that and stays with Newton. (docs/studies.md has what each of these is worth.)
    """
    if n_sampled >= FEWEST_TO_HALVE:
        return CrossFitted.name
    few_visits = shape is not None and (shape.stream or shape.n_rows > 20_000)
    if few_visits and noise.name in ("softmax", "logistic"):
        return Amortised.name
    return NaturalGradient.name if noise.name == "softmax" else Newton.name


def resolve_local(
    local_step: str | LocalStep | None, noise: Noise, method: str, preset: str | None,
    shape: Shape | None = None, sampler: ClassSampler | None = None, n_sampled: int = 1,
) -> LocalStep | None:  # fmt: skip
    """The E step of a model: the one asked for, the paper's, or `default_local_step`.

    With all classes in the sum nothing is random: the E step goes the whole way, and the M step holds what it found.
    For softmax that is the exact gradient of log p.
    """
    if method != "augment-reduce":
        if local_step is not None:
            raise ValueError(
                f"local_step={local_step!r} has no meaning for method={method!r}, which keeps nothing per row. "
                "Leave local_step=None, or use method='augment-reduce'."
            )
        return None
    softmax = noise.name == "softmax"
    if isinstance(local_step, LocalStep):
        chosen: LocalStep = local_step
    elif local_step is None and preset == "paper":
        # DESIGN: the published numbers come from steps counted by epoch, without the entropy's gradient.
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
        # A probit is there after one move; a logistic's linear tails make Newton overshoot (docs/studies.md)
        return Newton(StepSize(0.7, 0.0, "visits"), uses_updated=True, n_moves=1 if noise.name == "probit" else 2)
    else:
        name = default_local_step(noise, shape, n_sampled) if local_step is None else local_step
        if not isinstance(name, str) or name not in LOCAL_STEPS:
            raise ValueError(
                f"Expected local_step to be one of {', '.join(map(repr, LOCAL_STEPS))} or a LocalStep object, "
                f"found {local_step!r}."
            )
        chosen = LOCAL_STEPS[name]()
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
    """All choices from the estimator's parameters (as `get_params()` gives them) and the shape of the data."""
    get = parameters.get
    method, preset = str(get("method")), get("preset")
    assert preset is None or isinstance(preset, str)
    sampling = get("class_sampling")
    if method == "exact":
        sampler: ClassSampler = AllClasses()
    elif isinstance(sampling, str) and sampling == "auto":
        may_take_all = method == "augment-reduce" and get("n_sampled_classes") is None
        sampler = resolve_sampler("uniform" if preset else default_sampler(shape, may_take_all=may_take_all))
    else:
        sampler = resolve_sampler(sampling)  # type: ignore[arg-type]
    asked = get("n_sampled_classes")
    n_sampled = default_n_sampled(shape, sampler) if asked is None else int(asked)  # type: ignore[call-overload]
    sampler.n_classes = shape.n_classes
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
    """None follows the features: float32 stays float32, anything else is float64."""
    if dtype is None:
        return torch.float32 if x_dtype == torch.float32 else torch.float64
    name = dtype_name(dtype)
    if name not in ("float32", "float64"):
        raise ValueError(f"Expected dtype to be None, 'float32' or 'float64', found {dtype!r}.")
    return torch.float32 if name == "float32" else torch.float64


def dtype_name(dtype: object) -> str:
    """Of a name, a dtype of numpy or one of torch."""
    return str(dtype).removeprefix("torch.").removeprefix("<class 'numpy.").removesuffix("'>")

"""What is chosen when the user chooses nothing, and the presets: every rule in one place.

`resolve` turns the estimator's parameters, some of them None, and the shape of the data into `Settings` with nothing
left open. Shown when `verbose`; any of them can be set by hand instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .local import LOCAL_STEPS, LocalStep, NaturalGradient, Newton, Reparameterised, StepSize
from .noise import Noise
from .optim import OPTIMIZERS, Adagrad, RowOptimizer, SectionFour
from .sampler import AllClasses, ClassSampler, resolve_sampler


@dataclass(frozen=True)
class Shape:
    """What the rules look at."""

    n_rows: int
    n_features: int
    n_classes: int
    n_nonzero: int


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
    prior_touched_only: bool
    init_scale: tuple[float, float]  # standard deviation of the first weights, and of the first biases
    dtype: torch.dtype

    def describe(self) -> str:
        """One line for people."""
        words = {
            "model": self.noise.name,
            "method": self.method,
            "classes": f"{self.n_sampled_classes} by {self.sampler.name}",
            "batch": f"{self.batch_size:,}",
            "iterations": f"{self.max_iter:,}",
            "optimizer": f"{self.optimizer.name} (rate {getattr(self.optimizer, 'learning_rate', 0.0):g})",
            "local step": self.local.name if self.local else "none",
            "prior variance": "none" if self.prior_variance is None else f"{self.prior_variance:g}",
        }
        return ", ".join(f"{key} {value}" for key, value in words.items())


def default_sampler(shape: Shape) -> str:
    """Few classes: per row and uniform, as in the paper. Many: shared by the minibatch and drawn by frequency.

    With many classes most of the normaliser sits in the frequent ones; uniform draws miss them (docs/math.md).
    """
    return "uniform" if shape.n_classes <= 500 else "frequency-shared"


def default_n_sampled(shape: Shape, sampler: ClassSampler) -> int:
    """About the square root of K, in [20, 100], for each row; ten times that where the minibatch shares the draw."""
    per_row = int(min(max(20.0, math.sqrt(shape.n_classes)), 100.0))
    shared = sampler.name.endswith("shared")
    return min(10 * per_row, 1000) if shared else per_row


def default_batch_size(shape: Shape) -> int:
    """A hundredth of the rows, in [32, 512]: at least a hundred steps an epoch unless the data are tiny."""
    return int(min(max(32, shape.n_rows // 100), 512, max(1, shape.n_rows)))


def default_epochs(shape: Shape) -> int:
    """Enough visits of each row for its q to settle: 20 epochs, more where they are short."""
    return 20 if shape.n_rows > 20_000 else 50 if shape.n_rows > 2_000 else 200


def default_adagrad(rate: float | None, n_rows: int, batch_size: int) -> Adagrad:
    """Rate 0.1 (0.3 up to 2,000 rows, which come in few steps), and an eps of N / B: the size of one row's gradient.

    A plain Adagrad takes its full step on an entry's first gradient, however small; the weights of a rarely drawn class
    then jump. With this eps an entry needs about one row's worth of evidence first. On held-out rows it is worth 0.1
    nat on Bibtex with a prior and 1.1 without, and costs under 0.001 on MNIST (docs/defaults.md).
    """
    if rate is None:
        rate = 0.1 if n_rows > 2_000 else 0.3
    return Adagrad(learning_rate=rate, eps=n_rows / batch_size)


def default_prior_variance(noise: Noise) -> float:
    """0.6 times the variance of the noise, for a user's own noise 1: weights and noise add up to one utility."""
    return {"softmax": 1.0, "probit": 0.6, "logistic": 2.0}.get(noise.name, 1.0)


def resolve_optimizer(
    optimizer: str | RowOptimizer | None, learning_rate: float | None, preset: str | None, n_rows: int, batch_size: int
) -> RowOptimizer:
    if isinstance(optimizer, RowOptimizer):
        return optimizer
    if preset is not None and optimizer is None:
        rate = 0.02 if learning_rate is None else learning_rate
        if preset == "paper":
            return SectionFour(learning_rate=rate, first_kappa_one=True)
        return SectionFour(learning_rate=rate, every_entry=True)
    name = "adagrad" if optimizer is None else optimizer
    if name not in OPTIMIZERS:
        raise ValueError(
            f"Expected optimizer to be one of {', '.join(map(repr, OPTIMIZERS))} or a RowOptimizer object, "
            f"found {optimizer!r}."
        )
    if name == Adagrad.name:
        return default_adagrad(learning_rate, n_rows, batch_size)
    cls = OPTIMIZERS[name]
    return cls() if learning_rate is None else cls(learning_rate=learning_rate)  # type: ignore[call-arg]


def resolve_local(
    local_step: str | LocalStep | None, noise: Noise, method: str, preset: str | None
) -> LocalStep | None:
    """The E step of a model: natural gradient for softmax, stochastic Newton for the others; or the paper's."""
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
    else:
        name = local_step if local_step is not None else (NaturalGradient.name if softmax else Newton.name)
        if name not in LOCAL_STEPS:
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
    return chosen


def resolve(parameters: dict[str, object], noise: Noise, shape: Shape, x_dtype: torch.dtype) -> Settings:
    """All choices from the estimator's parameters (as `get_params()` gives them) and the shape of the data."""
    get = parameters.get
    method, preset = str(get("method")), get("preset")
    assert preset is None or isinstance(preset, str)
    sampling = get("class_sampling")
    if method == "exact":
        sampler: ClassSampler = AllClasses()
    elif sampling == "auto":
        sampler = resolve_sampler("uniform" if preset else default_sampler(shape))
    else:
        sampler = resolve_sampler(sampling)  # type: ignore[arg-type]
    asked = get("n_sampled_classes")
    n_sampled = default_n_sampled(shape, sampler) if asked is None else int(asked)  # type: ignore[call-overload]
    sampler.n_classes = shape.n_classes
    batch_size = get("batch_size")
    B = default_batch_size(shape) if batch_size is None else min(int(batch_size), shape.n_rows)  # type: ignore[call-overload]
    per_epoch = -(-shape.n_rows // B)
    max_iter, max_epochs = get("max_iter"), get("max_epochs")
    if max_iter is None:
        epochs = default_epochs(shape) if max_epochs is None else float(max_epochs)  # type: ignore[arg-type]
        max_iter = math.ceil(epochs * per_epoch)
    init = (0.1, 0.001) if preset else (0.0, 0.0)
    if get("init_scale") is not None:
        init = (float(get("init_scale")), float(get("init_scale")))  # type: ignore[arg-type]
    prior = get("prior_variance")
    if prior == "auto":
        prior = None if preset else default_prior_variance(noise)
    return Settings(
        method=method,
        noise=noise,
        sampler=sampler,
        n_sampled_classes=sampler.size(n_sampled),
        batch_size=B,
        max_iter=int(max_iter),  # type: ignore[call-overload]
        optimizer=resolve_optimizer(get("optimizer"), get("learning_rate"), preset, shape.n_rows, B),  # type: ignore[arg-type]
        local=resolve_local(get("local_step"), noise, method, preset),  # type: ignore[arg-type]
        prior_variance=None if prior is None else float(prior),  # type: ignore[arg-type]
        prior_touched_only=preset == "paper",
        init_scale=init,
        dtype=resolve_dtype(get("dtype"), x_dtype),
    )


def resolve_dtype(dtype: object, x_dtype: torch.dtype) -> torch.dtype:
    """None follows the features: float32 stays float32, anything else is float64."""
    if dtype is None:
        return torch.float32 if x_dtype == torch.float32 else torch.float64
    name = str(dtype).removeprefix("torch.").removeprefix("<class 'numpy.").removesuffix("'>")
    if name not in ("float32", "float64"):
        raise ValueError(f"Expected dtype to be None, 'float32' or 'float64', found {dtype!r}.")
    return torch.float32 if name == "float32" else torch.float64

"""From settings and rows to a trained model: builds the `Problem`, keeps what must outlive a fit, runs the loop.

Between the estimator (names, checks, scikit-learn's manners) and `vem` / `training` (the method).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch

from ..config.defaults import WORTH_MERGING, Settings
from ..kernels import device as device_kernels
from ..kernels.cpu.row_groups import NONE, RowGroups, split_groups
from ..kernels.protocol import Parameters
from ..kernels.threads import default_threads, num_threads, one_torch_thread
from ..local.base import LocalState
from ..model.scores import kernels_for
from ..optim import Prior
from ..sampling import ClassSampler
from ..sharding import Partition
from ..support.seeds import mix
from . import looks
from .fitted import Fitted, TrainingRows
from .loop import Evaluators, Plan, Schedule, Stopwatch, Window, train
from .progress import TrainingProgress
from .step import Problem, State, take_up

RUNS = 128  # different rows of a minibatch, at least, or parts of what is the same


class Keeper(Protocol):
    """What writes checkpoints (`persistence.checkpoints`)."""

    def due(self, iteration: int) -> bool: ...
    def write(self) -> None: ...


class Review(Protocol):
    """What judges the prior in the middle of a fit (`training.review`), on rows not trained on until then."""

    after: int  # iterations
    left_out: np.ndarray  # rows
    may_extend: bool  # the plan of the fit

    def __call__(self, fitted: Fitted, settings: Settings) -> Settings: ...


@contextlib.contextmanager
def threads(n_jobs: int | None) -> Iterator[None]:
    """`n_jobs` threads for the kernels inside, and one for torch; outside all is as it was.

    None: as many as the caller has set, by default all. -1: all, -2: all but one, and so on, as in scikit-learn.
    """
    most = default_threads()
    wanted = None if n_jobs is None else min(most, max(1, most + 1 + n_jobs if n_jobs < 0 else n_jobs))
    with num_threads(wanted), one_torch_thread():
        yield


def training_device(option: str) -> torch.device:
    """Where the weights are while they are trained. "auto" is the CPU: steps on sparse rows are short, and a GPU that
    takes them one at a time was slower than one core for a softmax and than four for a probit."""
    return torch.device("cuda" if option == "cuda" else "cpu")


def needs_device_kernels(device: torch.device) -> bool:
    return device.type != "cpu"


def move(parameters: Parameters, device: torch.device) -> Parameters:
    """The parameters with all that belongs to them on `device`, in place."""
    parameters.weight, parameters.bias = parameters.weight.to(device), parameters.bias.to(device)
    parameters.weight_state = [s.to(device) for s in parameters.weight_state]
    parameters.bias_state = [s.to(device) for s in parameters.bias_state]
    return parameters


def run(
    fitted: Fitted, settings: Settings, rows: TrainingRows, options: dict[str, Any], *, persistent: bool,
    stop_asked: Callable[[], bool] = lambda: False, watch: Stopwatch | None = None, keeper: Keeper | None = None,
    review: Review | None = None,
) -> None:  # fmt: skip
    """`run_here`, in stages if the fit is to be reviewed, with the weights on the device that was asked for; back on
    the CPU whatever happens."""
    on_cpu = rows.X.mapped or fitted.partition is not None
    device, watch = torch.device("cpu") if on_cpu else training_device(options["device"]), watch or Stopwatch()
    try:
        while review is not None:
            move(fitted.parameters, device)
            run_here(fitted, settings, rows, options, persistent, stop_asked, watch, keeper, review)
            if not at_review(fitted) or stop_asked():
                return
            move(fitted.parameters, torch.device("cpu"))
            with threads(options["n_jobs"]):
                settings = review(fitted, settings)
            watch.lap("search")
            if at_review(fitted):  # it was not completed: resuming repeats it
                return
            assert fitted.run.plan is not None
            settings = replace(settings, max_iter=fitted.run.plan.last - fitted.clock.iteration)
            review = review if fitted.run.plan.review else None
        move(fitted.parameters, device)
        run_here(fitted, settings, rows, options, persistent, stop_asked, watch, keeper)
    finally:
        move(fitted.parameters, torch.device("cpu"))


def at_review(fitted: Fitted) -> bool:
    """Whether the steps before a review have been taken."""
    plan = fitted.run.plan
    return plan is not None and 0 < plan.review < plan.last and fitted.clock.iteration >= plan.review


def run_here(
    fitted: Fitted, settings: Settings, rows: TrainingRows, options: dict[str, Any], persistent: bool,
    stop_asked: Callable[[], bool], watch: Stopwatch, keeper: Keeper | None = None, review: Review | None = None,
) -> None:  # fmt: skip
    """Train `fitted` on `rows`: for `settings.max_iter` iterations, without the rows of a `review` up to it; or one
    pass where rows will not come again."""
    active, held_out = rows.active(), np.empty(0, dtype=np.int64)
    if options["early_stopping"] and persistent:
        active, held_out = hold_out(active, options["validation_fraction"], fitted.seed)
    taken = 0 if fitted.rows_seen else fitted.clock.iteration  # by the search for the prior
    if not persistent or not fitted.rows_seen:
        count(fitted, settings, rows, active)
    if not persistent:
        fitted.run.plan, fitted.run.window = None, Window()
    if review is not None:
        active = np.setdiff1d(active, review.left_out, assume_unique=True)
    problem = make_problem(fitted, settings, rows, active)
    problem.sampler.load_state_dict(fitted.sampler, same_rows=persistent)
    state = State(fitted.parameters, local_state(fitted, problem, rows, persistent), fitted.clock)
    fitted.run.window.add(take_up(problem, state, fitted.late))
    fitted.late = {}

    per_epoch = -(-len(active) // settings.batch_size)
    fewest = 1 if fitted.run.plan is None else 0  # none where a fit was cut short after its last step
    n_iter = max(fewest, settings.max_iter - taken) if persistent else per_epoch
    schedule = Schedule(
        plan=looks.plan_of(
            fitted,
            problem,
            settings,
            n_iter,
            len(held_out),
            with_gap=persistent,
            review=0 if review is None else review.after,
            may_extend=review is not None and review.may_extend,
        ),
        batch_size=settings.batch_size,
        seed=fitted.seed,
        origin=0 if persistent else fitted.clock.iteration,
        early_stopping=len(held_out) > 0,
        n_iter_no_change=options["n_iter_no_change"],
        tol=options["tol"],
    )
    evaluators = Evaluators(
        validation=looks.validation_look(problem, state, rows, held_out) if len(held_out) else None,
        bound_gap=looks.bound_gap_look(problem, state, active, schedule.plan.gap_rows),
        checkpoint=None if keeper is None else writing(keeper, fitted, problem, state, watch),
    )
    progress = TrainingProgress(schedule.plan.last, options["verbose"], fitted.clock.iteration)
    with threads(options["n_jobs"]), progress:
        found = "" if fitted.found is None else f" ({fitted.found.why})"
        progress.say(f"{settings.describe()}{found}; {fitted.bytes_needed / 1e9:.2f} GB")
        if problem.row_group is not None:
            parts = int(problem.row_group.max()) + 1
            progress.say(f"{len(active):,} rows, many with the same features: kept together in {parts:,} parts")
        with progress.may_compile():
            problem.sampler.warm_up(rows.X)
        problem.sampler.prepare(rows.training_data(active), settings.n_sampled_classes)
        was_torn = fitted.torn
        try:
            fitted.torn = True  # until `keep` says otherwise
            train(problem, state, schedule, evaluators, progress, fitted.run, watch, stop_asked)
        finally:  # a fit that was cut short keeps what it has learned, and can go on from there
            keep(fitted, problem, state, watch, persistent, torn=was_torn or state.mark.torn)
        if fitted.run.plan is None and fitted.found is not None:
            fitted.factor = fitted.found.factor
        if fitted.run.plan is None:
            progress.say(watch.describe())


def writing(keeper: Keeper, fitted: Fitted, problem: Problem, state: State, watch: Stopwatch) -> Callable[[int], None]:
    """Write a checkpoint between two steps, where one is due."""

    def write(t: int) -> None:
        if keeper.due(t):
            keep(fitted, problem, state, watch, True, torn=False)
            if problem.shard_pass is not None:
                fitted.late = problem.shard_pass.pause()
            keeper.write()
            fitted.torn = True  # the fit goes on
            watch.lap("checkpoint")

    return write


def advance(
    fitted: Fitted, settings: Settings, rows: TrainingRows, active: np.ndarray, n_iter: int, options: dict[str, Any],
    stop_asked: Callable[[], bool],
) -> None:  # fmt: skip
    """`n_iter` more steps on the active rows, and nothing besides: no looks, no records to show."""
    if not fitted.rows_seen:
        count(fitted, settings, rows, active)
    problem = make_problem(fitted, settings, rows, active)
    problem.sampler.load_state_dict(fitted.sampler, same_rows=True)
    state = State(fitted.parameters, local_state(fitted, problem, rows, True), fitted.clock)
    last = fitted.clock.iteration + n_iter
    plan = Plan(last, record_every=n_iter, bound_every=n_iter, validate_every=0, gap_every=0, gap_rows=0)
    schedule, watch = Schedule(plan, settings.batch_size, fitted.seed), Stopwatch()
    progress = TrainingProgress(last, 0)
    with threads(options["n_jobs"]), progress:
        problem.sampler.warm_up(rows.X)
        problem.sampler.prepare(rows.training_data(active), settings.n_sampled_classes)
        train(problem, state, schedule, Evaluators(None, None), progress, fitted.run, watch, stop_asked)
    keep(fitted, problem, state, watch, True, torn=state.mark.torn)


def count(fitted: Fitted, settings: Settings, rows: TrainingRows, active: np.ndarray) -> None:
    """Take note of rows that are seen for the first time. All at once, or an interrupted fit would count them twice."""
    features = fitted.feature_counts
    if settings.prior_variance is not None or settings.intercept_prior_variance is not None:
        features = features + rows.X.feature_counts(active)
    classes = fitted.class_counts + np.bincount(rows.codes[active], minlength=len(fitted.class_counts))
    vars(fitted).update(class_counts=classes, feature_counts=features, rows_seen=fitted.rows_seen + len(active))


def keep(
    fitted: Fitted, problem: Problem, state: State, watch: Stopwatch, persistent: bool, *, torn: bool
) -> None:  # fmt: skip
    """What a fit leaves, all at once."""
    lasting = persistent or (problem.local is not None and problem.local.amortises)
    vars(fitted).update(
        stream_steps=fitted.stream_steps + (0 if persistent else state.clock.iteration - fitted.clock.iteration),
        clock=state.clock,
        local=state.local if lasting else {},
        sampler=problem.sampler.state_dict() or fitted.sampler,  # a part of a stream may do without it
        seconds=dict(watch.seconds),
        torn=torn,
        late={},
    )


def hold_out(active: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(rows to train on, rows to validate on), the same for the same seed."""
    n_held = n_held_out(len(active), fraction)
    order = np.random.Generator(np.random.PCG64(mix(seed, 3, 0))).permutation(len(active))
    return np.sort(active[order[n_held:]]), np.sort(active[order[:n_held]])


def n_held_out(n_rows: int, fraction: float) -> int:
    """How many of so many rows `hold_out` keeps to validate on."""
    n_held = math.ceil(fraction * n_rows)
    if n_held >= n_rows:
        raise ValueError(
            f"early_stopping holds out {fraction:.0%} of {n_rows} rows, which leaves none to train on. "
            "Lower validation_fraction, or set early_stopping=False."
        )
    return n_held


def make_problem(fitted: Fitted, settings: Settings, rows: TrainingRows, active: np.ndarray) -> Problem:
    dtype = fitted.parameters.weight.dtype
    X: Any = rows.X
    kernels = kernels_for("cpu")
    if needs_device_kernels(fitted.parameters.weight.device):
        kernels, X = device_kernels, device_kernels.DeviceRows.of(X, fitted.parameters.weight.device, dtype)
    prior, of_bias = None, settings.intercept_prior_variance
    if settings.prior_variance is not None or of_bias is not None:
        own_units = None
        if settings.prior_of_x and fitted.scaling is not None:
            with np.errstate(over="ignore"):
                own_units = fitted.scaling.scale**2
        prior = Prior.from_counts(
            settings.prior_variance, fitted.feature_counts, fitted.rows_seen, dtype, settings.prior_touched_only,
            of_bias=of_bias, per_feature=own_units,
        )  # fmt: skip
    problem = Problem(
        X=X,
        active=active,
        n_rows=fitted.rows_seen,
        labels=torch.from_numpy(rows.codes.astype(np.int64, copy=False)),
        sample_weight=None if rows.weight is None else torch.from_numpy(rows.weight).to(dtype),
        method=settings.method,
        noise=settings.noise,
        sampler=bound(settings.sampler, fitted.class_counts, kernels, fitted.partition),
        n_sampled=settings.n_sampled_classes,
        local=settings.local,
        optimizer=settings.optimizer.after(fitted.stream_steps),
        prior=prior,
        kernels=kernels,
        row_group=duplicates_together(rows.groups, active, settings),
        partition=fitted.partition,
    )
    if problem.local is not None and fitted.partition is None:
        problem.local = problem.local.on(kernels, settings.noise)
        problem.fused = problem.local.fused(kernels, settings.noise, fitted.n_classes)
        if not problem.sampler.observes:
            problem.fused_step = problem.local.fused_step(
                kernels, settings.noise, X, problem.labels, fitted.parameters, problem.optimizer, prior
            )
    elif problem.local is not None and fitted.partition is not None:
        problem.shard_pass = problem.local.over_ranks(settings.noise, fitted.partition)
    return problem


def bound(
    sampler: ClassSampler, class_counts: np.ndarray, kernels: ModuleType, partition: Partition | None = None
) -> ClassSampler:
    """The sampler of one fit; the settings' own is left as it is."""
    found = sampler.bind(class_counts, kernels.draw_without_replacement)
    if found is sampler:
        name = type(sampler).__name__
        raise TypeError(
            f"Expected {name}.bind to return a copy of the sampler, found the sampler itself. Write bound = "
            "super().bind(...), set what depends on the data on `bound`, and return it."
        )
    found.partition = partition
    return found


def duplicates_together(groups: RowGroups | None, active: np.ndarray, settings: Settings) -> np.ndarray | None:
    """For every row of X: those of the same number have the same features. None where too few have, to be worth it.

    Every label of a document an example: then a document's rows have the same scores, but for the label's, and with
    shared classes these, and the way back, are computed once for all of them. A minibatch has RUNS different rows, or
    parts of B / RUNS rows that are the same. Only with samplers that say so: `ClassSampler.shared`, `own_by_features`.
    """
    most, sampler = settings.batch_size // RUNS, settings.sampler
    if groups is None or not (sampler.shared and sampler.own_by_features) or most < 2 or len(active) < 2:
        return None
    number = split_groups(groups.stored[active], most)
    if len(active) < WORTH_MERGING * (number.max() + 1):
        return None
    row_group = np.full(len(groups.stored), NONE)
    row_group[active] = number
    return row_group


def local_state(fitted: Fitted, problem: Problem, rows: TrainingRows, persistent: bool) -> LocalState:
    """Each row's q: that of the last fit where it was on as many rows, fresh otherwise."""
    if problem.local is None:
        return {}
    if problem.local.amortises:
        return fitted.local if problem.local.knows(fitted.local, problem.noise, fitted.n_classes) else {}
    fresh = problem.local.init_state(rows.X.n_rows, fitted.parameters.weight.dtype)
    kept = fitted.local
    if persistent and kept.keys() == fresh.keys() and all(len(kept[k]) == len(fresh[k]) for k in kept):
        return kept
    return fresh

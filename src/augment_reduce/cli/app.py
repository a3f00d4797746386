"""The commands of the command line, and their error handling.

Their work is in `commands`, `reports.demo` and `reproduction.command`, imported only when a command runs: `--help`
loads neither torch nor scikit-learn. A new command is one function under `@app.command` and `@explained`.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer

from .._version import __version__
from . import options as opt
from . import show
from .reproduce import reproduce
from .wording import in_options
from .writing import STDOUT

if TYPE_CHECKING:
    from .reading import Reading

Command = TypeVar("Command", bound=Callable[..., None])
BAD_INPUT, FAILED, INTERRUPTED = 2, 1, 130
USERS_FAULTS = (
    FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError, ValueError,
)  # fmt: skip

app = typer.Typer(
    name="augment-reduce",
    help="Softmax, multinomial probit and multinomial logistic for very many classes, at a cost that does not grow "
    "with their number.\n\nThree commands make a round: [bold]fit[/] learns from a file of labelled rows and writes a "
    "model, [bold]evaluate[/] says how good it is on other rows, [bold]predict[/] names the most probable classes of "
    "new ones. [bold]demo[/] shows it all in about a minute, on data that come with the package.",
    epilog="Exit codes: 0 done, 1 failed while running, 2 wrong usage or bad input, 130 interrupted.",
    rich_markup_mode="rich",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"augment-reduce {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    version: Annotated[
        bool, typer.Option("--version", help="Say which release this is.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Options before the command."""


# ---- errors ----


def explained(command: Command) -> Command:
    """Turn an exception of a command into one paragraph on standard error and an exit code."""

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        try:
            with _data_warnings_shown():
                command(*args, **kwargs)
        except (typer.Exit, typer.Abort, typer.BadParameter, BrokenPipeError):
            raise
        except KeyboardInterrupt:
            _stop("Interrupted; nothing was written.", INTERRUPTED)
        except Exception as error:
            if kwargs.get("debug"):
                traceback.print_exc()
            _stop(*_explanation(error))

    return wrapper  # type: ignore[return-value]


def _explanation(error: Exception) -> tuple[str, int]:
    """The message and the exit code: 2 for invalid input, 1 for a failure while running."""
    text = " ".join(_in_options(error).split())
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}."
    if isinstance(error, USERS_FAULTS):
        return text, BAD_INPUT
    if isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
        return text, BAD_INPUT
    if isinstance(error, MemoryError):
        return text or "Out of memory.", FAILED
    if isinstance(error, FloatingPointError | OSError):
        return text, FAILED
    return f"{type(error).__name__}: {text} This is not expected; --debug shows where it happened.", FAILED


def _in_options(said: Exception | Warning) -> str:
    """The message with options in place of Python arguments, except in quotations from a file."""
    fact, advice = getattr(said, "fact", None), getattr(said, "advice", "")
    return in_options(str(said)) if fact is None else f"{fact} {in_options(advice)}".rstrip()


@contextlib.contextmanager
def _data_warnings_shown() -> Iterator[None]:
    """Print each `DataFileWarning` (how an ambiguous file was read) as a line on standard error."""
    from ..data.files import DataFileWarning

    with warnings.catch_warnings():
        usual = warnings.showwarning

        def shown(message: Any, *where: Any, **options: Any) -> None:
            if isinstance(message, DataFileWarning):
                show.note(_in_options(message))
            else:
                usual(message, *where, **options)

        warnings.showwarning = shown
        warnings.simplefilter("always", DataFileWarning)
        yield


def _stop(message: str, code: int) -> NoReturn:
    show.error(message)
    raise typer.Exit(code)


# ---- commands ----


@app.command(rich_help_panel="Commands")
@explained
def fit(
    data: opt.Data,
    output: opt.OutputModel,
    format: opt.Format = opt.Formats.auto,
    label_column: opt.LabelColumn = None,
    ignore_column: opt.IgnoreColumn = None,
    header: opt.Header = None,
    keep_index: opt.KeepIndex = False,
    labels: opt.Labels = None,
    zero_based: opt.ZeroBased = None,
    reduction: opt.Reduction = None,
    label_names: opt.LabelNames = None,
    min_count: opt.MinCount = 1,
    model: opt.Model = None,
    method: opt.Method = None,
    prior_variance: opt.PriorVariance = None,
    class_weight: opt.ClassWeight = None,
    preset: opt.Preset = None,
    n_sampled_classes: opt.NSampledClasses = None,
    class_sampling: opt.ClassSampling = None,
    batch_size: opt.BatchSize = None,
    optimizer: opt.Optimizer = None,
    learning_rate: opt.LearningRate = None,
    n_jobs: opt.NJobs = None,
    seed: opt.Seed = 0,
    resume: opt.Resume = None,
    max_epochs: opt.MaxEpochs = None,
    max_iter: opt.MaxIter = None,
    early_stopping: opt.EarlyStopping = None,
    validation_fraction: opt.ValidationFraction = None,
    json_output: opt.Json = False,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
) -> None:
    """Train on a file of labelled rows, and write a model.

    Only the two files are required: every option not given is chosen from the shape of the data, and printed before
    training starts. The progress shows the [bold]bound[/], a lower bound on the log likelihood of an example, which
    training maximises, and its gap to the log likelihood.

    [bold]Example[/]: each row has a set of labels; make every pair an example, drop labels seen fewer than 5 times.

    [cyan]augment-reduce fit train.txt.gz -o model.safetensors --reduction all --min-count 5[/]
    """
    from .commands import fit_file

    parameters = {
        "model": model, "method": method, "prior_variance": opt.prior_of(prior_variance), "class_weight": class_weight,
        "preset": preset, "n_sampled_classes": n_sampled_classes, "class_sampling": class_sampling,
        "batch_size": batch_size, "optimizer": optimizer, "learning_rate": learning_rate, "n_jobs": n_jobs,
        "random_state": seed, "max_epochs": max_epochs, "max_iter": max_iter, "early_stopping": early_stopping,
        "validation_fraction": validation_fraction, "verbose": 0 if quiet else 1,
    }  # fmt: skip
    plain = {name: str(value) if isinstance(value, str) else value for name, value in parameters.items()}
    reading = _reading(
        format, label_column, ignore_column, header, zero_based, reduction=reduction, labels=labels,
        label_names=label_names, keep_index=keep_index,
    )  # fmt: skip
    summary = fit_file(data, output, reading, plain, resume=resume, min_count=min_count)
    if json_output:
        show.as_json(summary)
    else:
        show.fit_summary(summary)


@app.command(rich_help_panel="Commands")
@explained
def predict(
    model: opt.ModelFile,
    data: opt.Data,
    top: Annotated[
        int, typer.Option("--top", "-k", min=1, help="How many classes a row.", rich_help_panel=opt.OUTPUT)
    ] = 5,
    output: opt.OutputTable = STDOUT,
    layout: opt.Layout = None,
    json_output: opt.Json = False,
    format: opt.Format = opt.Formats.auto,
    label_column: opt.LabelColumn = None,
    ignore_column: opt.IgnoreColumn = None,
    header: opt.Header = None,
    zero_based: opt.ZeroBased = None,
    n_jobs: opt.NJobs = None,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
) -> None:
    """Print the most probable classes of every row, with their probabilities.

    Labels in the file, if it has any, are ignored. Rows are counted from 0. Probabilities are exact for every
    model: they are of all classes, not only of those shown.

    [bold]Example[/]: the three best classes of each row, for a spreadsheet.

    [cyan]augment-reduce predict model.safetensors new.txt.gz --top 3 -o predictions.csv[/]
    """
    from ..persistence.outputs import check_output
    from .commands import load_for_prediction, predict_blocks
    from .reading import read_file
    from .writing import is_special, opened

    chosen = _layout(layout, output, json_output)
    if output != STDOUT and not is_special(output):
        check_output(output, [data, model])
    loaded = load_for_prediction(model, n_jobs)
    reading = _reading(format, label_column, ignore_column, header, zero_based)
    X = read_file(data, reading, loaded, need_labels=False).found.X
    blocks = predict_blocks(loaded, X, min(top, len(loaded.classes_)))
    with opened(output) as stream:
        show.predictions(stream, blocks, chosen)


@app.command(rich_help_panel="Commands")
@explained
def evaluate(
    model: opt.ModelFile,
    data: opt.Data,
    format: opt.Format = opt.Formats.auto,
    label_column: opt.LabelColumn = None,
    ignore_column: opt.IgnoreColumn = None,
    header: opt.Header = None,
    labels: opt.Labels = None,
    zero_based: opt.ZeroBased = None,
    reduction: opt.Reduction = None,
    label_names: opt.LabelNames = None,
    skip_unseen: Annotated[
        bool,
        typer.Option(
            "--skip-unseen",
            help="Leave out examples whose label the model has never seen, and count them.",
            rich_help_panel=opt.FILES,
        ),
    ] = False,
    n_jobs: opt.NJobs = None,
    reliability: opt.Reliability = None,
    json_output: opt.Json = False,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
) -> None:
    """Evaluate a model on labelled rows that were not used in training.

    Log likelihood (mean log probability of the label, exact), perplexity, accuracy and calibration error (difference of
    the most probable class's probability and the accuracy) are over examples. Precision at k is over rows, against all
    labels of a row: the share of correct labels among the k most probable classes.

    [bold]Example[/]: sets of labels, some of them unknown to the model.

    [cyan]augment-reduce evaluate model.safetensors test.txt.gz --reduction all --skip-unseen[/]
    """
    from .commands import evaluate_file

    reading = _reading(
        format, label_column, ignore_column, header, zero_based, reduction=reduction, labels=labels,
        label_names=label_names,
    )  # fmt: skip
    result = evaluate_file(model, data, reading, skip_unseen=skip_unseen, n_jobs=n_jobs, reliability=reliability)
    if json_output:
        show.as_json(result)
    else:
        show.evaluation(result)


@app.command(rich_help_panel="Commands")
@explained
def convert(
    data: opt.TextData,
    output: opt.OutputFolder,
    format: opt.Format = opt.Formats.auto,
    label_column: opt.LabelColumn = None,
    ignore_column: opt.IgnoreColumn = None,
    header: opt.Header = None,
    keep_index: opt.KeepIndex = False,
    zero_based: opt.ZeroBased = None,
    n_features: opt.NFeatures = None,
    reduction: opt.Reduction = None,
    label_names: opt.LabelNames = None,
    min_count: opt.MinCount = 1,
    json_output: opt.Json = False,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
) -> None:
    """Write the rows of a text file as a folder of arrays that [bold]fit[/] maps into memory.

    For rows larger than memory: the memory of this command and of a fit to the folder does not grow with the rows,
    except for a few numbers a row. [bold]fit[/], [bold]evaluate[/] and [bold]predict[/] accept the folder instead of a
    file.

    [bold]Example[/]: each row has a set of labels; every pair becomes an example.

    [cyan]augment-reduce convert train.txt.gz train-rows --reduction all[/]
    """
    from .commands import convert_file

    reading = _reading(
        format, label_column, ignore_column, header, zero_based, reduction=reduction, label_names=label_names,
        keep_index=keep_index,
    )  # fmt: skip
    summary = convert_file(data, output, reading, n_features=n_features, min_count=min_count)
    if json_output:
        show.as_json(summary)
    elif not quiet:
        show.conversion(summary)


@app.command(rich_help_panel="Commands")
@explained
def demo(
    output_dir: Annotated[
        Path, typer.Option(help="A folder for the model and the picture.", rich_help_panel=opt.OUTPUT)
    ] = Path("demo-output"),
    seed: opt.Seed = 0,
    n_jobs: opt.NJobs = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few hundred classes, a few seconds.", rich_help_panel=opt.TRAINING)
    ] = False,
    debug: opt.Debug = False,
) -> None:
    """What will this package depend on? All commands on real data, in about a minute.

    Trains on 41,172 Debian packages to predict which of 5,694 others each one needs from its name, description, section
    and maintainer; then evaluates the model, draws the bound and the likelihood over time, and predicts for a few.

    [bold]Example[/]:

    [cyan]augment-reduce demo --output-dir demo-output[/]
    """
    from ..reports.demo import run

    run(output_dir, seed=seed, n_jobs=n_jobs, quick=quick)


app.command(rich_help_panel="Commands")(explained(reproduce))


# ---- what the commands share ----


def _reading(
    format: opt.Formats, label_column: str | None, ignore_column: Sequence[str] | None, header: bool | None,
    zero_based: bool | None, *, reduction: opt.Reductions | None = None, labels: Path | None = None,
    label_names: Path | None = None, keep_index: bool = False,
) -> Reading:  # fmt: skip
    from .reading import Reading

    return Reading(
        format=format.value, label_column=label_column, ignore_columns=tuple(ignore_column or ()), header=header,
        labels=labels, zero_based=zero_based, reduction=None if reduction is None else reduction.value,
        label_names=label_names, keep_index=keep_index,
    )  # fmt: skip


def _layout(layout: opt.Layouts | None, output: Path, json_output: bool) -> str:
    if json_output:
        if layout not in (None, opt.Layouts.json):
            raise ValueError(f"--json and --layout {layout} contradict each other; give one of them.")
        return "json"
    if layout is not None:
        return layout.value
    return {".csv": "csv", ".jsonl": "jsonl", ".json": "json"}.get(output.suffix.lower(), "text")


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point of the command `augment-reduce`."""
    app(args=arguments, prog_name="augment-reduce")

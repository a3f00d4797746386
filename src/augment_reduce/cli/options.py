"""The options of the command line, each with its help, defined once and shared by the commands.

The choices repeat names that are defined in modules which import torch (`METHODS`, `OPTIMIZERS`, `SAMPLERS`,
`FORMATS`), so that `--help` is quick; a test compares them.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

FILES, MODEL, TRAINING, STOPPING, OUTPUT = "Data", "Model", "Training", "When to stop", "Output"
SHAPE = "[dim]Default: chosen from the shape of the data.[/dim]"


class Models(StrEnum):
    softmax = "softmax"
    probit = "probit"
    logistic = "logistic"


class Methods(StrEnum):
    augment_reduce = "augment-reduce"
    one_vs_each = "one-vs-each"
    sampled_softmax = "sampled-softmax"
    exact = "exact"


class Presets(StrEnum):
    paper = "paper"
    paper_text = "paper-text"


class Samplings(StrEnum):
    auto = "auto"
    uniform = "uniform"
    uniform_shared = "uniform-shared"
    frequency = "frequency"
    frequency_shared = "frequency-shared"
    head_tail_shared = "head-tail-shared"
    cache_shared = "cache-shared"
    candidates_shared = "candidates-shared"
    conditional = "conditional"
    all = "all"


class Optimizers(StrEnum):
    section4 = "section4"
    adagrad = "adagrad"
    rowwise_adagrad = "rowwise-adagrad"
    adam = "adam"


class ClassWeights(StrEnum):
    balanced = "balanced"


class Formats(StrEnum):
    auto = "auto"
    svmlight = "svmlight"
    xml = "xml"
    npz = "npz"
    npy = "npy"
    csv = "csv"


class Reductions(StrEnum):
    first = "first"
    all = "all"


class Layouts(StrEnum):
    text = "text"
    csv = "csv"
    jsonl = "jsonl"
    json = "json"


# ---- files ----

Data = Annotated[
    Path,
    typer.Argument(
        metavar="DATA",
        help="Rows: svmlight, XML repository, npz, npy or csv, gzip, bzip2 or not; or a folder that "
        "[bold]augment-reduce convert[/] wrote.",
        show_default=False,
    ),
]
TextData = Annotated[
    Path,
    typer.Argument(metavar="IN", help="Rows: svmlight, XML repository or csv; gzip, bzip2 or not.", show_default=False),
]
OutputFolder = Annotated[
    Path,
    typer.Argument(metavar="OUT", help="A new folder; an existing one is never replaced.", show_default=False),
]
NFeatures = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="How many features there are, if the file may lack the last ones. [dim]Default: those that occur.[/dim]",
        show_default=False,
        rich_help_panel=FILES,
    ),
]
ModelFile = Annotated[
    Path,
    typer.Argument(metavar="MODEL", help="A model file written by [bold]augment-reduce fit[/].", show_default=False),
]
Format = Annotated[Formats, typer.Option(help="Of the data file; [bold]auto[/] detects it.", rich_help_panel=FILES)]
LabelColumn = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="csv: the column with the label, by name or position (0 is the first, -1 the last). "
        "[dim]Default: the last one; with a model, the one that is not a feature.[/dim]",
        show_default=False,
        rich_help_panel=FILES,
    ),
]
IgnoreColumn = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME", help="csv: a column to leave out; may be repeated.", show_default=False, rich_help_panel=FILES
    ),
]
Header = Annotated[
    bool | None,
    typer.Option(
        "--header/--no-header",
        help="csv: the first line names the columns, or is a row. "
        "[dim]Default: a line of numbers is a row; what was decided is said.[/dim]",
        show_default=False,
        rich_help_panel=FILES,
    ),
]
KeepIndex = Annotated[
    bool,
    typer.Option(
        "--keep-index",
        help="csv: read a first column without a name as a feature, even if it numbers the rows.",
        rich_help_panel=FILES,
    ),
]
Labels = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="The labels of the rows, where DATA has none: npz (sparse: every entry is a label), npy, or text with a "
        "label on each line.",
        show_default=False,
        rich_help_panel=FILES,
    ),
]
ZeroBased = Annotated[
    bool | None,
    typer.Option(
        "--zero-based/--one-based",
        help="svmlight: features are counted from 0, or from 1. [dim]Default: from 1 unless a 0 occurs; "
        "with a model, as they were in its training file.[/dim]",
        show_default=False,
        rich_help_panel=FILES,
    ),
]
Reduction = Annotated[
    Reductions | None,
    typer.Option(
        help="For rows with sets of labels. [bold]first[/]: the lowest label of each row. "
        "[bold]all[/]: every (row, label) pair is an example.",
        show_default=False,
        rich_help_panel=FILES,
    ),
]
LabelNames = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Names for label numbers, one a line: line i names label i - 1. The model stores and prints the names.",
        show_default=False,
        rich_help_panel=FILES,
    ),
]
MinCount = Annotated[int, typer.Option(min=1, help="Drop labels with fewer examples than this.", rich_help_panel=FILES)]

# ---- model ----

Model = Annotated[
    Models | None,
    typer.Option(
        help="The noise of the utilities: Gumbel, Gaussian or logistic. [dim]Default: softmax.[/dim]",
        show_default=False,
        rich_help_panel=MODEL,
    ),
]
Method = Annotated[
    Methods | None,
    typer.Option(
        help="What is maximised. one-vs-each and sampled-softmax are for the softmax only; exact costs O(classes) a "
        "row. [dim]Default: augment-reduce.[/dim]",
        show_default=False,
        rich_help_panel=MODEL,
    ),
]
PriorVariance = Annotated[
    float | None,
    typer.Option(
        help="Variance of a Gaussian prior on the weights; the smaller, the stronger. "
        "[dim]Default: chosen from the number of rows and the model; inf: none (maximum likelihood).[/dim]",
        show_default=False,
        rich_help_panel=MODEL,
    ),
]


def prior_of(variance: float | None) -> float | str | None:
    """The estimator's prior_variance: "auto" if not given, None for infinity."""
    return "auto" if variance is None else None if variance == float("inf") else variance


ClassWeight = Annotated[
    ClassWeights | None,
    typer.Option(
        help="[bold]balanced[/]: rare classes weigh as much as frequent ones. "
        "[dim]Default: every example weighs the same.[/dim]",
        show_default=False,
        rich_help_panel=MODEL,
    ),
]

# ---- training ----

Preset = Annotated[
    Presets | None,
    typer.Option(
        help="[bold]paper[/]: the authors' code as they ran it; [bold]paper-text[/]: the text of the paper. "
        "[dim]Default: our own choices.[/dim]",
        show_default=False,
        rich_help_panel=TRAINING,
    ),
]
NSampledClasses = Annotated[
    int | None,
    typer.Option(
        help="Number of sampled classes in a step: more classes give less noise, and are slower. " + SHAPE,
        show_default=False,
        rich_help_panel=TRAINING,
    ),
]
ClassSampling = Annotated[
    Samplings | None,
    typer.Option(
        help="Uniform, by frequency, or by the features; for each row, or [bold]-shared[/] by the minibatch. "
        "[dim]Default: auto: all up to 2,000 classes, above candidates-shared, or head-tail-shared where dense.[/dim]",
        show_default=False,
        rich_help_panel=TRAINING,
    ),
]
BatchSize = Annotated[
    int | None, typer.Option(help="Rows a step. " + SHAPE, show_default=False, rich_help_panel=TRAINING)
]
Optimizer = Annotated[
    Optimizers | None,
    typer.Option(
        help="rowwise-adagrad needs half the memory; section4 is the paper's. [dim]Default: adagrad.[/dim]",
        show_default=False,
        rich_help_panel=TRAINING,
    ),
]
LearningRate = Annotated[
    float | None,
    typer.Option(
        help="Step size. [dim]Default: from the model and the non-zeros of a row.[/dim]",
        show_default=False,
        rich_help_panel=TRAINING,
    ),
]
NJobs = Annotated[
    int | None,
    typer.Option(
        help="Threads. [dim]Default: NUMBA_NUM_THREADS, or all cores.[/dim]",
        show_default=False,
        rich_help_panel=TRAINING,
    ),
]
Seed = Annotated[int, typer.Option(help="Same seed, same result.", min=0, max=2**32 - 1, rich_help_panel=TRAINING)]
Resume = Annotated[
    Path | None,
    typer.Option(
        metavar="MODEL",
        help="Resume the training of this model on the same data, by default for the same number of epochs.",
        show_default=False,
        rich_help_panel=TRAINING,
    ),
]

# ---- when to stop ----

MaxEpochs = Annotated[
    float | None, typer.Option(help="Passes over the data. " + SHAPE, show_default=False, rich_help_panel=STOPPING)
]
MaxIter = Annotated[
    int | None,
    typer.Option(help="Steps, instead of passes.", show_default=False, rich_help_panel=STOPPING),
]
EarlyStopping = Annotated[
    bool | None,
    typer.Option(
        "--early-stopping",
        help="Hold out some examples, stop when their log likelihood no longer rises, and keep the best weights.",
        show_default=False,
        rich_help_panel=STOPPING,
    ),
]
ValidationFraction = Annotated[
    float | None,
    typer.Option(
        help="The share that --early-stopping holds out. [dim]Default: 0.1.[/dim]",
        show_default=False,
        rich_help_panel=STOPPING,
    ),
]

# ---- output ----

OutputModel = Annotated[
    Path,
    typer.Option(
        "--output", "-o", metavar="MODEL", help="The model file; an existing file is replaced after the fit.",
        show_default=False, rich_help_panel=OUTPUT,
    ),
]  # fmt: skip
OutputTable = Annotated[
    Path,
    typer.Option(
        "--output", "-o", metavar="FILE", help="The file of predictions; - is standard output.", rich_help_panel=OUTPUT
    ),
]
Reliability = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Draw accuracy against confidence (a reliability diagram): a png, svg or pdf file.",
        show_default=False,
        rich_help_panel=OUTPUT,
    ),
]
Layout = Annotated[
    Layouts | None,
    typer.Option(
        help="text for people, csv (row, rank, class, probability), jsonl (an object a row) or json. "
        "[dim]Default: from the name of the output file, else text.[/dim]",
        show_default=False,
        rich_help_panel=OUTPUT,
    ),
]
Json = Annotated[
    bool,
    typer.Option("--json", help="One JSON object on standard output, and nothing else there.", rich_help_panel=OUTPUT),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.", rich_help_panel=OUTPUT)]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel=OUTPUT)]

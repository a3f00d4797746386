"""The library's messages for the command line: options in place of Python arguments."""

from __future__ import annotations

import re

SAID = {  # options that are not the argument's name with dashes
    "random_state": "--seed",
    "ignore_columns": "--ignore-column",
    "zero_based": "--zero-based or --one-based",
    "zero_based=True": "--zero-based",
    "zero_based=False": "--one-based",
    "header=True": "--header",
    "header=False": "--no-header",
    "keep_index=True": "--keep-index",
    "prior_variance=None": "--prior-variance inf",
    "early_stopping=True": "--early-stopping",
    "early_stopping=False": "no --early-stopping",
}
WITH_UNDERSCORES = (
    "label_column", "ignore_columns", "label_names", "zero_based", "keep_index", "min_count", "prior_variance",
    "class_weight", "n_sampled_classes", "class_sampling", "batch_size", "learning_rate", "n_jobs", "random_state",
    "max_epochs", "max_iter", "early_stopping", "validation_fraction", "n_features",
)  # fmt: skip
ALSO_WORDS = ("format", "header", "labels", "reduction", "model", "method", "preset", "optimizer", "resume")
QUOTED = r"""(?<!\w)'[^']*'|"[^"]*\""""  # quoted text is kept; the 's of a genitive is no quote
VALUE = r"""=(?P<value>'[^']*'|"[^"]*"|(?:[\w-]+(?:\.[\w-]+)*)?)"""
SET = VALUE.replace("value", "set")
ARGUMENT = re.compile(
    rf"{QUOTED}|\b(?P<name>{'|'.join(WITH_UNDERSCORES)})\b({VALUE})?|\b(?P<word>{'|'.join(ALSO_WORDS)}){SET}"
)


def in_options(message: str) -> str:
    """`label_column` as --label-column, `format='xml'` as --format xml; quoted text stays."""
    return ARGUMENT.sub(_option, message)


def _option(found: re.Match[str]) -> str:
    name = found["name"] or found["word"]
    if name is None:
        return found[0]
    value = (found["value"] or found["set"] or "").strip("'\"")
    said = SAID.get(f"{name}={value}")
    if said is not None:
        return said
    option = SAID.get(name, "--" + name.replace("_", "-"))
    return f"{option} {value}" if value else option

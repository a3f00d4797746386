"""Readers of data files, the named datasets, and the reductions from sets of labels to one label an example."""

from augment_reduce.data.arrow import ArrowRows
from augment_reduce.data.convert import convert_rows
from augment_reduce.data.datasets import DATASETS, load_dataset
from augment_reduce.data.download import DatasetNotFoundError, cache_folder
from augment_reduce.data.mapped import MappedData, open_mapped
from augment_reduce.data.mapped_writer import write_mapped
from augment_reduce.data.readers import (
    FORMATS,
    DataFileError,
    DataFileWarning,
    LabelledRows,
    MultiLabelRows,
    OmniglotImages,
    Table,
    detect_format,
    read_csv,
    read_idx,
    read_labels,
    read_npy,
    read_npz,
    read_omniglot_zip,
    read_rows,
    read_svmlight,
    read_xml_repository,
    write_npz,
)
from augment_reduce.data.reductions import (
    REDUCTIONS,
    Examples,
    all_pairs,
    encode,
    first_label,
    first_label_like_paper,
    frequent_labels,
    keep_labels,
    only_labels,
    reduce_labels,
)
from augment_reduce.data.shapes import PAPER_SHAPES, random_like
from augment_reduce.data.splits import Dataset, Split
from augment_reduce.data.text import TextDataset, TokenLines

__all__ = [
    "DATASETS",
    "FORMATS",
    "PAPER_SHAPES",
    "REDUCTIONS",
    "ArrowRows",
    "DataFileError",
    "DataFileWarning",
    "Dataset",
    "DatasetNotFoundError",
    "Examples",
    "LabelledRows",
    "MappedData",
    "MultiLabelRows",
    "OmniglotImages",
    "Split",
    "Table",
    "TextDataset",
    "TokenLines",
    "all_pairs",
    "cache_folder",
    "convert_rows",
    "detect_format",
    "encode",
    "first_label",
    "first_label_like_paper",
    "frequent_labels",
    "keep_labels",
    "load_dataset",
    "only_labels",
    "open_mapped",
    "random_like",
    "read_csv",
    "read_idx",
    "read_labels",
    "read_npy",
    "read_npz",
    "read_omniglot_zip",
    "read_rows",
    "read_svmlight",
    "read_xml_repository",
    "reduce_labels",
    "write_mapped",
    "write_npz",
]

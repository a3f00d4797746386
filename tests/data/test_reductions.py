"""From sets of labels to one label an example."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import sparse

from augment_reduce.data import (
    REDUCTIONS,
    MultiLabelRows,
    all_pairs,
    encode,
    first_label,
    first_label_like_paper,
    frequent_labels,
    keep_labels,
    read_xml_repository,
    reduce_labels,
)
from tests.helpers import SHARED

DATA = SHARED / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the real datasets are not on this machine")


def rows_of(sets: list[list[int]], n_labels: int = 6, names: list[str] | None = None) -> MultiLabelRows:
    """Row n has the features (n, 2 n) and the labels sets[n]."""
    labels = np.zeros((len(sets), n_labels), bool)
    for n, chosen in enumerate(sets):
        labels[n, chosen] = True
    X = np.arange(len(sets), dtype=np.float32)[:, None] * np.float32([1, 2])
    return MultiLabelRows(sparse.csr_matrix(X), sparse.csr_matrix(labels), names)


TRAIN = rows_of([[2, 4], [], [1], [4, 5, 2]])


def test_first_label_is_the_lowest_and_skips_rows_without():
    examples = first_label(TRAIN)
    assert examples.y.tolist() == [2, 1, 2]
    assert examples.rows.tolist() == [0, 2, 3]
    np.testing.assert_array_equal(examples.X.toarray(), [[0, 0], [2, 4], [3, 6]])
    assert len(examples) == 3


def test_first_label_is_the_lowest_also_if_the_matrix_is_not_sorted():
    labels = sparse.csr_matrix((np.ones(3, bool), np.asarray([5, 0, 3]), np.asarray([0, 2, 3])), shape=(2, 6))
    source = MultiLabelRows(sparse.csr_matrix((2, 1), dtype=np.float32), labels)
    assert first_label(source).y.tolist() == [0, 3]
    assert all_pairs(source).y.tolist() == [0, 5, 3]


def test_all_pairs_are_row_by_row():
    examples = all_pairs(TRAIN)
    assert examples.rows.tolist() == [0, 0, 2, 3, 3, 3]
    assert examples.y.tolist() == [2, 4, 1, 2, 4, 5]
    np.testing.assert_array_equal(examples.X.toarray()[:, 0], [0, 0, 2, 3, 3, 3])


def test_features_are_not_copied_when_every_row_is_taken_once():
    source = rows_of([[1], [0], [3, 4]])
    assert first_label(source).X is source.X
    assert all_pairs(source).X is not source.X


def test_paper_reduction_drops_test_rows_with_unseen_first_label():
    """A test row whose second label was seen is dropped too: only its first one counts."""
    train, test = first_label_like_paper(TRAIN, rows_of([[1, 5], [0, 1], [4], [2]]))
    assert train.y.tolist() == [2, 1, 2]
    assert test.rows.tolist() == [0, 3]
    assert test.y.tolist() == [1, 2]


def test_frequent_labels_are_counted_renumbered_and_named():
    source = rows_of([[2, 4], [], [1], [4, 5, 2]], names=list("abcdef"))
    kept_rows, kept = frequent_labels(source, 2)
    assert kept.tolist() == [2, 4]
    assert kept_rows.label_names == ["c", "e"]
    assert kept_rows.labels.toarray().tolist() == [[True, True], [True, True]]
    np.testing.assert_array_equal(kept_rows.X.toarray()[:, 0], [0, 3])
    test = keep_labels(rows_of([[4], [0], [1, 2]]), kept)
    assert test.labels.toarray().tolist() == [[False, True], [True, False]]
    assert frequent_labels(source, 1)[1].tolist() == [1, 2, 4, 5]
    with pytest.raises(ValueError, match=r"min_count=3.*is on 2.*Lower min_count"):
        frequent_labels(source, 3)


def test_encode_keeps_the_names():
    codes, classes = encode(["b", "a", "c", "a"])
    assert codes.tolist() == [1, 0, 2, 0]
    assert classes.tolist() == ["a", "b", "c"]
    again, _ = encode(["c", "b"], classes)
    assert again.tolist() == [2, 1]
    mixed, _ = encode([30, 10], [20, 30, 10])  # classes in an order of their own
    assert mixed.tolist() == [1, 2]
    with pytest.raises(ValueError, match=r"1 of 2 are not; first at row 1: .*'z'"):
        encode(["a", "z"], classes)


def test_reductions_by_name():
    assert set(REDUCTIONS) == {"first", "all"}
    assert reduce_labels(TRAIN, "all").y.tolist() == all_pairs(TRAIN).y.tolist()
    with pytest.raises(ValueError, match=r"\['all', 'first'\].*'random'"):
        reduce_labels(TRAIN, "random")


def test_rows_and_labels_must_match():
    with pytest.raises(ValueError, match="X has 2 rows and labels 3"):
        MultiLabelRows(sparse.csr_matrix((2, 1)), sparse.csr_matrix((3, 1), dtype=bool))


@needs_data
def test_bibtex_first_labels():
    """146 classes in training, 2,512 test rows left of 2,515, and 148 first labels in all: the paper's number."""
    train, test = (read_xml_repository(DATA / "bibtex" / f"bibtex_{part}.txt.gz") for part in ("train", "test"))
    reduced_train, reduced_test = first_label_like_paper(train, test)
    assert len(np.unique(reduced_train.y)) == 146
    assert (len(reduced_train), len(reduced_test)) == (4880, 2512)
    assert len(np.union1d(reduced_train.y, first_label(test).y)) == 148

"""csv files as people have them: with pandas' index, without a header, with True and False, in the formats of Excel."""

from __future__ import annotations

import gzip
import warnings
from pathlib import Path

import numpy as np
import pytest

from augment_reduce.data import DataFileError, DataFileWarning, read_csv, read_rows
from augment_reduce.data.csv_guesses import counts_rows, is_index, names_columns

KINDS = ["cat", "dog", "cat", "emu", "dog", "cat", "cat", "dog", "emu", "cat", "dog", "emu"]
N = len(KINDS)


def write(folder: Path, text: str, name: str = "t.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def rows(index=None, header="a,b,kind", delimiter=","):
    """N rows of two features and a label, with a first column of these values."""
    lines = [f"{i}.5,{i % 3},{kind}" for i, kind in enumerate(KINDS)]
    if index is not None:
        lines = [f"{value},{line}" for value, line in zip(index, lines, strict=True)]
    return ("\n".join([header, *lines] if header else lines) + "\n").replace(",", delimiter)


def silent(path, **options):
    """What is read without a word."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return read_csv(path, **options)


X = np.float32([[i + 0.5, i % 3] for i in range(N)])

# ---- an index ----

INDEXES = {
    "pandas": (range(N), ",a,b,kind"),
    "R, from 1": (range(1, N + 1), '"",a,b,kind'),
    "quoted": ([f'"{i}"' for i in range(N)], ",a,b,kind"),
    "as pandas names it when it reads it again": (range(N), "Unnamed: 0,a,b,kind"),
    "of rows in another order": (np.random.default_rng(0).permutation(N), ",a,b,kind"),
    "of some of many rows": (np.random.default_rng(0).choice(10**8 + 10, N, replace=False) + 10**8, ",a,b,kind"),
    "of two tables, one after the other": ([*range(7), *range(5)], ",a,b,kind"),
    "of floats": ([f"{i}.0" for i in range(N)], ",a,b,kind"),
}


@pytest.mark.parametrize("name", INDEXES)
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_an_index_is_left_out_and_that_is_said(name, delimiter, tmp_path):
    index, header = INDEXES[name]
    path = write(tmp_path, rows(index, header, delimiter))
    with pytest.warns(DataFileWarning, match=r"t.csv: the first column has no name.*left out.*keep_index=True"):
        table = read_csv(path)
    assert table.feature_names == ["a", "b"]
    np.testing.assert_array_equal(table.X, X)
    assert table.y is not None
    assert table.y.tolist() == KINDS


def test_an_index_may_be_kept_or_be_left_out_by_name(tmp_path):
    path = write(tmp_path, rows(range(N), ",a,b,kind"))
    kept = silent(path, keep_index=True)
    assert kept.feature_names == ["", "a", "b"]
    np.testing.assert_array_equal(kept.X[:, 0], np.arange(N))
    assert silent(path, ignore_columns=[""]).feature_names == ["a", "b"]
    assert silent(path, ignore_columns=[0]).feature_names == ["a", "b"]
    as_label = silent(path, label_column=0, ignore_columns=["kind"])
    assert as_label.y is not None
    assert as_label.y.tolist() == list(range(N))


def test_two_indexes_are_left_out(tmp_path):
    """Written by pandas, read without index_col, and written again."""
    path = write(tmp_path, rows([f"{i},{i}" for i in range(N)], ",Unnamed: 0,a,b,kind"))
    with pytest.warns(DataFileWarning) as said:
        assert read_csv(path).feature_names == ["a", "b"]
    assert len(said) == 2


@pytest.mark.parametrize(
    "values", [[0.5] * N, [1, 0] * (N // 2), [3, 1, 1, 2, 2, 1, 0, 4, 4, 0, 1, 9], [-1, *range(1, N)]]
)
def test_a_column_without_a_name_that_numbers_nothing_is_a_feature(values, tmp_path):
    table = silent(write(tmp_path, rows(values, ",a,b,kind")))
    assert table.feature_names == ["", "a", "b"]
    np.testing.assert_array_equal(table.X[:, 0], np.float32(values))


@pytest.mark.parametrize("start", [0, 1, 10**8 + 10])
@pytest.mark.parametrize(
    "name", ["index", "Index", "ID", "Id", "row", "row_number", "row.names", "rownames", "level_0"]
)
def test_a_column_called_index_is_one_if_it_numbers_the_rows(name, start, tmp_path):
    path = write(tmp_path, rows(range(start, start + N), f"{name},a,b,kind"))
    with pytest.warns(DataFileWarning, match=rf"is called '{name}' and numbers the rows.*keep_index=True"):
        assert read_csv(path).feature_names == ["a", "b"]
    assert silent(path, keep_index=True).feature_names == [name, "a", "b"]
    assert silent(write(tmp_path, rows([3, 1, 1, 2] * (N // 4), f"{name},a,b,kind"))).X.shape == (N, 3)


@pytest.mark.parametrize("name", ["", "Unnamed: 0", "id"])
def test_an_index_may_follow_the_label(name, tmp_path):
    text = f"kind,{name},a\n" + "".join(f"{kind},{i},{i % 5}\n" for i, kind in enumerate(KINDS))
    with pytest.warns(DataFileWarning, match="left out as an index"):
        assert read_csv(write(tmp_path, text), label_column=0).feature_names == ["a"]


def test_a_column_with_a_name_is_a_feature_whatever_it_holds(tmp_path):
    assert silent(write(tmp_path, rows(range(N), "i,a,b,kind"))).feature_names == ["i", "a", "b"]


def test_row_names_are_refused_with_a_way_out(tmp_path):
    with pytest.raises(DataFileError, match=r"line 2, column '': expected a finite number.*ignore_columns"):
        read_csv(write(tmp_path, rows([f"Mazda {i}" for i in range(N)], '"",a,b,kind')))


def test_an_index_of_many_rows_is_compared_exactly(tmp_path):
    """Above 2^24 float32 has not all whole numbers."""
    text = ",a,y\n" + "".join(f"{2**24 + i},{i % 7},{i % 2}\n" for i in range(5000))
    with pytest.warns(DataFileWarning, match=f"{2**24} to {2**24 + 4999}"):
        assert read_csv(write(tmp_path, text)).feature_names == ["a"]


def test_what_counts_as_an_index():
    assert is_index(np.array([7.0]))
    assert not is_index(np.array([]))
    assert not is_index(np.array([0.0, 1.5]))
    assert counts_rows(np.arange(10.0))
    assert counts_rows(np.arange(1.0, 11.0))
    assert not counts_rows(np.arange(5.0))
    assert not counts_rows(np.arange(2.0, 12.0))


# ---- no header ----


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_a_file_without_a_header_keeps_its_first_row_and_says_so(delimiter, tmp_path):
    path = write(tmp_path, rows(header=None, delimiter=delimiter))
    with pytest.warns(DataFileWarning, match=r"line 1: the first line has no names.*taken for a row.*header=True"):
        table = read_csv(path)
    assert table.feature_names is None
    np.testing.assert_array_equal(table.X, X)
    assert table.y is not None
    assert table.y.tolist() == KINDS


@pytest.mark.parametrize(
    "text",
    ["1,2,3\n4,5,6\n", "1,2,a\n3,4,b\n", "5.1,3.5,setosa\n4.9,3,virginica\n", "0,1,2\n3,4,5\n", "1e3,-2,0\n5,6,1\n"],
)
def test_a_first_line_of_numbers_is_a_row(text, tmp_path):
    with pytest.warns(DataFileWarning, match="taken for a row"):
        table = read_csv(write(tmp_path, text))
    assert table.X.shape == (2, 2)
    assert table.y is not None
    assert len(table.y) == 2


@pytest.mark.parametrize("missing", ["nan", "NA", "?", "", "null", "inf"])
@pytest.mark.parametrize("at", [0, 1])
def test_a_first_row_with_a_missing_value_is_not_lost(missing, at, tmp_path):
    """It was taken for the names of the columns, in silence."""
    cells = ["1.5", "2", "x"]
    cells[at] = missing
    text = ",".join(cells) + "\n" + "1.5,2,x\n2.5,3,y\n" * 6
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DataFileWarning)
        with pytest.raises(DataFileError, match=rf"line 1, column {at}: expected a finite number") as caught:
            read_csv(write(tmp_path, text))
    assert caught.value.line == 1


@pytest.mark.parametrize("text", ["True,1,x\n" + "False,2,y\n" * 5, "True,False,x\n" + "False,True,x\n" * 5])
def test_a_first_line_of_true_and_false_is_a_row(text, tmp_path):
    with pytest.warns(DataFileWarning, match="taken for a row"):
        assert read_csv(write(tmp_path, text)).X.shape == (6, 2)


@pytest.mark.parametrize("header", [",2018,2019,2020", ",0,1,2", ",0,1,kind", ",2018,2019,kind"])
def test_numbers_after_an_empty_cell_above_an_index_are_names(header, tmp_path):
    lines = "".join(f"{i},{i % 3}.5,{i % 5},{i % 2}\n" for i in range(20))
    with pytest.warns(DataFileWarning) as said:
        table = read_csv(write(tmp_path, header + "\n" + lines))
    assert "left out as an index" in str(said[-1].message)
    assert table.feature_names == header.split(",")[1:3]
    assert table.X.shape == (20, 2)


HEADERS = {
    "one number among names": ("2020,b,kind", False),
    "pandas' numbers": ("0,1,kind", False),
    "years": ("2018,2019,kind", True),
    "an empty name": (",b,kind", False),
    "names like numbers": ("nan,1st,kind", False),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_with_numbers_in_it_is_a_header(name, tmp_path):
    header, said = HEADERS[name]
    path = write(tmp_path, rows(header=header))
    if said:
        with pytest.warns(DataFileWarning, match=r"taken for the names.*header=False"):
            table = read_csv(path)
    else:
        table = silent(path)
    assert table.feature_names == header.split(",")[:2]
    assert table.X.shape == (N, 2)


def test_columns_that_pandas_numbered_are_a_header_if_they_are_many(tmp_path):
    path = write(tmp_path, "0,1,2,3\n" + "".join(f"{i},{i % 3},{i % 5},{i % 4}\n" for i in range(20)))
    with pytest.warns(DataFileWarning, match="names of the columns"):
        assert read_csv(path).feature_names == ["0", "1", "2"]


def test_header_overrules(tmp_path):
    path = write(tmp_path, "1,2,3\n4,5,6\n")
    assert silent(path, header=True).X.tolist() == [[4, 5]]
    assert silent(path, header=False).X.tolist() == [[1, 2], [4, 5]]
    assert silent(path, header=False, label_column=0, ignore_columns=["1"]).X.tolist() == [[3], [6]]
    named = write(tmp_path, rows())
    with pytest.raises(DataFileError, match=r"line 1, column 0: expected a finite number, but found 'a'"):
        read_csv(named, header=False)
    assert silent(write(tmp_path, "1,2,kind\n4,5,a\n4,6,b\n"), label_column="kind").X.shape == (2, 2)


def test_an_index_without_a_header_is_left_out_where_it_can_be_nothing_else(tmp_path):
    with pytest.warns(DataFileWarning) as said:
        table = read_csv(write(tmp_path, rows(range(N), None)))
    assert len(said) == 2
    np.testing.assert_array_equal(table.X, X)


@pytest.mark.parametrize(
    ("first", "labels", "expected"),
    [
        ("3,4,kind", ["a", "b"] * 9, (True, False)),
        ("3,4,a", ["a", "b"] * 9, (False, True)),
        ("3,3,kind", ["a", "b"] * 9, (False, False)),
        ("3,4.5,kind", ["a", "b"] * 9, (False, False)),
        ("0,1,kind", ["a", "b"], (True, True)),
        ("0,1,a", ["a", "b"], (False, True)),
        ("3,4,kind", ["a", "b", "c"], (False, False)),
        ("x,4,5", ["6", "7"], (True, True)),
    ],
)
def test_what_counts_as_a_header(first, labels, expected):
    below = [["1", "2", label] for label in labels]
    assert names_columns(first.split(","), below, 2) == expected


# ---- cells ----


def test_true_and_false_are_ones_and_zeros(tmp_path):
    text = "a,b,kind\nTrue,1,x\nFALSE,2,y\ntrue,3,x\n" + "False,4,True\n" * 3000
    table = silent(write(tmp_path, text))
    assert table.X[:4].tolist() == [[1, 1], [0, 2], [1, 3], [0, 4]]
    assert table.y is not None
    assert set(table.y) == {"x", "y", "True"}


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a,y\nTrue,1\n2,1\n", 2, "column 'a': expected a number, as in the rows above, but found 'True'"),
        ("a,y\n" + "True,1\n" * 3000 + "2,1\n", 3002, "True or False, as in the rows above.*'2'"),
        ("a,y\n" + "1,1\n" * 3000 + "True,1\n", 3002, "a number, as in the rows above.*'True'"),
        ("a;b;y\n1,5;2;u\n", 2, "column 'a'.*'1,5'.*Decimal commas.*decimal=','"),
        ('a,y\n"1.234,5",u\n', 2, "Decimal commas"),
        ("1,5;2,5;u\n", 2, "rows below the header|Decimal commas"),
        ("a,y\n1_000,u\n", 2, "finite number.*'1_000'"),
        ("a,y\n１,u\n", 2, "finite number"),
        ("a,y\n1,u\n1e39,u\n", 3, "finite number.*'1e39'"),
        ('a,y\n1,"u\n2,v\n', 3, "csv record.*unexpected end of data.*quote never closed"),
        ('a,y\n1,"u"v\n', 2, "csv record.*expected after"),
        ("a,y\r1,u\r2,v\r", 1, "csv record.*new-line character"),
        ("a,y\n" + "1," + "u" * 200_000 + "\n", 2, "csv record.*field limit"),
        ("x" * 200_000 + ",y\n1,2\n", 1, "csv record.*field limit"),
        ("a,y\n1,1e999\n", None, "label that is text, or a number of 64 bits"),
        ("\n \n\n", None, "an empty file"),
        ('""\n', None, "an empty file"),
    ],
)  # fmt: skip
def test_cells_that_are_refused(text, line, message, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DataFileWarning)
        with pytest.raises(DataFileError, match=message) as caught:
            read_csv(write(tmp_path, text))
    if "below" not in message:
        assert caught.value.line == line


def test_what_excel_writes(tmp_path):
    table = silent(write(tmp_path, "\ufeffsep=;\n\na;b;kind\n1;2;x\n3;4;y\n"))
    assert table.feature_names == ["a", "b"]
    assert table.X.tolist() == [[1, 2], [3, 4]]
    with pytest.raises(DataFileError, match=r"line 3, column 'b'"):
        read_csv(write(tmp_path, "sep=;\na;b;kind\n1;two;x\n"))


def test_a_delimiter_in_quotes_is_none(tmp_path):
    table = silent(write(tmp_path, '"a, in cm, or so";b;kind\n1;2;"x, y"\n'))
    assert table.feature_names == ["a, in cm, or so", "b"]


def test_columns_of_one_name_are_left_out_together(tmp_path):
    assert silent(write(tmp_path, "a,a,b,y\n1,2,3,u\n"), ignore_columns=["a"]).feature_names == ["b"]


def test_read_rows_passes_it_all_on(tmp_path):
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress(rows(range(N), ",a,b,kind").encode()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_rows(path, keep_index=True, header=True).n_features == 3

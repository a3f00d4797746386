"""The committed results: every file keeps the schema, and the documentation's tables are what the files say."""

import csv

import pytest

from benchmarks import common, tables

FILES = sorted(common.RESULTS.rglob("*.csv"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(common.RESULTS)))
def test_result_files_keep_the_schema(path):
    with open(path, newline="", encoding="utf-8") as file:
        header = tuple(next(csv.reader(file)))
    of_its_own = header[3:] if path.parent.name == "paper" else common.SCHEMAS[path.stem]
    assert len(set(header)) == len(header)
    assert common.read(path, (*common.COMMON, *of_its_own))


def test_every_schema_has_a_file():
    assert {path.stem for path in FILES if path.parent == common.RESULTS} == common.SCHEMAS.keys()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("machine,date,version,split,method\n", "expected the columns date, machine, version, split"),
        ("{head}yesterday,,,drawers,softmax,0,1,-5,0.2\n", "line 2: expected a date"),
        ("{head}2026-11-19,,,drawers,softmax\n", "line 2: expected 9 values"),
        ("{head}2026-11-19,,,drawers,softmax,0,1,-5,0.2,9\n", "line 2: expected 9 values"),
    ],
)
def test_other_files_are_refused(tmp_path, text, message):
    path = tmp_path / "omniglot_splits.csv"
    head = ",".join(common.columns_of(path)) + "\n"
    path.write_text(text.replace("{head}", head))
    with pytest.raises(ValueError, match=message):
        common.read(path)


def test_appended_rows_say_when_and_where(tmp_path):
    path = tmp_path / "omniglot_splits.csv"
    row = dict(zip(common.SCHEMAS[path.stem], ("drawers", "softmax", 0, 5, -5.1, 0.2), strict=True))
    for _ in range(2):
        common.append(path, [row], common.SCHEMAS[path.stem])
    first, second = common.read(path)
    assert first == second
    assert first["split"] == "drawers"
    assert first["date"] and first["machine"] and first["version"].startswith("augment-reduce ")  # noqa: PT018
    with pytest.raises(ValueError, match="expected the columns"):
        common.append(path, [{"a": 1}], ("a",))


def test_pages_are_up_to_date():
    assert tables.main(["--check"]) == [], "run python -m benchmarks.tables"


def test_every_table_is_on_a_page():
    shown = [name for page in tables.pages() for _, name, _ in tables.BLOCK.findall(page.read_text(encoding="utf-8"))]
    assert sorted(shown) == sorted(tables.TABLES)


def test_a_page_is_filled_between_its_markers(monkeypatch):
    monkeypatch.setitem(tables.TABLES, "small", lambda: "| a |")
    page = "above\n<!-- table: small -->\nold\n<!-- end -->\nbelow\n"
    assert tables.filled(page) == "above\n<!-- table: small -->\n\n| a |\n\n<!-- end -->\nbelow\n"
    assert tables.filled(tables.filled(page)) == tables.filled(page)
    empty = "<!-- table: small -->\n<!-- end -->\n"
    assert tables.filled(f"{empty}between\n{empty}").count("| a |") == 2
    with pytest.raises(KeyError, match="No table is called 'none'"):
        tables.filled(page.replace("small", "none"))


def test_the_last_measurement_is_shown(monkeypatch):
    origin = {"date": "2026-11-01", "machine": "a", "version": "augment-reduce 1, python 3, torch 2"}
    rows = [
        origin | {"benchmark": "classes", "case": f"uniform K={K} B=2", "quantity": "ms per step", "p50": p50}
        for K, p50 in (("1,000", "9"), ("1,000", "1.5"), ("10", "2"))
    ]
    monkeypatch.setattr(tables, "read", lambda path: rows)
    head, _, line = tables.classes().splitlines()
    assert head == "| classes drawn | K 10 | K 1,000 | date | machine | version |"
    assert line == "| for each row | 2.00 | 1.50 | 2026-11-01 | a | augment-reduce 1, torch 2 |"


def test_every_benchmark_is_run_by_a_test():
    """On tiny shapes, so that none goes stale: each module with a `main` is named in a test file."""
    texts = "".join(path.read_text(encoding="utf-8") for path in (common.ROOT / "tests").rglob("test_*.py"))
    folder = common.ROOT / "benchmarks"
    scripts = [path for kind in ("speed", "studies") for path in (folder / kind).glob("*.py")]
    scripts = [path for path in scripts if "\ndef main(" in path.read_text(encoding="utf-8")]
    assert len(scripts) >= 18
    for path in scripts:
        module = f"benchmarks.{path.parent.name}.{path.stem}"
        assert module in texts or f"from benchmarks.{path.parent.name} import {path.stem}" in texts, module

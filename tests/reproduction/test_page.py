"""The report page: complete, self-contained, and readable in a real browser, wide and on a phone."""

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib.figure import Figure

from augment_reduce.reproduction import figure, settings, sizes, sources
from augment_reduce.reproduction.cells import Cell, run_cell
from augment_reduce.reproduction.command import publish
from augment_reduce.reproduction.store import Store
from augment_reduce.reproduction.tables import build
from tests.helpers import tiny_studies

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)  # fmt: skip
SECTIONS = ("table1", "table2", "table3", "bounds", "synthetic", "figure2", "curves", "sizes", "settings")
VOID = {"meta", "link", "br", "img", "path", "use", "hr", "rect", "line", "circle"}


def write_sizes(path):
    """Two looks at two sizes of two methods on one set, and exact."""
    fits = [("augment-reduce", 2), ("augment-reduce", 5), ("one-vs-each", 2), ("one-vs-each", 5), ("exact", 7)]
    lines = [",".join(sizes.COLUMNS)]
    lines += [f",,,bibtex,{m},{s},{e},{e * s},{-3 + 0.1 * s - 1 / e},0.5" for m, s in fits for e in (1, 2)]
    path.write_text("\n".join(lines) + "\n")


def test_sizes_end_where_their_last_look_was(tmp_path):
    write_sizes(tmp_path / "sizes.csv")
    ends, ways = sizes.panels(sizes.read(tmp_path / "sizes.csv"))
    assert ends.level == pytest.approx(-2.8)
    assert [line.method for line in ends.lines] == ["softmax", "one-vs-each"]
    assert ends.lines[0].x.tolist() == [2, 5]
    assert ends.lines[0].y.tolist() == pytest.approx([-3.3, -3.0])
    assert ways.lines[1].x.tolist() == [5, 10]  # the largest size
    assert ways.lines[0].method == "exact"
    (tmp_path / "sizes.csv").write_text("something,else\n1,2\n")
    assert sizes.read(tmp_path / "sizes.csv") == sizes.read(tmp_path / "none.csv") == []


def test_a_line_far_below_the_others_is_said_in_words():
    x = np.array([1.0, 2.0])
    lines = [figure.Line("softmax", x, np.array([-4.0, -3.9])), figure.Line("one-vs-each", x, np.array([-9.0, -8.0]))]
    panel = figure.Panel("a set", tuple(lines), level=-3.85, log_x=True)
    assert figure.far_below(panel) == [lines[1]]
    axes = Figure().subplots()
    figure.draw(axes, panel)
    assert axes.get_ylim()[0] > -4.1
    assert [text.get_text() for text in axes.texts] == ["one-vs-each: -9 to -8, below"]
    near = figure.Panel("a set", (lines[0], figure.Line("one-vs-each", x, np.array([-4.4, -4.2]))), log_x=True)
    assert figure.far_below(near) == []


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page with some cells finished, some not, and two datasets missing."""
    store = Store(tmp_path_factory.mktemp("report")).open()
    with pytest.MonkeyPatch.context() as patch:
        tiny_studies.install(patch.setattr)
        store.add_statistics(sources.survey(settings.STUDIES, None))
        for study, method in (
            ("mnist", "exact"), ("mnist", "one-vs-each"), ("mnist", "softmax"), ("bibtex", "softmax"),
            ("bibtex", "probit"), ("synthetic", "softmax"), ("eurlex-4k-shape", "softmax"),
        ):  # fmt: skip
            kind = "timing" if "shape" in study else "full"
            run_cell(Cell(study, method, 0, kind, 30), store, None, lambda done, note: None)
    sources.load.cache_clear()
    write_sizes(store.folder / "sizes.csv")
    publish(store, build(store, 30), 30)
    return store.folder / "report.html"


class Outline(HTMLParser):
    """Every tag closed in order, and the ids and links on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.ids, self.links, self.sources, self.counts = [], [], [], [], {}

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.ids += [given["id"]] if "id" in given else []
        self.links += [given["href"]] if tag in ("a", "link") else []
        self.sources += [given["src"]] if "src" in given else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.counts[tag] = self.counts.get(tag, 0) + 1

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_page_is_well_formed_and_self_contained(page):
    text = page.read_text(encoding="utf-8")
    outline = Outline()
    outline.feed(text)
    assert outline.open == []
    assert set(SECTIONS) <= set(outline.ids)
    assert outline.counts["table"] == 5
    assert outline.counts["svg"] == 5 + 2 + 2  # figure 2, learning curves of two datasets, sampled classes of one
    assert "script" not in outline.counts
    assert outline.sources == []
    assert all(link.startswith(("#", "data:")) for link in outline.links)
    assert "@import" not in text
    assert not re.search(r"url\(\s*['\"]?(?!#)", text)


def test_page_says_paper_ours_and_difference(page):
    text = page.read_text(encoding="utf-8")
    row = re.search(r"<tr><th[^>]*>A&amp;R probit</th>(.*?)</tr>", text[text.index("<span>Bibtex") :]).group(1)
    cells = re.findall(r"<td[^>]*>(.*?)</td>", row)
    record = Store(page.parent).finished("bibtex.probit.seed0.iterations30")["metrics"]
    ours = record["test_log_likelihood_importance_floored"]
    minus = "\N{MINUS SIGN}"
    assert cells[0] == f"{minus}4.184"
    assert cells[1] == f"{ours:.3f}".replace("-", minus)
    assert cells[2] == f"{ours + 4.184:+.3f}".replace("-", minus)
    assert cells[3] == f"{record['test_log_likelihood']:.3f}".replace("-", minus)
    assert "random data, same shape" in text
    assert "Bring the files" in text
    assert "A short trial: 30 iterations" in text
    assert str(page.parent) not in text  # nothing of this machine's folders


MEASURE = """
<script>
const frame = document.querySelector('iframe');
frame.onload = () => {
  const page = frame.contentDocument, root = page.documentElement;
  const wide = [...page.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth + 1);
  const style = e => frame.contentWindow.getComputedStyle(e);
  const small = [...page.querySelectorAll('p, td, th')].map(e => parseFloat(style(e).fontSize));
  const drawn = [...page.querySelectorAll('svg')].map(e => e.getBoundingClientRect());
  document.body.setAttribute('data-found', JSON.stringify({
    overflow: root.scrollWidth - root.clientWidth, scrolling: wide.length, smallest: Math.min(...small),
    charts: drawn.filter(r => r.width > 200 && r.height > 120).length,
    rightmost: Math.max(...drawn.map(r => r.right)),
    pinned: style(page.querySelector('tbody th.pin')).position,
    background: style(page.body).backgroundColor,
    title: page.title, sections: [...page.querySelectorAll('section')].map(s => s.id)
  }));
};
</script>
"""


def measured(page, tmp_path, width: int, *flags: str) -> dict:
    """Open the page in the browser, in a frame of that width, and measure what is there."""
    text = html.escape(page.read_text(encoding="utf-8"), quote=True)
    frame = f'<iframe srcdoc="{text}" style="width:{width}px;height:900px;border:0"></iframe>'
    wrapper = tmp_path / "wrapper.html"
    wrapper.write_text(f'<!doctype html><meta charset="utf-8"><body>{frame}{MEASURE}', encoding="utf-8")
    dumped = subprocess.run(
        [BROWSER, *FLAGS, *flags, f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000", "--dump-dom",
         wrapper.as_uri()],
        capture_output=True, text=True, timeout=600, check=True,
    ).stdout  # fmt: skip
    return json.loads(html.unescape(re.search(r'<body data-found="(.*?)"', dumped).group(1)))


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here to open the page in")
@pytest.mark.parametrize("width", [1280, 390])
def test_page_in_a_browser(page, tmp_path, width):
    found = measured(page, tmp_path, width)
    assert found["title"] == "Augment and Reduce, reproduced"
    assert sorted(found["sections"]) == sorted(SECTIONS)
    assert found["overflow"] <= 0  # wide tables scroll by themselves, the page does not
    assert found["charts"] == 9
    assert found["rightmost"] <= width
    assert found["smallest"] >= 12
    assert found["pinned"] == "sticky"
    if width == 390:
        assert found["scrolling"] >= 4


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here to open the page in")
def test_page_follows_a_dark_screen(page, tmp_path):
    light = measured(page, tmp_path, 800)
    dark = measured(page, tmp_path, 800, "--blink-settings=preferredColorScheme=0")
    assert light["background"] == "rgb(255, 255, 255)"
    assert dark["background"] == "rgb(22, 24, 27)"

"""Every format shows every committed result, and made-up ones in known words."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from breakgraph.bench.result import Row
from breakgraph.errors import ConfigError, UnknownNameError
from breakgraph.report import FORMATS, render
from breakgraph.report.plots import plots
from unit.report.results import COMMITTED, capture_result, committed, count, prefill_result, result


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_each_committed_result_is_shown(path: Path, form: str) -> None:
    shown = committed(path)
    text = render([shown], form)
    assert shown.where.device_name in text
    assert shown.versions.torch in text


def test_terminal_has_a_line_a_row_and_no_details() -> None:
    text = render([prefill_result(), capture_result()], "terminal")
    lines = text.splitlines()
    assert "ms a step, 1 request (attention triton)" in lines
    assert "    16  320.0       25.6  24.0                                       20.0" in lines
    assert "all figures" not in text
    assert "note: <b>not bold</b> | not a cell" in lines
    assert text.count("Example device") == 2
    assert lines == [line.rstrip() for line in lines]


def test_markdown_tables_have_the_same_number_of_cells() -> None:
    text = render([prefill_result()], "markdown")
    assert "### ms a step, 1 request\n\nattention triton\n\n| tokens | eager |" in text
    assert "| 8 | 160.0 | 12.8 | 12.0 | 14.0 | 10.0 |\n" in text
    assert "- note: \\<b\\>not bold\\</b\\> \\| not a cell" in text
    assert "- command: `breakgraph bench prefill --tokens 8,16`" in text
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({row.count("|") for row in re.sub(r"\\\|", "", table).splitlines()}) == 1


class Page(HTMLParser):
    """Open tags, and what could load something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.loads += [f"{tag} {k}={v}" for k, v in attrs if k in ("src", "href") and not (v or "").startswith("#")]
        if tag != "meta":  # the only one here that has no end
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing() -> None:
    text = render([prefill_result(), capture_result()], "html")
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.loads == []
    assert not page.seen & {"script", "link", "img", "iframe", "b"}
    assert "@import" not in text
    assert "url(http" not in text
    assert "&lt;b&gt;not bold&lt;/b&gt; | not a cell" in text
    assert text.count("<svg") == 3
    assert '<td class="number">160.0</td>' in text
    assert text.count("<details>") == 1


def test_without_plots_a_page_needs_no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "<svg" not in render([result(Row(name="cost", params={}, metrics={"n": count(1)}))], "html")
    with pytest.raises(ConfigError, match=r"matplotlib.* pip install 'breakgraph\[report\]', or use format 'markdown'"):
        render([prefill_result()], "html")
    assert render([prefill_result()], "markdown")


def texts(svg: str) -> str:
    found = [element for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("text")]
    return "\n".join("".join(element.itertext()) for element in found)


def test_latency_against_tokens() -> None:
    (plot,) = plots(prefill_result())
    shown = texts(plot.svg)
    for word in ("eager", "breakable", "full", "torch.compile, body only (sdpa)", "GPU busy", "roofline", "(lower is"):
        assert word in shown
    assert "one prefill step of 1 request against" in plot.caption


def test_memory_and_the_steps_of_a_replay() -> None:
    memory, timeline = plots(capture_result())
    shown = texts(memory.svg)
    assert "breakable (triton): prefill, 2 buckets, sum of the bars 45.0 MiB" in shown
    assert "pool of all phases: 40.0 MiB" in shown
    assert "bucket, in requests" in shown
    shown = texts(timeline.svg)
    assert "breakable (triton): prefill 16, 2 segments, 1 breaks, host 63 us" in shown
    assert "breaks: attend" in shown


def test_the_emulated_device_has_an_order_and_no_times() -> None:
    _, timeline = plots(capture_result(emulated=True))
    assert " us" not in texts(timeline.svg)
    assert "no times, as the device is emulated" in timeline.caption


def test_the_same_result_gives_the_same_page() -> None:
    assert render([prefill_result(), capture_result()], "html") == render([prefill_result(), capture_result()], "html")


def test_what_cannot_be_shown_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="unknown format 'pdf'; known: html, markdown, terminal"):
        render([prefill_result()], "pdf")
    with pytest.raises(ConfigError, match="expected at least one result, got none"):
        render([], "terminal")

"""The documentation is true where a machine can tell: links lead somewhere, code runs, quoted messages exist."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from breakgraph import errors
from contract.source_tree import ROOT, all_modules

DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS]
NOT_RUN = {"llm.md"}
"""Wants a real model."""

TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"
ANYTHING = "…"

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """(line of the fence, code) of each fenced block in one language."""
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, m.start()) + 1, m.group(2)) for m in _BLOCK.finditer(text) if m.group(1) == language]


def compiled(page: Path) -> list[object]:
    """Each Python block as code whose tracebacks point into the page."""
    return [compile("\n" * line + code, str(page), "exec") for line, code in blocks(page, "python")]


def anchors(page: Path) -> set[str]:
    """The fragments of a page's headings, as GitHub makes them."""
    text = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> Iterator[str]:
    for target in _LINK.findall(_BLOCK.sub("", page.read_text(encoding="utf-8"))):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, fragment = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        if not linked.exists():
            yield f"{target}: there is no {linked}"
        elif fragment and fragment not in anchors(linked):
            yield f"{target}: {linked.name} has no such heading, only {sorted(anchors(linked))}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    assert not list(broken_links(page))


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    others = [page.name for page in DOCS if page.name != "index.md"]
    assert [name for name in others if f"({name})" not in index] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_compiles(page: Path) -> None:
    compiled(page)


@pytest.mark.parametrize("page", [page for page in DOCS if page.name not in NOT_RUN and compiled(page)], ids=name_of)
def test_python_runs(page: Path) -> None:
    """The blocks of one page share their names, in order."""
    namespace: dict[str, object] = {"__name__": "docs"}
    for code in compiled(page):
        exec(code, namespace)  # type: ignore[arg-type]


def texts_in_sources() -> Iterator[str]:
    """Every string of the sources, with a NUL for each value that is put in."""
    for module in all_modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def is_in(texts: list[str], message: str) -> bool:
    pattern = re.compile(".*".join(map(re.escape, message.split(ANYTHING))), re.DOTALL)
    return any(pattern.fullmatch(text) for text in texts)


def test_quoted_messages_are_in_the_sources() -> None:
    from breakgraph.graph.refusals import WAY_OUT

    texts = list(texts_in_sources())
    quoted = [text.rstrip("\n").replace(WAY_OUT, ANYTHING) for _, text in blocks(TROUBLESHOOTING, "text")]
    assert len(quoted) > 30
    assert [message for message in quoted if not is_in(texts, message)] == []


def test_reasons_of_a_refusal_are_in_the_sources() -> None:
    texts = list(texts_in_sources())
    section = TROUBLESHOOTING.read_text(encoding="utf-8").split("### UncapturableOpError")[1].split("###")[0]
    reasons = re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE)[1:]
    assert len(reasons) > 5
    assert [reason for reason in reasons if not any(reason in text for text in texts)] == []


def test_every_error_has_an_entry() -> None:
    text = TROUBLESHOOTING.read_text(encoding="utf-8")
    classes = [c for c in vars(errors).values() if inspect.isclass(c) and issubclass(c, errors.BreakgraphError)]
    assert [c.__name__ for c in classes if f"`{c.__name__}`" not in text and f"### {c.__name__}\n" not in text] == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[a](gone.md)", "there is no"),
        ("[a](index.md#gone)", "no such heading"),
        ("# Here\n[a](#there)", "no such heading"),
        ("# Here, *now*\n[a](#here-now) [b](index.md#not-yet) [c](https://example.com/gone)", None),
    ],
)
def test_a_broken_link_is_seen(text: str, fault: str | None, tmp_path: Path) -> None:
    (tmp_path / "index.md").write_text("## Not yet\n")
    page = tmp_path / "page.md"
    page.write_text(text)
    found = list(broken_links(page))
    assert (found == []) if fault is None else (len(found) == 1 and fault in found[0])


def test_a_message_that_nobody_raises_is_seen() -> None:
    texts = ["the \0 of \0 are gone; look for them"]
    assert is_in(texts, "the … of … are gone; look for them")
    assert is_in(texts, "the … are gone; look for them")
    assert not is_in(texts, "the … of … are gone")
    assert not is_in(texts, "the outputs of … are gone; look for them")

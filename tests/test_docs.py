"""Docs that are run: links lead somewhere, commands parse, Python examples work."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from repository import DOCS, ROOT

pytestmark = pytest.mark.docs

PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)


OWN_TESTS = {
    "docs/adding-an-executor.md": "tests/contract/test_adding_an_executor.py",
    "docs/adding-a-store.md": "tests/contract/test_adding_a_store.py",
    "docs/replica-protocol.md": "tests/serverless/test_protocol_docs.py",
    "docs/training.md": "tests/numerics/test_training_docs.py",
    "docs/configuration.md": "tests/cli/test_docs_pages.py",
}
"""Pages whose Python belongs together, and the test that runs it."""


def blocks(language: str) -> list[tuple[str, str]]:
    return [
        (f"{page.relative_to(ROOT)}#{number}", text)
        for page in PAGES
        for number, (kind, text) in enumerate(BLOCK.findall(page.read_text()))
        if kind == language
    ]


def commands() -> list[str]:
    lines = (line for _, text in blocks("console") for line in text.splitlines() if line.startswith("$ "))
    return sorted({line[2:].partition("  #")[0].strip() for line in lines})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = BLOCK.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http:", "https:", "#", "mailto:")):
            assert (page.parent / target.partition("#")[0]).exists(), f"{page.name}: {target}"


def anchors(page: Path) -> set[str]:
    """What can follow `#` in a link to the page: its headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_into_a_page_lead_to_a_heading(page):
    text = BLOCK.sub("", page.read_text())
    for target, anchor in re.findall(r"\]\(([^)\s:#]*)#([^)\s]+)\)", text):
        there = page.parent / target if target else page
        assert anchor in anchors(there), f"{page.name}: {target}#{anchor}"


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("atoll ")])
def test_every_command_in_the_docs_parses(command):
    import click

    from atoll.cli.app import Commands

    for part in re.split(r"\s+(?:&&|\|)\s+", command):
        program, *words = shlex.split(part)
        if program == "atoll" and words and not words[0].startswith("-"):
            found = Commands("atoll").get_command(click.Context(Commands("atoll")), words[0])
            assert found is not None, f"no command {words[0]}"
            found.make_context(words[0], words[1:])


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("make ")])
def test_every_make_target_in_the_docs_exists(command):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(command.split()[1:]) <= targets


@pytest.mark.process
@pytest.mark.parametrize(("name", "source"), blocks("python"), ids=[name for name, _ in blocks("python")])
def test_python_in_the_docs_runs(name, source, tmp_path):
    """A block with `...` in it is a sketch and only has to compile; every other one is run as a script."""
    compile(source, name, "exec")
    page = name.partition("#")[0]
    if page in OWN_TESTS:
        assert Path(page).name in (ROOT / OWN_TESTS[page]).read_text()
        return
    if "..." in source:
        return
    script = tmp_path / "snippet.py"
    script.write_text(source)
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_every_concept_has_one_picture_and_a_link_to_the_code():
    _, *sections = (ROOT / "docs" / "concepts.md").read_text().split("\n## ")
    titles = [section.partition("\n")[0] for section in sections]
    assert titles == ["Run", "Replica", "Round", "Offer", "Commit", "Participants", "Fragment", "Store layout"]
    for title, section in zip(titles, sections, strict=True):
        assert section.count("```mermaid\n") == 1, title
        assert "](../src/atoll/" in section, title

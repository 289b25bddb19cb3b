"""Lines that replicas print, as a terminal would show them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.terminal_text import shown_line, shown_text, without_escapes

GREEN, RESET = "\x1b[32m", "\x1b[0m"


@pytest.mark.parametrize(
    ("line", "plain", "coloured"),
    [
        ("step 3\tloss 2", "step 3\tloss 2", "step 3\tloss 2"),
        ("", "", ""),
        (f"{GREEN}ok{RESET} done", "ok done", f"{GREEN}ok{RESET} done"),
        (f"{GREEN}ok", "ok", f"{GREEN}ok{RESET}"),
        ("\x1b[38;5;9mred\x1b[m", "red", "\x1b[38;5;9mred\x1b[m"),
        (" 10%|#   |\r 50%|##  |\r100%|####|", "100%|####|", "100%|####|"),
        (" 50%|##  |\r", " 50%|##  |", " 50%|##  |"),
        ("100%|####|\r          \r", "100%|####|", "100%|####|"),
        (f"{GREEN} 10%\r 20%{RESET}", " 20%", f"{GREEN} 20%{RESET}"),
        ("old\x1b[1Gnew", "new", "new"),
        ("old\x1b[2K\x1b[Gnew", "new", "new"),
        ("\x1b[A\x1b[2J\x1b[10;20Htext\x1b[?25l", "text", "text"),
        ("\x1b]0;a title\x07text", "text", "text"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link", "link"),
        ("\x1bP1$r0m\x1b\\text\x1b(B", "text", "text"),
        ("\x9b31mtext\x9d0;t\x9c.", "text.", "text."),
        ("|\b/\b-", "-", "-"),
        ("a\x00b\x07c\x7f", "abc", "abc"),
        ("cut \x1b[3", "cut ", "cut "),
        ("cut \x1b", "cut ", "cut "),
        ("日本 é 🙂", "日本 é 🙂", "日本 é 🙂"),
    ],
)
def test_a_line_is_what_a_terminal_shows_of_it(line, plain, coloured):
    assert shown_line(line) == plain
    assert shown_line(line, colour=True) == coloured


@given(st.text(alphabet=st.sampled_from("ab\x1b[]0;1mGKH\r\b\x07\x9b\\P \t")))
def test_no_control_character_is_left(line):
    plain, coloured = shown_line(line), shown_line(line, colour=True)
    assert plain.replace("\t", " ").isprintable()
    assert without_escapes(coloured).replace("\t", " ").isprintable()
    assert "\r" not in coloured
    assert not coloured.count("\x1b") or coloured.rpartition("\x1b")[2].startswith(("[0m", "[m"))


def test_a_text_keeps_its_lines():
    assert shown_text("one\r\ntwo\x1b[31m\n\nthree") == "one\ntwo\n\nthree"

"""Text from elsewhere: nothing of it reaches a terminal but what can be seen."""

import pytest

from thinpipe.system.sanitize import one_line, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;OWNED\x07", "?]0;OWNED?"),
        ("\x1b[2J\x1b]52;c;aGk=\x07", "?[2J?]52;c;aGk=?"),
        ("\x9b31mred", "?31mred"),  # CSI in one byte of Latin-1
        ("a\rb\x00c\x7f", "a?b?c?"),
        ("abc\u202edcba\u2066x\u2069", "abc?dcba?x?"),
        ("a\u2028b", "a?b"),
        ("a\tb", "a b"),
        ("\udcff", "?"),
    ],
)
def test_terminal_controls_are_replaced(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_all_else_stays() -> None:
    text = "loss 2.3 µs, 模型 مرحبا 👩\u200d🔬\nsecond line"
    assert printable(text) == text


def test_one_line_has_no_line_ends() -> None:
    assert one_line("worker 1\nthinpipe: all is well\t\x1b[0m ") == "worker 1 thinpipe: all is well ?[0m"
    assert all(each >= " " for each in one_line("".join(map(chr, range(256)))))

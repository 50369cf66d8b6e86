import io

import pytest

from tracekit.cli.progress import WORTH_A_BAR, reading


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A standard error that is a terminal; not a fixture, because pytest puts its own stream back between fixture and test."""
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    return stream


def test_a_long_read_has_a_bar_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    with reading(quiet=False) as progress:
        assert progress is not None
        progress(WORTH_A_BAR // 2, WORTH_A_BAR)
    assert "Reading" in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[2K")


def test_a_short_read_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    with reading(quiet=False) as progress:
        assert progress is not None
        progress(1, WORTH_A_BAR - 1)
    assert screen.getvalue() == ""


def test_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal(monkeypatch)
    with reading(quiet=True) as progress:
        assert progress is None
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with reading(quiet=False) as progress:
        assert progress is None

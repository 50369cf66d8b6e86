import pytest


@pytest.fixture(autouse=True)
def _a_terminal_of_120_columns(monkeypatch):
    """What is printed must not depend on who runs the tests, and where."""
    monkeypatch.setenv("COLUMNS", "120")

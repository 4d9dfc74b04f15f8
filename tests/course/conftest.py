"""Keeps the tests' progress apart from the user's, and makes panels wide enough to read."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def progress_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The progress file of one test."""
    path = tmp_path / "progress" / "progress.json"
    monkeypatch.setenv("RLHF_LAB_PROGRESS", str(path))
    monkeypatch.setenv("COLUMNS", "140")
    return path

"""Fixtures for every kind of test."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder with golden values and foreign data that lies beside the repository; absent on most machines."""
    path = Path(__file__).resolve().parents[2] / "shared"
    if not path.is_dir():
        pytest.skip("the folder ../shared (golden values and foreign data) is not on this machine")
    return path

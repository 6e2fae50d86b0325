"""What docs/testing.md claims about tests is true."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"`((?:unit|properties|reference|contract|integration|real_data)/[\w/]+\.py)::(\w+)`")


def test_every_test_named_in_the_table_exists() -> None:
    text = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    named = NAMED.findall(text)
    assert len(named) > 60
    missing = []
    for file, name in named:
        path = ROOT / "tests" / file
        if not path.is_file() or not re.search(rf"^def {name}\(", path.read_text(encoding="utf-8"), re.MULTILINE):
            missing.append(f"{file}::{name}")
    assert not missing


def test_every_single_process_fault_has_a_row_with_a_test() -> None:
    rows = {
        int(number): tests
        for number, tests in re.findall(
            r"^\| (\d+) \|[^|]*\| (.*) \|$", (ROOT / "docs" / "testing.md").read_text(encoding="utf-8"), re.MULTILINE
        )
    }
    assert set(rows) >= {*range(1, 29), 31, 32, 33}
    assert all(NAMED.search(tests) for tests in rows.values())

"""The page of reported cases is whole, true and up to date."""

from __future__ import annotations

import runpy
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_case_has_a_guard_and_a_test_and_the_page_says_so() -> None:
    made = runpy.run_path(str(ROOT / "docs/cases.py"), run_name="cases")
    cases = tomllib.loads((ROOT / "docs/cases.toml").read_text())
    where = made["found"]()
    assert list(cases) == [f"C{number:02}" for number in range(1, 36)]
    assert where.keys() <= cases.keys(), "a case that docs/cases.toml does not tell"
    for number in cases:
        guards, tests = where.get(number, ([], []))
        assert guards, f"{number}: nothing in the package names it"
        assert tests, f"{number}: no test names it"
    assert made["PAGE"].read_text() == made["page"](), "make it again: python docs/cases.py"

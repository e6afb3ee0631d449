"""The tables of docs/reliability.md name tests that are there."""

import pathlib
import re

TESTS = pathlib.Path(__file__).parents[1]
TABLES = (TESTS.parent / "docs" / "reliability.md").read_text()


def test_every_test_that_the_catalogue_names_is_there():
    files = {path.stem for path in TESTS.rglob("test_*.py")}
    found = set(re.findall(r"def (test_\w+)", "".join(path.read_text() for path in TESTS.rglob("test_*.py"))))
    named = re.findall(r"\b(test_\w+)(…|\*|\b)", TABLES)
    assert len(named) > 60
    for name, cut in named:
        known = any(other.startswith(name) for other in found | files) if cut else name in found | files
        assert known, f"docs/reliability.md names {name}, which is no test"

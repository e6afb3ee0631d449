"""Every fault, and every line of the documents behind the project, names in docs/measured/ tests that are there."""

import pathlib
import re

TESTS = pathlib.Path(__file__).parents[1]
DOCS = TESTS.parent / "docs"
TEXT = (DOCS / "measured" / "faults.md").read_text()
RULES = (DOCS / "reliability.md").read_text()
DOCUMENTS = (DOCS / "measured" / "documents.md").read_text()
FILES = {str(path.relative_to(TESTS)): path.read_text() for path in TESTS.rglob("test_*.py")}


def rows(text=TEXT, heading="fault"):
    """First and last cell of every row that has three cells: a fault and its tests."""
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    return [(row[0], row[2]) for row in cells if len(row) == 3 and row[0] not in (heading, "---")]


def test_every_fault_names_a_test_or_that_of_the_row_above():
    for fault, tests in rows():
        assert re.search(r"\btest_\w+|^the same$", tests), f"docs/measured/faults.md: {fault} has no test"


def test_every_line_of_the_documents_names_a_test_or_a_section():
    asked = rows(DOCUMENTS, "asked for")
    assert len(asked) > 60
    assert not [line for line, shown in asked if not re.search(r"`test_\w+`|\]\(.+\)", shown)]


def test_every_test_that_the_catalogue_names_is_there():
    files = {path.split("/")[-1].removesuffix(".py") for path in FILES}
    found = set(re.findall(r"def (test_\w+)", "".join(FILES.values())))
    named = re.findall(r"\b(test_\w+)(…|\b)", TEXT + RULES + DOCUMENTS)
    assert len(named) > 100
    for name, cut in named:
        known = any(other.startswith(name) for other in found) if cut else name in found | files
        assert known, f"docs/ names {name}, which is no test"


def test_a_test_is_in_the_file_that_is_named_with_it():
    for name_of_file, name in re.findall(r"`((?:\w+/)?test_\w+\.py)(?:::|: )(test_\w+)", TEXT + RULES):
        files = [text for path, text in FILES.items() if f"/{path}".endswith(f"/{name_of_file}")]
        assert any(f"def {name}" in text for text in files), f"docs/ names {name} in {name_of_file}"


def test_the_text_counts_the_faults():
    assert f"{len(rows())} faults" in TEXT
    assert f"{len(rows())} faults" in RULES

"""What each config sends, computes and holds is kept in tests/golden; a change of it is a diff there."""

import difflib

import goldens
import pytest


@pytest.mark.fast(1)
@pytest.mark.parametrize("name", goldens.NAMES)
def test_a_config_sends_what_it_did(name):
    path = goldens.FOLDER / f"{name}.txt"
    kept, now = path.read_text().splitlines(), goldens.golden(name).splitlines()
    diff = "\n".join(difflib.unified_diff(kept, now, f"tests/golden/{name}.txt", "now", lineterm="", n=1))
    assert not diff, f"if this is meant, `make golden` writes it down:\n{diff}"


@pytest.mark.slow
def test_the_picture_of_a_step_is_that_of_the_quickstart():
    step = goldens.step_picture
    assert step.PICTURE.read_text() == step.picture(goldens.report_of("quickstart")), "`make golden` draws it anew"


def test_no_golden_is_of_a_config_that_is_gone():
    kept = {path.stem for path in goldens.FOLDER.glob("*.txt")}
    assert kept == {*goldens.NAMES, "collectives"}

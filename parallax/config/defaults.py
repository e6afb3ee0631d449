"""The configs that come with the repository, and the defaults that commands share with configs/base.py."""

import runpy
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def defaults_of(section: str) -> dict[str, Any]:
    """The defaults of a section, by key, as configs/base.py has them.

    >>> defaults_of("data")["field"]
    'text'
    """
    return dict(runpy.run_path(str(CONFIGS / "base.py"))["get_config"]()[section])

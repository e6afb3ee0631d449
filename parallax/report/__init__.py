"""What a step sends, stores and computes: `python -m parallax.report --config=FILE`, or `px.report(step)`."""

import sys
from types import ModuleType
from typing import Any

from parallax.report.executed import matmul_flops
from parallax.report.whole import Report, report

__all__ = ["Report", "matmul_flops", "report"]


class _Callable(ModuleType):
    """The module as its main function: a package's submodule hides a function of the same name."""

    def __call__(self, *args: Any, **kwargs: Any) -> Report:
        return report(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable

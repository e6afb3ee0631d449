"""What a step sends, stores and computes: `python -m parallax.report --config=FILE`, or `px.report(step)`."""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

# Imported when first asked for: the command says what it loads before it does.
HOME = {"Report": "whole", "matmul_flops": "executed", "report": "whole"}


class _Callable(ModuleType):
    """The module as its main function: a package's submodule hides a function of the same name."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What a step sends, stores and computes: a `parallax.report.whole.Report`."""
        return self.report(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name not in HOME:
            raise AttributeError(f"module 'parallax.report' has no {name!r}")
        return getattr(import_module(f"parallax.report.{HOME[name]}"), name)


sys.modules[__name__].__class__ = _Callable

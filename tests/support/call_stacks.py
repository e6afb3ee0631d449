"""The functions of the package that are being called when another one is, as stops of tests/walks.py."""

import contextlib
import functools
import pathlib
import sys

import parallax

PACKAGE = pathlib.Path(parallax.__file__).parent


def stop_of(code):
    """The stop whose code this is, "" outside of the package and for what is read where it stands, as a lambda."""
    path = pathlib.Path(code.co_filename)
    name = code.co_qualname.replace(".<locals>", "")
    if "<" in name or not path.is_relative_to(PACKAGE):
        return ""
    return f"{path.relative_to(PACKAGE)} {name}"


def stack():
    """The stops that are being called, outermost first."""
    frame, found = sys._getframe(2), []
    while frame is not None:
        found.append(stop_of(frame.f_code))
        frame = frame.f_back
    return [stop for stop in reversed(found) if stop]


@contextlib.contextmanager
def recorded(monkeypatch, **functions):
    """{name: the stacks of its calls} for functions given as (module, attribute), while the context lasts."""
    stacks = {name: [] for name in functions}
    with monkeypatch.context() as patched:
        for name, (module, attribute) in functions.items():
            original = getattr(module, attribute)

            def call(*args, original=original, calls=stacks[name], **kwargs):
                calls.append(stack())
                return original(*args, **kwargs)

            patched.setattr(module, attribute, functools.wraps(original)(call))
        yield stacks

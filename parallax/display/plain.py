"""Results as plain data."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any


def as_plain(value: Any, leave_out: Collection[str] = ()) -> Any:
    """Nested dicts and lists that JSON can hold, of dataclasses and named tuples without some of their fields.

    >>> as_plain({"sizes": (1, 2), "mesh": None}, ["mesh"])
    {'sizes': [1, 2]}
    """
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    value = value._asdict() if hasattr(value, "_asdict") else value
    if isinstance(value, Mapping):
        return {name: as_plain(part, leave_out) for name, part in value.items() if name not in leave_out}
    return [as_plain(part, leave_out) for part in value] if isinstance(value, list | tuple) else value

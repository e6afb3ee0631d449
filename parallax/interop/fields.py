"""A JSON object read field by field: what is left at the end was not understood."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from parallax.runtime.errors import LARGEST_INT32, QUOTED_LETTERS, ConfigError, shown

NEEDED: Any = object()  # the default of a field that must be there
LARGEST = 1e30  # far beyond what a model has; what is computed of it is still a float


class Fields:
    """Each field is taken once; one that is null counts as absent. `where` names the object in errors.

    >>> fields = Fields("config.json", {"hidden_size": 64, "hidden_act": "gelu"})
    >>> fields.whole("hidden_size")
    64
    >>> fields.only("hidden_act", "silu", absent="silu")
    Traceback (most recent call last):
    parallax.runtime.errors.ConfigError: config.json: hidden_act='gelu' is not supported; supported: 'silu'
    """

    def __init__(self, where: str, content: Mapping[str, Any]):
        self.where, self.left, self._known = where, dict(content), set()  # `left`: what was not taken yet
        self.notes: list[str] = []  # what users should know of fields that were taken

    def within(self, name: str, content: Mapping[str, Any]) -> "Fields":
        """The fields of an object that is a field of this one; what is noted there is noted here."""
        inner = Fields(f"{self.where}: {name}", content)
        inner.notes = self.notes
        return inner

    def take(self, name: str, absent: Any = NEEDED) -> Any:
        """The value as it is."""
        self._known.add(name)
        value = self.left.pop(name, None)
        if value is not None:
            return value
        if absent is NEEDED:
            raise ConfigError(f"{self.where} has no {name}; add it, as the model's authors have it")
        return absent

    def whole(self, name: str, absent: Any = NEEDED, least: int = 1) -> Any:
        """A whole number of at least `least`, and an int32."""
        value = self.take(name, absent)
        if value is absent:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST_INT32:
            self.refuse(name, value, f"a whole number of {least} or more, and at most {LARGEST_INT32}")
        return value

    def number(self, name: str, absent: Any = NEEDED, *, zero: bool = False) -> Any:
        """A number above 0, or from 0 on, and at most LARGEST, as a float."""
        value = self.take(name, absent)
        if value is absent:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LARGEST:
            self.refuse(name, value, f"a number from 0 to {LARGEST}")
        if value == 0 and not zero:
            self.refuse(name, value, "a number above 0")
        return float(value)

    def flag(self, name: str, absent: Any = NEEDED) -> Any:
        """True or false."""
        value = self.take(name, absent)
        if not isinstance(value, bool):
            self.refuse(name, value, "true or false")
        return value

    def object(self, name: str) -> Mapping[str, Any]:
        """A JSON object; an empty one if it is absent."""
        value = self.take(name, {})
        if not isinstance(value, dict):
            self.refuse(name, value, "an object")
        return value

    def only(self, name: str, *supported: Any, absent: Any = NEEDED) -> Any:
        """One of the values that are supported; what `absent` stands for must be one, too."""
        was_there = self.left.get(name) is not None
        value = self.take(name, absent)
        # 1 == True to Python; a zero may be written as a float.
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in supported):
            self.refuse(name, value, " or ".join(map(_text, supported)), absent=not was_there)
        return value

    def ignore(self, names: Iterable[str]) -> None:
        """Fields that change nothing that is computed."""
        for name in names:
            self._known.add(name)
            self.left.pop(name, None)

    def pass_over(self, name: str, why: str) -> None:
        """A field that is not read, and noted where it is there."""
        value = self.take(name, None)
        if value is not None:
            self.notes.append(f"{self.where}: {name}={value!r:.100} is passed over: {why}")

    def end(self) -> None:
        """ConfigError if there is a field that nobody asked for; a null says nothing."""
        left = [name for name, value in self.left.items() if value is not None]
        if left:
            close = difflib.get_close_matches(left[0][:QUOTED_LETTERS], self._known, n=1, cutoff=0.8)
            raise ConfigError(
                f"{self.where}: {shown(left[0])}={self.left[left[0]]!r:.100} is not supported, for what it does is not "
                f"known; {f'did you mean {close[0]!r}?' if close else 'if it changes nothing, remove it'}"
            )

    def refuse(self, name: str, value: Any, supported: str, *, absent: bool = False) -> None:
        """Raise ConfigError about a value."""
        how = f"{name} is absent, which stands for {_text(value)}, and" if absent else f"{name}={value!r:.100}"
        raise ConfigError(f"{self.where}: {how} is not supported; supported: {supported}")


def _text(value: Any) -> str:
    return "null" if value is None else repr(value)

"""Keys of a config: each is written once, with default, meaning and range; values are checked here."""

import dataclasses
import math
import os
import re
from typing import Any, ClassVar

from parallax.config.paths import paths_of
from parallax.errors import LARGEST_INT32, ConfigError, check_local, nearest, quoted
from parallax.storage.buckets import is_in_bucket, path_of
from parallax.storage.remote import source_path
from parallax.user_code import CODE_FORM, check_call, codes_by_name, names_code, settings_by_name

LARGEST_FLOAT32 = 3.4028234e38
ABOVE_ZERO = math.ulp(0.0)  # the next number above 0
# Limits of POSIX file systems. With a longer name, even checking whether the file exists is an error.
PATH_BYTES, NAME_BYTES = 4095, 255
BY_NAME_FORM = '"NAME=module:name" or "NAME=module:name(setting=1)", each name once, or settings as "NAME=(key=1)"'
SETTINGS_FORM = 'settings by name, as "NAME=(key=1) OTHER=(key=2)", each name once'
KINDS = {int: "a whole number", float: "a number", str: "a text in quotes", bool: "True or False"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """Meaning of a key, with the unit if the name has none, and the allowed values."""

    meaning: str
    choices: tuple[str, ...] = ()
    other: str = ""  # description of values that are allowed besides the choices
    least: float = 0  # smallest allowed number
    most: float | None = None
    below: float = math.inf
    also: int | None = None  # a number outside of the range that is also allowed, as 0 for "off"
    says: str = ""  # the error for a refused value, after KEY=VALUE
    too_large: str = ""  # the same for an integer above `most`
    path: bool = False  # whether it names a file or folder
    several: bool = False  # whether it may be a list of them: see paths_of
    elsewhere: str = ""  # where else than on this machine that may be: "bucket", or behind a "url" that can be read
    code: tuple[str, ...] = ()  # if it may name code, the arguments with which that is called: see check_call
    by_name: bool = False  # whether it names code for several names
    saved: bool | None = None  # whether the saved config of a run decides it; None: as its section says

    def decided_by_saved(self, kind: type, section_says: bool | None) -> bool | None:
        """Whether the saved config of a run decides this key; None if nobody has said.

        A text that is not one of a few words may name a place, so its section cannot say it.
        """
        free = kind is str and (not self.choices or bool(self.other))
        return section_says if self.saved is None and not free else self.saved

    def checked(self, name: str, value: Any, kind: type, section: type["Section"]) -> Any:
        """The value as the key's type; ConfigError if it has another type or is out of range."""
        # bool is a subclass of int in Python, but layers=True is a mistake. An integer is allowed for a float.
        known = int | float if kind is float else kind
        if not isinstance(value, known) or (kind is bool) != isinstance(value, bool):
            written = KINDS.get(type(value), type(value).__name__)
            raise ConfigError(f"{name}={quoted(value)} is {written}, but it must be {KINDS[kind]}")
        if kind is str:
            self._check_text(name, value)
        if kind is float and not abs(value) <= LARGEST_FLOAT32:  # or NaN; before an integer is converted to float
            raise ConfigError(
                f"{name}={quoted(value)} is not a number that float32 holds; use {LARGEST_FLOAT32:.1e} or less"
            )
        if kind in (int, float) and value != self.also:
            self._check_range(name, value, section, whole=kind is int)
        if self.code and names_code(value):
            self._check_code(name, value)
            return value
        return kind(value)

    def _check_code(self, name: str, value: str) -> None:
        if bool(codes_by_name(value)) != self.by_name:
            raise ConfigError(f"{name}={quoted(value)} must be {BY_NAME_FORM if self.by_name else CODE_FORM}.")
        if getattr(value, "target", None) is not None:
            check_call(name, value, self.code)

    def _check_text(self, name: str, value: str) -> None:
        # Files, terminals and JSON cannot hold these.
        if "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
            wrong = "holds a zero byte or half a surrogate pair, which is not text; leave it out"
            raise ConfigError(f"{name}={quoted(value)} {wrong}")
        if self.code and names_code(value):
            return
        if self.by_name and settings_by_name(name, value):
            return
        if self.by_name and value.strip():
            form = BY_NAME_FORM if self.code and not self.path else SETTINGS_FORM
            raise ConfigError(f"{name}={quoted(value)} must be {form}.")
        if self.path:
            for path in paths_of(name, value) if self.several else (value,):
                _check_path(name, path, self.elsewhere)
        if self.choices and not self.other and value not in self.choices:
            wrong = self.says or f"is unknown; {nearest(value, self.choices)}"
            raise ConfigError(f"{name}={quoted(value)} {wrong}{f', or {CODE_FORM}' if self.code else ''}")

    def _check_range(self, name: str, value: float, section: type["Section"], *, whole: bool) -> None:
        most = section.most if whole and self.most is None else self.most
        if whole and value > most:
            raise ConfigError(f"{name}={quoted(value)} {self.too_large or f'is too large; use {most} or less'}")
        if not self.least <= value < self.below or (most is not None and value > most):
            upper = f"below {self.below:g}" if most is None else f"at most {most:g}"
            range_ = section.says.format(self.least) if whole else f"must be at least {self.least} and {upper}."
            raise ConfigError(f"{name}={quoted(value)} {self.says or range_}")


def key(default: Any, meaning: str, **range_: Any) -> Any:
    """Define a key of a section: default, meaning, and allowed values as fields of `Key`."""
    return dataclasses.field(default=default, metadata={"key": Key(meaning=meaning, **range_)})


class Section:
    """A section of the config: a frozen dataclass of `key`s, which checks their values.

    `most` is the largest integer of keys without their own limit. Values far beyond any machine would only lead to
    tables of schedules and layers that fill the memory, or to numbers that do not fit into int32 on devices. `says` is
    the error for an integer that is too small.

    A run's folder may come from somebody else. `saved` says whether its config decides the keys that do not say so
    themselves: what is computed and read, but never where something is written, where compiled code is loaded from,
    or who is told. `not_saved` are the names of the other keys.
    """

    section: ClassVar[str]
    most: ClassVar[int]
    says: ClassVar[str]
    not_saved: ClassVar[frozenset[str]]

    def __init_subclass__(
        cls,
        most: int = LARGEST_INT32,
        says: str = "must be a whole number of {} or more.",
        saved: bool | None = None,
    ):
        cls.most, cls.says = most, says
        cls.section = re.sub("(?<=[a-z])(?=[A-Z])", "_", cls.__name__.removesuffix("Config")).lower()
        fields = {name: field for name, field in vars(cls).items() if isinstance(field, dataclasses.Field)}
        decided = {
            name: field.metadata["key"].decided_by_saved(cls.__annotations__[name], saved)
            for name, field in fields.items()
        }
        open_ = [f"{cls.section}.{name}" for name, said in decided.items() if said is None]
        assert not open_, f"write saved=True or saved=False for {', '.join(open_)}: may a run's saved config decide it?"
        cls.not_saved = frozenset(name for name, said in decided.items() if not said)

    def __post_init__(self):
        for field in dataclasses.fields(self):
            name, value = f"{self.section}.{field.name}", getattr(self, field.name)
            value = field.metadata["key"].checked(name, value, field.type, type(self))
            object.__setattr__(self, field.name, value)  # an integer given for a float is converted
        self.check()

    def check(self) -> None:
        """Raise ConfigError if values of several keys do not fit together."""


def _check_path(name: str, value: str, elsewhere: str) -> None:
    if elsewhere == "url":
        source_path(value, name, pattern=True)
    elif elsewhere and is_in_bucket(value):
        path_of(value)
    else:
        check_local(name, value)
    whole, longest = len(value.encode()), max(len(part.encode()) for part in value.split("/"))
    if longest > NAME_BYTES or whole > PATH_BYTES:
        raise ConfigError(
            f"{name}={quoted(value)} is too long for a path: it has {whole} bytes, its longest name {longest}; "
            f"use at most {PATH_BYTES}, and {NAME_BYTES} in a name"
        )
    home = value.split("/")[0]
    if home.startswith("~") and os.path.expanduser(home) == home:
        raise ConfigError(
            f"{name}={quoted(value)} begins with the home of a user who does not exist here; write it out"
        )

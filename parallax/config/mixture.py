"""The sources of `data.mixture` and the phases of `data.phases`, as their texts say."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any

from parallax.config.paths import dataset_of
from parallax.config.where import where_of
from parallax.errors import LARGEST_INT32, ConfigError, check_choice, names_of, nearest, quoted
from parallax.storage.remote import source_path
from parallax.user_code import codes_by_name, settings_by_name

REPEAT, DROP, STOP = ENDS = ("repeat", "drop", "stop")
FROM_STEP, SHAPE = "from_step", ("seq", "global_batch")
DATASET = "dataset"  # a source of data sets by name
RECORDS = ("jsonl", "parquet", "arrayrecord", DATASET)  # sources whose documents are fields of records
MOST_SOURCES = 1000
MOST_PERIOD = 100_000  # rows after which a mixture repeats: its table is made when data is opened
MOST_NUMBER = 2**53  # of a weight or a budget
SOURCE_NUMBERS = {"weight": "0 or more", "tokens": "1 or more", "epochs": "above 0"}


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """A source of a mixture: what it reads, its weight, and what happens after its budget.

    `budget` is the amount that may be read, in tokens or in epochs; None is no end.
    """

    name: str
    source: str = ""  # "" follows from the files' names
    path: tuple[str, ...] = ()
    field: str = ""  # "" is data.field
    format: str = ""  # "" is data.format
    where: str = ""
    weight: float = 1
    tokens: float = 0
    epochs: float = 0
    end: str = REPEAT

    @property
    def budget(self) -> Fraction | None:
        """Tokens or epochs until its end; None without an end."""
        if self.end == REPEAT:
            return None
        return exact(self.tokens or self.epochs or 1)

    def check_fields(self, kind: str) -> None:
        """ConfigError if it names a field, and a source of this kind has none."""
        for name in ("field", "format", "where"):
            if (written := getattr(self, name)) and kind not in RECORDS:
                raise ConfigError(
                    f"data.mixture.{self.name}.{name}={quoted(written)} reads fields, and a source {kind!r} has none; "
                    f"use {names_of(RECORDS)}"
                )
        if self.format == "completion" and self.field:
            raise ConfigError(
                f"data.mixture.{self.name}.field={quoted(self.field)} is not read with format='completion', whose "
                "fields are prompt and completion"
            )


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Steps with the same weights, by name of the source, and the same shape of batches. `first_step` counts from 0."""

    name: str
    first_step: int
    seq: int
    global_batch: int
    weights: Mapping[str, Fraction]

    @property
    def shape(self) -> tuple[int, int]:
        """(global_batch, seq)."""
        return self.global_batch, self.seq


def sources_of(text: str, key: str = "data.mixture") -> list[SourceConfig]:
    """The sources of a mixture, in their order.

    >>> [source.weight for source in sources_of("web=(path='web', weight=3) code=(path=['a/*.py', 'b'])")]
    [3, 1]

    Raises:
        ConfigError: a setting is unknown or out of its range.
    """
    written, codes = settings_by_name(key, text), codes_by_name(text)
    if bare := [name for name in codes if name not in written]:
        raise ConfigError(
            f"{key}: {bare[0]} is code alone; write its settings, as {bare[0]}=(source={str(codes[bare[0]])!r})"
        )
    if len(written) > MOST_SOURCES:
        raise ConfigError(f"{key} has {len(written)} sources; use {MOST_SOURCES} or fewer")
    return [
        _source(f"{key}.{name}", name, settings | ({"source": codes[name]} if name in codes else {}))
        for name, settings in written.items()
    ]


def _source(key: str, name: str, settings: Mapping[str, Any]) -> SourceConfig:
    known = [field.name for field in fields(SourceConfig) if field.name != "name"]
    if name in (FROM_STEP, *SHAPE):
        raise ConfigError(f"{key}: {name!r} is a setting of data.phases; give the source another name")
    for setting, value in settings.items():
        if setting not in known:
            raise ConfigError(f"{key}.{setting} is not a setting of a source; {nearest(setting, known)}")
        if setting in SOURCE_NUMBERS:
            _check_number(f"{key}.{setting}", value, SOURCE_NUMBERS[setting], least_is_allowed=setting == "weight")
        elif setting != "path" and not isinstance(value, str):
            raise ConfigError(f"{key}.{setting}={quoted(value)} must be a text in quotes")
    settings = {**settings, "path": _paths(f"{key}.path", settings.get("path", ()))}
    source = SourceConfig(name=name, **settings)
    _check_source(key, source, settings)
    return source


def _check_source(key: str, source: SourceConfig, settings: Mapping[str, Any]) -> None:
    check_choice(f"{key}.end", source.end, ENDS)
    budgets = [name for name in ("tokens", "epochs") if name in settings]
    if len(budgets) > 1:
        raise ConfigError(f"{key} has tokens and epochs; one of them is its budget")
    if budgets and source.end == REPEAT:
        raise ConfigError(
            f"{key}.{budgets[0]}={settings[budgets[0]]} is a budget, and end='repeat' has none; "
            f"add end='drop', with which the others go on by their weights, or end='stop', with which the run ends"
        )
    if not (source.path or source.source):
        raise ConfigError(f"{key} has neither path nor source; write {source.name}=(path='folder')")
    if source.where:
        where_of(f"{key}.where", source.where)
    if source.source == DATASET:
        for path in source.path:
            dataset_of(f"{key}.path", path)
    if source.source:
        source.check_fields(source.source)


def _check_number(key: str, value: Any, range_: str, *, least_is_allowed: bool) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MOST_NUMBER
    if not is_number or (value == 0 and not least_is_allowed):
        raise ConfigError(f"{key}={quoted(value)} must be a number of {range_}, and at most 2**53")


def _paths(key: str, value: Any) -> tuple[str, ...]:
    paths = [value] if isinstance(value, str) else value
    if not isinstance(paths, list | tuple) or not all(isinstance(path, str) and path for path in paths):
        raise ConfigError(f"{key}={quoted(value)} must be a path or glob in quotes, or a list of them")
    for path in paths:
        source_path(path, key, pattern=True)
    return tuple(paths)


def exact(number: float) -> Fraction:
    """A number as it is written, so that 0.7 is seven tenths."""
    return Fraction(repr(number))


def phases_of(text: str, sources: Sequence[SourceConfig], *, seq: int, global_batch: int) -> list[Phase]:
    """The phases of a run, the first of them from its first step on. What a phase does not say is as in the one before.

    Raises:
        ConfigError: a setting is unknown, steps do not rise, or a source is never read.
    """
    weights = {source.name: exact(source.weight) for source in sources}
    phase = Phase(name="", first_step=0, seq=seq, global_batch=global_batch, weights=weights)
    phases = [phase]
    for name, settings in settings_by_name("data.phases", text).items():
        phase = _next_phase(f"data.phases.{name}", name, settings, phase)
        phases.append(phase)
    for phase in phases if sources else ():  # a run of a single source has one phase
        _check_weights(f"data.phases.{phase.name}" if phase.name else "data.mixture", phase.weights)
    if never := [name for name in weights if not any(phase.weights[name] for phase in phases)]:
        raise ConfigError(f"data.mixture.{never[0]}.weight=0, and no phase reads it; give it a weight, or leave it out")
    return phases


def _next_phase(key: str, name: str, settings: Mapping[str, Any], before: Phase) -> Phase:
    known = (FROM_STEP, *SHAPE, *before.weights)
    for setting, value in settings.items():
        if setting not in known:
            raise ConfigError(
                f"{key}.{setting} is neither a source nor a setting of a phase; {nearest(setting, known)}"
            )
        if setting in before.weights:
            _check_number(f"{key}.{setting}", value, SOURCE_NUMBERS["weight"], least_is_allowed=True)
        elif type(value) is not int or not 1 <= value <= LARGEST_INT32:
            raise ConfigError(f"{key}.{setting}={quoted(value)} must be a whole number of 1 or more")
    if FROM_STEP not in settings:
        raise ConfigError(f"{key} has no {FROM_STEP}; write the number of its first step, as {FROM_STEP}=800")
    least = before.first_step + 2
    if settings[FROM_STEP] < least:
        raise ConfigError(
            f"{key}.{FROM_STEP}={settings[FROM_STEP]} does not come after the phase before; use {least} or more"
        )
    weights = {
        source: exact(settings[source]) if source in settings else there for source, there in before.weights.items()
    }
    shape = {setting: settings.get(setting, getattr(before, setting)) for setting in SHAPE}
    return Phase(name=name, first_step=settings[FROM_STEP] - 1, weights=weights, **shape)


def _check_weights(key: str, weights: Mapping[str, Fraction]) -> None:
    if not any(weights.values()):
        raise ConfigError(f"{key}: all weights are 0; give a source a weight")
    if (period := sum(parts_of(list(weights.values())))) > MOST_PERIOD:
        raise ConfigError(
            f"{key}: these weights are {period:,} parts of a whole, and {MOST_PERIOD:,} are the most; "
            "write them with fewer digits, as 0.125"
        )


def parts_of(weights: Sequence[Fraction]) -> list[int]:
    """Weights as the smallest whole numbers in their proportion.

    >>> parts_of([Fraction("0.7"), Fraction("0.2"), Fraction("0.1")])
    [7, 2, 1]
    """
    scale = math.lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * scale) for weight in weights]
    return [part // math.gcd(*whole) for part in whole]

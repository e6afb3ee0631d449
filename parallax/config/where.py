"""Which records of a source are documents: comparisons of their fields, as `score >= 0.5 and lang in ["de", "en"]`."""

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from parallax.errors import ConfigError, DataError, quoted

COMPARISONS: dict[type, Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda value, values: value in values,
    ast.NotIn: lambda value, values: value not in values,
}
WHERE_FORM = """write comparisons of fields, as 'score >= 0.5 and lang in ["de", "en"]'"""


class FieldComparison(NamedTuple):
    """A field, by its name and those of the objects around it, compared with a value."""

    field: tuple[str, ...]
    compare: Callable[[Any, Any], bool]
    value: Any


@dataclass(frozen=True)
class Where:
    """Comparisons that all must hold. A record without the field, or with a null there, does not pass.

    The text is only read: it names fields and values, and nothing in it is evaluated.
    """

    text: str
    comparisons: tuple[FieldComparison, ...]

    @property
    def columns(self) -> list[str]:
        """The outermost fields that it reads, each once."""
        return [*dict.fromkeys(comparison.field[0] for comparison in self.comparisons)]

    def passes(self, record: Mapping[str, Any], place: str) -> bool:
        """Whether a record is a document; DataError, with its place, if a value cannot be compared.

        >>> where_of("data.where", "meta.score >= 0.5").passes({"meta": {"score": 0.7}}, "a.jsonl:1")
        True
        """
        return all(_holds(comparison, record, place) for comparison in self.comparisons)


def where_of(key: str, text: str) -> Where:
    """The comparisons of a text; ConfigError if it holds anything else."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ConfigError(f"{key}={quoted(text)} cannot be read; {WHERE_FORM}") from None
    joined = tree.values if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And) else [tree]
    return Where(ast.unparse(tree), tuple(_comparison(key, text, each) for each in joined))


def _comparison(key: str, text: str, tree: ast.expr) -> FieldComparison:
    refused = ConfigError(
        f"{key}={quoted(text)}: {quoted(ast.unparse(tree))} is no comparison of a field; {WHERE_FORM}"
    )
    if not isinstance(tree, ast.Compare) or len(tree.ops) > 1 or type(tree.ops[0]) not in COMPARISONS:
        raise refused
    try:
        value = ast.literal_eval(tree.comparators[0])
    except (ValueError, TypeError):  # a list in a set, say
        raise refused from None
    field = _field(tree.left)
    fits = isinstance(value, list | tuple | set) == isinstance(tree.ops[0], ast.In | ast.NotIn)
    if not field or not fits or value is None:  # a null never passes
        raise refused
    return FieldComparison(field, COMPARISONS[type(tree.ops[0])], value)


def _field(tree: ast.expr) -> tuple[str, ...]:
    """The names of a field, as `meta.lang`, or one in quotes; empty for anything else."""
    if isinstance(tree, ast.Name):
        return (tree.id,)
    if isinstance(tree, ast.Constant) and isinstance(tree.value, str):
        return (tree.value,)
    if isinstance(tree, ast.Attribute) and (outer := _field(tree.value)):
        return (*outer, tree.attr)
    return ()


def _holds(comparison: FieldComparison, record: Mapping[str, Any], place: str) -> bool:
    value: Any = record
    for name in comparison.field:
        value = value.get(name) if isinstance(value, Mapping) else None
    try:
        return value is not None and bool(comparison.compare(value, comparison.value))
    except TypeError:
        name, kind = ".".join(comparison.field), type(value).__name__
        raise DataError(
            f"{place}: field {quoted(name)} holds {kind}, which cannot be compared with {quoted(comparison.value)}"
        ) from None

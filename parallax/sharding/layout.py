"""The notation: one string says which dims an array has and over which mesh axes each is sharded.

`"d_model/tp/dp d_ff"` is a matrix whose first dim is sharded over `tp`, and each piece again over `dp`.
`"batch/dp seq d_model +tp"` is an activation, and each `tp` rank holds a partial sum of it.
"""

import dataclasses
import functools
import string
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from parallax.config.sections import ALL_AXES, AXES
from parallax.errors import NotationError, divisors, listed, nearest, quoted

# Every dim that an array may have, with its letter in einsums and suffixes.
DIMS = {
    "batch": "B",
    "seq": "S",
    "kv_seq": "T",
    "d_model": "D",
    "d_ff": "F",
    "heads": "H",
    "kv_heads": "G",
    "d_head": "K",
    "d_rope": "P",
    "d_qk": "J",
    "d_latent": "R",
    "d_latent_q": "Q",
    "vocab": "V",
    "layers": "L",
    "microbatches": "M",
    "experts": "E",
    "d_expert": "U",  # width of one expert
    "d_shared": "W",  # total width of the experts that every token goes to
    "capacity": "C",
    "entries": "N",  # of several concatenated arrays
    "rows": "I",  # of any matrix
    "columns": "O",
    "gates": "X",  # of a token: one number
    "operands": "A",  # of a product: input, weight, gradient of the output
    "rank": "X",  # of an adapter's product
}
# Dims that count equal things, which share no block of scales, and dims of a head, which no axis shards.
COUNTING_DIMS = frozenset({"heads", "kv_heads", "experts", "layers"})
HEAD_DIMS = frozenset({"d_head", "d_qk", "d_rope"})


def new_dims(*names: str) -> None:
    """Declare dims that only layers of your own have, as "taps". Their letters in einsums are small ones.

    Raises NotationError for a name that is not one, or that of an axis.

    >>> new_dims("taps")
    >>> Layout.parse("d_model/tp taps")
    Layout.parse('d_model/tp taps')
    """
    for name in names:
        if not name.isidentifier() or name in ALL_AXES:
            raise NotationError(
                f"{quoted(name)} cannot be a dim; use a name that is not an axis: {', '.join(ALL_AXES)}."
            )
        if name not in DIMS:
            free = [letter for letter in string.ascii_lowercase if letter not in DIMS.values()]
            if not free:
                raise NotationError(f"{quoted(name)} is one dim too many: {len(DIMS)} are known; use one of them.")
            DIMS[name] = free[0]


# Colours of axes in pictures and notebooks: the palette of Okabe and Ito, which colour-blind people can tell apart.
AXIS_COLOURS = {
    "pp": "#e69f00",
    "replica": "#56b4e9",
    "dp": "#0072b2",
    "cp": "#cc79a7",
    "ep": "#d55e00",
    "tp": "#009e73",
}


@dataclasses.dataclass(frozen=True, repr=False)
class Layout:
    """Dims in order, the axes that shard each (major first), and the axes that hold partial sums.

    >>> Layout.parse("d_model/tp/dp d_ff").axes
    (('tp', 'dp'), ())
    >>> Layout.parse("batch/dp seq d_model +tp")
    Layout.parse('batch/dp seq d_model +tp')
    """

    names: tuple[str, ...]
    axes: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...] = ()

    @staticmethod
    @functools.cache
    def parse(text: str) -> "Layout":
        """Read a layout; NotationError names unknown or repeated dims and axes."""
        names, cuts, partial = [], [], []
        for word in text.split():
            if word.startswith("+"):
                partial.append(_known_axis(word[1:], text))
                continue
            name, *axes = word.split("/")
            if partial:
                raise NotationError(
                    f"{quoted(text)}: partial sums (+{partial[0]}) go last; move them after {quoted(word)}."
                )
            if name not in DIMS:
                raise NotationError(f"{quoted(text)}: unknown dim {quoted(name)}; {nearest(name, DIMS)}.")
            names.append(name)
            cuts.append(tuple(_known_axis(axis, text) for axis in axes))
        _refuse_repeats(text, "dim", names)
        _refuse_repeats(text, "axis", [axis for cut in cuts for axis in cut] + partial)
        return Layout(tuple(names), tuple(cuts), tuple(axis for axis in ALL_AXES if axis in partial))

    def __str__(self) -> str:
        return " ".join([*map(self.written, self.names), *(f"+{axis}" for axis in self.partial)])

    def written(self, *dims: str) -> str:
        """These of its dims, as they are written.

        >>> Layout.parse("d_model/tp/dp heads d_head").written("d_model", "d_head")
        'd_model/tp/dp d_head'
        """
        return " ".join("/".join((dim, *self.cut_of(dim))) for dim in dims)

    def __repr__(self) -> str:
        return f"Layout.parse({str(self)!r})"

    def _repr_html_(self) -> str:
        dims = [name + "".join(_coloured("/", axis) for axis in axes) for name, axes in zip(self.names, self.axes)]
        return f"<code>{' '.join([*dims, *(_coloured('+', axis) for axis in self.partial)])}</code>"

    def spec(self, mesh: Mesh | AbstractMesh | None = None) -> PartitionSpec:
        """The PartitionSpec of an array with this layout. Axes that `mesh` lacks are left out; without a mesh, those
        that not every mesh has.

        >>> Layout.parse("vocab/tp d_model/dp").spec() == PartitionSpec("tp", "dp")
        True
        """
        present = AXES if mesh is None else mesh.axis_names
        return PartitionSpec(*(tuple(a for a in axes if a in present) for axes in self.axes))

    def local_shape(self, sizes: Mapping[str, int], axis_sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of one device's piece; an axis that `axis_sizes` does not name is not bound.

        >>> Layout.parse("d_model/dp d_ff/tp").local_shape({"d_model": 8, "d_ff": 6}, {"dp": 4, "tp": 2})
        (2, 3)
        """
        return tuple(
            _local_size(self, name, axes, sizes, axis_sizes) for name, axes in zip(self.names, self.axes, strict=True)
        )

    def cut_of(self, dim: str) -> tuple[str, ...]:
        """The axes that shard `dim`, major first."""
        return self.axes[self.index(dim)]

    def index(self, dim: str) -> int:
        """The position of `dim` among the dims."""
        if dim not in self.names:
            raise NotationError(f"{str(self)!r} has no dim {dim!r}; it has {', '.join(self.names)}.")
        return self.names.index(dim)

    def without(self, *axes: str) -> "Layout":
        """The same dims, not sharded over `axes`.

        >>> str(Layout.parse("d_model/tp/dp d_ff").without("dp"))
        'd_model/tp d_ff'
        """
        kept = tuple(tuple(a for a in cut if a not in axes) for cut in self.axes)
        return Layout(self.names, kept, tuple(a for a in self.partial if a not in axes))

    def with_cut(self, dim: str, axes: tuple[str, ...]) -> "Layout":
        """The same layout with `dim` sharded over `axes`."""
        index = self.index(dim)
        return Layout.parse(str(Layout(self.names, (*self.axes[:index], axes, *self.axes[index + 1 :]), self.partial)))

    def with_partial(self, *axes: str) -> "Layout":
        """The same layout with partial sums over `axes`, in mesh order."""
        return dataclasses.replace(self, partial=tuple(a for a in ALL_AXES if a in axes))

    def used_axes(self) -> tuple[str, ...]:
        """All axes that shard a dim, in mesh order."""
        used = {axis for cut in self.axes for axis in cut}
        return tuple(axis for axis in ALL_AXES if axis in used)


def _known_axis(axis: str, text: str) -> str:
    if axis not in ALL_AXES:
        raise NotationError(f"{quoted(text)}: unknown axis {quoted(axis)}; {nearest(axis, ALL_AXES)}.")
    return axis


def _refuse_repeats(text: str, kind: str, words: list[str]) -> None:
    for word in words:
        if words.count(word) > 1:
            advice = "an array has each dim once" if kind == "dim" else "an axis shards one dim or is partial"
            raise NotationError(f"{quoted(text)}: {kind} {word!r} occurs {words.count(word)} times; {advice}.")


def _coloured(sign: str, axis: str) -> str:
    return f'<b style="color:{AXIS_COLOURS[axis]}">{sign}{axis}</b>'


def _local_size(layout, name, axes, sizes, axis_sizes) -> int:
    if name not in sizes:
        raise NotationError(f"{str(layout)!r}: no size is known for {name!r}; known: {', '.join(sizes)}.")
    size, pieces = sizes[name], 1
    for axis in axes:
        pieces *= axis_sizes.get(axis, 1)
    if size % pieces:
        cut = "*".join(f"{axis}={axis_sizes[axis]}" for axis in axes if axis in axis_sizes)
        up, down = -(-size // pieces) * pieces, size // pieces * pieces
        other = f"{down} or {up}" if down else str(up)
        raise NotationError(
            f"{str(layout)!r}: {name}={size} does not divide over {cut}; "
            f"shard it into one of {listed(divisors(size))} pieces, or use {name}={other}."
        )
    return size // pieces


def with_parents(name: str) -> list[str]:
    """The name of a parameter, and those of the modules and the part in which it is, the part first.

    >>> with_parents("blocks/mlp/up")
    ['blocks', 'blocks/mlp', 'blocks/mlp/up']
    """
    words = name.split("/")
    return ["/".join(words[:end]) for end in range(1, len(words) + 1)]


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by name, as "blocks/mlp/gate/kernel"; a layout is a leaf.

    >>> named_leaves({"mlp": {"gate": Layout.parse("d_model/dp d_ff/tp")}})
    {'mlp/gate': Layout.parse('d_model/dp d_ff/tp')}
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def parse_move(pattern: str) -> tuple[Layout, Layout]:
    """Read `"before -> after"`: two layouts of the same dims.

    >>> before, after = parse_move("batch/dp seq/tp -> batch/dp seq")
    """
    before, arrow, after = pattern.partition("->")
    if not arrow:
        raise NotationError(f"{pattern!r}: write 'before -> after'.")
    before, after = Layout.parse(before.strip()), Layout.parse(after.strip())
    if before.names != after.names:
        raise NotationError(
            f"{pattern!r}: a collective keeps the dims, but {' '.join(before.names)!r} became "
            f"{' '.join(after.names)!r}."
        )
    return before, after


def check_rank(pattern: str, layout: Layout, x: Any) -> None:
    """Raise NotationError if x is no array, or does not have as many dims as `layout`, a layout of `pattern`."""
    if not hasattr(x, "ndim"):
        raise NotationError(
            f"{pattern!r}: {str(layout)!r} is given a {type(x).__name__}, not an array; the array in what a projection "
            "reads is parallax.model.dense.unrounded(x), and a parameter is an array in the module that declares it."
        )
    if x.ndim != len(layout.names):
        raise NotationError(
            f"{pattern!r}: {str(layout)!r} has {len(layout.names)} dims, the array has {x.ndim}: {x.shape}."
        )

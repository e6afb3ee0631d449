"""Search for the fastest layouts. All have a lower bound, those that may be among the best a price in closed form, and
the best of these are traced.

A bound is the estimate of step_time.py for the least that a layout can compute, send and hold. It is never above the
estimate of the traced step, which a test checks, and often far below it. The closed form (closed_form.py) has nearly
the time of the traced step, and about its memory.
"""

import contextlib
import dataclasses
import functools
import hashlib
import heapq
import json
import math
import operator
import time
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from parallax.analysis.compiled.program import costs_of
from parallax.analysis.planned.closed_form import ClosedForm, WithoutMoves
from parallax.analysis.planned.layouts import (
    CHOSEN_AXES,
    Choice,
    build_if_legal,
    choices,
    model_on_topology,
    ranks_beside,
    unchosen_sizes,
)
from parallax.analysis.planned.moves import Move, SentPerUse, bytes_in_step, most_pieces, moves
from parallax.analysis.planned.step_time import (
    CompiledStep,
    Estimate,
    OpCost,
    Overlap,
    StepTime,
    TracedWork,
    compile_and_read,
    estimate,
    traced_work,
)
from parallax.analysis.planned.topology import Topology
from parallax.analysis.traced.collectives import Sent
from parallax.analysis.traced.flops import (
    FLOPS_PER_GRADIENT,
    flops_per_head_weight,
    flops_per_token,
    matmul_parameters_by_stack,
    qk_width,
    scores_flops,
)
from parallax.analysis.traced.memory import (
    HostMemory,
    Memory,
    predicted_host_memory,
    predicted_memory,
    predicted_state,
)
from parallax.analysis.traced.recompute import FINER, mlp_kernels, part_costs, recomputed_flops, sets_to_try
from parallax.config.remat import saved_parts
from parallax.config.sections import DataParallelConfig
from parallax.config.settings import Settings
from parallax.display.svg import INK, PAPER, TIP, svg
from parallax.display.units import in_bytes, percent
from parallax.errors import ConfigError, ParallaxError, errors_as
from parallax.hardware.chips import Chip
from parallax.model.experts.exchange_costs import exchange_of, exchanged_rows, rows_over_hosts
from parallax.model.kernels.flops import tokens_read_twice
from parallax.pipeline import BACKWARD, ShardedModel
from parallax.schedules.pricing import least_bubble, least_held
from parallax.sharding.activations import EXPERT_AXIS
from parallax.sharding.host import DEVICE, HOST, rests_on_host
from parallax.sharding.plan import FLOAT32_BYTES, Policies
from parallax.storage.files import read_object, write_whole
from parallax.version import code_version, version_of

# Of the seven products of blockwise attention, forward and backward: the number that read attention weights or their
# gradients, and the number that write scores or gradients of attention weights, in float32.
SCORES_MOVED, FLOAT32_SCORES_MOVED = 4, 3


LAYERS, TABLES = "layers", "tables"  # stand for the modules of a layer, and of both ends
PER_USE = SentPerUse(*[frozenset([LAYERS])] * 3)


class LayersOnMesh(NamedTuple):
    """What a sharding plan keeps of the layers' parameters on a device, and sends: see `moves`. Also what it sends of
    tables at each use, and whether it can round sums of gradients as it should."""

    pieces: int
    bytes: int
    moves: dict[Move, int]
    of_tables: dict[Move, int]
    is_legal: bool


class LeastWork:
    """Lower bound on the time of a model's step in each layout, from the least that it computes and sends."""

    def __init__(self, settings: Settings, topology: Topology, model: ShardedModel):
        """`model` may be on any mesh: its global shapes are the same on all."""
        self.settings, self.topology, self.plan = settings, topology, model.plan
        self.layers_of, self._products = functools.cache(self._layers_of), functools.cache(self._products_with)
        self._width_kept = functools.cache(self._width_kept_with)
        self.timed, self.secs_of = functools.cache(lambda choice: choice.applied(settings)), {}
        self.per_use = PER_USE._replace(modules=PER_USE.modules | SentPerUse.of(model.plan).modules)
        # For one rank of the axes that no sweep varies; all do the same.
        ranks = ranks_beside(settings.mesh)
        self.devices, self.seq = topology.devices // ranks, settings.data.seq
        self.tokens = settings.data.global_batch * settings.data.seq // ranks
        declared = model.plan.declared
        self.head_flops = flops_per_head_weight(declared) * settings.model.vocab * settings.model.d_model
        self.head = OpCost(self.head_flops * self.tokens / self.devices, 0, "forward", 1)
        kernels = matmul_parameters_by_stack(settings.model, declared, trained=True)
        self.weight_gradient_flops = FLOPS_PER_GRADIENT * sum(kernels.values())
        self.itemsize = jnp.dtype(settings.model.dtype).itemsize
        self.flops = flops_per_token(settings.model, model.plan.declared, seq=settings.data.seq)
        self.hidden = mlp_kernels(settings.model) * sum(settings.model.dense_widths)
        kept = predicted_state(model)
        arrays = jax.tree.leaves([kept.params, kept.opt_state])
        self.state = sum(x.size * x.dtype.itemsize for x in arrays if not rests_on_host(x.sharding))

    def bound(self, choice: Choice, parts: WithoutMoves | None = None) -> float:
        """Lower bound in seconds, never above the layout's own estimate, with the least that it computes and sends or,
        of these parts, what they do. The layout need not be legal."""
        parts = parts or WithoutMoves(self._products(choice.remat), self._sent(choice), 0.0)
        return self._secs(choice, parts._replace(sent=[*self._moved(choice), *parts.sent]), self._sums_on_host(choice))

    def work(self, choice: Choice) -> float:
        """The same without communication. It is computed once for all layouts with the same."""
        shape = choice.schedule, choice.pp, choice.microbatches, choice.virtual, choice.remat
        if shape not in self.secs_of:
            self.secs_of[shape] = self._secs(choice, WithoutMoves(self._products(choice.remat), [], 0.0))
        return self.secs_of[shape]

    def _secs(self, choice: Choice, parts: WithoutMoves, waiting: int = 0) -> float:
        costs = costs_of(self.settings.model, choice.remat, seq=self.seq)
        least = least_bubble(choice.schedule, choice.pp, choice.microbatches, choice.virtual, costs)
        bubble, beside = max(parts.bubble, least), parts.ticks_beside
        moved = {(BACKWARD, memory): choice.microbatches * waiting for memory in (HOST, DEVICE) if waiting}
        traced = TracedWork(parts.products, parts.sent, 0, bubble, moved, per_use=self.per_use, ticks_beside=beside)
        host, nothing_held = HostMemory(gradients=waiting), Memory(**dict.fromkeys(Memory._fields, 0))
        return estimate(self.timed(choice.as_timed), self.topology, nothing_held, traced, host).secs

    def _sums_on_host(self, choice: Choice) -> int:
        """Bytes of the layers' sums of gradients in host memory, which each microbatch reads and writes."""
        if choice.grads_on == DEVICE:
            return 0
        here, there = (self.layers_of(*choice._replace(grads_on=memory).sharding).bytes for memory in (DEVICE, HOST))
        return here - there

    def held(self, choice: Choice) -> float:
        """Lower bound in bytes on the memory of a device: parameters, states of the optimizer, sums of gradients,
        gathered weights that stay for the step, and residuals. Of residuals from B to W only the gradients of dense
        layers' `up`, and `gate` if there is one, are counted."""
        held = self.held_of_weights(choice)
        if self.settings.pipeline.residuals_on == DEVICE:
            until_b, until_w = least_held(choice.schedule, choice.pp, choice.microbatches, choice.virtual)
            width = until_b * self._width_kept(choice.remat) + until_w * self.hidden
            held += width * self.itemsize * self.tokens / self.devices / choice.microbatches
        return held

    def held_of_weights(self, choice: Choice) -> float:
        """The same without residuals."""
        layers = self.layers_of(*choice.sharding)
        return self.state / layers.pieces + layers.bytes

    def _layers_of(self, sizes: tuple[int, ...], policy: str, exceptions: str, sums: tuple[str, str]) -> LayersOnMesh:
        """What the plan of this mesh, policy, and dtype and memory of sums says of the layers' parameters."""
        policies = Policies(policy, DataParallelConfig(policy, exceptions).by_name)
        axis_sizes = dict(zip(CHOSEN_AXES, sizes)) | unchosen_sizes(self.settings.mesh)
        pipeline = dataclasses.replace(self.plan.pipeline, grads_dtype=sums[0], grads_on=sums[1])
        plan = dataclasses.replace(self.plan, policies=policies, axis_sizes=axis_sizes, orders={}, pipeline=pipeline)
        tables = {move: size for move, size in moves(plan, of_tables=True).items() if move.name in ("use", "add_up")}
        try:
            plan.check_grads()
        except ConfigError:
            return LayersOnMesh(most_pieces(plan), bytes_in_step(plan), moves(plan), tables, is_legal=False)
        return LayersOnMesh(most_pieces(plan), bytes_in_step(plan), moves(plan), tables, is_legal=True)

    def _products_with(self, remat: str) -> list[OpCost]:
        """Least work per token: products with weights, attention, recomputed products, and writes of residuals.

        Of the products with layers' weights, those forward, of input gradients and recomputed may be in 8 bits, and
        of weights' gradients if asked.
        """
        model = self.settings.model
        rate = partial(self.topology.matmul_rate, model.dtype)
        fastest = max("compute", model.matmul, key=rate)  # some of them are in the compute dtype in any case
        attention = scores_flops(model, self.settings.data.seq)
        scores = 0
        gradients = self.weight_gradient_flops
        weights = self.flops - attention - self.head_flops - gradients
        if model.kernel == "xla":  # scores pass through memory, and are computed once more for the backward pass
            read_twice = tokens_read_twice(model.windows, self.settings.data.seq)
            of_layers = [block.heads * twice / 2 for block, twice in zip(model.block_of_each, read_twice, strict=True)]
            pairs = sum(of_layers)
            attention += 2 * sum(map(operator.mul, of_layers, map(qk_width, model.block_of_each)))
            scores = pairs * (SCORES_MOVED * self.itemsize + FLOAT32_SCORES_MOVED * FLOAT32_BYTES)
        again = recomputed_flops(model, "layer" if remat == "stage" else remat, seq=self.seq)  # the same of one layer
        kept = 2 * self._width_kept(remat) * self.itemsize
        of_gradients = "compute" if model.matmul_weight_gradients == "compute" else fastest
        costs = [(gradients, 0, of_gradients), (weights, 0, fastest), (again, 0, fastest)]
        costs += [(attention, scores, "compute"), (0, kept, "compute")]
        count = self.tokens / self.devices
        layers = [OpCost(flops * count, moved * count, "forward", 1, matmul) for flops, moved, matmul in costs]
        return [*layers, self.head]

    def _moved(self, choice: Choice) -> list[Sent]:
        """Least communication over data axes: what the plan moves of layers."""
        uses = {"use": 2 * choice.microbatches, "add_up": choice.microbatches}  # in the forward and the backward pass
        return [
            Sent(move.kind, move.axes, size, uses.get(move.name, 1), "forward", LAYERS * (move.name in uses), "")
            for move, size in self.layers_of(*choice.sharding).moves.items()
        ]

    def of_tables(self, choice: Choice, uses: int) -> list[Sent]:
        """What the plan sends of tables if a step uses them so often, and no pipeline rank has a part of one."""
        sent = self.layers_of(*choice.sharding).of_tables.items()
        return [Sent(move.kind, move.axes, size, uses, "forward", TABLES, "") for move, size in sent]

    def _sent(self, choice: Choice) -> list[Sent]:
        """Least communication beside it. Over tp, with columns then rows: gathered inputs and scattered outputs of a
        layer's two branches, forward and backward. Over ep: the exchange of a mixture's tokens, there and back. Streams
        over tp, which hide, and communication of attention over cp and of routers are left out."""
        model, many, sent = self.settings.model, choice.microbatches, []
        tokens = self.tokens / choice.data_ranks / many * model.layers / choice.pp * self.itemsize
        if self.settings.layout.tensor_parallel == "column_row":
            passed = (1 - 1 / choice.tp) * tokens * model.d_model
            sent.append(Sent("all-gather", ("tp",), passed, 8 * many, "forward", LAYERS, ""))
        if choice.ep > 1:
            mixtures = tokens * model.layer_bases.count("moe") / model.layers * model.d_model
            form = exchange_of(choice.exchange, model, choice.ep, ragged=self.topology.has_ragged)
            each = {(): exchanged_rows(model, choice.ep)[form]}
            if (hosts := choice.exchange_hosts) > 1:
                apart = choice.ep // hosts
                between, inside = rows_over_hosts(model, choice.ep, hosts)
                each = {tuple(range(0, choice.ep, apart)): between, tuple(range(apart)): inside}
            for group, rows in each.items():
                sent.append(Sent("all-gather", (EXPERT_AXIS,), mixtures * rows, 2 * many, "forward", LAYERS, "", group))
        return sent

    def _width_kept_with(self, remat: str) -> float:
        """Least number of saved entries per token, in all layers: each layer's input, and the saved parts. Those of
        experts are not counted if the backward pass may recompute each chunk of tokens."""
        if remat == "stage":
            return 0
        model = self.settings.model
        saved = () if remat == "layer" else saved_parts("elementwise" if remat == "none" else remat)
        in_chunks = ("dispatch", "experts") if self.settings.layout.expert_chunk_tokens else ()
        costs = part_costs(model, seq=self.seq)
        widths = (costs[part].width for part in saved if part in costs and part not in in_chunks)
        return model.layers * model.d_model + sum(widths)


PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")


class Cache:
    """A folder with a file for each result, named by the hash of everything that determines it, including versions."""

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)
        self.versions = {"parallax": code_version()} | {name: version_of(name) for name in PACKAGES}
        with errors_as(ConfigError, f"--cache={folder} cannot be written (", "); name another folder."):
            self.folder.mkdir(parents=True, exist_ok=True)

    def kept(self, what: Any, make: Callable[[], Any]) -> Any:
        """The stored result for `what`. If its file is missing or damaged, `make` is called and its result stored. Both
        must be JSON values; stored tuples become lists."""
        path = self.folder / f"{digest([what, self.versions])}.json"
        with contextlib.suppress(OSError, ValueError, KeyError):
            entry = read_object(path, odd_numbers=True)
            if entry["digest"] == digest(entry["value"]):
                return entry["value"]
        value = make()
        write_whole(path, json.dumps({"digest": digest(value), "value": value}))
        return value


def digest(value: Any) -> str:
    """A hash of anything that JSON can hold.

    >>> digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


# The sections of the config that determine a plan.
PRICED_SECTIONS = ("mesh", "model", "layout", "pipeline", "data_parallel", "fsdp", "loss", "optimizer", "guard")


# How far the closed form may be from the traced step: in time, and in memory on either side. Both are wider than what
# tests/analysis/test_closed_form.py finds.
TIME_WITHIN, MEMORY_WITHIN = 0.01, 0.2


class PricedLayout(NamedTuple):
    """A layout that fits, and its predicted step."""

    choice: Choice
    estimate: Estimate


class Sweep:
    """A search for the `keep` fastest layouts with the settings' sums of gradients. A layout that does not fit with
    them is priced with those of its `with_smaller_sums` that costs the least and fits.

    `rows` are those priced so far, fastest first. `passed` counts the others by the reason for passing them over: "not
    legal", "too large", "slower", "beyond --most". `sets` are the settings' own layout with other values of
    `pipeline.remat`, fastest first."""

    def __init__(self, settings: Settings, topology: Topology, cache: Cache, *, keep: int, most: int = 0):
        """Looks at the `most` layouts with the least bounds besides the settings' own, or at all of them if 0.

        ConfigError if the settings' own layout is not legal.
        """
        self.settings, self.cache, self.keep, self.most = settings, cache, keep, most
        self.configured = Choice.of(settings)
        self.rows: list[PricedLayout] = []
        self.passed: Counter[str] = Counter()
        self.sets: list[PricedLayout] = []
        self._bound_of: dict[Choice, float] | None = None
        self._price_of: dict[Choice, float] | None = None
        self._too_large: list[tuple[Choice, float]] = []  # with their bytes besides those that depend on sums
        self._secs: list[float] = []  # of each layout that was priced, not found in the cache
        self.topology = as_measured_first(topology, cache)
        self.least = LeastWork(settings, self.topology, model_on_topology(settings, self.topology))
        self.closed = ClosedForm(settings, self.topology)

    def find(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Bound the work of all layouts; those that cannot fit are passed over."""
        every = [choice for choice in choices(self.settings, self.topology) if choice != self.configured]
        others = [choice for choice in every if choice.stages <= self.settings.model.layers]
        self.passed["not legal"] = len(every) - len(others)
        usable = self.topology.chip.usable_bytes
        self._bound_of = {}
        for done, choice in enumerate(others):
            progress(done, len(others))
            if any(self.least.held(tried) <= usable for tried in (choice, *self._smaller(choice))):
                self._bound_of[choice] = self.least.work(choice)
        self.passed["too large"] = len(others) - len(self._bound_of)

    def price(self, progress: Callable[[int, int | None], None] = lambda done, total: None) -> None:
        """Price layouts in closed form, in the order of their bounds, until no other can be among the best; first
        `find` them, if that was not done. A bound that is less than the best is made tighter first. How many it will
        be is not known, and `progress` is called without a total."""
        if self._bound_of is None:
            self.find()
        waiting = [(work, number, choice, 0) for number, (choice, work) in enumerate(self._bound_of.items())]
        heapq.heapify(waiting)
        self._price_of = {}
        fitting: list[float] = []  # seconds of those that fit for certain
        while waiting and (len(fitting) < self.keep or waiting[0][0] <= fitting[self.keep - 1] * (1 + TIME_WITHIN)):
            bound, number, choice, tighter = heapq.heappop(waiting)
            progress(len(self._price_of), None)
            if tighter < len(self._bounds):
                self._bound_of[choice] = bound = max(bound, self._bounds[tighter](choice))
                if bound < math.inf:
                    heapq.heappush(waiting, (bound, number, choice, tighter + 1))
                else:
                    self.passed["too large"] += 1
                continue
            if (priced := self._in_closed_form(choice)) is None:
                self.passed["not legal"] += 1
                continue
            secs, size = priced
            if size is None or self._may_fit(choice, size):
                self._price_of[choice] = secs
            else:
                self.passed["too large"] += 1
            fits = size is not None and size <= (1 - MEMORY_WITHIN) * self.topology.chip.usable_bytes
            is_among = len(fitting) < self.keep or secs < fitting[self.keep - 1]
            # Not all that is illegal is refused in closed form, and it may not hold the place of what is legal.
            if fits and is_among and build_if_legal(choice.applied(self.settings), self.topology) is not None:
                insort(fitting, secs)
        self.passed["slower"] += len(waiting)

    @property
    def _bounds(self) -> list[Callable[[Choice], float]]:
        """Bounds of a layout's step besides that of its work, each tighter and dearer than the one before."""
        return [self.least.bound, self._bound_of_layers, self._bound_without_moves, self._bound_of_sums]

    def _bound_of_layers(self, choice: Choice) -> float:
        """With all that its layers compute and send, which fewer traces say."""
        with contextlib.suppress(ParallaxError):
            if self.closed.knows(choice):
                parts = self.closed.of_layers(choice)
                return self.least.bound(choice, parts._replace(products=[*parts.products, self.least.head]))
        return 0.0

    def _bound_without_moves(self, choice: Choice) -> float:
        """With all that it computes and sends but for copies, and moves of tables once a step, so that these are traced
        only for layouts that may be among the best; infinite if what its passes hold cannot fit."""
        with contextlib.suppress(ParallaxError):
            if self.closed.knows(choice):
                passes = self.closed.memory_without_weights(choice).peak
                may_fit = self._may_fit(choice, passes + self.least.held_of_weights(choice))
                if not may_fit:
                    return math.inf
                parts, uses = self.closed.without_moves(choice), self.closed.uses_of_tables(choice)
                return self.least.bound(choice, parts._replace(sent=[*parts.sent, *self.least.of_tables(choice, uses)]))
        return 0.0

    def _bound_of_sums(self, choice: Choice) -> float:
        """Of a layout that cannot fit, a bound of those with smaller sums of gradients that may fit; infinite if there
        are none. What its sharding plan moves is not traced for that."""
        with contextlib.suppress(ParallaxError):
            if self.closed.knows(choice):
                size = self.closed.memory(choice).peak
                if size > (1 + MEMORY_WITHIN) * self.topology.chip.usable_bytes:
                    return min(map(self.least.bound, self._fitting(choice, size)), default=math.inf)
        return 0.0

    def _in_closed_form(self, choice: Choice) -> tuple[float, float | None] | None:
        """Seconds, and bytes of the device; of a layout without a closed form its bound and None; None if it is not
        legal."""
        try:
            if self.closed.knows(choice):
                priced = self.closed.estimate(choice)
                chip = self.topology.chip
                too_much = chip.host_bandwidth and priced.host_bytes > chip.host_bytes
                return priced.secs, math.inf if too_much else priced.peak_bytes
        except ParallaxError:
            if build_if_legal(choice.applied(self.settings), self.topology) is None:
                return None
        return (self._bound_of or {}).get(choice, 0.0), None

    def _may_fit(self, choice: Choice, size: float) -> bool:
        """Whether a layout of about this size may fit, perhaps with smaller sums of gradients."""
        return any(self._fitting(choice, size))

    def _fitting(self, choice: Choice, size: float) -> Iterator[Choice]:
        """A layout of about this size, and the same with smaller sums of gradients: those that may fit."""
        beside, usable = size - self.least.held(choice), (1 + MEMORY_WITHIN) * self.topology.chip.usable_bytes
        tried = (choice, *self._smaller(choice))
        legal = (each for each in tried if each == choice or self.least.layers_of(*each.sharding).is_legal)
        return (each for each in legal if beside + self.least.held(each) <= usable)

    def run(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Trace layouts in the order of their prices until no other can be among the best, or until `most` were looked
        at; first `price` them, if that was not done.

        `progress` is called with the number done and the number that may have to be looked at, which falls as faster
        layouts are found. Results survive an interruption.
        """
        if self._price_of is None:
            self.price()
        waiting = sorted(self._price_of, key=self._price_of.__getitem__)
        prices = [self._price_of[choice] for choice in waiting]
        self._too_large.clear()
        self._look_at(self.configured)
        done, end = 0, len(waiting)
        while done < end:
            progress(done, min(end, self.most or end))
            if self.most and done >= self.most:
                self.passed["beyond --most"] += end - done
                break
            self._look_at(waiting[done])
            done += 1
            if len(kept := self._with_own_sums()) == self.keep:
                end = max(done, bisect_right(prices, kept[-1].estimate.secs * (1 + TIME_WITHIN)))
        self.passed["slower"] += len(waiting) - end
        for choice, beside in self._too_large:
            self._make_smaller(choice, beside)
        progress(done, done)

    def run_sets(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Trace the settings' own layout with each set of recomputed parts that may be on the Pareto front of memory
        and time, for `sets`; sets that do not fit are left out."""
        exchanges = self.configured.ep > 1
        sets = sets_to_try(self.settings.model, seq=self.settings.data.seq, exchanges=exchanges, apart=FINER)
        others = [self.configured._replace(remat=remat) for remat in sets if remat != self.configured.remat]
        tried = [self.configured, *self._near_front(others)]
        for done, choice in enumerate(tried):
            progress(done, len(tried))
            priced = self._priced(choice)
            if isinstance(priced, Estimate):
                self.sets.append(PricedLayout(choice, priced))
        progress(len(tried), len(tried))
        self.sets.sort(key=lambda row: row.estimate.secs)

    def _near_front(self, layouts: Sequence[Choice]) -> list[Choice]:
        """Those that may fit, and than which no other is smaller and faster by more than the closed form may be
        wrong."""
        usable = self.topology.chip.usable_bytes
        priced = {choice: self._in_closed_form(choice) for choice in layouts if self._certain_bytes(choice) <= usable}
        known = [each for each in priced.values() if each and each[1] is not None]

        def may_be(secs: float, size: int | None) -> bool:
            if size is None:
                return True
            return not any(other < (1 - TIME_WITHIN) * secs and least <= size for other, least in known)

        return [choice for choice, each in priced.items() if each and may_be(*each)]

    def _look_at(self, choice: Choice) -> None:
        usable, held = self.topology.chip.usable_bytes, self._certain_bytes(choice)
        priced = self._priced(choice) if held <= usable else held
        if isinstance(priced, str):
            self.passed[priced] += 1
        elif isinstance(priced, Estimate):
            self._add(choice, priced)
        else:  # bytes, of which smaller sums free no more than they have less
            self._too_large.append((choice, priced - self.least.held(choice)))

    def _make_smaller(self, choice: Choice, beside: float) -> None:
        """Trace a layout with smaller sums of gradients, beside which it holds so many bytes, if these may fit and be
        faster than the last of the `keep`."""
        kept, usable = self._with_own_sums(), self.topology.chip.usable_bytes
        slowest = kept[-1].estimate.secs if len(kept) == self.keep else math.inf
        smaller = [other for other in self._smaller(choice) if beside + self.least.held(other) <= usable]
        faster = [other for other in smaller if self.least.bound(other) <= slowest]
        for other in faster:
            if isinstance(priced := self._priced(other), Estimate):
                return self._add(other, priced)
        self.passed["too large" if len(faster) == len(smaller) else "slower"] += 1

    def _add(self, choice: Choice, priced: Estimate) -> None:
        self.rows.append(PricedLayout(choice, priced))
        self.rows.sort(key=lambda row: row.estimate.secs)

    def _certain_bytes(self, choice: Choice) -> float:
        """What a layout holds on a device for certain."""
        least = self.least.held(choice)
        with contextlib.suppress(ParallaxError):
            return max(least, self.closed.certain_bytes(choice)) if self.closed.knows(choice) else least
        return least

    def _smaller(self, choice: Choice) -> list[Choice]:
        # Only if the speed of the chip's link to the host is known.
        return choice.with_smaller_sums(host=self.topology.chip.host_bandwidth > 0)

    def _with_own_sums(self) -> list[PricedLayout]:
        """The `keep` fastest rows with the settings' sums of gradients."""
        return [row for row in self.rows if row.choice.sums == self.configured.sums][: self.keep]

    def _priced(self, choice: Choice) -> Estimate | str | int:
        settings = choice.applied(self.settings)
        priced = self.cache.kept(key_of(settings, self.topology), lambda: self._timed(settings))
        return Estimate(*priced) if isinstance(priced, list | tuple) else priced

    def _timed(self, settings: Settings) -> Estimate | str | int:
        begun = time.perf_counter()
        priced = price(settings, self.topology)
        self._secs.append(time.perf_counter() - begun)
        return priced

    @property
    def mean_secs(self) -> float:
        """Mean seconds to price a layout; 0 if all came from the cache."""
        return sum(self._secs) / max(1, len(self._secs))

    def shown(self) -> list[PricedLayout]:
        """The rows of the table: the fastest layouts with the settings' sums of gradients, as many at most with smaller
        ones that are faster than the last of these, and the settings' own if it is not among them."""
        kept = self._with_own_sums()
        slowest = kept[-1].estimate.secs if len(kept) == self.keep else math.inf
        others = [row for row in self.rows if row.choice.sums != self.configured.sums and row.estimate.secs < slowest]
        shown = {row.choice for row in kept + others[: self.keep]} | {self.configured}
        return [row for row in self.rows if row.choice in shown]

    def compiled(self, choice: Choice, devices: list[Any]) -> CompiledStep:
        """The compiler's figures for a layout, from the cache or by compiling it."""
        settings = choice.applied(self.settings)
        what = ["compiled", key_of(settings, self.topology)]
        *sizes, time, sent = self.cache.kept(what, lambda: compile_and_read(settings, self.topology, devices))
        return CompiledStep(*sizes, time and StepTime(*time), tuple(Overlap(*row) for row in sent))


def as_measured_first(topology: Topology, cache: Cache) -> Topology:
    """The topology; for this machine's devices, with the speeds that the cache holds from the first measurement.

    A new measurement differs slightly, which would change all keys of the cache.
    """
    if not topology.shared:
        return topology
    what = ["measured", topology.name, sorted(topology.chip.flops), topology.chip.usable_bytes]
    return topology._replace(chip=Chip(*cache.kept(what, lambda: topology.chip)))


def price(settings: Settings, topology: Topology) -> Estimate | str | int:
    """The estimate of a layout, "not legal", "too large" for the host's memory, or the peak's bytes if these do not fit
    on the device."""
    model = build_if_legal(settings, topology)
    if model is None:
        return "not legal"
    held, host = predicted_memory(model, settings), predicted_host_memory(model, settings)
    if topology.chip.host_bandwidth and host.total > topology.chip.host_bytes:
        return "too large"
    if held.peak > topology.chip.usable_bytes:
        return held.peak
    return estimate(settings, topology, held, traced_work(model, settings), host)


def key_of(settings: Settings, topology: Topology) -> list[Any]:
    """Everything that determines a prediction, except versions."""
    sections = settings.to_dict()
    data = {name: sections["data"][name] for name in ("global_batch", "seq")}
    return [{name: sections[name] for name in PRICED_SECTIONS}, data, topology]


def front(rows: Sequence[PricedLayout]) -> list[Choice]:
    """Layouts on the Pareto front of memory and time, fastest first.

    Times that are equal to three digits count as the same.
    """
    marked, least = [], math.inf
    for choice, cost in sorted(rows, key=lambda row: (float(f"{row.estimate.secs:.3g}"), row.estimate.peak_bytes)):
        if cost.peak_bytes < least:
            marked.append(choice)
            least = cost.peak_bytes
    return marked


# Colours and labels by the axes that the mesh uses.
MESH_COLOURS = {"dp": "#0072b2", "tp": "#009e73", "pp": "#e69f00", "pp tp": "#cc79a7", "cp": "#d55e00"}
MESH_COLOURS |= {"ep": "#56b4e9"}
MESH_LABELS = {"dp": "data alone", "tp": "data and tensor", "pp": "with a pipeline", "pp tp": "pipeline and tensor"}
MESH_LABELS |= {"cp": "context", "ep": "experts"}
LIGHT = ("pp", "pp tp")  # fills that need dark text
PICTURE = 580, 265  # size of the plot in points; below it, the key has a line for each layout of the front
KEY_LINE = 13


def draw(title: str, rows: Sequence[PricedLayout], topology: Topology, configured: Choice) -> str:
    """An SVG of memory against time with a point for each layout; `configured` is ringed."""
    row_of, marked = {row.choice: row for row in rows}, front(rows)
    on_front = [row_of[choice] for choice in marked]
    under = f"{len(rows)} layouts, predicted; a {topology.chip.unit} holds {in_bytes(topology.chip.usable_bytes)}"
    edges = {True: {"markersize": 13, "markeredgecolor": INK}, False: {"markersize": 6, "alpha": 0.55}}

    def points(axes: Any) -> None:
        axes.set_title(f"{title}\n{under}", loc="left")
        axes.set(xlabel=f"memory of a {topology.chip.unit}, GiB", ylabel="time of a step, s")
        axes.margins(0.08)
        axes.plot(*zip(*map(_place, on_front)), "--", color=INK, linewidth=0.8, gid="front")
        for row in reversed(rows):
            fill, tip = MESH_COLOURS[_kind(row.choice)], f"{TIP}{_name(row.choice)}: {', '.join(_figures(row))}"
            axes.plot(*_place(row), "o", color=fill, gid=tip, **edges[row.choice in marked])
            if row.choice == configured:
                axes.plot(*_place(row), "o", color="none", markeredgecolor=INK, markersize=20)
        for number, row in enumerate(on_front, 1):
            ink = INK if _kind(row.choice) in LIGHT else PAPER
            axes.text(*_place(row), str(number), color=ink, weight="bold", ha="center", va="center_baseline")
        kinds = {_kind(row.choice) for row in rows}
        for kind in (kind for kind in MESH_COLOURS if kind in kinds):
            axes.plot([], [], "o", color=MESH_COLOURS[kind], label=MESH_LABELS[kind])
        axes.plot([], [], "o", color="none", markeredgecolor=INK, label="numbered: Pareto front; ringed: the config")
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.12), ncols=6, frameon=False, columnspacing=1)
        if on_front:
            key = [[str(number), _name(row.choice), *_figures(row)] for number, row in enumerate(on_front, 1)]
            high, widths = KEY_LINE * len(key) / PICTURE[1], (0.03, 0.64, 0.1, 0.1, 0.13)
            table = axes.table(key, colWidths=widths, edges="open", bbox=(0, -0.24 - high, 1, high), cellLoc="left")
            table.auto_set_font_size(False)
            for cell in table.get_celld().values():
                cell.PAD = 0.0  # else a tenth of a column is empty on either side

    return svg(points, *PICTURE)


def _place(row: PricedLayout) -> tuple[float, float]:
    return row.estimate.peak_bytes / 2**30, row.estimate.secs


def _figures(row: PricedLayout) -> tuple[str, str, str]:
    return in_bytes(row.estimate.peak_bytes), f"{row.estimate.secs:.3f} s", f"MFU {percent(row.estimate.mfu)}"


def _kind(choice: Choice) -> str:
    for axis in ("ep", "cp"):
        if getattr(choice, axis) > 1:
            return axis
    return " ".join(axis for axis in ("pp", "tp") if getattr(choice, axis) > 1) or "dp"


def _name(choice: Choice) -> str:
    """A layout in short.

    >>> _name(Choice(4, 8, 2, 16, "interleaved", 2, "layer", "zero1", "", 0))
    '4·8·2 M=16 interleaved v=2 remat layer zero1'
    """
    sizes = f"{choice.mesh} M={choice.microbatches}"
    words = sizes, choice.schedule_words, f"remat {choice.remat}", choice.policy_words, *choice.words_of_sums
    return " ".join(filter(None, words))

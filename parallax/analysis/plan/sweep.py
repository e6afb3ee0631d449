"""All legal layouts of a place, priced: the best are found, the others shown to be slower or too large."""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from parallax.analysis.plan.analytic import Estimate, estimate, predicted_memory, trace
from parallax.analysis.plan.bounds import Bounds
from parallax.analysis.plan.cache import Cache, digest, versions
from parallax.analysis.plan.compiling import Outcome, compile_step
from parallax.analysis.plan.layouts import Choice, build, build_if_legal, choices
from parallax.analysis.report.place import Place
from parallax.config.settings import Settings
from parallax.runtime.chips import Chip

SECTIONS = ("mesh", "model", "layout", "pipeline", "fsdp", "loss", "optimizer", "guard")  # that a plan follows from


class Row(NamedTuple):
    """A layout that fits, and its predicted step."""

    choice: Choice
    estimate: Estimate


class Sweep:
    """A search for the `keep` fastest layouts. `rows` are those priced so far, fastest first; `passed` counts the
    others by the reason why they were passed over: "not legal", "too large", "slower"."""

    def __init__(self, settings: Settings, place: Place, cache: Cache, *, keep: int):
        """ConfigError where the settings' own layout is not legal."""
        self.settings, self.cache, self.keep = settings, cache, keep
        self.own = Choice.of(settings)
        self.rows: list[Row] = []
        self.passed: Counter[str] = Counter()
        self._versions = versions()
        self.place = as_measured_first(place, cache, self._versions)
        self.bounds = Bounds(settings, self.place, build(settings, self.place))

    def run(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Price layouts, those first whose bound is least, until no other can be among the best.

        `progress` is told how many of how many are done. What was done before an interruption is kept.
        """
        bound_of = {choice: self.bounds.of(choice) for choice in choices(self.settings, self.place.devices)}
        waiting = sorted(bound_of, key=lambda choice: bound_of[choice].secs)
        self._look_at(self.own)
        for done, choice in enumerate(waiting):
            progress(done, len(waiting))
            if len(self.rows) >= self.keep and bound_of[choice].secs > self.rows[self.keep - 1].estimate.secs:
                self.passed["slower"] += len(waiting) - done
                break
            if choice == self.own:
                continue
            if bound_of[choice].peak_bytes > self.place.chip.usable_bytes:
                self.passed["too large"] += 1
            else:
                self._look_at(choice)
        progress(len(waiting), len(waiting))

    def _look_at(self, choice: Choice) -> None:
        found = priced(choice.applied(self.settings), self.place, self.cache, self._versions)
        if found is None:
            self.passed["not legal"] += 1
        elif found["estimate"] is None:
            self.passed["too large"] += 1
        else:
            self.rows.append(Row(choice, Estimate(*found["estimate"])))
            self.rows.sort(key=lambda row: row.estimate.secs)

    def shown(self) -> list[Row]:
        """The rows of the table: the fastest, and the config's own where it is none of them."""
        own = [row for row in self.rows[self.keep :] if row.choice == self.own]
        return self.rows[: self.keep] + own

    def compiled(self, choice: Choice, devices: list[Any]) -> Outcome:
        """What the compiler says of a layout, from the cache or compiled."""
        settings = choice.applied(self.settings)
        key = digest(["compiled", key_of(settings, self.place, self._versions)])
        if (found := self.cache.get(key)) is not None:
            return Outcome(*found)
        made = compile_step(settings, self.place, devices)
        self.cache.put(key, made)
        return made


def as_measured_first(place: Place, cache: Cache, known: dict[str, str]) -> Place:
    """The place, with this machine's devices as they were measured when the cache first had them.

    A new measurement differs a little, and nothing that was found before would be found again.
    """
    if not place.shared:
        return place
    key = digest(["measured", place.name, sorted(place.chip.flops), place.chip.usable_bytes, known])
    if (found := cache.get(key)) is not None:
        return place._replace(chip=Chip(*found))
    cache.put(key, place.chip)
    return place


def priced(settings: Settings, place: Place, cache: Cache, known: dict[str, str]) -> dict[str, Any] | None:
    """`{"peak_bytes", "estimate"}` of a layout, from the cache or traced; None where it is not legal.

    Without an estimate where it is too large. `known` are the versions that the cache is kept for.
    """
    key = key_of(settings, place, known)
    if (found := cache.get(key)) is not None:
        return found or None
    model = build_if_legal(settings, place)
    if model is None:
        cache.put(key, {})
        return None
    held = predicted_memory(model, settings)
    fits = held.peak <= place.chip.usable_bytes
    made = estimate(settings, place, held, trace(model, settings)) if fits else None
    cache.put(key, {"peak_bytes": held.peak, "estimate": made})
    return {"peak_bytes": held.peak, "estimate": made}


def key_of(settings: Settings, place: Place, known: dict[str, str]) -> str:
    """The hash of all that a prediction follows from."""
    sections = settings.to_dict()
    data = {name: sections["data"][name] for name in ("global_batch", "seq")}
    return digest([{name: sections[name] for name in SECTIONS}, data, place, known])

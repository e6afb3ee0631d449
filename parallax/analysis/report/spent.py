"""Where the time of traced steps went: parts of the model, collectives that nothing hides, and idle; together all."""

import dataclasses
import heapq
import json
from collections import Counter, defaultdict
from collections.abc import Collection
from typing import Any, NamedTuple

from parallax.analysis.report.spent_text import text
from parallax.analysis.report.trace import Ran, Trace


class Part(NamedTuple):
    """Seconds of an average device in all traced steps. `hidden` are those of a collective during which the device
    computed: they are part of its compute. `calls` are of an average device, too."""

    name: str
    secs: float
    hidden: float
    products: float
    calls: float


class DeviceTime(NamedTuple):
    """Seconds of one device: `compute`, `exposed` collectives, `idle`; their sum is the wall time."""

    device: int
    place: str
    compute: float
    exposed: float
    idle: float

    @property
    def total(self) -> float:
        return self.compute + self.exposed + self.idle


@dataclasses.dataclass(frozen=True, repr=False)
class Spent:
    """The time of traced steps; it prints as text."""

    name: str
    steps: tuple[int, ...]
    secs: float
    kind: str
    mesh: dict[str, int]
    modules: tuple[Part, ...]
    collectives: tuple[Part, ...]
    idle: float
    devices: tuple[DeviceTime, ...]

    def to_dict(self) -> dict[str, Any]:
        """Nested dicts and lists that JSON can hold."""
        plain = dataclasses.asdict(self)
        plain["modules"] = [one._asdict() for one in self.modules]
        plain["collectives"] = [one._asdict() for one in self.collectives]
        plain["devices"] = [one._asdict() for one in self.devices]
        return plain

    def to_json(self) -> str:
        """All of it."""
        return json.dumps(self.to_dict(), indent=2)

    def __repr__(self) -> str:
        return text(self)


class Account:
    """Adds one device's operations up, moment by moment."""

    def __init__(self, span: tuple[float, float]):
        self.span = span
        self.modules: dict[str, float] = defaultdict(float)
        self.products: dict[str, float] = defaultdict(float)
        self.exposed: dict[str, float] = defaultdict(float)
        self.hidden: dict[str, float] = defaultdict(float)
        self.calls: Counter = Counter()
        self.idle = 0.0

    def add(self, ran: list[Ran]) -> None:
        """A moment belongs to the operations that compute then, in equal parts; to collectives where none does; and is
        idle where nothing runs."""
        ran = sorted(ran)
        self.calls.update(one.module for one in ran)
        running: list[tuple[float, int]] = []  # ends, first to end first
        now, at = self.span[0], 0
        while now < self.span[1]:
            while at < len(ran) and ran[at].start <= now:
                if ran[at].end > now:
                    heapq.heappush(running, (ran[at].end, at))
                at += 1
            following = [self.span[1], *(end for end, _ in running[:1])]
            if at < len(ran):
                following.append(ran[at].start)
            until = min(following)
            self._share(until - now, [ran[number] for _, number in running])
            now = until
            while running and running[0][0] <= now:
                heapq.heappop(running)

    def _share(self, secs: float, running: list[Ran]) -> None:
        computing = [one for one in running if not one.collective]
        sending = [one for one in running if one.collective]
        for one in computing:
            self.modules[one.module] += secs / len(computing)
            self.products[one.module] += secs / len(computing) * one.product
        for one in sending:
            (self.hidden if computing else self.exposed)[one.module] += secs / len(sending)
        if not running:
            self.idle += secs


def spent(trace: Trace) -> Spent:
    """The account of a trace, of an average device and of each."""
    accounts = {number: Account(trace.span) for number in trace.devices}
    for number, account in accounts.items():
        account.add(trace.devices[number])
    secs, products, exposed, hidden, calls = (
        _means(accounts.values(), of) for of in ("modules", "products", "exposed", "hidden", "calls")
    )
    modules = [Part(name, secs[name], 0.0, products[name], calls[name]) for name in secs]
    sent = [Part(name, exposed[name], hidden[name], 0.0, calls[name]) for name in {**exposed, **hidden}]
    devices = [
        DeviceTime(number, _place(trace, number), sum(one.modules.values()), sum(one.exposed.values()), one.idle)
        for number, one in accounts.items()
    ]
    return Spent(
        name=trace.name,
        steps=trace.steps,
        secs=trace.secs,
        kind=trace.kind,
        mesh=trace.mesh,
        modules=tuple(sorted(modules, key=lambda part: -part.secs)),
        collectives=tuple(sorted(sent, key=lambda part: -part.secs - part.hidden)),
        idle=sum(one.idle for one in accounts.values()) / len(accounts),
        devices=tuple(devices),
    )


def _means(accounts: Collection[Account], of: str) -> defaultdict[str, float]:
    """Over all devices; 0 for what none of them has."""
    total: defaultdict[str, float] = defaultdict(float)
    for account in accounts:
        for name, value in getattr(account, of).items():
            total[name] += value / len(accounts)
    return total


def _place(trace: Trace, number: int) -> str:
    """Where on the mesh a device lies, as "pp=0 dp=1 tp=0"."""
    if number not in trace.order or not trace.mesh:
        return ""
    at, ranks = trace.order.index(number), []
    for axis, size in reversed(trace.mesh.items()):
        at, rank = divmod(at, size)
        ranks.append(f"{axis}={rank}")
    return " ".join(reversed(ranks))

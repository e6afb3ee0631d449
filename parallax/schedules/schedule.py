"""A schedule: a timetable that prints itself with its bubble, and draws itself in notebooks."""

from dataclasses import dataclass

from parallax.schedules.drawing import gantt
from parallax.schedules.pricing import USUAL, figures
from parallax.schedules.timetable import Timetable, grid_text


@dataclass(frozen=True, repr=False)
class Schedule(Timetable):
    """A pipeline schedule. Its fields, ticks and tables are those of `Timetable`."""

    def __str__(self) -> str:
        sizes = f"ranks={self.ranks} stages={self.stages} microbatches={self.microbatches} ticks={self.ticks}"
        grid = grid_text(self.grid(), joint=self.joint)
        return f"{self.name} {sizes} lockstep bubble={figures(self).lockstep_bubble:.1%}\n{grid}"

    __repr__ = __str__

    def _repr_svg_(self) -> str:
        return gantt(self, USUAL)

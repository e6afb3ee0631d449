"""The table at the start of a run: what will be trained, and what a device will hold."""

from parallax.analysis.memory import Memory
from parallax.analysis.render import text_table
from parallax.runtime.units import in_bytes


def render(parameters: dict[str, int], memory: Memory) -> str:
    """Two tables as text: parameters by component, and bytes on each device."""
    total = sum(parameters.values())
    counts = [[name, f"{count:,}", f"{count / total:.1%}"] for name, count in parameters.items()]
    sizes = [[name.replace("_", " "), in_bytes(size)] for name, size in memory._asdict().items()]
    model = text_table(["", "parameters", "share"], [*counts, ["total", f"{total:,}", ""]], left=1)
    device = text_table(["", "on each device"], [*sizes, ["total", in_bytes(memory.peak)]], left=1)
    return "\n".join([*model, "", *device])

"""What a run needs until its first step is reported, and until it has evaluated and saved that step.

    python benchmarks/first_step.py [--config quickstart]

CPU seconds of this process and wall time by phase, and how many programs each phase compiles, with the CPU seconds of
that. The run has one step, in a folder of its own, without a cache of compiled programs; no sample is written.
"""

import importlib
import sys
import tempfile
import time
from typing import Any, NamedTuple
from unittest import mock

from arguments import Arguments, run_benchmark

from parallax.display.progress import loading

COMPILED = "/jax/core/compile/backend_compile_duration"  # JAX tells of each program that it has compiled
LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"  # and lowered, just before


def main() -> None:
    parser = Arguments(description=__doc__, smallest={"config": "tiny_gqa"})
    parser.add_argument("--config", choices=("quickstart", "tiny_gqa"), default="quickstart")
    args = parser.parse_args()
    phases = Phases()
    with loading(__name__, sys.stderr):
        import jax

        from parallax.training import run
        from parallax.training.loop import TrainingLoop
        from parallax.training.step_reports import StepReports
    phases.end("loading")
    jax.config.update("jax_enable_compilation_cache", False)
    jax.monitoring.register_event_duration_secs_listener(phases.heard)
    ends = (
        (run, "build", "data and checks"),
        (run, "init_state", "first state"),
        (run, "step_costs", "predicted costs"),
        (TrainingLoop, "take", "compiling the step"),
        (StepReports, "read", "first step"),
    )
    config = importlib.import_module(f"configs.{args.config}").get_config()
    config.train.steps, config.optimizer.warmup_steps, config.sample.prompt = 1, 0, ""
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(sys, "stdout", sys.stderr):
        for owner, name, phase in ends:
            setattr(owner, name, phases.ending(phase, getattr(owner, name)))
        run.train(config, f"{folder}/run")
        phases.end("evaluation and save")
    print("\n".join(phases.table(last="first step")))


class Phase(NamedTuple):
    name: str
    cpu_secs: float
    wall_secs: float
    programs: int
    compile_cpu_secs: float


class Phases:
    """CPU seconds, wall time and compilations, divided at the ends of phases."""

    def __init__(self) -> None:
        self.ended: list[Phase] = []
        self.cpu, self.wall = 0.0, time.monotonic()  # a process begins with none of the one
        self.lowered, self.programs, self.compile_cpu_secs = 0.0, 0, 0.0

    def heard(self, event: str, secs: float, **about: Any) -> None:
        if event == LOWERED:
            self.lowered = time.process_time()
        elif event == COMPILED:
            self.programs += 1
            self.compile_cpu_secs += time.process_time() - self.lowered
            self.lowered = time.process_time()

    def end(self, name: str) -> None:
        cpu, wall = time.process_time(), time.monotonic()
        self.ended.append(Phase(name, cpu - self.cpu, wall - self.wall, self.programs, self.compile_cpu_secs))
        self.cpu, self.wall, self.programs, self.compile_cpu_secs = cpu, wall, 0, 0.0

    def ending(self, name: str, function: Any) -> Any:
        """The same function, with whose first call this phase ends."""

        def call(*args: Any, **named: Any) -> Any:
            result = function(*args, **named)
            if name not in {phase.name for phase in self.ended}:
                self.end(name)
            return result

        return call

    def table(self, last: str) -> list[str]:
        """Rows of all phases, and after that named `last` the sum of all before."""
        rows = ["| | CPU s | wall s | programs | compiled in CPU s |", "|---|---|---|---|---|"]
        for number, phase in enumerate(self.ended, start=1):
            rows.append(_row(phase))
            if phase.name == last:
                rows.append(_row(Phase("until here", *(sum(column) for column in [*zip(*self.ended[:number])][1:]))))
        return rows


def _row(phase: Phase) -> str:
    return (
        f"| {phase.name} | {phase.cpu_secs:.1f} | {phase.wall_secs:.1f} | {phase.programs} "
        f"| {phase.compile_cpu_secs:.1f} |"
    )


if __name__ == "__main__":
    run_benchmark(main)

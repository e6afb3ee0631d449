"""What a step computes, read from its traced program."""

from parallax.report.executed import matmul_flops

__all__ = ["matmul_flops"]

"""Several processes of one job: they connect, wait for each other, limit their waits, and end together.

JAX connects the processes and runs their collectives. In addition, process 0 has a coordinator, to which each process
connects: through it they compare values that must be equal, report their phase, and learn at once when one of them
ends. With one process all of this does nothing, but limit its waits.
"""

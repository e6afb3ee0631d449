"""Several processes of one job: they connect, agree on values, limit their waits, and end together.

JAX connects the processes and runs their collectives. In addition, a control line connects process 0 with each of the
others: over it they compare values that must be equal, report their phase, and learn at once when one of them ends.
With one process all of this does nothing, but limit its waits.
"""

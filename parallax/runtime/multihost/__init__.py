"""Several processes of one job: how they find each other, agree, wait no longer than they may, and end together.

JAX connects the processes and runs their collectives. Beside it runs a line of our own between process 0 and each of
the others: over it they compare what must be equal, say where they are, and hear at once when one of them ends. With
one process all of this does nothing.
"""

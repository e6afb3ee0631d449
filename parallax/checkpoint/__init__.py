"""Checkpoints of a run: saved in the background and atomically, loaded onto any mesh.

A step counts only with its manifest, which lists the files with sizes and checksums, the arrays with shapes, dtypes and
fingerprints, and the settings of the run. Orbax writes the arrays; by itself it would accept any folder with a number
as its name, and would silently restore flipped bits.
"""

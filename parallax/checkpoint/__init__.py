"""Checkpoints of a run: saved in the background, complete or not there at all, loaded onto any mesh.

A step counts only with its manifest, which lists the files with sizes and checksums, the arrays with shapes, dtypes and
fingerprints, and the settings of the run that wrote them. Orbax writes the arrays; it would take any folder that is
named by a number for a step, and would restore flipped bits in silence.
"""

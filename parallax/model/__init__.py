"""Flax Linen layers in local view: each declares its parameters and activations in the notation.

The sections `Communication` of a layer's docstring say what it sends; a test compares them with its trace. There "the
transposes" of all_gather and reduce_scatter are each other, that of all_to_all is an all_to_all, and that of
all_reduce, whose output is the same on all ranks, is nothing. Parameters vary over every axis when a layer runs: if
several ranks hold a parameter, the caller sums its gradient once, after all microbatches.
"""

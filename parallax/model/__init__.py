"""Flax Linen layers in local view: each declares its parameters and activations in the notation.

What a layer sends is said in the sections `Communication` of its docstring, which a test holds to its trace. There
"the transposes" of all_gather and reduce_scatter are each other, that of an all_to_all is one, that of an all_reduce,
whose output is the same on all ranks, nothing. Parameters vary over every axis when a layer runs: the gradient of one
that several ranks hold is summed once, by the caller, after all microbatches.
"""

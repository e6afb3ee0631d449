"""Attention kernels: in XLA, for TPUs (splash) and for GPUs (cuDNN, Triton)."""

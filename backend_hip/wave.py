"""The wave size that every kernel is built for."""

WAVE = 32  # lanes; RDNA4 in the mode that HIP uses, NVIDIA's warp, the CPU runtime's default

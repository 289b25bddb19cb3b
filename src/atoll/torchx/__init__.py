"""A TorchX scheduler for AppWrapper, MCAD and Kueue, and Atoll runs as TorchX components.

`kubernetes_mcad_scheduler` has the scheduler; the other modules build and read plain dicts. The distribution
`atoll-torchx` registers the scheduler with TorchX: Atoll alone changes nothing there.
"""

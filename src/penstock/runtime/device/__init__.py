"""Everything that differs between a GPU and the host: streams, random state, autocast, time, memory, CUDA graphs, NCCL.

Each module wraps one of these, and does on the host whatever corresponds to it, so that the other rooms never ask which device they
run on. Calls go one way: the other rooms call this one, and this one imports none of them. Another kind of device is added here.
"""

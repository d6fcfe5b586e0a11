"""A GPU made of software that lags behind the host, for tests of the code that drives a GPU.

    with LaggingDevice() as device:
        ...  # tensors on "cuda", torch.cuda.Stream, Event, CUDAGraph

Operations on its tensors check their shapes, dtypes and devices at once, through FakeTensorMode, and compute later: by
default at the last moment that is legal, with a seed at random moments. `streams.py` has the queues and the order that
they guarantee, `memory.py` the allocator and pinned memory, `device.py` the tensors and operations, and `cuda_api.py`
what replaces functions of torch.cuda.

Everything that may go wrong on a GPU depending on timing raises DeviceFault, whether or not it went wrong this time:
memory that two streams access without an order, or host and device; pinned memory that the host overwrites before
its copy has run, or reads before it has waited; memory that is freed while another stream, or a graph, uses it; and
calls that make the host wait while a graph is captured.
"""

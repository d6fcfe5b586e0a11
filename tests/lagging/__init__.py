"""A GPU made of software that lags behind the host, for tests of the code that drives a GPU.

    with LaggingDevice() as device:
        ...  # tensors on "cuda", torch.cuda.Stream, Event, CUDAGraph

Operations on its tensors check their shapes and devices at once, through FakeTensorMode, and compute later, on
the CPU: by default at the last moment that is legal, with a seed at random moments. `streams.py` has the queues,
`memory.py` the allocator and pinned memory, `device.py` the tensors and operations, `cuda_api.py` what replaces
functions of torch.cuda, and `kernels.py` the kernels.

What may go wrong on a GPU depending on timing raises DeviceFault, whether or not it went wrong this time: memory
that two streams, or the host and the device, access without an order; pinned memory that it overwrites before
a copy has run, or reads before it has waited; memory that is freed while another stream, or a graph, uses it; and
calls that make the host wait while a graph is captured.
"""

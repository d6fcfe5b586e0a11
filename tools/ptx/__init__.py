"""A GPU made of software, which executes the PTX that Triton compiles.

In the order of a launch:

- `device`: compiles a launch to PTX, gives each tensor an address, and copies back what was written
- `parser`: text to instructions
- `steps`: instructions to functions; memory, branches, barriers and warps
- `arithmetic`, `rounding`, `tensor_core`: instructions that compute, as the PTX ISA manual defines them
- `machine`: threads, and the order in which they run
- `memory`: bytes, and the checks of every access
"""

"""The GPU side of the operators: Triton kernels and their launchers. Imported only when a tensor is on a GPU."""

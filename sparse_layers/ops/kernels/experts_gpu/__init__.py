"""Products of rows with the kernels of their experts on GPUs, by Triton."""

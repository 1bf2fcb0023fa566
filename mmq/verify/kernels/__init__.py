"""Level kernels: the Triton kernels against their references, on the machine it runs on."""

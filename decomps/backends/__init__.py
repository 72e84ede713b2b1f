"""Which kernel runs a batch norm: the rules, the selection, forcing one, and the kernels that PyTorch lacks."""

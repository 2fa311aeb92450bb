"""Benchmarks: CPU time at one thread, eager PyTorch and `torch.compile` in the same run."""

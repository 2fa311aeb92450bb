"""Benchmarks: eager PyTorch, `torch.compile` and every backend in one run. See conftest.py."""

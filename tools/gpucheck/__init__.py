"""The checks of `tools/gpu_check.py`, one module a subject; see docs/gpu.md."""

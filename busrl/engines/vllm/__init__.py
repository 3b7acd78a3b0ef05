"""The engine that drives vLLM in a process of its own. Knows nothing of the run."""

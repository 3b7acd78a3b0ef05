"""busrl's embedded engine: generation with transformers models on PyTorch. Knows nothing of the run."""

"""The engine of busrl's own: generation with transformers models on PyTorch. Knows nothing of the run."""

"""The mathematics of a training step: advantages, values, losses, corrections, diagnostics.

Every function here works on plain tensors, arrays or lists and knows nothing of samples, models, rings or files, so
that each can be checked against published numbers in float64. `busrl.training` joins them to a model.
"""

"""The mathematics of a training step, with torch and nothing else: advantages, losses, diagnostics.

Every function here works on plain tensors and knows nothing of samples, models, rings or files, so that each can be
checked against published numbers in float64. `busrl.training` joins them to a model.
"""

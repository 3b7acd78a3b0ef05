"""An independent second opinion on a finished run: every number of every step from the write-ahead log and the weights.

Run as `python tools/oracle RUN_DIR`. It imports nothing of busrl: it reads the files by their documented formats, loads
the model folders with transformers, and has each formula written out once more, in float64.
"""

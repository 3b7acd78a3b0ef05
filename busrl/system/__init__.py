"""Services of the machine that a process runs on: files, clocks, devices, pipes, imports, parents that die.

Imports nothing of busrl but its errors, and knows nothing of runs.
"""

"""What a process needs of the machine that it runs on: files, clocks, devices, pipes, imports, parents that die.

Imports nothing of busrl but its errors, and knows nothing of runs.
"""

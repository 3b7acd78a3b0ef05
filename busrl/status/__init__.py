"""The state of a run, read from its ring and its files while others write them, and put into words.

Part of the core: launch writes its summary from this state, and decides by it whether the run is stalled; `busrl
status` prints it. The monitor (`busrl.observe`) adds what only the bus shows.
"""

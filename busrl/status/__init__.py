"""The state of a run, read from its ring and its files while others write them, and told in words.

Part of the core: launch decides by it whether the run stands still and writes its summary from it; `busrl status`
prints it. The monitor (`busrl.observe`) adds what only the bus shows.
"""

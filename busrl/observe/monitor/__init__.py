"""A run looked at without touching it: shown live or as one page, recorded, and played again.

Talks to the tap of the bus, and to the ring and the files of a run, all for reading. `RunState` is what is known of a
run; `Reader` and `Watcher` keep it true; `screen`, `text`, `status` and `web` show it. `launch` shows its own run
with the same views. `Recorder` writes what passes the tap into a file; `Replayer` publishes such a file again.
"""

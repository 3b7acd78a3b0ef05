"""A run watched without touching it: shown on a terminal or in a browser, recorded, and replayed.

Opens the tap of the bus, the ring and the files of a run, all for reading. A `Watcher` (`sources`) keeps a `RunState`
(`busrl.status`) up to date; `screen`, `phrases` and `web` show it. `Recorder` writes what passes the tap into a file,
`Replayer` publishes such a file again (`recording`). `launch` shows its own run by `screen` too.
"""

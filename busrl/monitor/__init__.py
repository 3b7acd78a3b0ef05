"""Watching, recording and replaying a run from outside, without touching it.

Talks to the tap of the bus, and to the ring and the files of a run, all for reading. `Watcher` keeps a `Picture` true;
views show it; `Recorder` writes what passes the tap into a file; `Replayer` publishes such a file again.
"""

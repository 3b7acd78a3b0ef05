"""A small topology on disk for these tests (`topologies`)."""

from topologies import here, loaded, refused

__all__ = ["here", "loaded", "refused"]

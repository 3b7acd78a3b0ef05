"""The wire: messages, their bytes, their topics and the protocol's version.

Imports msgspec, and of busrl only `capabilities`, which adds the messages of optional parts. Knows nothing of sockets
or of the ring, so any tool can read a recorded message.
"""

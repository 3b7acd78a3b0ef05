"""The wire: messages, their bytes, their topics and the protocol's version.

Imports msgspec and nothing else of busrl, so that any tool can read a recorded message.
"""

"""The control bus: publish and subscribe through one broker, for messages that may be lost.

Imports ZeroMQ, `protocol`, `keys` and `errors`. Knows nothing of the ring or of roles. Only the process that serves a
bus imports `broker`.
"""

from __future__ import annotations

from busrl.bus.endpoint import Endpoint
from busrl.bus.security import allow_many_connections, private_directory, tcp_pair

__all__ = ["Endpoint", "allow_many_connections", "private_directory", "tcp_pair"]

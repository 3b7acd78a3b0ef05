"""The bus: publish and subscribe through one broker, for messages that may be lost.

Talks to ZeroMQ, to the codec of `protocol` and to keys. Knows nothing of the ring or of roles. This head does not
import `broker`, which the bus process needs, and parts that listen on encrypted sockets or make recordings.
"""

from __future__ import annotations

from busrl.bus.addresses import allow_many_connections, private_directory, tcp_pair
from busrl.bus.endpoint import Endpoint

__all__ = ["Endpoint", "allow_many_connections", "private_directory", "tcp_pair"]

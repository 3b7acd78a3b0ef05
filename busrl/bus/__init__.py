"""The control bus: publish and subscribe through one broker, for messages that may be lost.

Imports ZeroMQ, `protocol`, `keys` and `errors`; knows nothing of the ring or of roles.
"""

from busrl.bus.aio import AsyncEndpoint
from busrl.bus.broker import run_broker
from busrl.bus.door import Door, Refusal
from busrl.bus.endpoint import Endpoint
from busrl.bus.security import allow_many_connections, private_directory, tcp_pair
from busrl.bus.stats import EndpointStats

__all__ = [
    "AsyncEndpoint",
    "Door",
    "Endpoint",
    "EndpointStats",
    "Refusal",
    "allow_many_connections",
    "private_directory",
    "run_broker",
    "tcp_pair",
]

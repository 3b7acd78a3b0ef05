"""The control bus: publish and subscribe through one broker, for messages that may be lost.

Imports ZeroMQ, `protocol`, `keys` and `errors`. Knows nothing of the ring or of roles. Importing it imports no asyncio,
because the broker must be back soon after a death.
"""

from __future__ import annotations

from busrl.bus.broker import CurveListener, Refusal, StopRequest, run_broker
from busrl.bus.endpoint import Endpoint
from busrl.bus.security import allow_many_connections, private_directory, tcp_pair

__all__ = [
    "CurveListener", "Endpoint", "Refusal", "StopRequest", "allow_many_connections", "private_directory", "run_broker",
    "tcp_pair",
]

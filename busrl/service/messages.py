"""Messages between the door and the tuner of a service: doorbells, which say that a log has grown.

Talks to nothing. Nothing is lost with a message: both look at the logs by themselves now and then.
"""

from __future__ import annotations

from busrl.protocol.messages import Message


# tinker -> tuner
class RequestsLogged(Message, tag="REQUESTS_LOGGED"):
    """The log of a service's requests has new ones for the tuner."""


# tuner -> tinker
class AnswersLogged(Message, tag="ANSWERS_LOGGED"):
    """The log of a service's answers has new ones."""


MESSAGES: tuple[type[Message], ...] = (RequestsLogged, AnswersLogged)

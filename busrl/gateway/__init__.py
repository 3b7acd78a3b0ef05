"""The keeper's gateway for workers that do not map the ring: who they are, what they hold, and what is answered.

Pure: fed with messages and a clock value, it decides and calls a `Book`, which is the ledger as it needs it. Imports
the protocol and NumPy; knows nothing of sockets, rings or files.
"""

from busrl.gateway.book import Answer, Book, Gone, Held, Member, Room, task_id
from busrl.gateway.checks import Broken, Limits
from busrl.gateway.desk import BAD, Desk, FairClock, Settings, Tally

__all__ = [
    "BAD",
    "Answer",
    "Book",
    "Broken",
    "Desk",
    "FairClock",
    "Gone",
    "Held",
    "Limits",
    "Member",
    "Room",
    "Settings",
    "Tally",
    "task_id",
]

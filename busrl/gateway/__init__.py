"""The keeper's gateway for workers that do not map the ring: who they are, what they hold, and what is answered.

Pure: fed with messages and a clock value, `desk` decides and calls a `RemoteLedger` (`ledger`). Imports the protocol
and NumPy; knows nothing of sockets, rings or files.
"""

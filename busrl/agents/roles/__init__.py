"""The processes in which episodes are played: agents of a run, clients over HTTP, and environments of Atropos."""

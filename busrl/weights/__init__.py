"""Weight transports behind one interface (`base`): shared memory on one host, a broadcast over a changing group,
folders, or one copy that engine and learner share. `factory` makes the transport that the topology names."""

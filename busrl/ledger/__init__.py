"""The ledger's files: fates, the learner's write-ahead log, the trained set, open slots, put-backs, the train log.

Every file that says what became of a sample is written here; the ring alone writes `fates.bin`. `busrl.ledger.audit`
reads them all again with readers of its own. Knows nothing of processes, messages or torch; importing this package
imports none of its modules.
"""

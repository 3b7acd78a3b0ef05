"""The ledger's files: the write-ahead log, the train log, the trained set, open slots and put-backs, errors.jsonl.

Every file that records what became of a sample is written here; the ring alone writes `fates.bin`.
`busrl.ledger.audit` reads them all again with readers of its own. Knows nothing of processes, messages or torch;
importing this package imports none of its modules.
"""

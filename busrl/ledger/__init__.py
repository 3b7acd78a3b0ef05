"""The ledger's files: the write-ahead log, the train log, the trained set, open slots and put-backs, errors.jsonl.

The modules here write every file that records what became of a sample, but `fates.bin`, which the ring writes.
`busrl.ledger.audit` reads them all again with readers of its own. Knows nothing of processes, messages or torch;
importing this package imports none of its modules.
"""

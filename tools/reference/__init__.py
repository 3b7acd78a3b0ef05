"""Writes the documents that are made from the code: the page and vectors of the protocol, the reference topology."""

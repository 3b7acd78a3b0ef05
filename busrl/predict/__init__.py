"""Predicted lengths of answers, and the controller of the batch size that uses them.

An optional part of busrl: `busrl.capabilities` names it, nothing else of the core imports it.
"""

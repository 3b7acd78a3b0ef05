"""Processes of tests that need torch, forked from one that has loaded it: a start of their own costs seconds of CPU."""

from __future__ import annotations

import multiprocessing

forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(["torch", "safetensors.torch", "busrl.training.checkpoint", "busrl.weights.factory"])

"""Checkpoints: their files, writing them while training runs, and whole tensors from sharded ones."""

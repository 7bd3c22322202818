"""Checkpoints: the files of one, the writing of them while training runs, and whole tensors from split ones."""

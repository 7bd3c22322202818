"""The model and the length of samples that `flashspan train` uses by default."""

DEFAULT_PRESET, DEFAULT_SEQUENCE = "tiny", 256

"""Text to tokens to samples: tokenizers, token files, `flashspan prepare`, and the samples of a step."""

"""Text to tokens to samples: tokenizers, the token file, `flashspan prepare`, and which tokens a step reads."""

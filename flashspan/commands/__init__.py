"""What a subcommand does that is neither training, generation nor a benchmark."""

"""The subcommands attend, check, compile, profile and plan draw."""

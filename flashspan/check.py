"""`python -m flashspan.check`, for torchrun: the command `flashspan check`."""

import sys

from flashspan.cli import main

sys.exit(main(["check", *sys.argv[1:]]))

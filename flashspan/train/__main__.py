"""`python -m flashspan.train`, for torchrun."""

import sys

from .run import main

try:
    sys.exit(main(sys.argv[1:]))
except (ValueError, OSError) as error:
    print(f"flashspan: {error}", file=sys.stderr)
    sys.exit(2)
except KeyboardInterrupt as stop:
    print(f"flashspan: {str(stop) or 'stopped; what was written stays'}", file=sys.stderr)
    sys.exit(130)

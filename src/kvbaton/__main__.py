"""`python -m kvbaton`: the same commands as the console script."""

import sys

from kvbaton.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m kvbaton.router`."""

import sys

from kvbaton.router.command import main

sys.exit(main())

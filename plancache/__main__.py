"""`python -m plancache`: the command line."""

import sys

from plancache.cli import main

sys.exit(main())

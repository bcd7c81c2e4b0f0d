"""`python -m suites` is `assay`."""

import sys

from suites.cli import main

sys.exit(main())

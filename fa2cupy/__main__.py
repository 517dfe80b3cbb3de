"""``python -m fa2cupy``."""

import sys

from .cli import main

sys.exit(main())

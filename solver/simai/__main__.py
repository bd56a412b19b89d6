"""``python -m solver.simai``."""

from __future__ import annotations

import sys

from solver.simai.command import main

sys.exit(main())

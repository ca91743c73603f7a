"""``python -m jackfield.cli``."""

from __future__ import annotations

import sys

from jackfield.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m writer_rl.trainer COMMAND …`."""

from __future__ import annotations

import sys

from writer_rl.trainer.main import main

if __name__ == "__main__":
    sys.exit(main())

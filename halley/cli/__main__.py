"""``python -m halley.cli``: what the launcher starts on each rank."""

import sys

from halley.cli.main import main


sys.exit(main())

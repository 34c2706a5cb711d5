"""Entry point of ``python -m halley.cli``, which the launcher starts on each rank."""

import sys

from halley.cli.main import main


sys.exit(main())

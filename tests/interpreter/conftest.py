"""Skip this folder where Triton compiles: its tests are about the interpreter."""

import os


collect_ignore_glob = [] if os.environ["TRITON_INTERPRET"] == "1" else ["test_*.py"]

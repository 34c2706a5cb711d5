"""The tests of this folder are about the interpreter: none of them runs where Triton compiles."""

import os


collect_ignore_glob = [] if os.environ["TRITON_INTERPRET"] == "1" else ["test_*.py"]

"""The command line starts without importing Triton."""

import subprocess
import sys


def test_commands_import_no_triton() -> None:
    """Its first import decides how kernels run, and is for those who need kernels."""
    found = "import sys, halley.cli.main; print('triton' in sys.modules)"
    command = [sys.executable, "-c", found]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "False\n"

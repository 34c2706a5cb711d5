"""Deprecated name of ``halley.integrations.transformers``."""

import warnings

from halley.integrations.transformers import *  # noqa: F403


warnings.warn(
    "halley.integrations.huggingface is deprecated: use halley.integrations.transformers",
    FutureWarning,
    stacklevel=2,
)

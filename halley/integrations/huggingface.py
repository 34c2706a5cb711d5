"""Deprecated name of ``halley.integrations.transformers``."""

from halley.integrations.contract import warn_deprecated
from halley.integrations.transformers import *  # noqa: F403


warn_deprecated("halley.integrations.huggingface", "halley.integrations.transformers")

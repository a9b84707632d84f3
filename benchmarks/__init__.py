"""Measurements behind the choices in this package: one command per question."""

import os

# Sites have addresses without names, of which torch would warn in every process. Read when torch is
# imported.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

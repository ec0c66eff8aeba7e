"""Benchmark files import their siblings, as they do when run as scripts."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

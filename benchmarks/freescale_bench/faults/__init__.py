"""Training under a storm of faults. The storm itself is a test harness, tests/faults, which only a
clone has."""

import sys

from freescale_bench.common.repository import require_repository

sys.path.append(str(require_repository() / "tests"))

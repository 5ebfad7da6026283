"""Training under a storm of faults. The storm itself is a harness of the tests, tests/faults, which
exists in a clone only."""

import sys

from freescale_bench.common.repository import require_repository

sys.path.append(str(require_repository() / "tests"))

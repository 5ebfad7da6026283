"""Whether kernels run in Triton's interpreter, on the CPU: as it was when the kernels were made."""

import triton

INTERPRETED: bool = triton.knobs.runtime.interpret

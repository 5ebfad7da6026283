/* Kernels for small batches, without an operation of torch for each line. All use one core, except
   copies and optimizers.
   Matrices are row-major and contiguous. Each function is a version of a plain-torch reference. Sums
   go by token, then by pair: the same inputs give the same bits. */

#include "best.h"
#include "checksums.h"
#include "layers.h"
#include "marks.h"
#include "pairs.h"
#include "position_softmax.h"
#include "positions.h"
#include "requests.h"
#include "row_copies.h"
#include "rows.h"
#include "softmax.h"

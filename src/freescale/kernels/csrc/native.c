/* Kernels for one core, except copies and optimizers: what a small batch computes, without an
   operation of torch for each line.
   Matrices are row by row and contiguous. Each function is the plain-torch reference's twin; sums go
   by token, then by pair, so the same inputs give the same bits. */

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

/* What there is for each set of instructions: of `LANES` floats in a vector, under names that NAME makes. */

#include "vectors.h"
#include "inputs_first.h"
#if LANES == 8
#include "codes_avx2.h"
#include "scales_avx2.h"
#include "dynamic_avx2.h"
#include "dynamic_avx2_tiles.h"
#include "numbers_avx2.h"
#include "blocks_avx2.h"
#include "linear_avx2.h"
#endif
#include "formats.h"
#include "linear.h"
#if LANES == 8
#include "by_inputs_avx2.h"
#endif
#include "attention_scores.h"
#include "attention.h"
#include "norm.h"
#include "pointwise.h"
#include "rotary.h"
#include "recurrence.h"
#undef LANES
#undef NAME

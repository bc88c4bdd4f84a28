/* What there is for each set of instructions: of `LANES` floats in a vector, under names that NAME makes. */

#include "vectors.h"
#include "formats.h"
#include "linear.h"
#include "inputs_first.h"
#include "dynamic_linear.h"
#include "attention_scores.h"
#include "attention.h"
#include "norm.h"
#include "pointwise.h"
#include "rotary.h"
#include "recurrence.h"
#undef LANES
#undef NAME

/* The cost-aware policy, one chunk after the other: what cost.py does with arrays, and must do exactly alike.

   All that is known of chunks and of their past lies in numpy's arrays, which cost.py, history.py and hazard.py make,
   describe and check; they are lent to a Kernel as buffers for as long as it lives. A Kernel owns only the order:

       class 3   first run -> ... -> last run        runs of slots that were used together, by time
                 7 <-> 3 <-> 9                       slots of a run, those that should leave first in front
       held      4 <-> 8                             passed over, the last one held last
       due       8                                   held, and no child needs them any more

   Every link is a slot's or a run's number, so nothing is allocated but scratch space for the longest batch.

       kernel.h    what a kernel is            past.h      fingerprints, what is remembered, what is learned
       order.h     who leaves next             policy.c    arguments, methods, the type

   Arguments are checked before anything is changed. Python can write into the arrays meanwhile: what is read from them
   and used as an index is confined to its range first, so the worst that follows is a wrong victim. */

#ifndef STOWAGE_KERNEL_H
#define STOWAGE_KERNEL_H

#include "../binding.h"

#include <math.h>
#include <stddef.h>
#include <string.h>
#include <structmember.h>

enum { AGES = 64, LEVELS = 9, SPANS = 14, CLASSES = LEVELS * SPANS, EPOCHS = 256, WAYS = 8 };
enum { NONE = -1, OUT = -1, HELD = -2 };

static const int64_t NEVER = (int64_t)1 << 62;
static const int64_t PAST_GAP_MAX = (int64_t)1 << 30;
static const int64_t PAST_USES_MAX = (int64_t)1 << 14;
static const uint64_t MIX[4] = {0x9E3779B97F4A7C15u, 0xC2B2AE3D27D4EB4Fu, 0x165667B19E3779F9u, 0xD6E8FEB86659FD93u};

/* cost.py's PAST. */
typedef struct {
    int64_t last;
    int32_t gap;
    int16_t uses;
    int16_t of_class;
} Past;

typedef struct {
    int64_t time;
    int32_t first, last; /* slots; NONE: not in use */
    int32_t before, after; /* runs of the class; `after` also links those not in use */
    int32_t of_class;
} Run;

/* The arrays that are lent, in the order in which they are given. */
enum {
    HERE, PRINT, USES, GAP, LAST, CLASS, SERIAL, PARENT, PARENT_SERIAL, KIDS,
    KNOWN, ORDER, PAST,
    USED, ENDED, WAITING, INDEX,
    ARRAYS
};
enum { PER_SLOT, PER_SLOT_AND_ONE, PER_ENTRY, PER_AGE, PER_EPOCH };
static const struct {
    const char *name;
    Py_ssize_t bytes;
    int length;
} SHAPES[ARRAYS] = {
    {"here", 1, PER_SLOT}, {"print", 8, PER_SLOT}, {"uses", 8, PER_SLOT}, {"gap", 8, PER_SLOT}, {"last", 8, PER_SLOT},
    {"class", 8, PER_SLOT}, {"serial", 8, PER_SLOT_AND_ONE}, {"parent", 8, PER_SLOT}, {"parent_serial", 8, PER_SLOT},
    {"kids", 8, PER_SLOT},
    {"prints", 8, PER_ENTRY}, {"order", 8, PER_ENTRY}, {"past", sizeof(Past), PER_ENTRY},
    {"used", 8, PER_AGE}, {"ended", 8, PER_AGE}, {"waiting", 8, PER_EPOCH}, {"index", 8, PER_AGE},
};

typedef struct {
    PyObject_HEAD
    Py_buffer lent[ARRAYS];
    uint8_t *here;
    uint64_t *print, *known;
    int64_t *uses, *gap, *last, *of_class, *serial, *parent, *parent_serial, *kids, *order, *index;
    double *used, *ended, *waiting;
    Past *past;
    int64_t slots, rows, width;
    int64_t clock, epoch, puts, batch, length;
    int64_t remembered; /* 0: no need to look into the history, which is a cache miss per chunk */
    /* The order. */
    int32_t *before, *after, *run_of; /* per slot */
    int32_t *due_before, *due_after; /* per slot, of those that are due; `due_before` of others: HELD */
    int64_t *mark; /* per slot: the last batch that it was in */
    Run *runs;
    int32_t unused, held_last, due_last;
    int32_t first_run[CLASSES], last_run[CLASSES], open_run[CLASSES];
    /* Scratch space for a batch. */
    int64_t *some, *other;
    uint64_t *prints;
    Py_ssize_t room;
} Kernel;

#endif

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

/* A doubly linked list of slots; the links are in arrays. NONE: empty. */
typedef struct {
    int32_t first, last;
} List;

typedef struct {
    int64_t time;
    List slots; /* none: not in use */
    int32_t before, after; /* runs of the class; `after` also links those not in use */
    int32_t of_class;
} Run;

/* The borrowed arrays, in the order of the arguments: item type, field here, name, and length. */
#define LENT(OF)                                                                                                       \
    OF(uint8_t, here, "here", PER_SLOT) OF(uint64_t, print, "print", PER_SLOT) OF(int64_t, uses, "uses", PER_SLOT)     \
    OF(int64_t, gap, "gap", PER_SLOT) OF(int64_t, last, "last", PER_SLOT) OF(int64_t, of_class, "class", PER_SLOT)     \
    OF(int64_t, serial, "serial", PER_SLOT_AND_ONE) OF(int64_t, parent, "parent", PER_SLOT)                            \
    OF(int64_t, parent_serial, "parent_serial", PER_SLOT) OF(int64_t, kids, "kids", PER_SLOT)                          \
    OF(uint64_t, known, "prints", PER_ENTRY) OF(int64_t, order, "order", PER_ENTRY) OF(Past, past, "past", PER_ENTRY)  \
    OF(double, used, "used", PER_AGE) OF(double, ended, "ended", PER_AGE) OF(double, waiting, "waiting", PER_EPOCH)    \
    OF(int64_t, index, "index", PER_AGE)
enum { PER_SLOT, PER_SLOT_AND_ONE, PER_ENTRY, PER_AGE, PER_EPOCH };
#define OF(...) +1
enum { ARRAYS = 0 LENT(OF) };
#undef OF

typedef struct {
    PyObject_HEAD
    Py_buffer lent[ARRAYS];
#define OF(TYPE, field, ...) TYPE *field;
    LENT(OF)
#undef OF
    int64_t slots, rows, width;
    int64_t clock, epoch, puts, batch, length;
    int64_t remembered; /* 0: no need to look into the history, which is a cache miss per chunk */
    /* The order. */
    int32_t *before, *after, *run_of; /* per slot */
    int32_t *due_before, *due_after; /* per slot, of those that are due; `due_before` of others: HELD */
    int64_t *mark; /* per slot: the last batch that it was in */
    Run *runs; /* as many as slots; behind them lie all arrays of the order */
    List held, due;
    int32_t unused;
    int32_t first_run[CLASSES], last_run[CLASSES], open_run[CLASSES];
    /* Scratch space for a batch, all of it behind `some`. */
    int64_t *some, *other;
    uint64_t *prints;
    Py_ssize_t room;
} Kernel;

#endif

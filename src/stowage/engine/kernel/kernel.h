/* What the kernels share: jobs, instruction sets, and threads.
 *
 * A kernel sums every result in an order that depends on its own row alone. So a token's logits are the same to the bit
 * alone and in a batch, computed at once and in pieces, in a prompt and one by one: what `--deterministic` stands on.
 * Which instructions are used changes the bits; that is decided once, from the processor.
 */
#ifndef STOWAGE_ENGINE_KERNEL_H
#define STOWAGE_ENGINE_KERNEL_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define ALWAYS __attribute__((always_inline))
#define DEPTH 1024 /* inputs that are summed at a time */
#define PANEL 64   /* rows whose block of inputs stays in the cache */
#define KEYS 64    /* keys that a softmax takes at a time */
#define ROWS 64    /* query rows of one head that are worked on together */

enum { FULL = 0, SLIDING = 1, CHUNKED = 2 };

enum { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };

/* `scales`: of codes (INT8), one for each output. */
typedef struct {
    const float *x, *scales;
    const void *w;
    float *y;
    int64_t rows, inputs, outputs, x_row, w_row;
    int form;
} Linear;

/* Keys or values of one layer: their address, and strides in elements. */
typedef struct {
    const void *at;
    int64_t block, token, head;
} Place;

/* `count` tokens of one sequence from position `start`; its blocks are the table's from `table` on, the first of which
 * holds position `base`. */
typedef struct {
    int64_t begin, count, start, table, base;
} Run;

typedef struct {
    const void *q;
    float *out;
    Place k, v;
    const int64_t *table;
    const Run *runs;
    const float *sinks;
    int64_t count, heads, fold, width, value_width, block_tokens, window, kind;
    float scale, softcap;
    int half;
} Attention;

/* What one thread works with: rows of queries and what has become of them, and a tile of keys and values. */
typedef struct {
    float *q, *out, *peak, *sum, *keys, *values, *weights[2];
    const float *key[KEYS], *value[KEYS];
} Scratch;

typedef void (*Share)(void *job);
typedef void (*Parallel)(Share share, void *job, unsigned threads, unsigned flags);

#endif

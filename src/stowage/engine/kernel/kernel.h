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
#if defined(__GNUC__)
#define FETCH(address) __builtin_prefetch(address)
#else
#define FETCH(address) ((void)(address))
#endif
/* The value is what it is here. Else a compiler may fuse a product with a sum, or compute several at once, in one tile
 * and not in another, and their bits would differ. */
#if defined(__x86_64__) && defined(__GNUC__)
#define SETTLE(value) __asm__("" : "+x"(value))
#elif defined(__GNUC__)
#define SETTLE(value) __asm__("" : "+m"(value))
#else
#define SETTLE(value) ((void)(value))
#endif
#define DEPTH 1024 /* inputs that are summed at a time */
#define PANEL 64   /* rows whose block of inputs stays in the cache */
#define KEYS 64    /* keys that a softmax takes at a time */
#define ROWS 64    /* query rows of one head that are worked on together */

enum { FULL = 0, SLIDING = 1, CHUNKED = 2 };

enum { AWAY = -2 }; /* -1 is a block that is nowhere */

enum { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, INT4 = 3, HALVES = 4, INT8_HALVES = 5 };

/* `scales` of codes. INT8: floats, one for each output. INT4: halves, one for each `group` of inputs of an output, and
 * behind them all as many least values; byte j of an output has input j in its low half, and input j + inputs / 2 in
 * the other. `x` are floats; HALVES, where the weights are too, and INT8_HALVES: bfloat16. */
typedef struct {
    const void *x, *scales, *w;
    float *y;
    int64_t rows, inputs, outputs, x_row, w_row, group;
    int form;
} Linear;

/* What is left to do of outputs [begin, end) of all rows that were summed over codes of 8 bits. */
static inline void scale_outputs(const Linear *job, int64_t begin, int64_t end)
{
    for (int64_t row = 0; row < job->rows; row++)
        for (int64_t n = begin; n < end; n++)
            job->y[row * job->outputs + n] *= ((const float *)job->scales)[n];
}

/* What will be read next: rows of so many bytes; input k is k times 2^shift bytes from the first. */
typedef struct {
    const char *at;
    int64_t row;
    int shift;
} Ahead;

/* A float of 16 bits (IEEE 754) as one of 32. */
static inline float half_float(uint16_t half)
{
    uint32_t bits = (uint32_t)(half & 0x7fff) << 13;
    float value;
    memcpy(&value, &bits, sizeof value);
    value *= 0x1p112f; /* the exponents' biases differ by so much; exact, also below the least normal one */
    if ((half & 0x7c00) == 0x7c00)
        value = half & 0x3ff ? NAN : INFINITY;
    return half & 0x8000 ? -value : value;
}

/* Keys or values of one layer: their address, and strides in elements. Blocks lie in two memories: in the pool, `block`
 * apart from `at`, and away from it, where block u begins u times `unit` from `away`. */
typedef struct {
    const void *at;
    int64_t block, token, head;
    const void *away;
    int64_t unit;
} Place;

/* `count` tokens of one sequence from position `start`; its blocks are the table's from `table` on, the first of which
 * holds position `base`: a block of the pool, or AWAY - u. */
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

/* What the kernels share: jobs, instruction sets, and threads.
 *
 * A kernel is batch-invariant: it sums each result in an order that depends on its own row alone. So a token's logits
 * are the same to the bit alone and in a batch, in one prefill chunk or several, in a prompt or decoded, as
 * `--deterministic` promises. Other instructions give other bits; the set is chosen once, from the processor.
 */
#ifndef STOWAGE_ENGINE_KERNEL_H
#define STOWAGE_ENGINE_KERNEL_H

#include "../binding.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#if defined(__GNUC__)
#define FETCH_FAR(address) __builtin_prefetch(address, 0, 2) /* into L2, which has more requests in flight */
#else
#define FETCH_FAR(address) ((void)(address))
#endif
/* Fixes a value at this point. Otherwise a compiler may fuse a product with a sum, or vectorize, in one tile and not in
 * another, and their bits would differ. */
#if defined(__x86_64__) && defined(__GNUC__)
#define SETTLE(value) __asm__("" : "+x"(value))
#elif defined(__GNUC__)
#define SETTLE(value) __asm__("" : "+m"(value))
#else
#define SETTLE(value) ((void)(value))
#endif
/* Has addresses computed from this one where they are used. Otherwise a compiler spills each to the stack. */
#if defined(__GNUC__)
#define FROM_HERE(pointer) __asm__("" : "+r"(pointer))
#else
#define FROM_HERE(pointer) ((void)(pointer))
#endif
#define UNROLLED _Pragma("GCC unroll 16")
#define UNUSED __attribute__((unused))
#define DEPTH 1024 /* inputs that are summed at a time */
#define FEW 8      /* rows with which a weight's row is read to its end */
#define FAR_ROWS 4 /* rows with which outputs that are computed together lie far apart */
#define INPUTS_AHEAD 64 /* inputs whose outputs are fetched before they are laid out */
#define AHEAD 2048 /* bytes that are fetched before what is read so */
#define PANEL 64   /* rows whose block of inputs stays in the cache */
#define KEYS 64    /* keys that a softmax takes at a time */
#define TILES_FEW 4 /* with more rows tiles are used, where there are any */
#define ROWS 64    /* query rows of one head that are worked on together */
#define MANY 4     /* of which so many are multiplied at once */
#define TURNED_ROWS 16 /* with so many, turning keys pays */
#define SCORE_LANES 4096 /* sums of lanes before they are added: 4 of 32 rows by 32 keys */

#define SUM_LEAST 0x1p-100f /* smaller sums, of rounded weights, become 0 when they are scaled down */

enum { FULL = 0, SLIDING = 1, CHUNKED = 2 };

enum { OFFLOADED = -2 }; /* -1 is a block that is nowhere */

enum { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, INT4 = 3, HALVES = 4, INT8_HALVES = 5, DYNAMIC = 6, DYNAMIC_HALVES = 7 };

/* `scales` of codes. INT8: floats, one for each output. INT4: halves, one for each `group` of inputs of an output, and
 * behind them all as many least values; byte j of an output has input j in its low half, and input j + inputs / 2 in
 * the other. `x` are floats; HALVES, where the weights are too, and INT8_HALVES: bfloat16 (without
 * instructions for pairs of them, they become floats first). So is `y` if it is `narrow`,
 * which only these two can make it, and DYNAMIC and DYNAMIC_HALVES, where x, floats or bfloat16, is rounded to 8 bits
 * (dynamic.h). `packed`: the rows of x as tiles.h or dynamic.h lays them out, or NULL.
 *
 * `format`: weights lie in one of the formats of formats_common.h, rows `w_row` bytes apart, and become numbers of the
 * form. One scale, of a `kind`, is for `tall` (block_rows) outputs by `group` inputs; `zeros`: zero points, or NULL. Of
 * NVFP4 `zeros` are global scales, each for `tall` outputs. */
typedef struct {
    const void *x, *scales, *w, *zeros;
    const char *packed;
    void *y;
    float *wide; /* where sums go before they are narrow, or NULL */
    int64_t rows, inputs, outputs, x_row, w_row, group;
    int64_t tall;
    int form, narrow, format, kind;
} Linear;

/* The same layer of at most `most` rows from one on, whose inputs lie laid out. */
static inline Linear some_rows(const Linear *all, int64_t row, int64_t most, const void *laid)
{
    Linear job = *all;
    int half = job.form >= HALVES && job.form != DYNAMIC;
    job.rows = job.rows - row < most ? job.rows - row : most;
    job.x = (const char *)job.x + (row * job.x_row << (half ? 1 : 2));
    job.y = (char *)job.y + (size_t)(row * job.outputs) * (job.narrow ? 2 : 4);
    job.packed = laid;
    return job;
}

/* What remains to be done with sums over codes of 8 bits. */
static inline void scale_sums(float *sums, const float *scales, int64_t count)
{
    for (int64_t n = 0; n < count; n++)
        sums[n] *= scales[n];
}

/* What to prefetch: rows of so many bytes; input k is k times 2^shift bytes behind the first. */
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
    value *= 0x1p112f; /* the difference of the exponents' biases; exact, also for subnormals */
    if ((half & 0x7c00) == 0x7c00)
        value = half & 0x3ff ? NAN : INFINITY;
    return half & 0x8000 ? -value : value;
}

/* A float as the nearest of bfloat16. */
static inline uint16_t float_half(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

/* Keys or values of one layer: their address, and strides in elements. Blocks lie in two memories: in the pool, `block`
 * apart from `at`, and offloaded, where block u begins u times `unit` from `offloaded`. */
typedef struct {
    const void *at;
    int64_t block, token, head;
    const void *offloaded;
    int64_t unit;
} Blocks;

/* `count` tokens of one sequence from position `start`; its blocks are the table's from `table` on, the first of which
 * holds position `base`: a block of the pool, or OFFLOADED - u. */
typedef struct {
    int64_t begin, count, start, table, base;
} Run;

/* Queries, keys and values are bfloat16 if `half`, else float32; the output is bfloat16 if `narrow`. For queries at
 * positions from `rounded_from` on, attention weights are rounded to bfloat16, which is faster. */
typedef struct {
    const void *q;
    void *out;
    Blocks k, v;
    const int64_t *table;
    const Run *runs;
    const float *sinks;
    int64_t count, heads, fold, width, value_width, block_tokens, window, kind;
    float scale, softcap;
    int64_t rounded_from;
    int half, narrow;
} Attention;

/* `rows` rows of x, `width` numbers each, side by side; x, w and y in bfloat16 if `half`, else float32. ROUNDED: what
 * weights multiply is rounded to the type of x before. `more`: added to each weight. */
enum { ROUNDED = 0, WHOLE = 1 };

typedef struct {
    const void *x, *w;
    void *y;
    int64_t rows, width;
    float eps, more;
    int half, way;
} Norm;

/* Numbers in memory: `step` elements apart in each dimension, bfloat16 if `half`, else float32. */
enum { INNER = 3, NUMBERS = 256 }; /* the last dimension; numbers that are worked on at a time */

typedef struct {
    void *at;
    int64_t step[INNER + 1];
    int half;
} Operand;

/* out = a, -a, a + b, a - b, a b; or that of the table b (bfloat16, by their 65,536 bits) for a, all in bfloat16. */
enum { COPY = 0, NEGATE = 1, ADD = 2, SUBTRACT = 3, MULTIPLY = 4, LOOK_UP = 5 };

typedef struct {
    int way;
    int64_t size[INNER + 1];
    Operand out, a, b;
} Pointwise;

/* Rotary embeddings: of the heads of a token, which are `token` and `head` numbers apart, the first half of the numbers
 * and the other, times cosines and sines of that token, `width` each, which lie side by side. So do heads and tokens of
 * out. All are bfloat16 if `half`, else float32. */
typedef struct {
    const void *x, *cosines, *sines;
    void *out;
    int64_t heads, width, token, head;
    int half;
} Rotation;

/* A sequence's number among states that lie somewhere in a pool; `rows` NULL: they are one after the other. */
static inline int64_t row_of(const int64_t *rows, int64_t b)
{
    return rows == NULL ? b : rows[b];
}

/* Gated delta rules. q and k are `keys` wide, v and out `values`; decay is the logarithm of what a token leaves of the
 * state, one for each head or (`per_key`) for each of its keys; beta how much of its change a token makes. They, `state`
 * [batch, heads, keys, values] and sums are floats; q, k, v and out bfloat16 if `half`. `normed`: q and k are brought to
 * length 1 first. Strides are in elements; numbers of a head lie side by side, and out as if it were [batch, tokens,
 * heads, values]. */
typedef struct {
    const void *q, *k, *v;
    const float *decay, *beta;
    float *state;
    void *out;
    const int64_t *rows;
    int64_t batch, tokens, heads, keys, values;
    int64_t q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, state_batch;
    float scale;
    int per_key, normed, half;
} Delta;

/* The inputs of one token of a head, shared by all values. `decayed`: k times decay. */
typedef struct {
    const float *k, *q, *decayed, *decay;
    float beta;
} DeltaToken;

/* Selective state spaces: `state` [batch, heads, width, states]. A step's length is dt and bias through a softplus, if
 * there is to be one, and within [least, most]; it leaves e^(length a) of the state. b and c are those of `groups` of
 * heads; d: how much of x goes on to out, [batch, tokens, heads, width]. x, b, c and dt are bfloat16 if `half`. */
typedef struct {
    const void *x, *b, *c, *dt;
    const float *bias, *a, *d;
    float *state, *out;
    const int64_t *rows;
    int64_t batch, tokens, heads, groups, width, states;
    int64_t x_batch, x_token, x_head, b_batch, b_token, b_group, c_batch, c_token, c_group, dt_batch, dt_token, dt_head;
    int64_t state_batch;
    float least, most;
    int softplus, half;
} Scan;

/* Causal depthwise convolutions with weights w [channels, taps], then an optional silu. `state` [batch, channels,
 * before]: the tokens before, updated if there is one token only; NULL: none. x and out [batch, tokens, channels] are
 * contiguous in channels. All are bfloat16 if `half`. */
typedef struct {
    const void *x, *w, *bias;
    void *state, *out;
    const int64_t *rows;
    int64_t batch, tokens, channels, taps, before, x_batch, x_token, state_batch;
    int silu, half;
} Convolution;

enum { DELTA_VALUES = 64, SCAN_TOKENS = 16, CHANNELS = 256, TAPS = 16 }; /* what is worked on at a time; taps at most */

/* How a tile is prepared: keys in memory; keys transposed, and values widened; scores computed, and values widened;
 * scores computed, and values in pairs. */
enum { LYING = 0, TURNED = 1, SCORED = 2, LAID = 3 };

typedef struct Scoring Scoring;

/* A thread's workspace: rows of queries with their sums, and a tile of keys and values. With a `scoring` also queries,
 * keys and values packed in pairs, scores [ROWS, KEYS], and sums of lanes. */
typedef struct {
    float *q, *out, *peak, *sum, *keys, *values, *turned, *weights[MANY], *scores, *lanes;
    const void *key[KEYS], *value[KEYS]; /* floats, or the type in memory: see `fetch` */
    const uint16_t *query[ROWS];
    uint32_t *query_pairs, *key_pairs, *value_pairs;
    const Scoring *scoring;
    int exact; /* the number of rows, from the first, whose weights are not rounded */
} Scratch;

/* Scores of many rows by bfloat16 instructions, with the bits of float32. A thread calls `begin`, if there is one,
 * before all rows of a width, and `end` after them. `lay_queries`, `score` and `lay_values` return 0 if float32 must be
 * used. `add` multiplies packed values with rounded weights, for widths that are multiples of 16. */
struct Scoring {
    void (*begin)(int64_t width);
    void (*end)(void);
    int (*lay_queries)(int64_t width, int rows, Scratch *s);
    int (*score)(int64_t width, int rows, int low, int high, const int *from, const int *until, Scratch *s);
    int (*lay_values)(int64_t width, int low, int high, Scratch *s);
    void (*add)(int64_t width, const float *const *weights, int low, int high, float *const *out, const Scratch *s);
};

typedef void (*Share)(void *job);
typedef void (*Parallel)(Share share, void *job, unsigned threads, unsigned flags);

#endif

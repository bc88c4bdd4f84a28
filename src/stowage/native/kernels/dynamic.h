/* Inputs rounded to 8 bits in blocks of 32, and weights in block formats as whole numbers (dynamic quantization).
 *
 * A block of inputs has a scale, its largest size / 127, and whole numbers from -127 to 127. One of weights has codes of
 * 8 bits without a sign, which are its numbers and a `bias`, times a scale; or codes times a scale and a least value. The
 * products of a block are added as whole numbers, which is exact. Blocks are added in float32, of every fourth one in
 * their order, and these four sums then; no product is fused with a sum. So all instructions give the same bits.
 */
#ifndef STOWAGE_ENGINE_DYNAMIC_H
#define STOWAGE_ENGINE_DYNAMIC_H

#include "super_blocks.h"

enum { DYNAMIC_BLOCK = 32, DYNAMIC_GROUP = 128, DYNAMIC_ROWS = 512 }; /* rows that are rounded at a time */

/* BIASED: codes less a bias. LEAST: and a least value. TWO: as BIASED; the first 16 weights have their own scale. */
typedef enum { DYNAMIC_NONE = 0, BIASED = 1, LEAST = 2, TWO = 3 } DynamicKind;

/* Four blocks of a row's inputs; `codes`: the first 16 of each, then the others. */
typedef struct {
    int8_t codes[2][64];
    float scale[4];
    int32_t less[4];       /* the sum of a block, times less than nothing the bias */
    float sum[4];          /* the sum times the scale */
    int32_t first_less[4]; /* `less` of the first 16 */
} DynamicInputs;

/* What becomes of a format's blocks, and their bias. */
static const struct {
    DynamicKind kind;
    int bias;
} dynamic_formats[FORMATS_END + 1] = {
    [PLAIN] = {BIASED, 128}, [Q8_0] = {BIASED, 128}, [Q4_0] = {BIASED, 8}, [Q4_1] = {LEAST, 0}, [Q5_0] = {BIASED, 16},
    [Q5_1] = {LEAST, 0}, [Q4_K] = {LEAST, 0}, [Q5_K] = {LEAST, 0}, [Q6_K] = {TWO, 32}, [MXFP4_BLOCK] = {BIASED, 12},
    [MXFP4] = {BIASED, 12}, [INT4_WORDS] = {BIASED, 8}, [GPTQ] = {LEAST, 0}, [AWQ] = {LEAST, 0},
    [PACKED4] = {LEAST, 0}};

static inline DynamicKind dynamic_kind(const Linear *job)
{
    return job->format == INT4_WORDS && job->zeros != NULL ? LEAST : dynamic_formats[job->format].kind;
}

static inline int dynamic_bias(const Linear *job)
{
    return dynamic_kind(job) == LEAST ? 0 : dynamic_formats[job->format].bias;
}

static inline int64_t dynamic_groups(int64_t inputs)
{
    return (inputs + DYNAMIC_GROUP - 1) / DYNAMIC_GROUP;
}

/* Twice the number that a code of FP4 means, and a bias of 12. */
static const uint8_t dynamic_fp4[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

/* The number of `i` of a block in a row's inputs. */
static inline int8_t *dynamic_code(DynamicInputs *x, int64_t k)
{
    return &x[k / DYNAMIC_GROUP].codes[k % 32 / 16][k % DYNAMIC_GROUP / 32 * 16 + k % 16];
}

/* What is left to say of a block whose codes are there. `peak`: the bits of its largest size. */
static inline void dynamic_finish(DynamicInputs *to, int at, int32_t peak, int first, int second, int bias)
{
    to->scale[at] = peak >= 0x7f800000 ? NAN : peak < 0x10000000 ? 0 : float_of((uint32_t)peak) / 127;
    to->less[at] = -bias * (first + second);
    to->first_less[at] = -bias * first;
    to->sum[at] = to->scale[at] * (float)(first + second);
}

/* A row of `inputs` numbers, of bfloat16 if `half`, else float32, rounded. Blocks beyond them are zeros, and so are those
 * whose sizes are below 2^-95: their scale would be no normal number. */
static void dynamic_round(const void *from, int half, int64_t inputs, int bias, DynamicInputs *to)
{
    for (int64_t k = 0; k < dynamic_groups(inputs) * DYNAMIC_GROUP; k += DYNAMIC_BLOCK) {
        float values[DYNAMIC_BLOCK];
        int32_t peak = 0;
        int sums[2] = {0, 0};
        for (int i = 0; i < DYNAMIC_BLOCK; i++) {
            uint32_t bits = 0;
            if (k + i < inputs && half)
                bits = (uint32_t)((const uint16_t *)from)[k + i] << 16;
            else if (k + i < inputs)
                memcpy(&bits, (const float *)from + k + i, 4);
            values[i] = float_of(bits);
            int32_t size = (int32_t)(bits & 0x7fffffff);
            peak = size > peak ? size : peak;
        }
        int zero = peak < 0x10000000 || peak >= 0x7f800000;
        float inverse = zero ? 0 : 127 / float_of((uint32_t)peak);
        for (int i = 0; i < DYNAMIC_BLOCK; i++) {
            float scaled = values[i] * inverse;
            SETTLE(scaled);
            int code = zero ? 0 : (int)lrintf(scaled);
            sums[i / 16] += code;
            *dynamic_code(to, k + i) = (int8_t)code;
        }
        dynamic_finish(to + k / DYNAMIC_GROUP, (int)(k % DYNAMIC_GROUP / 32), peak, sums[0], sums[1], bias);
    }
}

/* 32 codes of 4 bits in 16 bytes, low halves before high ones, with fifth bits. */
static inline ALWAYS void dynamic_halves(const uint8_t *from, uint32_t high, uint8_t *to)
{
    for (int i = 0; i < 16; i++) {
        to[i] = (uint8_t)((from[i] & 15) | (high >> i & 1) << 4);
        to[i + 16] = (uint8_t)(from[i] >> 4 | (high >> (i + 16) & 1) << 4);
    }
}

/* The format is known where this is compiled: a loop that looks at it is slower. */
static inline ALWAYS void dynamic_codes_of(int format, const Coded *row, int64_t k, uint8_t *codes)
{
    for (int i = 0; i < 32; i++)
        codes[i] = (uint8_t)code_of(format, row, k, i);
}

static inline const uint8_t *dynamic_block(int format, const Coded *row, int64_t k)
{
    return row->w + k / (format < Q2_K ? 32 : 256) * block_bytes_of[format];
}

/* Of a group of inputs of a format whose scales lie apart: its scale, and least value. */
static inline void dynamic_scale_of_group(const Linear *job, const Coded *row, int64_t group, float *scale, float *more)
{
    if (job->format == PACKED4) {
        *scale = read_half(row->scales + 2 * group);
        *more = read_half(row->zeros + 2 * group);
    } else { /* INT4_WORDS, GPTQ, AWQ */
        *scale = scale_of(row, group);
        *more = dynamic_kind(job) == LEAST ? -(zero_of(row, group) * *scale) : 0;
    }
}

/* Of block `k / 32` of an output's row: its scale, and least value or second scale. Compiled where it is called: one instruction
 * for short vectors among those for long ones takes a hundred times its time. */
static inline ALWAYS void dynamic_scale(const Linear *job, const Coded *row, int64_t k, float *scale, float *more)
{
    int j = (int)(k % 256 / 32);
    const uint8_t *block = dynamic_block(job->format, row, k);
    float scales[16];
    *more = 0;
    switch (job->format) {
    case PLAIN:
        *scale = scale_of(row, 0);
        return;
    case Q4_1:
    case Q5_1:
        *more = read_half(block + 2); /* fall through */
    case Q8_0:
    case Q4_0:
    case Q5_0:
    case IQ4_NL:
        *scale = read_half(block);
        return;
    case Q4_K:
    case Q5_K:
        scales_k(block, scales);
        *scale = scales[j];
        *more = -scales[8 + j];
        return;
    case Q6_K:
        *scale = read_half(block + 208) * (float)(int8_t)block[192 + 2 * j];
        *more = read_half(block + 208) * (float)(int8_t)block[193 + 2 * j];
        return;
    case IQ4_XS:
        scales_iq4_xs(block, scales);
        *scale = scales[2 * j];
        return;
    case MXFP4_BLOCK:
        *scale = power_of(block[0]) * 0.5f;
        return;
    case MXFP4:
        *scale = scale_of(row, k / 32) * 0.5f;
        return;
    case NVFP4:
        *scale = scale_of(row, k / 16) * 0.5f;
        *more = scale_of(row, k / 16 + 1) * 0.5f;
        return;
    default:
        dynamic_scale_of_group(job, row, k / row->group, scale, more);
    }
}

/* Its codes. */
static void dynamic_codes(const Linear *job, const Coded *row, int64_t k, uint8_t codes[32])
{
    int j = (int)(k % 256 / 32);
    const uint8_t *block = dynamic_block(job->format, row, k);
    switch (job->format) {
    case PLAIN:
    case Q8_0:
        for (int i = 0; i < 32; i++)
            codes[i] = (job->format == PLAIN ? row->w[k + i] : block[2 + i]) ^ 128;
        return;
    case Q4_0:
        dynamic_halves(block + 2, 0, codes);
        return;
    case Q4_1:
        dynamic_halves(block + 4, 0, codes);
        return;
    case Q5_0:
        dynamic_halves(block + 6, read_word(block + 2), codes);
        return;
    case Q5_1:
        dynamic_halves(block + 8, read_word(block + 4), codes);
        return;
    case Q4_K:
        codes_q4_k(block, j, (int8_t *)codes);
        return;
    case Q5_K:
        codes_q5_k(block, j, (int8_t *)codes);
        return;
    case Q6_K:
        for (int i = 0; i < 32; i++)
            codes[i] = (uint8_t)((block[j / 4 * 64 + j % 2 * 32 + i] >> j % 4 / 2 * 4 & 15)
                                 | (block[128 + j / 4 * 32 + i] >> j % 4 * 2 & 3) << 4);
        return;
    case MXFP4_BLOCK:
        dynamic_halves(block + 1, 0, codes);
        for (int i = 0; i < 32; i++)
            codes[i] = dynamic_fp4[codes[i]];
        return;
    case MXFP4:
        for (int i = 0; i < 32; i++)
            codes[i] = dynamic_fp4[code_of(MXFP4, row, k, i)];
        return;
    case PACKED4:
        dynamic_codes_of(PACKED4, row, k, codes);
        return;
    case INT4_WORDS:
        dynamic_codes_of(INT4_WORDS, row, k, codes);
        return;
    case GPTQ:
        dynamic_codes_of(GPTQ, row, k, codes);
        return;
    default:
        dynamic_codes_of(AWQ, row, k, codes);
    }
}

/* Format, its name here, bytes of so many groups of four blocks, what its codes are, and how large: below 16, such that
 * eight of them times inputs are below 2^15, or larger. HERE: scales are in the blocks. LAID: they are laid out before.
 * TURNS: these too, and a byte's halves are neighbours; for few rows inputs are turned instead, and codes at even
 * places are the first 16. */
enum { SIGNED = 3 /* of whole numbers */, SMALL = 2, MEDIUM = 1, LARGE = 0 };
#define DYNAMIC_BEGINS(OF)                                                                                             \
    OF(Q8_0, q8_0, 4 * bytes_q8_0, 1, BIASED, LARGE)                                                                   \
    OF(Q4_0, q4_0, 4 * bytes_q4_0, 1, BIASED, SMALL)                                                                   \
    OF(Q4_1, q4_1, 4 * bytes_q4_1, 1, LEAST, SMALL)                                                                    \
    OF(Q5_0, q5_0, 4 * bytes_q5_0, 1, BIASED, MEDIUM)                                                                  \
    OF(Q5_1, q5_1, 4 * bytes_q5_1, 1, LEAST, MEDIUM)
#define DYNAMIC_SUPER(OF)                                                                                              \
    OF(Q4_K, q4_k, bytes_q4_k, 2, LEAST, SMALL)                                                                        \
    OF(Q5_K, q5_k, bytes_q5_k, 2, LEAST, MEDIUM)                                                                       \
    OF(Q6_K, q6_k, bytes_q6_k, 2, TWO, MEDIUM)
#define DYNAMIC_FP4_BLOCK(OF) OF(MXFP4_BLOCK, mxfp4_block, 4 * bytes_mxfp4_block, 1, BIASED, MEDIUM)
#define DYNAMIC_HERE(OF) DYNAMIC_BEGINS(OF) DYNAMIC_SUPER(OF) DYNAMIC_FP4_BLOCK(OF)
#define DYNAMIC_LAID(OF) OF(PLAIN, plain, 128, 1, BIASED, LARGE) DYNAMIC_PACKED4(OF)
#define DYNAMIC_PACKED4(OF)                                                                                            \
    OF(PACKED4, packed4, 128, 1, LEAST, SMALL)                                                                         \
    OF(FORMATS_END, packed4_high, 128, 1, LEAST, SMALL)
#define DYNAMIC_IN_TURN(OF) OF(MXFP4, mxfp4, 64, 1, BIASED, MEDIUM) OF(INT4_WORDS, int4, 64, 1, BIASED, SMALL)
#define DYNAMIC_TURNS(OF) DYNAMIC_IN_TURN(OF) OF(GPTQ, int4_least, 64, 1, LEAST, SMALL)

#endif

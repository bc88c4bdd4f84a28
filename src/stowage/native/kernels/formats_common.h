/* Block formats (weights/quantized/formats.py) without vector instructions: the addresses of a row's codes, scales and
 * zero points, and the values of single ones. */
#ifndef STOWAGE_ENGINE_FORMATS_COMMON_H
#define STOWAGE_ENGINE_FORMATS_COMMON_H

#include "kernel.h"

/* Those of E4M3 are times a row's global scale, or divided by it. */
enum { SCALES_F32 = 0, SCALES_F16 = 1, SCALES_BF16 = 2, SCALES_E8M0 = 3, SCALES_TIMES = 4, SCALES_DIVIDED = 5 };
static const int scale_bytes[] = {[SCALES_F32] = 4, [SCALES_F16] = 2, [SCALES_BF16] = 2, [SCALES_E8M0] = 1,
                                  [SCALES_TIMES] = 1, [SCALES_DIVIDED] = 1};

/* From Q2_K on in blocks of 256. */
#define ALL_FORMATS(OF)                                                                                                \
    OF(Q8_0, q8_0), OF(Q4_0, q4_0), OF(Q4_1, q4_1), OF(Q5_0, q5_0), OF(Q5_1, q5_1), OF(IQ4_NL, iq4_nl),                \
        OF(MXFP4_BLOCK, mxfp4_block), OF(F32, f32), OF(F16, f16), OF(BF16, bf16), OF(MXFP4, mxfp4), OF(FP8, fp8),      \
        OF(INT4_WORDS, int4), OF(GPTQ, gptq), OF(AWQ, awq), OF(PACKED4, packed4), OF(NVFP4, nvfp4), OF(S8, s8),        \
        OF(U8, u8), OF(Q2_K, q2_k), OF(Q3_K, q3_k), OF(Q4_K, q4_k), OF(Q5_K, q5_k), OF(Q6_K, q6_k), OF(IQ4_XS, iq4_xs),                                            \
        OF(IQ2_XXS, iq2_xxs), OF(IQ2_XS, iq2_xs), OF(IQ2_S, iq2_s), OF(IQ3_XXS, iq3_xxs), OF(IQ3_S, iq3_s),            \
        OF(IQ1_S, iq1_s), OF(IQ1_M, iq1_m), OF(TQ1_0, tq1_0), OF(TQ2_0, tq2_0), OF(Q1_0, q1_0)
#define OF(FORMAT, format) FORMAT
enum { PLAIN = 0 /* of the job's form */, ALL_FORMATS(OF), FORMATS_END,
       INPUTS_FIRST = FORMATS_END /* as PLAIN; rows of `w_row` numbers are those of inputs */ };

/* Bytes of a block of 32 inputs that has its scale in it. */
#define BLOCKS_OF_32(OF)                                                                                               \
    OF(Q8_0, q8_0, 34) OF(Q4_0, q4_0, 18) OF(IQ4_NL, iq4_nl, 18) OF(Q4_1, q4_1, 20) OF(Q5_0, q5_0, 22) OF(Q5_1, q5_1, 24) \
    OF(MXFP4_BLOCK, mxfp4_block, 17)

/* The distance of rows that are dequantized for a multiplication. */
static inline int64_t laid_stride(const Linear *job)
{
    return (job->inputs + 31) / 32 * 32 + 32;
}

/* Multiplies with outputs [begin, end): `lay` dequantizes up to `most` at a time to numbers of `size` bytes, in rows
 * with the distance of its last argument, and `work` multiplies. Returns 0 if there is no memory. */
static inline int multiply_laid(const Linear *job, int64_t begin, int64_t end, int64_t size, int64_t most,
                                void (*lay)(const Linear *, int64_t, int64_t, char *, int64_t),
                                void (*work)(const Linear *, int64_t, int64_t))
{
    int64_t stride = laid_stride(job);
    char *laid = aligned_alloc(64, (size_t)(most * stride * size));
    if (laid == NULL)
        return 0;
    for (int64_t first = begin, wide; first < end; first += wide) {
        wide = end - first < most ? end - first : most;
        lay(job, first, wide, laid, stride * size);
        Linear plain = *job;
        plain.format = PLAIN;
        plain.w = laid;
        plain.w_row = stride;
        plain.y = (char *)job->y + first * (job->narrow ? 2 : 4);
        work(&plain, 0, wide);
    }
    free(laid);
    return 1;
}
#undef OF

/* One output's row. Scale i is at index `i * scale_step`; its zero point in nibble `zero_shift` of the word at `i *
 * zero_step`, less `zero_from`; without zero points it is 8. `whole`: the global scale of NVFP4. */
typedef struct {
    const uint8_t *w, *scales, *zeros;
    int64_t group, across, scale_step, zero_step;
    int kind, shift, zero_shift;
    uint32_t zero_more;
    float whole;
} Coded;

static const float fp4_values[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -.5f, -1, -1.5f, -2, -3, -4, -6};
#define GPTQ_MORE 0x11111111u /* to a word of zero points: see _gptq in weights/quantized/formats.py */
static const int awq_nibbles[8] = {0, 4, 1, 5, 2, 6, 3, 7}; /* of outputs 0 to 7 of eight */

static inline uint16_t read_short(const uint8_t *from)
{
    uint16_t value;
    memcpy(&value, from, sizeof value);
    return value;
}

static inline uint32_t read_word(const uint8_t *from)
{
    uint32_t value;
    memcpy(&value, from, sizeof value);
    return value;
}

static inline float read_half(const uint8_t *from)
{
    return half_float(read_short(from));
}

static inline float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* 2^(e - 127); 255 is no number. */
static inline float power_of(uint8_t e)
{
    return float_of((uint32_t)e << 23 | (uint32_t)(e == 0 || e == 255) << 22);
}

/* A float of 8 bits (e4m3, no infinities). */
static inline float fp8_value(uint8_t code)
{
    float size = float_of((uint32_t)(code & 0x7f) << 20) * 0x1p120f;
    if ((code & 0x7f) == 0x7f)
        size = NAN;
    return code & 0x80 ? -size : size;
}

/* Scales of the eight parts of a block of 256, and behind them their least values, negated: two halves, and twelve
 * bytes with eight pairs of numbers of 6 bits. */
static inline void scales_k(const uint8_t *block, float scales[16])
{
    float scale = read_half(block), least = read_half(block + 2);
    const uint8_t *bits = block + 4;
    for (int j = 0; j < 4; j++) {
        scales[j] = scale * (float)(bits[j] & 63);
        scales[8 + j] = least * (float)(bits[4 + j] & 63);
        scales[4 + j] = scale * (float)((bits[8 + j] & 15) | bits[j] >> 6 << 4);
        scales[12 + j] = least * (float)(bits[8 + j] >> 4 | bits[4 + j] >> 6 << 4);
    }
}

static inline float scale_of(const Coded *row, int64_t i)
{
    i *= row->scale_step;
    switch (row->kind) {
    case SCALES_F16:
        return read_half(row->scales + 2 * i);
    case SCALES_BF16:
        return float_of((uint32_t)read_short(row->scales + 2 * i) << 16);
    case SCALES_E8M0:
        return power_of(row->scales[i]);
    case SCALES_TIMES:
        return fp8_value(row->scales[i]) * row->whole;
    case SCALES_DIVIDED:
        return fp8_value(row->scales[i]) / row->whole;
    default:
        return float_of(read_word(row->scales + 4 * i));
    }
}

static inline float zero_of(const Coded *row, int64_t i)
{
    if (row->zeros == NULL)
        return 8;
    return (float)((read_word(row->zeros + 4 * i * row->zero_step) + row->zero_more) >> row->zero_shift & 15);
}

/* Code k + i of 4 bits of a format whose scales lie apart; k is a multiple of eight. Of GPTQ and AWQ an output's codes
 * lie `across` bytes apart. */
static inline ALWAYS int code_of(int format, const Coded *row, int64_t k, int i)
{
    switch (format) {
    case GPTQ:
        return read_word(row->w + (k + i) / 8 * row->across) >> i % 8 * 4 & 15;
    case AWQ:
        return read_word(row->w + (k + i) * row->across) >> row->shift & 15;
    case PACKED4:
        return k + i < row->across ? row->w[k + i] & 15 : row->w[k + i - row->across] >> 4;
    default: /* MXFP4, NVFP4, INT4_WORDS */
        return row->w[(k + i) / 2] >> i % 2 * 4 & 15;
    }
}

/* Whether the codes of an input are contiguous, instead of those of an output. */
static inline int lies_by_inputs(const Linear *job)
{
    return job->format == GPTQ || job->format == AWQ;
}

static inline Coded coded_row(const Linear *job, int64_t n)
{
    int64_t eighth = job->outputs / 8, groups = 0;
    if (job->scales != NULL) /* divisions take noticeable time where rows are short */
        groups = (int64_t)((uint32_t)(job->inputs + job->group - 1) / (uint32_t)job->group);
    Coded row = {.w = (const uint8_t *)job->w + n * job->w_row, .scales = job->scales, .zeros = job->zeros,
                 .group = job->group, .kind = job->kind, .scale_step = 1, .zero_step = 1,
                 .zero_shift = (int)(n % 8) * 4};
    if (lies_by_inputs(job)) {
        int awq = job->format == AWQ;
        row.across = 4 * (awq ? eighth : job->outputs);
        row.w = (const uint8_t *)job->w + 4 * (awq ? n / 8 : n);
        row.scale_step = job->outputs;
        row.scales += n * scale_bytes[job->kind];
        row.zeros += n / 8 * 4;
        row.zero_step = eighth;
        row.shift = row.zero_shift = 4 * (awq ? awq_nibbles[n % 8] : (int)(n % 8));
        row.zero_more = awq ? 0 : GPTQ_MORE;
    } else if (job->format == PACKED4) { /* zero points are what is added */
        row.across = job->inputs / 2;
        row.scales += n * groups * 2;
        row.zeros += n * groups * 2;
    } else if (job->format == NVFP4) {
        row.scales += n * groups;
        row.whole = float_of(read_word(row.zeros + n / job->tall * 4));
    } else if (job->scales != NULL) {
        row.scales += (job->tall == 1 ? n : n / job->tall) * groups * scale_bytes[job->kind];
        row.zeros += job->zeros != NULL ? n / 8 * groups * 4 : 0;
    }
    return row;
}

#endif

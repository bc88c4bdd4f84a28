/* ggml's blocks of 256 values, which are whole numbers times scales: each 16 of them have one, and in some formats a
 * value that is added then. A part of a block is 32 values. */
#ifndef STOWAGE_ENGINE_SUPER_BLOCKS_H
#define STOWAGE_ENGINE_SUPER_BLOCKS_H

#include "formats_common.h"

/* Format, its name here, bytes of a block; then as in coded.h. */
#define I_QUANTS(OF)                                                                                                   \
    OF(IQ2_XXS, iq2_xxs, 66, 16, 8, 1) OF(IQ2_XS, iq2_xs, 74, 16, 8, 1) OF(IQ2_S, iq2_s, 82, 16, 8, 1)                 \
    OF(IQ3_XXS, iq3_xxs, 98, 16, 8, 1) OF(IQ3_S, iq3_s, 110, 16, 8, 1) OF(IQ1_S, iq1_s, 50, 16, 8, 1)                  \
    OF(IQ1_M, iq1_m, 56, 16, 8, 1)
/* Codes of one number and two signs, or of two signs alone; blocks of the last are pairs of its own, of 128. */
#define SIGNS(OF) OF(TQ1_0, tq1_0, 54, 16, 8, 1) OF(TQ2_0, tq2_0, 66, 16, 8, 1) OF(Q1_0, q1_0, 36, 16, 8, 1)
#define SUPER_BLOCKS(OF)                                                                                               \
    OF(Q2_K, q2_k, 84, 32, 8, 1) OF(Q3_K, q3_k, 110, 16, 8, 1) OF(Q4_K, q4_k, 144, 16, 4, 2)                           \
    OF(Q5_K, q5_k, 176, 16, 4, 2) OF(Q6_K, q6_k, 210, 16, 8, 1) OF(IQ4_XS, iq4_xs, 136, 16, 8, 1) I_QUANTS(OF) SIGNS(OF)

#define OF(FORMAT, format, BYTES, ...) bytes_##format = BYTES,
enum { BLOCKS_OF_32(OF) SUPER_BLOCKS(OF) };
#undef OF
#define OF(FORMAT, format, ...) [FORMAT] = bytes_##format,
static const int block_bytes_of[FORMATS_END] = {BLOCKS_OF_32(OF) SUPER_BLOCKS(OF)};
#undef OF

static const int8_t not_linear[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

/* Number i of part j. */
#define CODES(format, CODE)                                                                                            \
    static inline ALWAYS void codes_##format(const uint8_t *block, int j, int8_t *to)                                  \
    {                                                                                                                  \
        for (int i = 0; i < 32; i++)                                                                                   \
            to[i] = (int8_t)(CODE);                                                                                    \
    }
CODES(q2_k, block[16 + j / 4 * 32 + i] >> j % 4 * 2 & 3)
CODES(q3_k, ((block[32 + j / 4 * 32 + i] >> j % 4 * 2 & 3) | (block[i] >> j & 1) << 2) - 4)
CODES(q4_k, block[16 + j / 2 * 32 + i] >> j % 2 * 4 & 15)
CODES(q5_k, (block[48 + j / 2 * 32 + i] >> j % 2 * 4 & 15) | (block[16 + i] >> j & 1) << 4)
CODES(q6_k, ((block[j / 4 * 64 + j % 2 * 32 + i] >> j % 4 / 2 * 4 & 15) |
             (block[128 + j / 4 * 32 + i] >> j % 4 * 2 & 3) << 4) - 32)
CODES(tq2_0, (block[j / 4 * 32 + i] >> j % 4 * 2 & 3) - 1)
CODES(q1_0, (block[j / 4 * 18 + 2 + j % 4 * 4 + i / 8] >> i % 8 & 1) * 2 - 1)
#undef CODES

/* Five codes in a byte: each is the highest digit, to the base of three, of what is left of it as a fraction of 256. */
static inline ALWAYS void codes_tq1_0(const uint8_t *block, int j, int8_t *to)
{
    static const uint8_t powers[5] = {1, 3, 9, 27, 81};
    for (int i = 0; i < 32; i++) {
        int at = 32 * j + i, last = at >= 240;
        int byte = j < 5 ? i : last ? 48 + i % 4 : 32 + i % 16, digit = j < 5 ? j : last ? (at - 240) / 4 : (at - 160) / 16;
        to[i] = (int8_t)(((uint8_t)(block[byte] * powers[digit]) * 3 >> 8) - 1);
    }
}

/* What codes of IQ4 mean, of which 16 bytes have two each. */
static inline ALWAYS void codes_iq4(const uint8_t *from, int8_t *to)
{
#if defined(__GNUC__) && !defined(__clang__)
    typedef uint8_t Sixteen __attribute__((vector_size(16)));
    Sixteen table, codes, halves[2];
    memcpy(&table, not_linear, sizeof table);
    memcpy(&codes, from, sizeof codes);
    halves[0] = __builtin_shuffle(table, codes & 15); /* one instruction, where there is one */
    halves[1] = __builtin_shuffle(table, codes >> 4);
    memcpy(to, halves, sizeof halves);
#else
    for (int i = 0; i < 32; i++)
        to[i] = not_linear[from[i % 16] >> i / 16 * 4 & 15];
#endif
}

static inline ALWAYS void codes_iq4_xs(const uint8_t *block, int j, int8_t *to)
{
    codes_iq4(block + 8 + 16 * j, to);
}

/* What i-quants look up, as weights/quantized/i_quants.py makes it; zeros until then. Eight values, or four, have a
 * code, and signs: bytes that are 255 where a value is negated. */
static struct {
    uint64_t signs[256], signs_7[128], iq2_xxs[256], iq2_xs[512], iq2_s[1024];
    uint32_t iq3_xxs[256], iq3_s[512];
    uint64_t iq1[4096];
} grids;

#define EIGHT(format, VALUES, SIGNS)                                                                                   \
    static inline ALWAYS uint64_t values_##format(const uint8_t *block, int i) { return VALUES; }                      \
    static inline ALWAYS uint64_t signs_##format(const uint8_t *block, int i) { return (void)block, (void)i, SIGNS; }  \
    static inline ALWAYS void codes_##format(const uint8_t *block, int j, int8_t *to)                                  \
    {                                                                                                                  \
        for (int i = 0; i < 4; i++) {                                                                                  \
            uint64_t values = values_##format(block, 4 * j + i), signs = signs_##format(block, 4 * j + i);             \
            values = (values ^ signs) + (signs & 0x0101010101010101); /* none is zero, so bytes stay apart */          \
            memcpy(to + 8 * i, &values, sizeof values);                                                                \
        }                                                                                                              \
    }
#define FOURS(GRID, FIRST, SECOND) (grids.GRID[FIRST] | (uint64_t)grids.GRID[SECOND] << 32)
EIGHT(iq2_xxs, grids.iq2_xxs[block[2 + i / 4 * 8 + i % 4]],
      grids.signs_7[read_word(block + 6 + i / 4 * 8) >> i % 4 * 7 & 127])
EIGHT(iq2_xs, grids.iq2_xs[read_short(block + 2 + 2 * i) & 511], grids.signs_7[read_short(block + 2 + 2 * i) >> 9])
EIGHT(iq2_s, grids.iq2_s[block[2 + i] | (block[66 + i / 4] >> i % 4 * 2 & 3) << 8], grids.signs[block[34 + i]])
EIGHT(iq3_xxs, FOURS(iq3_xxs, block[2 + 2 * i], block[3 + 2 * i]),
      grids.signs_7[read_word(block + 66 + i / 4 * 4) >> i % 4 * 7 & 127])
EIGHT(iq3_s, FOURS(iq3_s, block[2 + 2 * i] | (block[66 + i / 4] >> i % 4 * 2 & 1) << 8,
                   block[3 + 2 * i] | (block[66 + i / 4] >> (i % 4 * 2 + 1) & 1) << 8), grids.signs[block[74 + i]])
EIGHT(iq1_s, grids.iq1[block[2 + i] | (read_short(block + 34 + i / 4 * 2) >> i % 4 * 3 & 7) << 8 |
                       block[35 + i / 4 * 2] >> 7 << 11], 0)
EIGHT(iq1_m, grids.iq1[block[i] | (block[32 + i / 2] >> i % 2 * 4 & 15) << 8], 0)
#undef EIGHT
#undef FOURS

static inline float half_of_iq1_m(const uint8_t *block)
{
    int half = block[49] >> 4 | (block[51] & 0xf0) | (block[53] & 0xf0) << 4 | (block[55] & 0xf0) << 8;
    return half_float((uint16_t)half);
}

/* Scale j: a half, times the sum of a number and a whole one, which is in a WORD at an offset, or in one of WORDS. In
 * vectors, where there are all j at once, they are those of coded_scales.h. */
#define SUPER_SCALES(OF)                                                                                               \
    OF(q3_k, read_half(block + 108), -32, (WORDS(96, 2, j % 8 / 4) >> (j % 4 * 8 + j / 8 * 4) & 15) |                  \
                                              (WORD(104) >> (j % 4 * 8 + j / 4 * 2) & 3) << 4)                         \
    OF(q6_k, read_half(block + 208), -128, (WORDS(192, 4, j / 4) >> j % 4 * 8 & 255) ^ 128)                            \
    OF(iq4_xs, read_half(block), -32, (WORD(4) >> j / 2 * 4 & 15) | (WORD(2) >> j / 2 * 2 & 3) << 4)                   \
    OF(iq2_xxs, read_half(block) / 4, .5f, WORDS(2, 16, j / 2 * 2 + 1) >> 28)                                          \
    OF(iq2_xs, read_half(block) / 4, .5f, WORDS(66, 2, j / 8) >> j % 8 * 4 & 15)                                       \
    OF(iq2_s, read_half(block) / 4, .5f, WORDS(74, 2, j / 8) >> j % 8 * 4 & 15)                                        \
    OF(iq3_xxs, read_half(block) / 2, .5f, WORDS(66, 8, j / 2) >> 28)                                                  \
    OF(iq3_s, read_half(block) * 2, .5f, WORD(106) >> j / 2 * 4 & 15)                                                  \
    OF(iq1_s, read_half(block) / 4, .5f, WORDS(34, 4, j / 4) >> (j / 2 % 2 * 16 + 12) & 7)                             \
    OF(iq1_m, half_of_iq1_m(block) / 4, .5f, WORDS(48, 2, j / 8) >> (j / 4 % 2 * 16 + j % 4 * 3) & 7)         \
    OF(tq1_0, read_half(block + 52), 1, j & 0)                                                                         \
    OF(tq2_0, read_half(block + 64), 1, j & 0)
#define WORD(OFFSET) read_word(block + OFFSET)
#define WORDS(OFFSET, COUNT, INDEX) read_word(block + OFFSET + 4 * (INDEX))
#define OF(format, SCALE, ADDED, NUMBER)                                                                               \
    static inline ALWAYS void scales_##format(const uint8_t *block, float *to)                                         \
    {                                                                                                                  \
        float scale = SCALE;                                                                                           \
        for (uint32_t j = 0; j < 16; j++)                                                                              \
            to[j] = scale * ((float)(int)(NUMBER) + ADDED);                                                            \
    }
SUPER_SCALES(OF)
#undef OF
#undef WORD
#undef WORDS

static inline ALWAYS void scales_q2_k(const uint8_t *block, float *to)
{
    float scale = read_half(block + 80), least = -read_half(block + 82), own[32];
    for (int j = 0; j < 16; j++) {
        own[j] = scale * (float)(block[j] & 15);
        own[16 + j] = least * (float)(block[j] >> 4);
    }
    memcpy(to, own, sizeof own);
}

static inline ALWAYS void scales_q4_k(const uint8_t *block, float *to)
{
    float own[16];
    scales_k(block, own);
    for (int j = 0; j < 16; j++) {
        to[j] = own[j / 2];
        to[16 + j] = -own[8 + j / 2];
    }
}
#define scales_q5_k scales_q4_k

static inline ALWAYS void scales_q1_0(const uint8_t *block, float *to)
{
    for (int j = 0; j < 16; j++)
        to[j] = read_half(block + j / 8 * 18);
}

#endif

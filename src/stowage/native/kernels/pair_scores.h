/* Scores of many rows and keys in bfloat16 by products of pairs (AVX512_BF16), with the bits of attention_scores.h.
 *
 * A product of two numbers of bfloat16 is exact in float32. VDPBF16PS adds the product of a pair's odd numbers to its sum
 * and rounds, then that of the even ones, and rounds. These are two fused products one after the other, so pairs are laid
 * out as a lane takes them:
 *
 *     floats, lane l:  l, then 16 + l, then 32 + l, then 48 + l, ...
 *     pairs:           (16 + l, l), then (48 + l, 32 + l), ...          (even, odd)
 *
 * Only numbers below the normal ones differ, which are 0 to it. There are none if queries and keys are 0 or between 2^-56
 * and 2^57: then every product, and so every sum, is a multiple of 2^-126, and none overflows. What has other numbers is
 * left to floats. Whether a processor really adds up so is tried before it is used (executor/tiles.py).
 */
enum { SIZE_LEAST = 71 << 8, SIZE_END = 184 << 8, SCORES_WIDTH = 1024 }; /* bits of 2^-56 and 2^57, shifted by the sign */


static inline ALWAYS __mmask32 out_of_range(__m512i numbers)
{
    __m512i size = _mm512_slli_epi16(numbers, 1), above = _mm512_sub_epi16(size, _mm512_set1_epi16(SIZE_LEAST));
    return _mm512_mask_cmpge_epu16_mask(_mm512_test_epi16_mask(size, size), above,
                                        _mm512_set1_epi16((short)(SIZE_END - SIZE_LEAST)));
}

static inline ALWAYS __mmask32 of_32(int64_t left)
{
    return left >= 32 ? 0xffffffff : left > 0 ? ((__mmask32)1 << left) - 1 : 0;
}

/* Whether all numbers of a row are in range. */
static inline int in_range(const uint16_t *row, int64_t width)
{
    __mmask32 out = 0;
    for (int64_t k = 0; k < width; k += 32)
        out |= out_of_range(_mm512_maskz_loadu_epi16(of_32(width - k), row + k));
    return out == 0;
}

/* Columns become rows, of 16 by 16 pairs. */
static inline ALWAYS void turn(__m512i v[16])
{
    __m512i pairs[16], fours[16];
    UNROLLED for (int i = 0; i < 8; i++) {
        pairs[2 * i] = _mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]);
        pairs[2 * i + 1] = _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]);
    }
    UNROLLED for (int i = 0; i < 16; i += 4) {
        fours[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
        fours[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
        fours[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
        fours[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
    }
    UNROLLED for (int j = 0; j < 4; j++) {
        __m512i low = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0x44);
        __m512i high = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0xee);
        __m512i low_too = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0x44);
        __m512i high_too = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0xee);
        v[j] = _mm512_shuffle_i32x4(low, low_too, 0x88);
        v[4 + j] = _mm512_shuffle_i32x4(low, low_too, 0xdd);
        v[8 + j] = _mm512_shuffle_i32x4(high, high_too, 0x88);
        v[12 + j] = _mm512_shuffle_i32x4(high, high_too, 0xdd);
    }
}

/* Numbers [32 t, 32 t + 32) of keys [i, i + 16), of those there are, turned: v[p] is pair p, of two numbers of `order`.
 * Numbers from `whole` on count as 0. Which of them are out of range. */
static inline ALWAYS __mmask32 turned_pairs(const Scratch *s, int low, int high, int i, int64_t t, int64_t whole,
                                            __m512i order, __m512i v[16])
{
    __mmask32 there = of_32(whole - 32 * t), out = 0;
    UNROLLED for (int c = 0; c < 16; c++) {
        int is = i + c >= low && i + c < high;
        const uint16_t *key = is ? (const uint16_t *)s->key[i + c] + 32 * t : NULL;
        v[c] = is ? _mm512_maskz_loadu_epi16(there, key) : _mm512_setzero_si512();
        out |= out_of_range(v[c]);
        v[c] = _mm512_permutexvar_epi16(order, v[c]);
    }
    turn(v);
    return out;
}

/* Adds the rest of a width, behind whole lanes, to the scores number by number. */
static void add_rest(int64_t width, int rows, int low, int high, Scratch *s)
{
    for (int64_t e = width / 16 * 16; e < width; e++)
        for (int r = 0; r < rows; r++)
            for (int i = low; i < high; i++) {
                float *sum = s->scores + r * KEYS + i;
                *sum = __builtin_fmaf(avx512_one_b(s->query[r][e]), avx512_one_b(((const uint16_t *)s->key[i])[e]), *sum);
            }
}

static inline int64_t pairs_of(int64_t width) /* that a lane has */
{
    return (width / 16 + 1) / 2;
}

static int pairs_lay_queries(int64_t width, int rows, Scratch *s)
{
    int64_t pairs = pairs_of(width), whole = width / 16 * 16;
    if (whole == 0 || width > SCORES_WIDTH)
        return 0;
    for (int r = 0; r < rows; r++) {
        const uint16_t *q = s->query[r];
        if (!in_range(q, whole))
            return 0;
        for (int64_t t = 0; t < pairs; t++)
            for (int lane = 0; lane < 16; lane++)
                s->query_pairs[(r * 16 + lane) * pairs + t] =
                    (uint32_t)q[32 * t + lane] << 16 | (32 * t + 16 < whole ? q[32 * t + 16 + lane] : 0);
    }
    return 1;
}

/* Pair t of a lane of KEYS keys is at key_pairs + (lane * pairs + t) * KEYS. */
static int pairs_lay_keys(int64_t width, int low, int high, Scratch *s)
{
    int64_t pairs = pairs_of(width);
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i order = _mm512_or_si512(_mm512_slli_epi32(lane, 16), _mm512_add_epi32(lane, _mm512_set1_epi32(16)));
    for (int i = low / 16 * 16; i < high; i += 16)
        for (int64_t t = 0; t < pairs; t++) {
            __m512i v[16];
            if (turned_pairs(s, low, high, i, t, width / 16 * 16, order, v))
                return 0;
            UNROLLED for (int l = 0; l < 16; l++)
                _mm512_store_si512(s->key_pairs + (l * pairs + t) * KEYS + i, v[l]);
        }
    return 1;
}

/* Lanes `lane` and `lane` + 8 of MANY rows and 32 keys, added. */
static inline ALWAYS void pairs_lanes(const uint32_t *const *q, const uint32_t *keys, int64_t pairs, int lane,
                                      __m512 out[MANY][2])
{
    __m512 sums[MANY][2][2];
    UNROLLED for (int r = 0; r < MANY; r++)
        UNROLLED for (int i = 0; i < 4; i++)
            sums[r][i / 2][i % 2] = _mm512_setzero_ps();
    for (int64_t t = 0; t < pairs; t++)
        UNROLLED for (int m = 0; m < 2; m++) {
            int64_t at = (lane + 8 * m) * pairs + t;
            __m512bh low = (__m512bh)_mm512_load_si512(keys + at * KEYS);
            __m512bh high = (__m512bh)_mm512_load_si512(keys + at * KEYS + 16);
            UNROLLED for (int r = 0; r < MANY; r++) {
                __m512bh query = (__m512bh)_mm512_set1_epi32((int)q[r][at]);
                sums[r][0][m] = _mm512_dpbf16_ps(sums[r][0][m], query, low);
                sums[r][1][m] = _mm512_dpbf16_ps(sums[r][1][m], query, high);
            }
        }
    UNROLLED for (int r = 0; r < MANY; r++)
        UNROLLED for (int v = 0; v < 2; v++)
            out[r][v] = _mm512_add_ps(sums[r][v][0], sums[r][v][1]);
}

#define ADD_TO(to, more)                                                                                               \
    UNROLLED for (int r = 0; r < MANY; r++)                                                                            \
        UNROLLED for (int v = 0; v < 2; v++)                                                                           \
            to[r][v] = _mm512_add_ps(to[r][v], more[r][v]);

/* The even lanes of a vector, or (`first` is 1) the odd ones, added. */
static inline ALWAYS void pairs_half(const uint32_t *const *q, const uint32_t *keys, int64_t pairs, int first,
                                     __m512 sums[MANY][2])
{
    __m512 four[MANY][2], more[MANY][2];
    pairs_lanes(q, keys, pairs, first, sums);
    pairs_lanes(q, keys, pairs, first + 4, more);
    ADD_TO(sums, more)
    pairs_lanes(q, keys, pairs, first + 2, four);
    pairs_lanes(q, keys, pairs, first + 6, more);
    ADD_TO(four, more)
    ADD_TO(sums, four)
}

/* MANY rows, of which some may be the same, and 32 keys: lanes are added as in `total`. */
static void pairs_score(const uint32_t *const *q, const uint32_t *keys, int64_t pairs, float *const *to)
{
    __m512 sums[MANY][2], odd[MANY][2];
    pairs_half(q, keys, pairs, 0, sums);
    pairs_half(q, keys, pairs, 1, odd);
    ADD_TO(sums, odd)
    UNROLLED for (int r = 0; r < MANY; r++)
        UNROLLED for (int v = 0; v < 2; v++)
            _mm512_store_ps(to[r] + 16 * v, sums[r][v]);
}
#undef ADD_TO

static int pairs_scores(int64_t width, int rows, int low, int high, const int *from, const int *until, Scratch *s)
{
    int64_t pairs = pairs_of(width);
    if (!pairs_lay_keys(width, low, high, s))
        return 0;
    for (int i = low / 32 * 32; i < high; i += 32)
        for (int row = 0; row < rows; row += MANY) {
            int own = row, seen = 0;
            const uint32_t *q[MANY];
            float *to[MANY];
            for (int r = 0; r < MANY; r++) {
                own = row + r < rows ? row + r : own;
                q[r] = s->query_pairs + own * 16 * pairs;
                to[r] = s->scores + own * KEYS + i;
                seen |= from[own] < i + 32 && until[own] > i;
            }
            if (seen)
                pairs_score(q, s->key_pairs + i, pairs, to);
        }
    add_rest(width, rows, low, high, s);
    return 1;
}

#include "pair_values.h"

static const Scoring by_pairs = {NULL, NULL, pairs_lay_queries, pairs_scores, pairs_lay_values, pairs_add};

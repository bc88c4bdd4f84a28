/* Values weighed by products of pairs (AVX512_BF16), where weights are rounded to bfloat16: with the bits of `add` of
 * attention.h.
 *
 * VDPBF16PS adds the product of a pair's odd numbers first, so these are the earlier key's:
 *
 *     weights of a row:        (key 1, key 0), (key 3, key 2), ...          (even, odd)
 *     values, of two keys:     (1's number 0, 0's number 0), (1's number 1, 0's number 1), ...
 *
 * It takes numbers below the normal ones as 0. There are none: weights are 0 or 2^-30 and more, values are 0 or in the
 * range of pair_scores.h (others are left to floats), and sums that shrink below SUM_LEAST become 0. So all are multiples
 * of 2^-123.
 */

static inline ALWAYS __m512i pairs_sixteen(const uint16_t *from)
{
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
}

/* Keys 2 p and 2 p + 1 of [low, high), of those there are, at value_pairs + p * width. */
static int pairs_lay_values(int64_t width, int low, int high, Scratch *s)
{
    __mmask32 out = 0;
    for (int p = low / 2; 2 * p < high; p++) {
        const uint16_t *odd = 2 * p >= low ? s->value[2 * p] : NULL, *even = 2 * p + 1 < high ? s->value[2 * p + 1] : NULL;
        for (int64_t d = 0; d < width; d += 16) {
            __m512i pairs = odd ? _mm512_slli_epi32(pairs_sixteen(odd + d), 16) : _mm512_setzero_si512();
            if (even)
                pairs = _mm512_or_si512(pairs, pairs_sixteen(even + d));
            out |= out_of_range(pairs);
            _mm512_store_si512(s->value_pairs + p * width + d, pairs);
        }
    }
    return out == 0;
}

#define ADD(W)                                                                                                         \
    for (; d + 16 * W <= width; d += 16 * W) {                                                                         \
        __m512 sums[MANY][W];                                                                                          \
        UNROLLED for (int r = 0; r < MANY; r++)                                                                        \
            UNROLLED for (int j = 0; j < W; j++)                                                                       \
                sums[r][j] = _mm512_loadu_ps(out[r] + d + 16 * j);                                                     \
        for (int p = low / 2; 2 * p < high; p++) {                                                                     \
            __m512bh values[W];                                                                                        \
            UNROLLED for (int j = 0; j < W; j++)                                                                       \
                values[j] = (__m512bh)_mm512_load_si512(s->value_pairs + p * width + d + 16 * j);                      \
            UNROLLED for (int r = 0; r < MANY; r++) {                                                                  \
                __m512bh weight = (__m512bh)_mm512_set1_epi32((int)pairs[r][p]);                                       \
                UNROLLED for (int j = 0; j < W; j++)                                                                   \
                    sums[r][j] = _mm512_dpbf16_ps(sums[r][j], weight, values[j]);                                      \
            }                                                                                                          \
        }                                                                                                              \
        UNROLLED for (int r = 0; r < MANY; r++)                                                                        \
            UNROLLED for (int j = 0; j < W; j++)                                                                       \
                _mm512_storeu_ps(out[r] + d + 16 * j, sums[r][j]);                                                     \
    }

/* Adds weighted values to MANY rows, some of which may be the same. Masked keys have weight 0; no value is infinite. */
static void pairs_add(int64_t width, const float *const *weights, int low, int high, float *const *out,
                      const Scratch *s)
{
    uint32_t pairs[MANY][KEYS / 2] __attribute__((aligned(64)));
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i order = _mm512_add_epi32(_mm512_mullo_epi32(lane, _mm512_set1_epi32(4 << 16 | 4)),
                                           _mm512_set1_epi32(1 << 16 | 3)); /* the upper halves of two floats */
    UNROLLED for (int r = 0; r < MANY; r++)
        UNROLLED for (int i = 0; i < KEYS; i += 32)
            _mm512_store_si512(pairs[r] + i / 2,
                               _mm512_permutex2var_epi16(_mm512_load_si512(weights[r] + i), order,
                                                         _mm512_load_si512(weights[r] + i + 16)));
    int64_t d = 0;
    ADD(4)
    ADD(1)
}
#undef ADD

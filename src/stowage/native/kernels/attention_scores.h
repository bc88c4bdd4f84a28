/* Scores: dot products of rows of queries with keys in float32, summed in one order.
 *
 *     lane l of LANES takes numbers l, l + LANES, l + 2 LANES ... one after the other, by fused products from 0
 *     lanes are added as in `total`, and what is left of a width after them one after the other
 *
 * Of few rows keys are read as they lie. Of many they are turned first, which saves the sums across vectors and gives
 * the same bits. So do pairs and tiles of bfloat16 (pair_scores.h, tile_scores.h).
 */

#undef KEYS_WIDE
#define KEYS_WIDE (LANES == 16 ? 4 : 2) /* vectors of keys for which there are registers with three and four rows */

/* Dot products of R rows with C keys, which are floats or bfloat16. */
#define DOTS(WHAT, F, T, R, C)                                                                                         \
    static inline ALWAYS void NAME(WHAT##_##F##R)(const float *const *q, const void *const *keys, int64_t width,       \
                                                   float *const *out, int i)                                           \
    {                                                                                                                  \
        NAME(vec) sums[R][C];                                                                                          \
        for (int r = 0; r < R; r++)                                                                                    \
            for (int c = 0; c < C; c++)                                                                                \
                sums[r][c] = (NAME(vec)){0};                                                                           \
        int64_t d = 0;                                                                                                 \
        for (; d + LANES <= width; d += LANES) {                                                                       \
            NAME(vec) query[R];                                                                                        \
            for (int r = 0; r < R; r++)                                                                                \
                query[r] = NAME(load)(q[r] + d);                                                                       \
            for (int c = 0; c < C; c++) {                                                                              \
                NAME(vec) key = NAME(load_##F)((const T *)keys[i + c] + d);                                            \
                for (int r = 0; r < R; r++)                                                                            \
                    sums[r][c] += query[r] * key;                                                                      \
            }                                                                                                          \
        }                                                                                                              \
        for (int r = 0; r < R; r++)                                                                                    \
            for (int c = 0; c < C; c++) {                                                                              \
                float sum = NAME(total)(sums[r][c]);                                                                   \
                for (int64_t e = d; e < width; e++) {                                                                  \
                    sum += q[r][e] * NAME(one_##F)(((const T *)keys[i + c])[e]);                                       \
                    SETTLE(sum);                                                                                       \
                }                                                                                                      \
                out[r][i + c] = sum;                                                                                   \
            }                                                                                                          \
    }
#define SCORE(F, T, R, C)                                                                                              \
    DOTS(dots, F, T, R, C)                                                                                             \
    DOTS(dot, F, T, R, 1)                                                                                              \
    static void NAME(score_##F##R)(const float *const *q, const void *const *keys, int64_t width, float *const *out,   \
                                   int first, int end)                                                                 \
    {                                                                                                                  \
        int i = first;                                                                                                 \
        for (; i + C <= end; i += C)                                                                                   \
            NAME(dots_##F##R)(q, keys, width, out, i);                                                                 \
        for (; i < end; i++)                                                                                           \
            NAME(dot_##F##R)(q, keys, width, out, i);                                                                  \
    }
#define SCORES(F, T)                                                                                                   \
    SCORE(F, T, 1, 4) SCORE(F, T, 2, 4)                                                                                \
    SCORE(F, T, 3, KEYS_WIDE) SCORE(F, T, 4, KEYS_WIDE)
SCORES(f, float)
SCORES(b, uint16_t)
#undef SCORES
#undef SCORE
#undef DOTS

typedef void (*NAME(scorer))(const float *const *, const void *const *, int64_t, float *const *, int, int);
#define ALL(F) {NAME(score_##F##1), NAME(score_##F##2), NAME(score_##F##3), NAME(score_##F##4)}
static const NAME(scorer) NAME(scorers)[2][MANY] = {ALL(f), ALL(b)};
#undef ALL

/* Transposes keys [low, high) of the tile: number d of key i is s->turned[d * KEYS + i]. The entries of other keys are
 * undefined. */
static void NAME(turn)(const Attention *job, int low, int high, Scratch *s)
{
    for (int i = low / 4 * 4; i < high; i += 4) {
        const float *key[4];
        for (int c = 0; c < 4; c++)
            key[c] = s->key[i + c < low ? low : i + c < high ? i + c : high - 1]; /* widened */
        int64_t d = 0;
#if LANES >= 8
        for (; d + 4 <= job->width; d += 4) {
            __m128 a = _mm_loadu_ps(key[0] + d), b = _mm_loadu_ps(key[1] + d), c = _mm_loadu_ps(key[2] + d),
                   e = _mm_loadu_ps(key[3] + d);
            _MM_TRANSPOSE4_PS(a, b, c, e);
            float *to = s->turned + d * KEYS + i;
            _mm_store_ps(to, a);
            _mm_store_ps(to + KEYS, b);
            _mm_store_ps(to + 2 * KEYS, c);
            _mm_store_ps(to + 3 * KEYS, e);
        }
#endif
        for (; d < job->width; d++)
            for (int c = 0; c < 4; c++)
                s->turned[d * KEYS + i + c] = key[c][d];
    }
}

/* Sums of one lane after the other of a vector of numbers, as `total` adds them up, LANES keys at once: of lanes l,
 * l + 4, l + 8 ... of MANY rows. */
static inline ALWAYS void NAME(lane_sums)(const float *const *q, const float *keys, int64_t whole, int lane,
                                          NAME(vec) *out)
{
    NAME(vec) sums[MANY][LANES / 4];
    for (int r = 0; r < MANY; r++)
        for (int m = 0; m < LANES / 4; m++)
            sums[r][m] = (NAME(vec)){0};
    for (int64_t d = lane; d < whole; d += LANES)
        for (int m = 0; m < LANES / 4; m++) {
            NAME(vec) key = NAME(load)(keys + (d + 4 * m) * KEYS);
            for (int r = 0; r < MANY; r++)
                sums[r][m] += NAME(fill)(q[r][d + 4 * m]) * key;
        }
    for (int r = 0; r < MANY; r++)
#if LANES == 16
        out[r] = (sums[r][0] + sums[r][2]) + (sums[r][1] + sums[r][3]);
#elif LANES == 8
        out[r] = sums[r][0] + sums[r][1];
#else
        out[r] = sums[r][0];
#endif
}

/* As `score`, to the bit, for MANY rows and transposed keys: a vector holds one number of LANES keys, so nothing is
 * summed across a vector. */
static void NAME(score_many)(const Attention *job, const float *const *q, int first, int end, Scratch *s)
{
    int64_t whole = job->width / LANES * LANES;
    for (int i = first / LANES * LANES; i < end; i += LANES) {
        NAME(vec) even[MANY], odd[MANY], more[MANY];
        const float *keys = s->turned + i;
        NAME(lane_sums)(q, keys, whole, 0, even);
        NAME(lane_sums)(q, keys, whole, 2, more);
        for (int r = 0; r < MANY; r++)
            even[r] += more[r];
        NAME(lane_sums)(q, keys, whole, 1, odd);
        NAME(lane_sums)(q, keys, whole, 3, more);
        for (int r = 0; r < MANY; r++) {
            NAME(vec) sum = even[r] + (odd[r] + more[r]);
            for (int64_t e = whole; e < job->width; e++) {
                sum += NAME(fill)(q[r][e]) * NAME(load)(keys + e * KEYS);
                SETTLE(sum);
            }
            NAME(store)(s->weights[r] + i, sum);
        }
    }
}

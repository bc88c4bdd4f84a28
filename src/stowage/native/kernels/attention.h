/* Softmax attention of rows of queries over keys and values that lie in blocks, summed in one order.
 *
 * Keys are taken in tiles of KEYS at multiples of KEYS of their position, with running maxima and sums (Milakov and
 * Gimelshein, arXiv:1805.02867; Dao et al., arXiv:2205.14135). What a row gives depends on its own query, its position
 * and the keys that it sees: not on how many rows are computed with it, nor on which of them decode. Of many rows keys
 * are turned first, which saves the sums across vectors and gives the same bits.
 */

#undef ADD_WIDE
#define ADD_WIDE (LANES == 16 ? 4 : 2) /* vectors of sums that three and four rows have registers for */
#undef KEYS_WIDE
#define KEYS_WIDE (LANES == 16 ? 4 : 2) /* the same of keys */

static const char *NAME(address)(const Attention *job, const Blocks *of, int64_t block, int64_t head, int64_t inside)
{
    int64_t offset = block > AWAY ? block * of->block : (AWAY - block) * of->unit;
    return (const char *)(block > AWAY ? of->at : of->away)
           + (offset + inside * of->token + head * of->head) * (job->half ? 2 : 4);
}

/* Where the key and the value at position `at` lie, and how many from there on, before `end`, are in the same block: a
 * division for each key takes longer than the rest. */
static int NAME(in_block)(const Attention *job, const Run *run, int64_t head, int64_t at, int64_t end,
                          const char **key, const char **value)
{
    int64_t number = job->table[run->table + (at - run->base) / job->block_tokens], inside = at % job->block_tokens;
    *key = NAME(address)(job, &job->k, number, head, inside);
    *value = NAME(address)(job, &job->v, number, head, inside);
    return (int)(end - at < job->block_tokens - inside ? end - at : job->block_tokens - inside);
}

/* Keys and values at positions [at + low, at + high), to the same rows of the tile, as floats if they are `widened`. */
static void NAME(fetch)(const Attention *job, const Run *run, int64_t head, int64_t at, int low, int high, int widened,
                        Scratch *s)
{
    int64_t size = job->half ? 2 : 4, key_bytes = job->k.token * size, value_bytes = job->v.token * size;
    const char *key, *value;
    for (int i = low; i < high;)
        for (int left = NAME(in_block)(job, run, head, at + i, at + high, &key, &value); left > 0; left--, i++) {
            s->key[i] = key;
            s->value[i] = value;
            if (widened) {
                NAME(widen)((const uint16_t *)key, s->keys + i * job->width, job->width);
                NAME(widen)((const uint16_t *)value, s->values + i * job->value_width, job->value_width);
                s->key[i] = s->keys + i * job->width;
                s->value[i] = s->values + i * job->value_width;
            }
            key += key_bytes;
            value += value_bytes;
        }
}

/* The second cache is told of the keys and values at positions [at, end). */
static void NAME(announce)(const Attention *job, const Run *run, int64_t head, int64_t at, int64_t end)
{
    int64_t size = job->half ? 2 : 4, key_bytes = job->k.token * size, value_bytes = job->v.token * size;
    const char *key, *value;
    while (at < end)
        for (int left = NAME(in_block)(job, run, head, at, end, &key, &value); left > 0; left--, at++) {
            for (int64_t i = 0; i < job->width * size; i += 64)
                FETCH_FAR(key + i);
            for (int64_t i = 0; i < job->value_width * size; i += 64)
                FETCH_FAR(value + i);
            key += key_bytes;
            value += value_bytes;
        }
}

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

/* Keys [low, high) of the tile number by number: number d of key i is s->turned[d * KEYS + i]. What other keys have there
 * means nothing. */
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

/* What `score` gives, to the bit, of MANY rows and turned keys: a vector holds one number of LANES keys, so nothing is
 * added across a vector. */
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

static inline ALWAYS NAME(vec) NAME(larger)(NAME(vec) a, NAME(vec) b)
{
    NAME(ints) higher = a > b;
    return (NAME(vec))(((NAME(ints))a & higher) | ((NAME(ints))b & ~higher));
}

/* Scores of one row become weights; what the row has already shrinks to the new largest score. Keys that it does not
 * see weigh nothing. */
static void NAME(soften)(const Attention *job, int row, int first, int end, float *weights, Scratch *s)
{
    for (int i = 0; i < first; i++)
        weights[i] = -INFINITY;
    for (int i = end; i < KEYS; i++)
        weights[i] = -INFINITY;
    float peak = s->peak[row];
    NAME(vec) highest = NAME(fill)(peak);
    for (int i = 0; i < KEYS; i += LANES) {
        NAME(vec) v = NAME(load)(weights + i) * job->scale;
        if (job->softcap > 0) { /* cap * tanh(v / cap), by e^(-2|x|) */
            NAME(vec) x = v / job->softcap;
            NAME(ints) sign = (NAME(ints))x & (NAME(ints))NAME(fill)(-0.0f);
            NAME(vec) size = (NAME(vec))((NAME(ints))x ^ sign);
            NAME(vec) e = NAME(exponential)(size * -2.0f);
            NAME(vec) bent = (1.0f - e) / (1.0f + e) * job->softcap;
            NAME(ints) seen = v > NAME(fill)(-INFINITY);
            bent = (NAME(vec))((NAME(ints))bent | sign);
            v = (NAME(vec))(((NAME(ints))bent & seen) | ((NAME(ints))v & ~seen));
        }
        highest = NAME(larger)(v, highest);
        NAME(store)(weights + i, v);
    }
    float peaks[LANES], shrink[LANES];
    NAME(store)(peaks, highest);
    for (int wide = LANES / 2; wide > 0; wide /= 2)
        for (int i = 0; i < wide; i++)
            peaks[i] = peaks[i + wide] > peaks[i] ? peaks[i + wide] : peaks[i];
    peak = peaks[0];
    shrink[0] = 1.0f; /* what e^0 is to the bit */
    if (peak - s->peak[row] != 0.0f)
        NAME(store)(shrink, NAME(exponential)(NAME(fill)(s->peak[row] - peak)));
    NAME(vec) sum = {0};
    for (int i = 0; i < KEYS; i += LANES) {
        NAME(vec) weight = NAME(exponential)(NAME(load)(weights + i) - peak);
        NAME(store)(weights + i, weight);
        sum += weight;
    }
    s->sum[row] = s->sum[row] * shrink[0] + NAME(total)(sum);
    s->peak[row] = peak;
    float *out = s->out + row * job->value_width;
    if (shrink[0] != 1.0f)
        for (int64_t d = 0; d < job->value_width; d++)
            out[d] *= shrink[0];
}

/* Values of keys [first, end), weighed, to R rows. */
#define ADD(F, T, R, W)                                                                                                \
    static void NAME(add_##F##R)(int64_t width, const float *const *weights, int first, int end,                       \
                                 const void *const *values, float *const *out)                                         \
    {                                                                                                                  \
        int64_t d = 0;                                                                                                 \
        for (; d + W * LANES <= width; d += W * LANES) {                                                               \
            NAME(vec) sums[R][W];                                                                                      \
            for (int r = 0; r < R; r++)                                                                                \
                for (int j = 0; j < W; j++)                                                                            \
                    sums[r][j] = NAME(load)(out[r] + d + j * LANES);                                                   \
            for (int i = first; i < end; i++) {                                                                        \
                NAME(vec) weight[R];                                                                                   \
                for (int r = 0; r < R; r++)                                                                            \
                    weight[r] = NAME(fill)(weights[r][i]);                                                             \
                for (int j = 0; j < W; j++) {                                                                          \
                    NAME(vec) value = NAME(load_##F)((const T *)values[i] + d + j * LANES);                            \
                    for (int r = 0; r < R; r++)                                                                        \
                        sums[r][j] += weight[r] * value;                                                               \
                }                                                                                                      \
            }                                                                                                          \
            for (int r = 0; r < R; r++)                                                                                \
                for (int j = 0; j < W; j++)                                                                            \
                    NAME(store)(out[r] + d + j * LANES, sums[r][j]);                                                   \
        }                                                                                                              \
        for (; d + LANES <= width; d += LANES)                                                                         \
            for (int r = 0; r < R; r++) {                                                                              \
                NAME(vec) sum = NAME(load)(out[r] + d);                                                                \
                for (int i = first; i < end; i++)                                                                      \
                    sum += NAME(fill)(weights[r][i]) * NAME(load_##F)((const T *)values[i] + d);                       \
                NAME(store)(out[r] + d, sum);                                                                          \
            }                                                                                                          \
        for (; d < width; d++)                                                                                         \
            for (int r = 0; r < R; r++) {                                                                              \
                float one = out[r][d];                                                                                 \
                for (int i = first; i < end; i++) {                                                                    \
                    one += weights[r][i] * NAME(one_##F)(((const T *)values[i])[d]);                                   \
                    SETTLE(one);                                                                                       \
                }                                                                                                      \
                out[r][d] = one;                                                                                       \
            }                                                                                                          \
    }
#define ADDS(F, T) ADD(F, T, 1, 4) ADD(F, T, 2, 4) ADD(F, T, 3, ADD_WIDE) ADD(F, T, 4, ADD_WIDE)
ADDS(f, float)
ADDS(b, uint16_t)
#undef ADDS
#undef ADD

typedef void (*NAME(adder))(int64_t, const float *const *, int, int, const void *const *, float *const *);
#define ALL(F) {NAME(add_##F##1), NAME(add_##F##2), NAME(add_##F##3), NAME(add_##F##4)}
static const NAME(adder) NAME(adders)[2][MANY] = {ALL(f), ALL(b)};
#undef ALL

/* One tile for up to MANY rows, whose keys are turned if `turned`: [from, until) is what each sees of it. A key that only
 * some of them see is not given to the others: nothing times infinity is not nothing. */
static void NAME(tile_rows)(const Attention *job, int row, int rows, int turned, const int *from, const int *until,
                            Scratch *s)
{
    const float *q[MANY];
    float *out[MANY];
    const float *weights[MANY];
    int low = from[0], high = until[0], first = from[0], last = until[0];
    for (int r = 0; r < MANY; r++) {
        int own = r < rows ? r : rows - 1;
        q[r] = s->q + (row + own) * job->width;
        out[r] = s->out + (row + own) * job->value_width;
        weights[r] = s->weights[own];
        low = from[own] < low ? from[own] : low;
        high = until[own] > high ? until[own] : high;
        first = from[own] > first ? from[own] : first;
        last = until[own] < last ? until[own] : last;
    }
    int half = job->half && !turned; /* keys and values as they lie */
    const NAME(adder) *add = NAME(adders)[half];
    if (turned)
        NAME(score_many)(job, q, low, high, s);
    else
        NAME(scorers)[half][rows - 1](q, s->key, job->width, s->weights, low, high);
    for (int r = 0; r < rows; r++)
        NAME(soften)(job, row + r, from[r], until[r], s->weights[r], s);
    if (first > last) /* there is no key that all see */
        first = last = 0;
    for (int r = 0; r < rows; r++)
        add[0](job->value_width, weights + r, from[r], last > first ? first : until[r], s->value, out + r);
    if (last <= first)
        return;
    add[rows - 1](job->value_width, weights, first, last, s->value, out);
    for (int r = 0; r < rows; r++)
        add[0](job->value_width, weights + r, last, until[r], s->value, out + r);
}

static int64_t NAME(seen_from)(const Attention *job, int64_t position)
{
    if (job->kind == SLIDING)
        return position + 1 > job->window ? position + 1 - job->window : 0;
    return job->kind == CHUNKED ? position / job->window * job->window : 0;
}

/* Rows [begin, end) of a run's `count * fold` rows for one head of keys: row = token * fold + query head. */
static void NAME(rows)(const Attention *job, const Run *run, int64_t head, int64_t begin, int64_t end, Scratch *s)
{
    int64_t fold = job->fold, heads = job->heads * fold;
    for (int64_t row = begin; row < end; row++) {
        int64_t token = run->begin + row / fold, which = head * fold + row % fold;
        int64_t from = (token * heads + which) * job->width;
        if (job->half)
            NAME(widen)((const uint16_t *)job->q + from, s->q + (row - begin) * job->width, job->width);
        else
            memcpy(s->q + (row - begin) * job->width, (const float *)job->q + from, job->width * 4);
        s->peak[row - begin] = job->sinks ? job->sinks[which] : -INFINITY;
        s->sum[row - begin] = job->sinks ? 1.0f : 0.0f;
    }
    memset(s->out, 0, (end - begin) * job->value_width * 4);
    int turned = LANES >= 8 && end - begin >= TURNED_ROWS; /* no instruction fills fewer lanes at no cost */
    int64_t last = run->start + (end - 1) / fold, first = NAME(seen_from)(job, run->start + begin / fold);
    for (int64_t at = first / KEYS * KEYS; at <= last; at += KEYS) {
        int low = at < first ? (int)(first - at) : 0, high = at + KEYS <= last ? KEYS : (int)(last + 1 - at);
        NAME(fetch)(job, run, head, at, low, high, job->half && turned, s);
        NAME(announce)(job, run, head, at + KEYS, at + 2 * KEYS <= last ? at + 2 * KEYS : last + 1);
        if (turned)
            NAME(turn)(job, low, high, s);
        int waiting = 0, from[MANY], until[MANY]; /* rows before this one that see something */
        for (int64_t row = begin; row < end; row++) {
            int64_t position = run->start + row / fold, seen = NAME(seen_from)(job, position) - at;
            from[waiting] = seen > low ? (int)seen : low;
            until[waiting] = position - at < high ? (int)(position - at) + 1 : high;
            int sees = from[waiting] < until[waiting];
            waiting += sees;
            if (waiting == MANY || (waiting > 0 && (!sees || row + 1 == end))) {
                NAME(tile_rows)(job, (int)(row + sees - begin) - waiting, waiting, turned, from, until, s);
                waiting = 0;
            }
        }
    }
    for (int64_t row = begin; row < end; row++) {
        int64_t token = run->begin + row / fold, which = head * fold + row % fold;
        float *to = job->out + (token * heads + which) * job->value_width;
        const float *from = s->out + (row - begin) * job->value_width;
        for (int64_t d = 0; d < job->value_width; d++)
            to[d] = from[d] / s->sum[row - begin];
    }
}

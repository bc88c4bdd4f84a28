/* Softmax attention of rows of queries over keys and values that lie in blocks, summed in one order.
 *
 * Keys are taken in tiles of KEYS at multiples of KEYS of their position, with running maxima and sums (Milakov and
 * Gimelshein, arXiv:1805.02867; Dao et al., arXiv:2205.14135). What a row gives depends on its own query, its position
 * and the keys that it sees: not on how many rows are computed with it, nor on which of them decode.
 */

#undef ADD_WIDE
#define ADD_WIDE (LANES == 16 ? 4 : 2) /* vectors of sums for which there are registers with three and four rows */

static const char *NAME(address)(const Attention *job, const Blocks *of, int64_t block, int64_t head, int64_t inside)
{
    int64_t offset = block > OFFLOADED ? block * of->block : (OFFLOADED - block) * of->unit;
    return (const char *)(block > OFFLOADED ? of->at : of->offloaded)
           + (offset + inside * of->token + head * of->head) * (job->half ? 2 : 4);
}

/* Addresses of the key and value at position `at`; returns how many positions before `end` are in the same block. A
 * division for each key would take longer than all else. */
static int NAME(in_block)(const Attention *job, const Run *run, int64_t head, int64_t at, int64_t end,
                          const char **key, const char **value)
{
    int64_t number = job->table[run->table + (at - run->base) / job->block_tokens], inside = at % job->block_tokens;
    *key = NAME(address)(job, &job->k, number, head, inside);
    *value = NAME(address)(job, &job->v, number, head, inside);
    return (int)(end - at < job->block_tokens - inside ? end - at : job->block_tokens - inside);
}

/* Stores the addresses of keys and values at positions [at + low, at + high) in the same rows of the tile. */
static void NAME(fetch)(const Attention *job, const Run *run, int64_t head, int64_t at, int low, int high, Scratch *s)
{
    int64_t size = job->half ? 2 : 4, key_bytes = job->k.token * size, value_bytes = job->v.token * size;
    const char *key, *value;
    for (int i = low; i < high;)
        for (int left = NAME(in_block)(job, run, head, at + i, at + high, &key, &value); left > 0; left--, i++) {
            s->key[i] = key;
            s->value[i] = value;
            key += key_bytes;
            value += value_bytes;
        }
}

/* Widens rows [low, high) of the tile from bfloat16 to floats, to `to`. */
static void NAME(widen_rows)(const void **rows, int low, int high, int64_t width, float *to)
{
    for (int i = low; i < high; i++) {
        NAME(widen)(rows[i], to + i * width, width);
        rows[i] = to + i * width;
    }
}

/* Prefetches the keys and values at positions [at, end) into the L2 cache. */
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

static inline ALWAYS NAME(vec) NAME(larger)(NAME(vec) a, NAME(vec) b)
{
#if LANES == 16
    return (NAME(vec))_mm512_max_ps((__m512)a, (__m512)b); /* b where one is no number, as below */
#else
    NAME(ints) higher = a > b;
    return (NAME(vec))(((NAME(ints))a & higher) | ((NAME(ints))b & ~higher));
#endif
}

/* The largest of a vector's numbers. */
static inline ALWAYS float NAME(highest)(NAME(vec) v)
{
#if LANES >= 8 /* in registers: what is stored comes back late */
#if LANES == 16
    __m256 eight = _mm256_max_ps(_mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd((__m512)v), 1)),
                                 _mm512_castps512_ps256((__m512)v));
#else
    __m256 eight = (__m256)v;
#endif
    __m128 low = _mm256_castps256_ps128(eight), four = _mm_max_ps(_mm256_extractf128_ps(eight, 1), low);
    __m128 two = _mm_max_ps(_mm_movehl_ps(four, four), four);
    return _mm_cvtss_f32(_mm_max_ss(_mm_movehdup_ps(two), two));
#else
    float peaks[LANES];
    NAME(store)(peaks, v);
    for (int wide = LANES / 2; wide > 0; wide /= 2)
        for (int i = 0; i < wide; i++)
            peaks[i] = peaks[i + wide] > peaks[i] ? peaks[i + wide] : peaks[i];
    return peaks[0];
#endif
}

/* cap * tanh(v / cap), by e^(-2|x|). Masked scores stay masked. */
static inline ALWAYS NAME(vec) NAME(bend)(NAME(vec) v, float cap)
{
    NAME(vec) x = v / cap;
    NAME(ints) sign = (NAME(ints))x & (NAME(ints))NAME(fill)(-0.0f), seen = v > NAME(fill)(-INFINITY);
    NAME(vec) e = NAME(exponential)((NAME(vec))((NAME(ints))x ^ sign) * -2.0f);
    NAME(vec) bent = (NAME(vec))((NAME(ints))((1.0f - e) / (1.0f + e) * cap) | sign);
    return (NAME(vec))(((NAME(ints))bent & seen) | ((NAME(ints))v & ~seen));
}

/* Online softmax of up to MANY rows: scores become weights, and a row's sums are scaled to its new maximum. Masked keys
 * weigh 0. Each step is done for all rows before the next, since the steps of one row depend on each other. */
static void NAME(soften)(const Attention *job, int row, int rows, const int *from, const int *until,
                         float *const *scores, Scratch *s)
{
    float peaks[MANY], shrink[LANES] = {0}; /* there are MANY lanes at least */
    for (int r = 0; r < rows; r++) {
        float *weights = scores[r];
        for (int i = 0; i < from[r]; i++)
            weights[i] = -INFINITY;
        for (int i = until[r]; i < KEYS; i++)
            weights[i] = -INFINITY;
        NAME(vec) most = NAME(fill)(s->peak[row + r]);
        for (int i = 0; i < KEYS; i += LANES) {
            NAME(vec) v = NAME(load)(weights + i) * job->scale;
            if (job->softcap > 0)
                v = NAME(bend)(v, job->softcap);
            most = NAME(larger)(v, most);
            NAME(store)(weights + i, v);
        }
        peaks[r] = NAME(highest)(most);
        shrink[r] = s->peak[row + r] - peaks[r];
        s->peak[row + r] = peaks[r];
    }
    NAME(store)(shrink, NAME(exponential)(NAME(load)(shrink)));
    for (int r = 0; r < rows; r++) {
        int rounded = row + r >= s->exact;
        const float nothing = rounded ? SUM_LEAST : 0.0f;
        float *out = s->out + (row + r) * job->value_width;
        NAME(vec) sum = {0};
        for (int i = 0; i < KEYS; i += LANES) {
            NAME(vec) below = NAME(load)(scores[r] + i) - peaks[r];
            NAME(vec) weight = rounded ? NAME(rounded_exponential)(below) : NAME(exponential)(below);
            NAME(store)(scores[r] + i, weight);
            sum += weight;
        }
        s->sum[row + r] = s->sum[row + r] * shrink[r] + NAME(total)(sum);
        if (shrink[r] != 1.0f)
            for (int64_t d = 0; d < job->value_width; d++) {
                float shrunk = out[d] * shrink[r];
                out[d] = fabsf(shrunk) < nothing ? 0.0f : shrunk;
            }
    }
}

/* Adds the weighted values of keys [first, end) to R rows. */
#define ADD(F, T, R, W)                                                                                                \
    static void NAME(add_##F##R)(int64_t width, const float *const *weights, int first, int end,                       \
                                 const void *const *values, float *const *out)                                         \
    {                                                                                                                  \
        int64_t d = 0;                                                                                                 \
        if (first >= end)                                                                                              \
            return;                                                                                                    \
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

/* One tile for up to MANY rows; `way`: what is prepared of it; [from, until): the keys that each row sees. A masked key
 * is not multiplied with weight 0, since its value may be infinite. */
static void NAME(tile_rows)(const Attention *job, int row, int rows, int way, const int *from, const int *until,
                            Scratch *s)
{
    const float *q[MANY];
    float *out[MANY], *scores[MANY];
    const float *weights[MANY];
    int low = from[0], high = until[0], first = from[0], last = until[0];
    for (int r = 0; r < MANY; r++) {
        int own = r < rows ? r : rows - 1;
        q[r] = s->q + (row + own) * job->width;
        out[r] = s->out + (row + own) * job->value_width;
        weights[r] = scores[r] = way >= SCORED ? s->scores + (row + own) * KEYS : s->weights[own];
        low = from[own] < low ? from[own] : low;
        high = until[own] > high ? until[own] : high;
        first = from[own] > first ? from[own] : first;
        last = until[own] < last ? until[own] : last;
    }
    int half = job->half && way == LYING;
    const NAME(adder) *add = NAME(adders)[half];
    if (way == TURNED)
        NAME(score_many)(job, q, low, high, s);
    else if (way == LYING)
        NAME(scorers)[half][rows - 1](q, s->key, job->width, s->weights, low, high);
    NAME(soften)(job, row, rows, from, until, scores, s);
    if (way == LAID) {
        s->scoring->add(job->value_width, weights, low, high, out, s);
        return;
    }
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
    int rows = (int)(end - begin), from[ROWS], until[ROWS]; /* what each row sees of a tile */
    int64_t positions[ROWS], seen[ROWS];
    for (int64_t row = begin; row < end; row++) {
        int64_t token = run->begin + row / fold, which = head * fold + row % fold;
        int64_t at = (token * heads + which) * job->width;
        s->query[row - begin] = (const uint16_t *)job->q + at;
        if (job->half)
            NAME(widen)(s->query[row - begin], s->q + (row - begin) * job->width, job->width);
        else
            memcpy(s->q + (row - begin) * job->width, (const float *)job->q + at, job->width * 4);
        s->peak[row - begin] = job->sinks ? job->sinks[which] : -INFINITY;
        s->sum[row - begin] = job->sinks ? 1.0f : 0.0f;
        positions[row - begin] = run->start + row / fold;
        seen[row - begin] = NAME(seen_from)(job, positions[row - begin]);
    }
    int64_t exact = (job->rounded_from - run->start) * fold - begin;
    s->exact = exact < 0 ? 0 : exact < rows ? (int)exact : rows;
    memset(s->out, 0, (end - begin) * job->value_width * 4);
    int turned = LANES >= 8 && rows >= TURNED_ROWS; /* no instruction fills fewer lanes at no cost */
    int scoring = turned && s->scoring != NULL && s->scoring->lay_queries(job->width, rows, s);
    int64_t last = run->start + (end - 1) / fold, first = seen[0];
    for (int64_t at = first / KEYS * KEYS; at <= last; at += KEYS) {
        int low = at < first ? (int)(first - at) : 0, high = at + KEYS <= last ? KEYS : (int)(last + 1 - at);
        NAME(fetch)(job, run, head, at, low, high, s);
        if (!turned)
            NAME(announce)(job, run, head, at + KEYS, at + 2 * KEYS <= last ? at + 2 * KEYS : last + 1);
        for (int r = 0; r < rows; r++) {
            from[r] = seen[r] - at > low ? (int)(seen[r] - at) : low;
            until[r] = positions[r] - at < high ? (int)(positions[r] - at) + 1 : high;
        }
        int scored = scoring && s->scoring->score(job->width, rows, low, high, from, until, s);
        int way = scored ? SCORED : turned ? TURNED : LYING;
        if (scored && s->exact == 0 && job->value_width % 16 == 0
            && s->scoring->lay_values(job->value_width, low, high, s))
            way = LAID;
        if ((way == TURNED || way == SCORED) && job->half)
            NAME(widen_rows)(s->value, low, high, job->value_width, s->values);
        if (way == TURNED && job->half)
            NAME(widen_rows)(s->key, low, high, job->width, s->keys);
        if (way == TURNED)
            NAME(turn)(job, low, high, s);
        int waiting = 0; /* rows before this one that see something */
        for (int r = 0; r < rows; r++) {
            int sees = from[r] < until[r];
            waiting += sees;
            if (waiting == MANY || (waiting > 0 && (!sees || r + 1 == rows))) {
                int one = r + sees - waiting;
                NAME(tile_rows)(job, one, waiting, way, from + one, until + one, s);
                waiting = 0;
            }
        }
    }
    for (int64_t row = begin; row < end; row++) {
        int64_t token = run->begin + row / fold, which = head * fold + row % fold;
        int64_t at = (token * heads + which) * job->value_width;
        float *from = s->out + (row - begin) * job->value_width;
        float *to = job->narrow ? from : (float *)job->out + at;
        for (int64_t d = 0; d < job->value_width; d++)
            to[d] = from[d] / s->sum[row - begin];
        if (job->narrow)
            NAME(narrow)(from, (uint16_t *)job->out + at, job->value_width);
    }
}

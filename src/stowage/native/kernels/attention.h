/* Softmax attention of rows of queries over keys and values that lie in blocks, summed in one order.
 *
 * Keys are taken in tiles of KEYS at multiples of KEYS of their position, with running maxima and sums (Milakov and
 * Gimelshein, arXiv:1805.02867; Dao et al., arXiv:2205.14135). What a row gives depends on its own query, its position
 * and the keys that it sees: not on how many rows are computed with it, nor on which of them decode.
 */

static const void *NAME(address)(const Attention *job, const Blocks *of, const Run *run, int64_t head, int64_t at)
{
    int64_t block = job->table[run->table + (at - run->base) / job->block_tokens];
    int64_t inside = (at % job->block_tokens) * of->token + head * of->head;
    int64_t offset = block > AWAY ? block * of->block : (AWAY - block) * of->unit;
    return (const char *)(block > AWAY ? of->at : of->away) + (offset + inside) * (job->half ? 2 : 4);
}

/* Keys and values at positions [at + low, at + high), to the same rows of the tile. */
static void NAME(fetch)(const Attention *job, const Run *run, int64_t head, int64_t at, int low, int high,
                        Scratch *s)
{
    for (int i = low; i < high; i++) {
        const void *key = NAME(address)(job, &job->k, run, head, at + i);
        const void *value = NAME(address)(job, &job->v, run, head, at + i);
        s->key[i] = key;
        s->value[i] = value;
        if (job->half) {
            NAME(widen)(key, s->keys + i * job->width, job->width);
            NAME(widen)(value, s->values + i * job->value_width, job->value_width);
            s->key[i] = s->keys + i * job->width;
            s->value[i] = s->values + i * job->value_width;
        }
    }
}

/* Dot products of R rows with 4 keys, or with one. */
#define DOTS(R, C)                                                                                                     \
    static inline ALWAYS void NAME(dots_##R##C)(const float *const *q, const float *const *keys, int64_t width,        \
                                                float *const *out)                                                     \
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
                NAME(vec) key = NAME(load)(keys[c] + d);                                                               \
                for (int r = 0; r < R; r++)                                                                            \
                    sums[r][c] += query[r] * key;                                                                      \
            }                                                                                                          \
        }                                                                                                              \
        for (int r = 0; r < R; r++)                                                                                    \
            for (int c = 0; c < C; c++) {                                                                              \
                float sum = NAME(total)(sums[r][c]);                                                                   \
                for (int64_t e = d; e < width; e++) {                                                                  \
                    sum += q[r][e] * keys[c][e];                                                                       \
                    SETTLE(sum);                                                                                       \
                }                                                                                                      \
                out[r][c] = sum;                                                                                       \
            }                                                                                                          \
    }
DOTS(1, 1) DOTS(1, 4) DOTS(2, 1) DOTS(2, 4)
#undef DOTS

/* Raw scores of one row or of two for keys [first, end) of the tile. */
static void NAME(score)(const Attention *job, int rows, const float *const *q, int first, int end, Scratch *s)
{
    int i = first;
    for (; i + 4 <= end; i += 4) {
        float *out[2] = {s->weights[0] + i, s->weights[1] + i};
        if (rows == 2)
            NAME(dots_24)(q, s->key + i, job->width, out);
        else
            NAME(dots_14)(q, s->key + i, job->width, out);
    }
    for (; i < end; i++) {
        float *out[2] = {s->weights[0] + i, s->weights[1] + i};
        if (rows == 2)
            NAME(dots_21)(q, s->key + i, job->width, out);
        else
            NAME(dots_11)(q, s->key + i, job->width, out);
    }
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
        NAME(ints) higher = v > highest;
        highest = (NAME(vec))(((NAME(ints))v & higher) | ((NAME(ints))highest & ~higher));
        NAME(store)(weights + i, v);
    }
    for (int i = 0; i < LANES; i++)
        peak = highest[i] > peak ? highest[i] : peak;
    float shrink[LANES];
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
    for (int64_t d = 0; d < job->value_width; d++)
        out[d] *= shrink[0];
}

/* Values of keys [first, end), weighed, to R rows. */
#define ADD(R)                                                                                                         \
    static void NAME(add_##R)(const Attention *job, const float *const *weights, int first, int end,                   \
                              const Scratch *s, float *const *out)                                               \
    {                                                                                                                  \
        int64_t d = 0;                                                                                                 \
        for (; d + 4 * LANES <= job->value_width; d += 4 * LANES) {                                                    \
            NAME(vec) sums[R][4];                                                                                      \
            for (int r = 0; r < R; r++)                                                                                \
                for (int j = 0; j < 4; j++)                                                                            \
                    sums[r][j] = NAME(load)(out[r] + d + j * LANES);                                                   \
            for (int i = first; i < end; i++) {                                                                        \
                NAME(vec) weight[R];                                                                                   \
                for (int r = 0; r < R; r++)                                                                            \
                    weight[r] = NAME(fill)(weights[r][i]);                                                             \
                for (int j = 0; j < 4; j++) {                                                                          \
                    NAME(vec) value = NAME(load)(s->value[i] + d + j * LANES);                                         \
                    for (int r = 0; r < R; r++)                                                                        \
                        sums[r][j] += weight[r] * value;                                                               \
                }                                                                                                      \
            }                                                                                                          \
            for (int r = 0; r < R; r++)                                                                                \
                for (int j = 0; j < 4; j++)                                                                            \
                    NAME(store)(out[r] + d + j * LANES, sums[r][j]);                                                   \
        }                                                                                                              \
        for (; d + LANES <= job->value_width; d += LANES)                                                              \
            for (int r = 0; r < R; r++) {                                                                              \
                NAME(vec) sum = NAME(load)(out[r] + d);                                                                \
                for (int i = first; i < end; i++)                                                                      \
                    sum += NAME(fill)(weights[r][i]) * NAME(load)(s->value[i] + d);                                    \
                NAME(store)(out[r] + d, sum);                                                                          \
            }                                                                                                          \
        for (; d < job->value_width; d++)                                                                              \
            for (int r = 0; r < R; r++) {                                                                              \
                float one = out[r][d];                                                                                 \
                for (int i = first; i < end; i++) {                                                                    \
                    one += weights[r][i] * s->value[i][d];                                                             \
                    SETTLE(one);                                                                                       \
                }                                                                                                      \
                out[r][d] = one;                                                                                       \
            }                                                                                                          \
    }
ADD(1) ADD(2)
#undef ADD

/* One tile for one row or for two: [from, until) is what each sees of it. A key that only one of them sees is not
 * given to the other: nothing times infinity is not nothing. */
static void NAME(tile_rows)(const Attention *job, int row, int rows, const int *from, const int *until,
                            Scratch *s)
{
    const float *q[2];
    float *out[2];
    const float *weights[2] = {s->weights[0], s->weights[1]};
    int low = from[0], high = until[0];
    for (int r = 0; r < rows; r++) {
        q[r] = s->q + (row + r) * job->width;
        out[r] = s->out + (row + r) * job->value_width;
        low = from[r] < low ? from[r] : low;
        high = until[r] > high ? until[r] : high;
    }
    NAME(score)(job, rows, q, low, high, s);
    for (int r = 0; r < rows; r++)
        NAME(soften)(job, row + r, from[r], until[r], s->weights[r], s);
    int first = rows == 2 && from[1] > from[0] ? from[1] : from[0];
    int last = rows == 2 && until[1] < until[0] ? until[1] : until[0];
    if (rows == 1 || first >= last) {
        for (int r = 0; r < rows; r++)
            NAME(add_1)(job, weights + r, from[r], until[r], s, out + r);
        return;
    }
    for (int r = 0; r < 2; r++)
        NAME(add_1)(job, weights + r, from[r], first, s, out + r);
    NAME(add_2)(job, weights, first, last, s, out);
    for (int r = 0; r < 2; r++)
        NAME(add_1)(job, weights + r, last, until[r], s, out + r);
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
    int64_t last = run->start + (end - 1) / fold, first = NAME(seen_from)(job, run->start + begin / fold);
    for (int64_t at = first / KEYS * KEYS; at <= last; at += KEYS) {
        int low = at < first ? (int)(first - at) : 0, high = at + KEYS <= last ? KEYS : (int)(last + 1 - at);
        NAME(fetch)(job, run, head, at, low, high, s);
        int waiting = -1, from[2], until[2];
        for (int64_t row = begin; row <= end; row++) {
            int sees = 0;
            if (row < end) {
                int64_t position = run->start + row / fold, seen = NAME(seen_from)(job, position) - at;
                int side = waiting < 0 ? 0 : 1;
                from[side] = seen > low ? (int)seen : low;
                until[side] = position - at < high ? (int)(position - at) + 1 : high;
                sees = from[side] < until[side];
            }
            if (waiting >= 0) { /* its neighbour goes with it, if it sees something */
                NAME(tile_rows)(job, waiting, 1 + sees, from, until, s);
                waiting = -1;
            } else if (sees) {
                waiting = (int)(row - begin);
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

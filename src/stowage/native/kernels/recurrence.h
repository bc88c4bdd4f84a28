/* Layers that carry a state instead of keys: gated delta rules (Yang et al., "Gated Delta Networks", 2024; "Kimi
 * Linear", 2025), selective state spaces with one decay per head (Dao and Gu, "Mamba-2", 2024), and the short
 * convolutions before them. Included once for each instruction set, after vectors.h.
 *
 * Tokens are taken one after the other, as the recurrences are defined. Scans that take many at once, whose matrices
 * want many more operations, are for processors with thousands of lanes: here a head's state lies in the first cache
 * meanwhile, and what this takes is a few percent of what the layers' weights do. So a prompt's token is computed like
 * a generated one, to the bit, wherever a prompt is cut. */

/* x / (1 + e^-x) */
static inline ALWAYS NAME(vec) NAME(silu)(NAME(vec) x)
{
    const NAME(vec) one = NAME(fill)(1.0f), zero = NAME(fill)(0.0f);
    NAME(ints) below = x < zero;
    NAME(vec) small = NAME(exponential)((NAME(vec))(((NAME(ints))x & below) | ((NAME(ints))(zero - x) & ~below)));
    NAME(vec) upper = (NAME(vec))(((NAME(ints))small & below) | ((NAME(ints))one & ~below));
    return x * (upper / (one + small));
}

static inline void NAME(spread_out)(const void *from, int half, int64_t at, float *to, int64_t count)
{
    if (half)
        NAME(widen)((const uint16_t *)from + at, to, count);
    else
        memcpy(to, (const float *)from + at, (size_t)count * sizeof *to);
}

static inline void NAME(bring_back)(const float *from, void *to, int half, int64_t at, int64_t count)
{
    if (half)
        for (int64_t i = 0; i < count; i++)
            ((uint16_t *)to)[at + i] = float_half(from[i]);
    else
        memcpy((float *)to + at, from, (size_t)count * sizeof *from);
}

/* 1, or what brings numbers to length 1. */
static inline float NAME(to_length)(const float *x, int64_t count, int normed)
{
    return normed ? 1.0f / sqrtf(NAME(square_sum)(x, 0, count) + 1e-6f) : 1.0f;
}

/* One token for `wide` vectors of values of one head: s = decay s; s += k (beta (v - k s)); out = q s. */
static inline ALWAYS void NAME(delta_values)(const DeltaToken *t, float *s, int64_t pitch, int64_t keys, const float *v,
                                             float *out, const int wide)
{
    NAME(vec) sum[4] = {{0}};
    const float *row = s;
    for (int64_t i = 0; i < keys; i++, row += pitch) {
        NAME(vec) k = NAME(fill)(t->decayed[i]);
        for (int w = 0; w < wide; w++)
            sum[w] += NAME(load)(row + w * LANES) * k;
    }
    NAME(vec) change[4];
    for (int w = 0; w < wide; w++) {
        SETTLE(sum[w]);
        change[w] = (NAME(load)(v + w * LANES) - sum[w]) * t->beta;
        SETTLE(change[w]);
        sum[w] = NAME(fill)(0.0f);
    }
    for (int64_t i = 0; i < keys; i++, s += pitch) {
        NAME(vec) decay = NAME(fill)(t->decay[i]), k = NAME(fill)(t->k[i]), q = NAME(fill)(t->q[i]);
        for (int w = 0; w < wide; w++) {
            NAME(vec) part = k * change[w];
            SETTLE(part);
            NAME(vec) now = NAME(load)(s + w * LANES) * decay + part;
            SETTLE(now);
            NAME(store)(s + w * LANES, now);
            sum[w] += now * q;
        }
    }
    for (int w = 0; w < wide; w++)
        NAME(store)(out + w * LANES, sum[w]);
}

static inline void NAME(delta_value)(const DeltaToken *t, float *s, int64_t pitch, int64_t keys, float v, float *out)
{
    float sum = 0.0f;
    for (int64_t i = 0; i < keys; i++) {
        sum += s[i * pitch] * t->decayed[i];
        SETTLE(sum);
    }
    float change = (v - sum) * t->beta;
    SETTLE(change);
    sum = 0.0f;
    for (int64_t i = 0; i < keys; i++) {
        float part = t->k[i] * change;
        SETTLE(part);
        float now = s[i * pitch] * t->decay[i] + part;
        SETTLE(now);
        s[i * pitch] = now;
        sum += now * t->q[i];
        SETTLE(sum);
    }
    *out = sum;
}

/* e to the power of `count` numbers, which are rarely above 0. */
static inline void NAME(decays)(const float *from, float *to, int64_t count)
{
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        NAME(store)(to + i, NAME(exponential)(NAME(load)(from + i)));
    for (; i < count; i++)
        to[i] = expf(from[i]);
    for (i = 0; i < count; i++)
        if (from[i] > 0)
            to[i] = expf(from[i]);
}

/* All tokens of sequence b, head h, values [begin, end), at most DELTA_VALUES of them. */
static void NAME(delta)(const Delta *job, int64_t b, int64_t h, int64_t begin, int64_t end, float *room)
{
    int64_t keys = job->keys, values = job->values, count = end - begin, pitch = values;
    float *k = room, *q = k + keys, *decayed = q + keys, *decay = decayed + keys, *v = decay + keys;
    float *out = v + DELTA_VALUES, *tile = out + DELTA_VALUES;
    float *state = job->state + row_of(job->rows, b) * job->state_batch + h * keys * values + begin, *s = state;
    int copied = job->tokens > 2;
    if (copied) { /* rows of it are copied together: the L1 cache may not hold a whole state */
        s = tile, pitch = count;
        for (int64_t i = 0; i < keys; i++)
            memcpy(s + i * pitch, state + i * values, (size_t)count * sizeof *s);
    }
    for (int64_t t = 0; t < job->tokens; t++) {
        NAME(spread_out)(job->k, job->half, b * job->k_batch + t * job->k_token + h * job->k_head, k, keys);
        NAME(spread_out)(job->q, job->half, b * job->q_batch + t * job->q_token + h * job->q_head, q, keys);
        NAME(spread_out)(job->v, job->half, b * job->v_batch + t * job->v_token + h * job->v_head + begin, v, count);
        int64_t one = (b * job->tokens + t) * job->heads + h;
        if (job->per_key)
            NAME(decays)(job->decay + one * keys, decay, keys);
        else {
            float same = expf(job->decay[one]);
            for (int64_t i = 0; i < keys; i++)
                decay[i] = same;
        }
        float of_k = NAME(to_length)(k, keys, job->normed);
        float of_q = NAME(to_length)(q, keys, job->normed) * job->scale;
        for (int64_t i = 0; i < keys; i++) {
            k[i] *= of_k;
            q[i] *= of_q;
            decayed[i] = k[i] * decay[i];
        }
        DeltaToken token = {k, q, decayed, decay, job->beta[one]};
        int64_t c = 0;
        for (; c + 4 * LANES <= count; c += 4 * LANES)
            NAME(delta_values)(&token, s + c, pitch, keys, v + c, out + c, 4);
        for (; c + LANES <= count; c += LANES)
            NAME(delta_values)(&token, s + c, pitch, keys, v + c, out + c, 1);
        for (; c < count; c++)
            NAME(delta_value)(&token, s + c, pitch, keys, v[c], out + c);
        NAME(bring_back)(out, job->out, job->half, one * values + begin, count);
    }
    if (copied)
        for (int64_t i = 0; i < keys; i++)
            memcpy(state + i * values, s + i * pitch, (size_t)count * sizeof *s);
}

/* A state of one number of a head's: s = decay s + x B; returns s C. */
static inline ALWAYS float NAME(scan_row)(float *s, float decay, float x, const float *b, const float *c, int64_t states)
{
    NAME(vec) sum = {0}, decays = NAME(fill)(decay), xs = NAME(fill)(x);
    int64_t i = 0;
    for (; i + LANES <= states; i += LANES) {
        NAME(vec) part = NAME(load)(b + i) * xs;
        SETTLE(part);
        NAME(vec) now = NAME(load)(s + i) * decays + part;
        SETTLE(now);
        NAME(store)(s + i, now);
        sum += now * NAME(load)(c + i);
    }
    float rest = NAME(total)(sum);
    for (; i < states; i++) {
        float part = b[i] * x;
        SETTLE(part);
        s[i] = s[i] * decay + part;
        rest += s[i] * c[i];
        SETTLE(rest);
    }
    return rest;
}

static inline float NAME(step_length)(const Scan *job, int64_t at, float bias)
{
    float dt = NAME(one)(job->dt, job->half, at) + bias;
    if (job->half)
        dt = NAME(one_b)(float_half(dt));
    if (job->softplus && dt <= 20.0f) {
        dt = log1pf(expf(dt));
        if (job->half)
            dt = NAME(one_b)(float_half(dt));
    }
    float least = job->half ? NAME(one_b)(float_half(job->least)) : job->least;
    float most = job->half ? NAME(one_b)(float_half(job->most)) : job->most;
    dt = dt < least ? least : dt;
    return dt > most ? most : dt;
}

/* All tokens of sequence b, head h: SCAN_TOKENS at a time, whose B and C stay in the first cache. */
static void NAME(scan)(const Scan *job, int64_t b, int64_t h, float *room)
{
    int64_t states = job->states, width = job->width, group = h / (job->heads / job->groups);
    float *bs = room, *cs = bs + SCAN_TOKENS * states, *x = cs + SCAN_TOKENS * states, *y = x + SCAN_TOKENS * width;
    float length[SCAN_TOKENS], decay[SCAN_TOKENS];
    float *state = job->state + row_of(job->rows, b) * job->state_batch + h * width * states;
    for (int64_t begin = 0; begin < job->tokens; begin += SCAN_TOKENS) {
        int64_t count = begin + SCAN_TOKENS < job->tokens ? SCAN_TOKENS : job->tokens - begin;
        for (int64_t i = 0; i < count; i++) {
            int64_t t = begin + i;
            length[i] = NAME(step_length)(job, b * job->dt_batch + t * job->dt_token + h * job->dt_head, job->bias[h]);
            decay[i] = expf(length[i] * job->a[h]);
            NAME(spread_out)(job->b, job->half, b * job->b_batch + t * job->b_token + group * job->b_group,
                             bs + i * states, states);
            NAME(spread_out)(job->c, job->half, b * job->c_batch + t * job->c_token + group * job->c_group,
                             cs + i * states, states);
            NAME(spread_out)(job->x, job->half, b * job->x_batch + t * job->x_token + h * job->x_head, x + i * width,
                             width);
        }
        for (int64_t p = 0; p < width; p++)
            for (int64_t i = 0; i < count; i++) {
                float in = x[i * width + p], through = in * job->d[h], scaled = in * length[i];
                SETTLE(through);
                SETTLE(scaled);
                y[i * width + p] = NAME(scan_row)(state + p * states, decay[i], scaled, bs + i * states,
                                                  cs + i * states, states) + through;
            }
        for (int64_t i = 0; i < count; i++)
            memcpy(job->out + ((b * job->tokens + begin + i) * job->heads + h) * width, y + i * width,
                   (size_t)width * sizeof *y);
    }
}

/* Number i of weights, which may be missing. */
static inline float NAME(weight)(const void *from, int half, int64_t i)
{
    return from == NULL ? 0.0f : NAME(one)(from, half, i);
}

/* `count` channels from `begin` on of all tokens of sequence b. Of `seen`, the last `taps` tokens, the oldest first, all
 * but the newest are there already. */
static inline void NAME(convolve_tokens)(const Convolution *job, int64_t b, int64_t begin, int64_t count,
                                         const float *w, const float *bias, float **seen, float *y)
{
    int64_t taps = job->taps;
    for (int64_t t = 0; t < job->tokens; t++) {
        NAME(spread_out)(job->x, job->half, b * job->x_batch + t * job->x_token + begin, seen[taps - 1], count);
        for (int64_t c = 0; c < count; c += LANES) {
            NAME(vec) sum = NAME(load)(bias + c);
            for (int64_t j = 0; j < taps; j++)
                sum += NAME(load)(seen[j] + c) * NAME(load)(w + j * CHANNELS + c);
            SETTLE(sum);
            NAME(store)(y + c, sum);
        }
        float *oldest = seen[0];
        memmove(seen, seen + 1, (size_t)(taps - 1) * sizeof *seen);
        seen[taps - 1] = oldest;
        if (job->half && job->silu)
            for (int64_t c = 0; c < count; c++)
                y[c] = NAME(one_b)(float_half(y[c]));
        if (job->silu)
            for (int64_t c = 0; c < count; c += LANES)
                NAME(store)(y + c, NAME(silu)(NAME(load)(y + c)));
        NAME(bring_back)(y, job->out, job->half, (b * job->tokens + t) * job->channels + begin, count);
    }
}

/* Channels [begin, end) of all sequences. */
static void NAME(convolve)(const Convolution *job, int64_t begin, int64_t end, float *room)
{
    int64_t taps = job->taps, count = end - begin, before = job->before, size = job->half ? 2 : 4;
    float *w = room, *x = w + taps * CHANNELS, *y = x + taps * CHANNELS, *bias = y + CHANNELS;
    memset(room, 0, (size_t)((2 * taps + 2) * CHANNELS) * sizeof *room); /* whole vectors, of which some is nothing */
    for (int64_t c = 0; c < count; c++) {
        for (int64_t j = 0; j < taps; j++)
            w[j * CHANNELS + c] = NAME(weight)(job->w, job->half, (begin + c) * taps + j);
        bias[c] = NAME(weight)(job->bias, job->half, begin + c);
    }
    for (int64_t b = 0; b < job->batch; b++) {
        int64_t state = row_of(job->rows, b) * job->state_batch + begin * before;
        float *seen[TAPS];
        for (int64_t j = 0; j < taps; j++) {
            seen[j] = x + j * CHANNELS;
            for (int64_t c = 0; c < count && j < taps - 1; c++)
                seen[j][c] = NAME(weight)(job->state, job->half, state + (c + 1) * before - (taps - 1) + j);
        }
        NAME(convolve_tokens)(job, b, begin, count, w, bias, seen, y);
        for (int64_t c = 0; c < count && job->state != NULL; c++) { /* without its first token, and with the new one */
            char *row = (char *)job->state + (state + c * before) * size;
            memmove(row, row + size, (size_t)((before - 1) * size));
            memcpy(row + (before - 1) * size, (const char *)job->x + (b * job->x_batch + begin + c) * size,
                   (size_t)size);
        }
    }
}

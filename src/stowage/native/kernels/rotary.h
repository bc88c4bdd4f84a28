/* Rotary embeddings: x cos + (-second half, first half) sin, each product and each sum rounded once. Included once for each
 * instruction set, after vectors.h. */

/* The nearest of bfloat16, as a float. What is no number, and was one of bfloat16, stays none. */
static inline ALWAYS NAME(vec) NAME(rounded)(NAME(vec) v)
{
    NAME(words) bits = (NAME(words))v;
    return (NAME(vec))((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000);
}

static inline ALWAYS float NAME(rotated_one)(float x, float cosine, float other, float sine, int half)
{
    float a = x * cosine, b = other * sine;
    SETTLE(a);
    SETTLE(b);
    return half ? NAME(one_b)(float_half(a)) + NAME(one_b)(float_half(b)) : a + b;
}

static inline ALWAYS NAME(vec) NAME(rotated)(NAME(vec) x, NAME(vec) cosine, NAME(vec) other, NAME(vec) sine, int half)
{
    NAME(vec) a = x * cosine, b = other * sine;
    if (half)
        return NAME(rounded)(a) + NAME(rounded)(b);
    SETTLE(a);
    SETTLE(b);
    return a + b;
}

#define ROTATE_HEAD(of, type, half, LOAD, ONE, PUT, PUT_ONE)                                                           \
    static inline void NAME(rotate_##of)(const type *x, const type *c, const type *s, type *out, int64_t width)        \
    {                                                                                                                  \
        int64_t side = width / 2, i = 0;                                                                               \
        for (; i + LANES <= side; i += LANES) {                                                                        \
            NAME(vec) a = LOAD(x + i), b = LOAD(x + side + i), y[2];                                                   \
            y[0] = NAME(rotated)(a, LOAD(c + i), -b, LOAD(s + i), half);                                               \
            y[1] = NAME(rotated)(b, LOAD(c + side + i), a, LOAD(s + side + i), half);                                  \
            PUT(out + i, y[0]);                                                                                        \
            PUT(out + side + i, y[1]);                                                                                 \
        }                                                                                                              \
        for (; i < side; i++) {                                                                                        \
            float a = ONE(x[i]), b = ONE(x[side + i]);                                                                 \
            out[i] = PUT_ONE(NAME(rotated_one)(a, ONE(c[i]), -b, ONE(s[i]), half));                                    \
            out[side + i] = PUT_ONE(NAME(rotated_one)(b, ONE(c[side + i]), a, ONE(s[side + i]), half));                \
        }                                                                                                              \
    }

static inline ALWAYS void NAME(put_b)(uint16_t *to, NAME(vec) v)
{
    float values[LANES];
    NAME(store)(values, v);
    NAME(narrow)(values, to, LANES);
}

ROTATE_HEAD(halves, uint16_t, 1, NAME(load_b), NAME(one_b), NAME(put_b), float_half)
ROTATE_HEAD(floats, float, 0, NAME(load_f), NAME(one_f), NAME(store), NAME(one_f))
#undef ROTATE_HEAD

/* Tokens [begin, end). */
static void NAME(rotate)(const Rotation *job, int64_t begin, int64_t end)
{
    for (int64_t t = begin; t < end; t++)
        for (int64_t h = 0; h < job->heads; h++) {
            int64_t from = t * job->token + h * job->head, at = t * job->width, to = (t * job->heads + h) * job->width;
            if (job->half)
                NAME(rotate_halves)((const uint16_t *)job->x + from, (const uint16_t *)job->cosines + at,
                                    (const uint16_t *)job->sines + at, (uint16_t *)job->out + to, job->width);
            else
                NAME(rotate_floats)((const float *)job->x + from, (const float *)job->cosines + at,
                                    (const float *)job->sines + at, (float *)job->out + to, job->width);
        }
}

/* Vectors of LANES floats, and what is done with them in one order only.
 *
 * Included once for each instruction set, with LANES defined and NAME(x) giving every function its own name. All sums
 * here have an order that depends on nothing but the length, so that a result never depends on what else is computed.
 */
typedef float NAME(vec) __attribute__((vector_size(LANES * 4)));
typedef int32_t NAME(ints) __attribute__((vector_size(LANES * 4)));
typedef int8_t NAME(bytes) __attribute__((vector_size(LANES)));
typedef uint16_t NAME(halves) __attribute__((vector_size(LANES * 2)));
typedef uint32_t NAME(words) __attribute__((vector_size(LANES * 4)));

static inline ALWAYS NAME(vec) NAME(load)(const float *from)
{
    NAME(vec) v;
    memcpy(&v, from, sizeof v);
    return v;
}

static inline ALWAYS void NAME(store)(float *to, NAME(vec) v)
{
    memcpy(to, &v, sizeof v);
}

static inline ALWAYS NAME(vec) NAME(fill)(float value)
{
    return value - (NAME(vec)){0};
}

static inline ALWAYS float NAME(total)(NAME(vec) v)
{
#if LANES == 16
    v += __builtin_shuffle(v, (NAME(ints)){8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
    v += __builtin_shuffle(v, (NAME(ints)){4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
    v += __builtin_shuffle(v, (NAME(ints)){2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13});
#elif LANES == 8
    v += __builtin_shuffle(v, (NAME(ints)){4, 5, 6, 7, 0, 1, 2, 3});
    v += __builtin_shuffle(v, (NAME(ints)){2, 3, 0, 1, 6, 7, 4, 5});
#else
    return (v[0] + v[2]) + (v[1] + v[3]);
#endif
    return v[0] + v[1];
}

/* `count` numbers of bfloat16 as float32. */
static inline void NAME(widen)(const uint16_t *from, float *to, int64_t count)
{
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        NAME(halves) half;
        memcpy(&half, from + i, sizeof half);
        NAME(words) word = __builtin_convertvector(half, NAME(words)) << 16;
        memcpy(to + i, &word, sizeof word);
    }
    for (; i < count; i++) {
        uint32_t word = (uint32_t)from[i] << 16;
        memcpy(to + i, &word, sizeof word);
    }
}

/* `count` codes of one byte as float32. */
static inline void NAME(decode)(const int8_t *from, float *to, int64_t count)
{
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
#if LANES == 16
        NAME(ints) wide = (NAME(ints))_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(from + i)));
#elif LANES == 8 /* what GCC 12 makes of a conversion of eight bytes took four times as long */
        NAME(ints) wide = (NAME(ints))_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(from + i)));
#else
        NAME(bytes) codes;
        memcpy(&codes, from + i, sizeof codes);
        NAME(ints) wide = __builtin_convertvector(codes, NAME(ints));
#endif
        NAME(store)(to + i, __builtin_convertvector(wide, NAME(vec)));
    }
    for (; i < count; i++)
        to[i] = (float)from[i];
}

/* e^x, for x <= 0 up to one unit in the last place; 0 below -87. Argument reduction and a polynomial of degree 6, as in
 * Cephes (Moshier, 1992). */
static inline ALWAYS NAME(vec) NAME(exponential)(NAME(vec) x)
{
    const NAME(vec) round = NAME(fill)(12582912.0f); /* 1.5 * 2^23: what is added to it becomes an integer */
    NAME(ints) small = x < NAME(fill)(-87.0f);
    NAME(vec) inside = (NAME(vec))((NAME(ints))x & ~small); /* 0 where the answer is 0 anyway */
    NAME(vec) shifted = inside * 1.44269504f + round;
    NAME(vec) n = shifted - round;
    NAME(vec) r = inside - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    NAME(vec) p = NAME(fill)(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    NAME(ints) power = ((NAME(ints))shifted - (NAME(ints))round) << 23;
    NAME(vec) scaled = (NAME(vec))((NAME(ints))p + power);
    return (NAME(vec))((NAME(ints))scaled & ~small);
}

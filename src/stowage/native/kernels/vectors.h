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
    SETTLE(v);
#if LANES == 16
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256((__m512)v),
                                 _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd((__m512)v), 1)));
#elif LANES == 8
    __m256 eight = (__m256)v;
#endif
#if LANES >= 8
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}

/* LANES weights as float32, and one: floats, bfloat16, codes of one byte. */
static inline ALWAYS NAME(vec) NAME(load_f)(const float *from)
{
    return NAME(load)(from);
}

static inline ALWAYS NAME(vec) NAME(load_b)(const uint16_t *from)
{
#if LANES == 16 /* GCC 12 splits a conversion of sixteen into two */
    return (NAME(vec))_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
#elif LANES == 8
    return (NAME(vec))_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)), 16);
#else
    NAME(halves) half;
    memcpy(&half, from, sizeof half);
    return (NAME(vec))(__builtin_convertvector(half, NAME(words)) << 16);
#endif
}

static inline ALWAYS NAME(vec) NAME(load_c)(const int8_t *from)
{
#if LANES == 16
    NAME(ints) wide = (NAME(ints))_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from));
#elif LANES == 8 /* the code of GCC 12 for a conversion of eight bytes took four times as long */
    NAME(ints) wide = (NAME(ints))_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from));
#else
    NAME(bytes) codes;
    memcpy(&codes, from, sizeof codes);
    NAME(ints) wide = __builtin_convertvector(codes, NAME(ints));
#endif
    return __builtin_convertvector(wide, NAME(vec));
}

static inline ALWAYS float NAME(one_f)(float from)
{
    return from;
}

static inline ALWAYS float NAME(one_b)(uint16_t from)
{
    return float_of((uint32_t)from << 16);
}

static inline ALWAYS float NAME(one_c)(int8_t from)
{
    return (float)from;
}

/* Number i of bfloat16 if `half`, else of float32. */
static inline ALWAYS float NAME(one)(const void *from, int half, int64_t i)
{
    return half ? NAME(one_b)(((const uint16_t *)from)[i]) : NAME(one_f)(((const float *)from)[i]);
}

/* The sum of the squares of `count` such numbers. */
static inline float NAME(square_sum)(const void *from, int half, int64_t count)
{
    NAME(vec) squares = {0};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        NAME(vec) v = half ? NAME(load_b)((const uint16_t *)from + i) : NAME(load_f)((const float *)from + i);
        squares += v * v;
    }
    float sum = NAME(total)(squares);
    for (; i < count; i++) {
        float one = NAME(one)(from, half, i);
        sum += one * one;
        SETTLE(sum);
    }
    return sum;
}

/* `count` numbers of bfloat16 as float32. */
static inline void NAME(widen)(const uint16_t *from, float *to, int64_t count)
{
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        NAME(store)(to + i, NAME(load_b)(from + i));
    for (; i < count; i++)
        to[i] = NAME(one_b)(from[i]);
}

/* Floats as the nearest of bfloat16, halfway cases to even. */
static inline void NAME(narrow)(const float *from, uint16_t *to, int64_t count)
{
#if LANES == 16
    for (int64_t i = 0; i < count; i += 16) {
        __mmask16 there = count - i < 16 ? (__mmask16)((1 << (count - i)) - 1) : 0xffff;
        __m512i bits = (__m512i)_mm512_maskz_loadu_ps(there, from + i);
        __mmask16 no_number = _mm512_cmp_ps_mask((__m512)bits, (__m512)bits, _CMP_UNORD_Q);
        __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        bits = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
        bits = _mm512_mask_mov_epi32(bits, no_number, _mm512_set1_epi32(0x7fc0));
        _mm512_mask_cvtepi32_storeu_epi16(to + i, there, bits);
    }
#else
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        NAME(words) bits = (NAME(words))NAME(load)(from + i);
        NAME(words) strange = (NAME(words))((bits & 0x7fffffff) > 0x7f800000);
        bits = ((bits + 0x7fff + (bits >> 16 & 1)) >> 16 & ~strange) | (0x7fc0 & strange);
        NAME(halves) half = __builtin_convertvector(bits, NAME(halves));
        memcpy(to + i, &half, sizeof half);
    }
    for (; i < count; i++)
        to[i] = float_half(from[i]);
#endif
}

/* `count` codes of four bits as numbers: code * scale + least. `shift`: 0 for the low halves of the bytes, 4 for the
 * others. */
static inline void NAME(decode_halves)(const uint8_t *from, int shift, float scale, float least, float *to,
                                       int64_t count)
{
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
#if LANES == 16
        NAME(ints) wide = (NAME(ints))_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(from + i)));
#elif LANES == 8
        NAME(ints) wide = (NAME(ints))_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(from + i)));
#else
        NAME(ints) wide = {from[i], from[i + 1], from[i + 2], from[i + 3]};
#endif
        NAME(store)(to + i, __builtin_convertvector(wide >> shift & 15, NAME(vec)) * scale + least);
    }
    for (; i < count; i++)
        to[i] = (float)(from[i] >> shift & 15) * scale + least;
}

/* e^x, for x <= 0 up to one unit in the last place; 0 below -87. Argument reduction and a polynomial of degree 6, as in
 * Cephes (Moshier, 1992). */
static inline ALWAYS NAME(vec) NAME(exponential)(NAME(vec) x)
{
    const NAME(vec) round = NAME(fill)(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer, in the last bits */
    NAME(ints) small = x < NAME(fill)(-87.0f);
    NAME(vec) shifted = x * 1.44269504f + round;
    NAME(vec) n = shifted - round;
    NAME(vec) r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    NAME(vec) p = NAME(fill)(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    return (NAME(vec))(((NAME(ints))p + ((NAME(ints))shifted << 23)) & ~small);
}

/* The same rounded to bfloat16, up to 0.53 units in its last place; 0 below -20.75, which is less than 2^-29. */
static inline ALWAYS NAME(vec) NAME(rounded_exponential)(NAME(vec) x)
{
    const NAME(vec) round = NAME(fill)(12582912.0f);
    NAME(ints) small = x < NAME(fill)(-20.75f);
    NAME(vec) shifted = x * 1.44269504f + round;
    NAME(vec) r = x * 1.44269504f - (shifted - round);
    NAME(vec) p = NAME(fill)(5.5008580e-2f) * r + 2.4221037e-1f;
    p = p * r + 6.9328290e-1f;
    p = p * r + 1.0f;
    NAME(ints) bits = (NAME(ints))p + ((NAME(ints))shifted << 23) + 0x8000;
    return (NAME(vec))(bits & ~0xffff & ~small);
}

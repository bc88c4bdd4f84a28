/* AVX-512 in plain C and AVX2, as Intel's reference has it: scripts/emulated_avx512.py compiles the kernels with it in
 * place of the compiler's headers. What is not written here does not compile. What instructions leave undefined is a
 * pattern that tests notice; an address that is not aligned, where it must be, ends the program. */
#ifndef AVX512_EMULATED_H
#define AVX512_EMULATED_H
typedef float __m512 __attribute__((vector_size(64), may_alias));
typedef double __m512d __attribute__((vector_size(64), may_alias));
typedef long long __m512i __attribute__((vector_size(64), may_alias));
typedef short __m512bh __attribute__((vector_size(64), may_alias));
typedef unsigned char __mmask8;
typedef unsigned short __mmask16;
typedef unsigned __mmask32;
typedef unsigned long long __mmask64;
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")

#define EMULATED static __attribute__((noinline, unused)) /* inline they take minutes to compile */
typedef union {
    __m512i i;
    __m512 f;
    __m512d p;
    int8_t b[64];
    uint8_t ub[64];
    int16_t w[32];
    uint16_t uw[32];
    int32_t d[16];
    uint32_t ud[16];
    int64_t q[8];
    uint64_t uq[8];
    float s[16];
    __m256i half[2];
    __m128i quarter[4];
} Wide;
#define W(x) ((Wide){.i = (__m512i)(x)})
#define EACH(n) for (int k = 0; k < (n); k++)

/* where, and how wide */
EMULATED __m512i _mm512_loadu_si512(const void *at)
{
    __m512i v;
    memcpy(&v, at, 64);
    return v;
}
EMULATED __m512 _mm512_loadu_ps(const void *at) { return (__m512)_mm512_loadu_si512(at); }
EMULATED __m512i _mm512_load_si512(const void *at)
{
    if ((uintptr_t)at % 64)
        __builtin_trap();
    return _mm512_loadu_si512(at);
}
EMULATED __m512 _mm512_load_ps(const void *at) { return (__m512)_mm512_load_si512(at); }
EMULATED void _mm512_storeu_si512(void *at, __m512i v) { memcpy(at, &v, 64); }
EMULATED void _mm512_storeu_ps(void *at, __m512 v) { memcpy(at, &v, 64); }
EMULATED void _mm512_store_si512(void *at, __m512i v)
{
    if ((uintptr_t)at % 64)
        __builtin_trap();
    memcpy(at, &v, 64);
}
EMULATED void _mm512_store_ps(void *at, __m512 v) { _mm512_store_si512(at, (__m512i)v); }

#define MASKED_LOAD(name, type, result, field, n)                                                                      \
    EMULATED result name(uint64_t mask, const void *at)                                                                \
    {                                                                                                                  \
        type v[n];                                                                                                     \
        EACH(n) v[k] = mask >> k & 1 ? ((const type *)at)[k] : 0;                                                      \
        result r;                                                                                                      \
        memcpy(&r, v, sizeof r);                                                                                       \
        return r;                                                                                                      \
    }
MASKED_LOAD(_mm512_maskz_loadu_epi32, int32_t, __m512i, d, 16)
MASKED_LOAD(_mm512_maskz_loadu_epi16, int16_t, __m512i, w, 32)
MASKED_LOAD(_mm512_maskz_loadu_ps, float, __m512, s, 16)
MASKED_LOAD(_mm_maskz_loadu_epi8, int8_t, __m128i, b, 16)
MASKED_LOAD(_mm_maskz_loadu_epi32, int32_t, __m128i, d, 4)
MASKED_LOAD(_mm256_maskz_loadu_epi8, int8_t, __m256i, b, 32)
MASKED_LOAD(_mm256_maskz_loadu_epi16, int16_t, __m256i, w, 16)

EMULATED void _mm_mask_storeu_ps(void *at, uint64_t mask, __m128 v)
{
    EACH(4) if (mask >> k & 1) ((float *)at)[k] = v[k];
}
EMULATED void _mm_mask_storeu_epi16(void *at, uint64_t mask, __m128i v)
{
    int16_t w[8];
    memcpy(w, &v, 16);
    EACH(8) if (mask >> k & 1) ((int16_t *)at)[k] = w[k];
}

/* one number everywhere, or each */
#define SET1(name, type, field, n)                                                                                     \
    EMULATED __m512i name(type x)                                                                                      \
    {                                                                                                                  \
        Wide v;                                                                                                        \
        EACH(n) v.field[k] = x;                                                                                        \
        return v.i;                                                                                                    \
    }
SET1(_mm512_set1_epi8, int8_t, b, 64)
SET1(_mm512_set1_epi16, int16_t, w, 32)
SET1(_mm512_set1_epi32, int32_t, d, 16)
SET1(_mm512_set1_epi64, int64_t, q, 8)
EMULATED __m512 _mm512_set1_ps(float x)
{
    Wide v;
    EACH(16) v.s[k] = x;
    return v.f;
}
EMULATED __m512i _mm512_setzero_si512(void) { return _mm512_set1_epi32(0); }
EMULATED __m512 _mm512_setzero_ps(void) { return _mm512_set1_ps(0); }
#define _mm512_setr_epi32(...) ((Wide){.d = {__VA_ARGS__}}.i)
#define _mm512_setr_epi64(...) ((Wide){.q = {__VA_ARGS__}}.i)
#define _mm512_setr_ps(...) ((Wide){.s = {__VA_ARGS__}}.f)
#define _mm512_set_epi32(p, o, n, m, l, k, j, i, h, g, f, e, d_, c, b_, a)                                             \
    _mm512_setr_epi32(a, b_, c, d_, e, f, g, h, i, j, k, l, m, n, o, p)
#define _mm512_set_epi64(h, g, f, e, d_, c, b_, a) _mm512_setr_epi64(a, b_, c, d_, e, f, g, h)
#define _mm512_set4_epi32(d_, c, b_, a) _mm512_setr_epi32(a, b_, c, d_, a, b_, c, d_, a, b_, c, d_, a, b_, c, d_)

/* two of a width, each with its own */
#define EACH_WITH(name, result, field, n, expression)                                                                  \
    EMULATED result name(result x, result y)                                                                           \
    {                                                                                                                  \
        Wide a = W(x), b = W(y), v;                                                                                    \
        EACH(n) v.field[k] = expression;                                                                               \
        return (result)v.i;                                                                                            \
    }
EACH_WITH(_mm512_add_ps, __m512, s, 16, a.s[k] + b.s[k])
EACH_WITH(_mm512_sub_ps, __m512, s, 16, a.s[k] - b.s[k])
EACH_WITH(_mm512_mul_ps, __m512, s, 16, a.s[k] * b.s[k])
EACH_WITH(_mm512_div_ps, __m512, s, 16, a.s[k] / b.s[k])
EACH_WITH(_mm512_max_ps, __m512, s, 16, a.s[k] > b.s[k] ? a.s[k] : b.s[k])
EACH_WITH(_mm512_and_si512, __m512i, q, 8, a.q[k] & b.q[k])
EACH_WITH(_mm512_or_si512, __m512i, q, 8, a.q[k] | b.q[k])
EACH_WITH(_mm512_xor_si512, __m512i, q, 8, a.q[k] ^ b.q[k])
EACH_WITH(_mm512_add_epi8, __m512i, ub, 64, a.ub[k] + b.ub[k])
EACH_WITH(_mm512_add_epi16, __m512i, uw, 32, a.uw[k] + b.uw[k])
EACH_WITH(_mm512_sub_epi16, __m512i, uw, 32, a.uw[k] - b.uw[k])
EACH_WITH(_mm512_add_epi32, __m512i, ud, 16, a.ud[k] + b.ud[k])
EACH_WITH(_mm512_sub_epi32, __m512i, ud, 16, a.ud[k] - b.ud[k])
EACH_WITH(_mm512_max_epi32, __m512i, d, 16, a.d[k] > b.d[k] ? a.d[k] : b.d[k])
EACH_WITH(_mm512_mullo_epi16, __m512i, uw, 32, (uint16_t)((uint32_t)a.uw[k] * b.uw[k]))
EACH_WITH(_mm512_mullo_epi32, __m512i, ud, 16, a.ud[k] * b.ud[k])
EACH_WITH(_mm512_srlv_epi16, __m512i, uw, 32, b.uw[k] < 16 ? a.uw[k] >> b.uw[k] : 0)
EACH_WITH(_mm512_sllv_epi16, __m512i, uw, 32, b.uw[k] < 16 ? (uint16_t)(a.uw[k] << b.uw[k]) : 0)
EACH_WITH(_mm512_srlv_epi32, __m512i, ud, 16, b.ud[k] < 32 ? a.ud[k] >> b.ud[k] : 0)
EACH_WITH(_mm512_madd_epi16, __m512i, ud, 16,
          (uint32_t)(a.w[2 * k] * b.w[2 * k]) + (uint32_t)(a.w[2 * k + 1] * b.w[2 * k + 1]))
EACH_WITH(_mm512_shuffle_epi8, __m512i, ub, 64, b.ub[k] & 128 ? 0 : a.ub[k / 16 * 16 + (b.ub[k] & 15)])
EACH_WITH(_mm512_unpacklo_epi8, __m512i, ub, 64, (k & 1 ? b : a).ub[k / 16 * 16 + k % 16 / 2])
EACH_WITH(_mm512_unpackhi_epi8, __m512i, ub, 64, (k & 1 ? b : a).ub[k / 16 * 16 + 8 + k % 16 / 2])
EACH_WITH(_mm512_unpacklo_epi16, __m512i, uw, 32, (k & 1 ? b : a).uw[k / 8 * 8 + k % 8 / 2])
EACH_WITH(_mm512_unpackhi_epi16, __m512i, uw, 32, (k & 1 ? b : a).uw[k / 8 * 8 + 4 + k % 8 / 2])
EACH_WITH(_mm512_unpacklo_epi32, __m512i, ud, 16, (k & 1 ? b : a).ud[k / 4 * 4 + k % 4 / 2])
EACH_WITH(_mm512_unpackhi_epi32, __m512i, ud, 16, (k & 1 ? b : a).ud[k / 4 * 4 + 2 + k % 4 / 2])
EACH_WITH(_mm512_unpacklo_ps, __m512, ud, 16, (k & 1 ? b : a).ud[k / 4 * 4 + k % 4 / 2])
EACH_WITH(_mm512_unpackhi_ps, __m512, ud, 16, (k & 1 ? b : a).ud[k / 4 * 4 + 2 + k % 4 / 2])
EACH_WITH(_mm512_unpacklo_epi64, __m512i, q, 8, (k & 1 ? b : a).q[k / 2 * 2])
EACH_WITH(_mm512_unpackhi_epi64, __m512i, q, 8, (k & 1 ? b : a).q[k / 2 * 2 + 1])
#define SATURATED(x, least, most) ((x) < (least) ? (least) : (x) > (most) ? (most) : (x))
EACH_WITH(_mm512_packs_epi32, __m512i, w, 32, SATURATED((k % 8 < 4 ? a : b).d[k / 8 * 4 + k % 4], -32768, 32767))
EACH_WITH(_mm512_packs_epi16, __m512i, b, 64, SATURATED((k % 16 < 8 ? a : b).w[k / 16 * 8 + k % 8], -128, 127))
/* the first says which of the second */
EACH_WITH(_mm512_permutexvar_epi16, __m512i, uw, 32, b.uw[a.uw[k] & 31])
EACH_WITH(_mm512_permutexvar_epi32, __m512i, ud, 16, b.ud[a.ud[k] & 15])
EMULATED __m512 _mm512_permutexvar_ps(__m512i which, __m512 x)
{
    return (__m512)_mm512_permutexvar_epi32(which, (__m512i)x);
}

#define TWO_TABLES(name, field, n)                                                                                     \
    EMULATED __m512i name(__m512i x, __m512i which, __m512i y)                                                         \
    {                                                                                                                  \
        Wide a = W(x), b = W(y), at = W(which), v;                                                                     \
        EACH(n) v.field[k] = (at.field[k] & (n) ? b : a).field[at.field[k] & ((n) - 1)];                               \
        return v.i;                                                                                                    \
    }
TWO_TABLES(_mm512_permutex2var_epi8, ub, 64)
TWO_TABLES(_mm512_permutex2var_epi16, uw, 32)
TWO_TABLES(_mm512_permutex2var_epi32, ud, 16)
TWO_TABLES(_mm512_permutex2var_epi64, uq, 8)
EMULATED __m512 _mm512_permutex2var_ps(__m512 x, __m512i which, __m512 y)
{
    return (__m512)_mm512_permutex2var_epi32((__m512i)x, which, (__m512i)y);
}

/* by a number that is the same for all */
#define EACH_BY(name, field, n, expression)                                                                            \
    EMULATED __m512i name(__m512i x, unsigned y)                                                                       \
    {                                                                                                                  \
        Wide a = W(x), v;                                                                                              \
        EACH(n) v.field[k] = expression;                                                                               \
        return v.i;                                                                                                    \
    }
EACH_BY(_mm512_slli_epi16, uw, 32, y < 16 ? (uint16_t)(a.uw[k] << y) : 0)
EACH_BY(_mm512_srli_epi16, uw, 32, y < 16 ? a.uw[k] >> y : 0)
EACH_BY(_mm512_slli_epi32, ud, 16, y < 32 ? a.ud[k] << y : 0)
EACH_BY(_mm512_srli_epi32, ud, 16, y < 32 ? a.ud[k] >> y : 0)
EACH_BY(_mm512_srai_epi32, d, 16, a.d[k] >> (y < 32 ? y : 31))
EACH_BY(_mm512_shuffle_epi32, ud, 16, a.ud[k / 4 * 4 + (y >> 2 * (k % 4) & 3)])
EMULATED __m512i _mm512_srl_epi32(__m512i x, __m128i by)
{
    uint64_t y = (uint64_t)_mm_cvtsi128_si64(by);
    return y < 32 ? _mm512_srli_epi32(x, (unsigned)y) : _mm512_setzero_si512();
}

#define TWO_BY(name, result, field, n, expression)                                                                     \
    EMULATED result name(result x, result y, unsigned how)                                                             \
    {                                                                                                                  \
        Wide a = W(x), b = W(y), v;                                                                                    \
        EACH(n) v.field[k] = expression;                                                                               \
        return (result)v.i;                                                                                            \
    }
TWO_BY(_mm512_shldi_epi16, __m512i, uw, 32, (uint16_t)(((uint32_t)a.uw[k] << 16 | b.uw[k]) << (how & 15) >> 16))
TWO_BY(_mm512_shrdi_epi16, __m512i, uw, 32, (uint16_t)(((uint32_t)b.uw[k] << 16 | a.uw[k]) >> (how & 15)))
TWO_BY(_mm512_shuffle_ps, __m512, ud, 16, (k % 4 < 2 ? a : b).ud[k / 4 * 4 + (how >> 2 * (k % 4) & 3)])
TWO_BY(_mm512_shuffle_i32x4, __m512i, ud, 16, (k < 8 ? a : b).ud[(how >> 2 * (k / 4) & 3) * 4 + k % 4])
EMULATED __m512 _mm512_shuffle_f32x4(__m512 x, __m512 y, unsigned how)
{
    return (__m512)_mm512_shuffle_i32x4((__m512i)x, (__m512i)y, how);
}
EMULATED __m512i _mm512_ternarylogic_epi32(__m512i x, __m512i y, __m512i z, unsigned table)
{
    Wide a = W(x), b = W(y), c = W(z), v;
    EACH(16)
    {
        uint32_t found = 0;
        for (unsigned one = 0; one < 8; one++)
            if (table >> one & 1)
                found |= (one & 4 ? a.ud[k] : ~a.ud[k]) & (one & 2 ? b.ud[k] : ~b.ud[k])
                         & (one & 1 ? c.ud[k] : ~c.ud[k]);
        v.ud[k] = found;
    }
    return v.i;
}

/* parts */
EMULATED __m512i _mm512_inserti32x4(__m512i x, __m128i part, unsigned at)
{
    Wide v = W(x);
    v.quarter[at & 3] = part;
    return v.i;
}
EMULATED __m512i _mm512_inserti64x4(__m512i x, __m256i part, unsigned at)
{
    Wide v = W(x);
    v.half[at & 1] = part;
    return v.i;
}
EMULATED __m256i _mm512_extracti64x4_epi64(__m512i x, unsigned at) { return W(x).half[at & 1]; }
EMULATED __m256d _mm512_extractf64x4_pd(__m512d x, unsigned at) { return (__m256d)W(x).half[at & 1]; }
EMULATED __m128 _mm512_extractf32x4_ps(__m512 x, unsigned at) { return (__m128)W(x).quarter[at & 3]; }
EMULATED __m128i _mm512_extracti32x4_epi32(__m512i x, unsigned at) { return W(x).quarter[at & 3]; }
EMULATED __m512i _mm512_broadcast_i32x4(__m128i x) { return ((Wide){.quarter = {x, x, x, x}}).i; }
EMULATED __m512i _mm512_broadcast_i64x4(__m256i x) { return ((Wide){.half = {x, x}}).i; }
EMULATED __m512 _mm512_broadcastss_ps(__m128 x) { return _mm512_set1_ps(x[0]); }
/* what is above is undefined: it is made to be noticed */
#define ABOVE (int64_t)0xa5a5f7a55a7ffca5
EMULATED __m512i _mm512_castsi128_si512(__m128i x)
{
    Wide v = W(_mm512_set1_epi64(ABOVE));
    v.quarter[0] = x;
    return v.i;
}
EMULATED __m512i _mm512_castsi256_si512(__m256i x)
{
    Wide v = W(_mm512_set1_epi64(ABOVE));
    v.half[0] = x;
    return v.i;
}
EMULATED __m512 _mm512_castps128_ps512(__m128 x) { return (__m512)_mm512_castsi128_si512((__m128i)x); }
EMULATED __m256i _mm512_castsi512_si256(__m512i x) { return W(x).half[0]; }
EMULATED __m128i _mm512_castsi512_si128(__m512i x) { return W(x).quarter[0]; }
EMULATED __m256 _mm512_castps512_ps256(__m512 x) { return (__m256)W(x).half[0]; }
EMULATED __m128 _mm512_castps512_ps128(__m512 x) { return (__m128)W(x).quarter[0]; }
EMULATED __m512d _mm512_castps_pd(__m512 x) { return (__m512d)x; }

/* numbers of another kind */
#define FROM(name, result, from_type, from, count, field, expression)                                                  \
    EMULATED result name(from_type x)                                                                                  \
    {                                                                                                                  \
        from a[sizeof(from_type) / sizeof(from)];                                                                      \
        memcpy(a, &x, sizeof a);                                                                                       \
        Wide v;                                                                                                        \
        EACH(count) v.field[k] = expression;                                                                           \
        return (result)v.i;                                                                                            \
    }
FROM(_mm512_cvtepu16_epi32, __m512i, __m256i, uint16_t, 16, ud, a[k])
FROM(_mm512_cvtepi16_epi32, __m512i, __m256i, int16_t, 16, d, a[k])
FROM(_mm512_cvtepi8_epi32, __m512i, __m128i, int8_t, 16, d, a[k])
FROM(_mm512_cvtepu8_epi32, __m512i, __m128i, uint8_t, 16, ud, a[k])
FROM(_mm512_cvtepu8_epi16, __m512i, __m256i, uint8_t, 32, uw, a[k])
FROM(_mm512_cvtepi8_epi16, __m512i, __m256i, int8_t, 32, w, a[k])
FROM(_mm512_cvtepi32_ps, __m512, __m512i, int32_t, 16, s, (float)a[k])
EMULATED __m512 _mm512_cvtph_ps(__m256i x)
{
    Wide v;
    v.half[0] = (__m256i)_mm256_cvtph_ps(_mm256_castsi256_si128(x));
    v.half[1] = (__m256i)_mm256_cvtph_ps(_mm256_extracti128_si256(x, 1));
    return v.f;
}
EMULATED __m512i _mm512_cvtps_epi32(__m512 x)
{
    Wide a = W(x), v;
    v.half[0] = _mm256_cvtps_epi32((__m256)a.half[0]);
    v.half[1] = _mm256_cvtps_epi32((__m256)a.half[1]);
    return v.i;
}
EMULATED __m256i _mm512_cvtepi32_epi16(__m512i x)
{
    Wide a = W(x), v;
    EACH(16) v.w[k] = (int16_t)a.d[k];
    return v.half[0];
}
EMULATED __m128i _mm_cvtepi32_epi16(__m128i x)
{
    int32_t a[4];
    memcpy(a, &x, 16);
    Wide v = W(_mm512_setzero_si512());
    EACH(4) v.w[k] = (int16_t)a[k];
    return v.quarter[0];
}
EMULATED void _mm512_mask_cvtepi32_storeu_epi16(void *at, uint64_t mask, __m512i x)
{
    EACH(16) if (mask >> k & 1) ((int16_t *)at)[k] = (int16_t)W(x).d[k];
}

/* masks */
#define MASK_OF(name, n, field, test)                                                                                  \
    EMULATED uint64_t name(__m512i x, __m512i y)                                                                       \
    {                                                                                                                  \
        Wide a = W(x), b = W(y);                                                                                       \
        uint64_t found = 0;                                                                                            \
        EACH(n) found |= (uint64_t)(test) << k;                                                                        \
        return found;                                                                                                  \
    }
MASK_OF(_mm512_test_epi8_mask, 64, b, (a.b[k] & b.b[k]) != 0)
MASK_OF(_mm512_test_epi16_mask, 32, w, (a.w[k] & b.w[k]) != 0)
MASK_OF(_mm512_cmpge_epi16_mask, 32, w, a.w[k] >= b.w[k])
MASK_OF(_mm512_cmpge_epu16_mask, 32, w, a.uw[k] >= b.uw[k])
MASK_OF(_mm512_cmpeq_epi32_mask, 16, d, a.d[k] == b.d[k])
MASK_OF(_mm512_cmpeq_epi16_mask, 32, w, a.w[k] == b.w[k])
#define _mm512_mask_test_epi8_mask(mask, x, y) ((uint64_t)(mask) & _mm512_test_epi8_mask(x, y))
#define _mm512_mask_cmpge_epu16_mask(mask, x, y) ((uint64_t)(mask) & _mm512_cmpge_epu16_mask(x, y))
EMULATED uint64_t _mm512_movepi8_mask(__m512i x) { return _mm512_test_epi8_mask(x, _mm512_set1_epi8(-128)); }
EMULATED uint64_t _mm512_cmp_ps_mask(__m512 x, __m512 y, int how)
{
    Wide a = W(x), b = W(y);
    uint64_t found = 0;
    if (how != _CMP_UNORD_Q)
        __builtin_trap();
    EACH(16) found |= (uint64_t)(a.s[k] != a.s[k] || b.s[k] != b.s[k]) << k;
    return found;
}
#define _mm_cmp_ps_mask(x, y, how) ((uint64_t)_mm_movemask_ps(_mm_cmp_ps(x, y, how)))
#define _mm_cmplt_epi32_mask(x, y) ((uint64_t)_mm_movemask_ps((__m128)_mm_cmplt_epi32(x, y)))
#define _mm_cmpge_epi32_mask(x, y) ((uint64_t)(15 ^ _mm_movemask_ps((__m128)_mm_cmplt_epi32(x, y))))
#define _mm256_cmpeq_epi8_mask(x, y) ((uint64_t)(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(x, y)))

#define CHOSEN(name, field, n)                                                                                         \
    EMULATED __m512i name(__m512i other, uint64_t mask, __m512i x)                                                     \
    {                                                                                                                  \
        Wide a = W(other), b = W(x), v;                                                                                \
        EACH(n) v.field[k] = mask >> k & 1 ? b.field[k] : a.field[k];                                                  \
        return v.i;                                                                                                    \
    }
CHOSEN(_mm512_mask_mov_epi8, b, 64)
CHOSEN(_mm512_mask_mov_epi16, w, 32)
CHOSEN(_mm512_mask_mov_epi32, d, 16)
#define _mm512_mask_add_epi8(other, mask, x, y) _mm512_mask_mov_epi8(other, mask, _mm512_add_epi8(x, y))
#define _mm512_mask_add_epi16(other, mask, x, y) _mm512_mask_mov_epi16(other, mask, _mm512_add_epi16(x, y))
#define _mm512_mask_or_epi32(other, mask, x, y) _mm512_mask_mov_epi32(other, mask, _mm512_or_si512(x, y))
#define _mm512_mask_permutexvar_epi16(other, mask, which, x)                                                           \
    _mm512_mask_mov_epi16(other, mask, _mm512_permutexvar_epi16(which, x))
#define _mm512_mask_broadcastss_ps(other, mask, x)                                                                     \
    ((__m512)_mm512_mask_mov_epi32((__m512i)(other), mask, (__m512i)_mm512_broadcastss_ps(x)))
/* places outside of the mask keep the index */
#define _mm512_mask2_permutex2var_epi16(x, which, mask, y)                                                             \
    ({                                                                                                                 \
        __m512i which_ = (which);                                                                                      \
        _mm512_mask_mov_epi16(which_, mask, _mm512_permutex2var_epi16(x, which_, y));                                  \
    })
EMULATED __m512i _mm512_maskz_compress_epi8(uint64_t mask, __m512i x)
{
    Wide a = W(x), v = W(_mm512_setzero_si512());
    int to = 0;
    EACH(64) if (mask >> k & 1) v.b[to++] = a.b[k];
    return v.i;
}
EMULATED __m512i _mm512_mask_expand_epi8(__m512i other, uint64_t mask, __m512i x)
{
    Wide a = W(x), v = W(other);
    int from = 0;
    EACH(64) if (mask >> k & 1) v.b[k] = a.b[from++];
    return v.i;
}
EMULATED __m128 _mm_mask_mov_ps(__m128 other, uint64_t mask, __m128 x)
{
    EACH(4) if (mask >> k & 1) other[k] = x[k];
    return other;
}
EMULATED __m128i _mm_mask_mov_epi32(__m128i other, uint64_t mask, __m128i x)
{
    return (__m128i)_mm_mask_mov_ps((__m128)other, mask, (__m128)x);
}
#define _mm_maskz_div_ps(mask, x, y) _mm_mask_mov_ps(_mm_setzero_ps(), mask, _mm_div_ps(x, y))
EMULATED __m256i _mm256_mask_sub_epi8(__m256i other, uint64_t mask, __m256i x, __m256i y)
{
    int8_t r[32], c[32];
    memcpy(r, &other, 32);
    x = _mm256_sub_epi8(x, y);
    memcpy(c, &x, 32);
    EACH(32) r[k] = mask >> k & 1 ? c[k] : r[k];
    memcpy(&other, r, 32);
    return other;
}

/* sums of products */
EMULATED __m512 _mm512_fmadd_ps(__m512 x, __m512 y, __m512 z)
{
    Wide a = W(x), b = W(y), c = W(z), v;
    for (int h = 0; h < 2; h++)
        v.half[h] = (__m256i)_mm256_fmadd_ps((__m256)a.half[h], (__m256)b.half[h], (__m256)c.half[h]);
    return v.f;
}
EMULATED __m512i _mm512_dpbusd_epi32(__m512i sums, __m512i x, __m512i y)
{
    Wide v = W(sums), a = W(x), b = W(y);
    EACH(16) for (int i = 0; i < 4; i++) v.ud[k] += (uint32_t)((int32_t)a.ub[4 * k + i] * b.b[4 * k + i]);
    return v.i;
}
EMULATED __m512i _mm512_dpwssd_epi32(__m512i sums, __m512i x, __m512i y)
{
    return _mm512_add_epi32(sums, _mm512_madd_epi16(x, y));
}
/* Intel's reference: what is below the normal numbers is 0, to nearest; the odd ones first. */
static __attribute__((noinline, unused)) void two_products(Wide *v, const Wide *a, const Wide *b)
{
    unsigned before = _mm_getcsr();
    _mm_setcsr((before & ~0x6000u) | 0x8040);
    for (int h = 0; h < 2; h++) {
        __m256i x = a->half[h], y = b->half[h], top = _mm256_set1_epi32((int)0xffff0000);
        __m256 odd_x = (__m256)_mm256_and_si256(x, top), odd_y = (__m256)_mm256_and_si256(y, top);
        __m256 sum = _mm256_fmadd_ps(odd_x, odd_y, (__m256)v->half[h]);
        v->half[h] = (__m256i)_mm256_fmadd_ps((__m256)_mm256_slli_epi32(x, 16), (__m256)_mm256_slli_epi32(y, 16), sum);
    }
    _mm_setcsr(before);
}
EMULATED __m512 _mm512_dpbf16_ps(__m512 sums, __m512bh x, __m512bh y)
{
    Wide v = W(sums), a = W(x), b = W(y);
    two_products(&v, &a, &b);
    return v.f;
}
EMULATED uint16_t to_bfloat16(uint32_t bits)
{
    if ((bits & 0x7f800000) == 0)
        return (uint16_t)(bits >> 16 & 0x8000);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
EMULATED __m512bh _mm512_cvtne2ps_pbh(__m512 high, __m512 low)
{
    Wide a = W(high), b = W(low), v;
    EACH(32) v.uw[k] = to_bfloat16(k < 16 ? b.ud[k] : a.ud[k - 16]);
    return (__m512bh)v.i;
}
#define _mm512_loadu_epi16 _mm512_loadu_si512
#define _mm512_stream_si512 _mm512_store_si512
#pragma GCC pop_options
#endif

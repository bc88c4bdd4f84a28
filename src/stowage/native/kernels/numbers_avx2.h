/* Weights in block formats as floats with AVX2: to the bit what formats.h makes of them. */

#define AVX2_ROWS 2 /* of so many at most are products made while weights are in registers */

/* Eight codes from 8 `i` on of block b of a group, which lie in whole bytes or halves. */
#define WHOLE(format, CODES)                                                                                           \
    static inline ALWAYS __m256i whole_avx2_##format(const uint8_t *at UNUSED, int part UNUSED, int b UNUSED, int i UNUSED) \
    {                                                                                                                  \
        return CODES;                                                                                                  \
    }
static inline ALWAYS __m256i avx2_half_bytes(const uint8_t *at, int high)
{
    __m256i v = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)at));
    return high ? _mm256_srli_epi32(v, 4) : _mm256_and_si256(v, _mm256_set1_epi32(15));
}

static inline ALWAYS __m256i avx2_turns(const uint8_t *at)
{
    __m256i v = _mm256_srlv_epi32(_mm256_set1_epi32((int)read_word(at)), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
    return _mm256_and_si256(v, _mm256_set1_epi32(15));
}

static inline ALWAYS __m256i avx2_not_linear(const uint8_t *at, int high)
{
    __m128i v = _mm_loadl_epi64((const __m128i *)at), low = _mm_set1_epi8(15);
    v = _mm_and_si128(high ? _mm_srli_epi16(v, 4) : v, low);
    return _mm256_cvtepi8_epi32(_mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)not_linear), v));
}
WHOLE(q8_0, _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(at + 34 * b + 2 + 8 * i))))
WHOLE(q4_0, avx2_half_bytes(at + 18 * b + 2 + 8 * (i % 2), i / 2))
WHOLE(q4_1, avx2_half_bytes(at + 20 * b + 4 + 8 * (i % 2), i / 2))
WHOLE(q4_k, avx2_half_bytes(at + 16 + 64 * part + b / 2 * 32 + 8 * i, b % 2))
WHOLE(packed4, avx2_half_bytes(at + 32 * b + 8 * i, 0))
WHOLE(packed4_high, avx2_half_bytes(at + 32 * b + 8 * i, 1))
WHOLE(int4, avx2_turns(at + 16 * b + 4 * i))
WHOLE(iq4_nl, avx2_not_linear(at + 18 * b + 2 + 8 * (i % 2), i / 2))
WHOLE(iq4_xs, avx2_not_linear(at + 8 + 64 * part + 16 * b + 8 * (i % 2), i / 2))
#undef WHOLE

/* Those of others, of 5 or 6 bits or of FP4: blocks 2 p and 2 p + 1 of a group in a register each, of every eight codes four
 * in the first half and four in the other. */
#define DEALT(format)                                                                                                  \
    static inline ALWAYS void dealt_avx2_##format(const uint8_t *at UNUSED, int part UNUSED, int p UNUSED, __m256i blocks[2])
#define BOTH UNROLLED for (int b = 0; b < 2; b++)

static inline ALWAYS __m256i avx2_dealt(const uint8_t *at)
{
    return _mm256_permutevar8x32_epi32(avx2_32(at), _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
}

static inline ALWAYS __m256i avx2_split(const uint8_t *at)
{
    __m256i v = (__m256i)_mm256_permutevar_ps((__m256)avx2_twice(at), _mm256_setr_epi32(0, 2, 0, 2, 1, 3, 1, 3));
    return avx2_low(_mm256_srlv_epi64(v, _mm256_setr_epi64x(0, 4, 0, 4)));
}

static inline ALWAYS __m256i avx2_fifths(const uint8_t *at)
{
    __m256i which = _mm256_broadcastsi128_si256(_mm_setr_epi32(0, 0x01010101, 0x02020202, 0x03030303));
    __m256i bit = _mm256_setr_m128i(_mm_set1_epi32(0x08040201), _mm_set1_epi32((int)0x80402010));
    __m256i bits = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32((int)read_word(at)), which), bit);
    return _mm256_and_si256(_mm256_cmpeq_epi8(bits, bit), _mm256_set1_epi8(16));
}

#define WITH_FIFTHS(format, BYTES)                                                                                     \
    DEALT(format)                                                                                                      \
    {                                                                                                                  \
        const uint8_t *last = at + (2 * p + 1) * BYTES;                                                                \
        BOTH blocks[b] = _mm256_or_si256(avx2_split(last + b * BYTES - 16), avx2_fifths(last + b * BYTES - 20));       \
    }
WITH_FIFTHS(q5_0, 22) WITH_FIFTHS(q5_1, 24)
#undef WITH_FIFTHS

DEALT(q5_k)
{
    __m256i v = avx2_dealt(at + 48 + 64 * part + 32 * p), fifth = avx2_dealt(at + 16);
    BOTH blocks[b] = avx2_with_bit(b ? avx2_high(v) : avx2_low(v), fifth, 4 * part + 2 * p + b);
}

DEALT(q6_k)
{
    __m256i high = avx2_dealt(at + 128 + 32 * part);
    BOTH {
        __m256i v = avx2_dealt(at + 64 * part + 32 * b), more = p ? high : _mm256_slli_epi16(high, 4);
        more = _mm256_and_si256(b ? _mm256_srli_epi16(more, 2) : more, _mm256_set1_epi8(48));
        blocks[b] = _mm256_or_si256(p ? avx2_high(v) : avx2_low(v), more);
    }
}

DEALT(mxfp4_block)
{
    BOTH blocks[b] = _mm256_shuffle_epi8(avx2_twice(dynamic_fp4), avx2_split(at + 34 * p + 17 * b + 1));
}

DEALT(mxfp4)
{
    __m256i pairs = _mm256_setr_epi8(0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13, -1, 2, -1, 3, -1, 6, -1, 7, -1, 10,
                                     -1, 11, -1, 14, -1, 15, -1);
    BOTH {
        __m256i v = _mm256_shuffle_epi8(avx2_twice(at + 32 * p + 16 * b), pairs);
        v = avx2_low(_mm256_or_si256(v, _mm256_slli_epi16(v, 4)));
        blocks[b] = _mm256_shuffle_epi8(avx2_twice(dynamic_fp4), v);
    }
}

/* Whole numbers of 8 bits, in their order: twice what codes of FP4 mean. */
DEALT(nvfp4)
{
    __m256i values = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
    BOTH {
        __m256i v = avx2_twice(at + 32 * p + 16 * b), low = avx2_low(v), high = avx2_high(v);
        v = _mm256_blend_epi32(_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high), 0xf0);
        blocks[b] = _mm256_shuffle_epi8(values, v);
    }
}

#define SIGNED_CODES(FORMAT, format, B, P, K, S)                                                                       \
    DEALT(format)                                                                                                      \
    {                                                                                                                  \
        int8_t codes[DYNAMIC_BLOCK];                                                                                   \
        BOTH {                                                                                                         \
            codes_##format(at, 4 * part + 2 * p + b, codes);                                                           \
            blocks[b] = avx2_32((const uint8_t *)codes);                                                               \
        }                                                                                                              \
    }
AVX2_SIGNED(SIGNED_CODES)
#undef SIGNED_CODES
#undef BOTH
#undef DEALT

static inline ALWAYS __m256 avx2_signed(__m256i codes, int i)
{
    __m128i half = i < 2 ? _mm256_castsi256_si128(codes) : _mm256_extracti128_si256(codes, 1);
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(i % 2 ? _mm_unpackhi_epi64(half, half) : half));
}

/* Eight codes of a block in a register so, as floats that are more by 2^7: codes are the first to seventh bit of a fraction. */
static inline ALWAYS __m256 avx2_more_by_128(__m256i dealt, int i)
{
    __m256i none = _mm256_setzero_si256(), high = _mm256_set1_epi8(0x43);
    __m256i halves = i < 2 ? _mm256_unpacklo_epi8(dealt, high) : _mm256_unpackhi_epi8(dealt, high);
    return (__m256)(i % 2 ? _mm256_unpackhi_epi16(none, halves) : _mm256_unpacklo_epi16(none, halves));
}

/* Weights of such codes, of a block's `scale` and what `avx2_ready` laid out beside it. */
static inline ALWAYS __m256 avx2_number(DynamicKind kind, int size, int long_scales, __m256 codes, float scale, float more)
{
    __m256 own = _mm256_set1_ps(scale);
    if (kind == TWO && size == MEDIUM)
        codes = _mm256_sub_ps(codes, _mm256_set1_ps(160));
    if (kind == TWO || size == LARGE || long_scales)
        return _mm256_mul_ps(codes, own);
    codes = kind == LEAST && size == MEDIUM ? _mm256_sub_ps(codes, _mm256_set1_ps(128)) : codes;
    return _mm256_fmadd_ps(codes, own, _mm256_set1_ps(more));
}

/* `blocks` blocks of one output as numbers; and R rows of x times groups of two outputs, and then maybe half a group, whose
 * columns of sums go on. `own`: scales as of `avx2_ready`, then what lies beside them. Of half a group codes are read as of a whole
 * one. Products of blocks that begin with their scale: blocks_avx2.h. */
#define NUMBERS(FORMAT, format, BYTES, PER, KIND, SIZE)                                                                \
    static void avx2_fill_##format(const uint8_t *at, int64_t blocks, const float *own, const float *more, int rounded,\
                                   float *to)                                                                          \
    {                                                                                                                  \
        for (int64_t g = 0; 4 * g < blocks; g++) {                                                                     \
            const uint8_t *from = at + g / PER * BYTES;                                                                \
            __m256i dealt[2] UNUSED;                                                                                   \
            UNROLLED for (int b = 0; b < 4; b++, to += DYNAMIC_BLOCK) {                                                \
                if (4 * g + b == blocks)                                                                               \
                    return;                                                                                            \
                if (b % 2 == 0)                                                                                        \
                    DEAL_##SIZE(format, from, (int)(g % PER), b / 2, dealt);                                           \
                UNROLLED for (int i = 0; i < 4; i++) {                                                                 \
                    __m256 value = NUMBER(FORMAT, format, PER, KIND, SIZE, from, dealt[b % 2], own[4 * g + b],         \
                                          more[4 * g + b]);                                                            \
                    _mm256_storeu_ps(to + 8 * i, rounded && !EXACT(FORMAT) ? avx2_nearest_half(value) : value);        \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
    }
#define DOTS(FORMAT, format, BYTES, PER, KIND, SIZE, R)                                                                \
    static void avx2_dots_##format##R(const float *x, int64_t x_row, const uint8_t *const at[2], int64_t groups, int half,\
                                      const float *const scales[4], __m256 *kept)                                      \
    {                                                                                                                  \
        __m256 sums[R][2];                                                                                             \
        UNROLLED for (int r = 0; r < R; r++)                                                                           \
            sums[r][0] = kept[2 * r], sums[r][1] = kept[2 * r + 1];                                                    \
        for (int64_t g = 0; g < groups + half; g++, x += DYNAMIC_GROUP) {                                              \
            const float *rows[R];                                                                                      \
            UNROLLED for (int r = 0; r < R; r++) {                                                                     \
                rows[r] = x + r * x_row;                                                                               \
                FROM_HERE(rows[r]);                                                                                    \
            }                                                                                                          \
            UNROLLED for (int p = 0; p < 2; p++) {                                                                     \
                __m256i dealt[2][2] UNUSED;                                                                            \
                const uint8_t *own_at[2];                                                                              \
                if (p == 1 && g == groups)                                                                             \
                    break;                                                                                             \
                UNROLLED for (int c = 0; c < 2; c++) {                                                                 \
                    own_at[c] = at[c] + g / PER * BYTES;                                                               \
                    DEAL_##SIZE(format, own_at[c], PER == 1 ? 0 : (int)(g % PER), p, dealt[c]);                        \
                    FETCH_FAR(own_at[c] + AVX2_AHEAD + 64 * p);                                                        \
                }                                                                                                      \
                UNROLLED for (int b = 2 * p; b < 2 * p + 2; b++)                                                       \
                    UNROLLED for (int c = 0; c < 2; c++) {                                                             \
                        float own = scales[c][4 * g + b], more = scales[2 + c][4 * g + b];                             \
                        FROM_HERE(own_at[c]);                                                                          \
                        UNROLLED for (int i = 0; i < 4; i++) {                                                         \
                            __m256 value = NUMBER(FORMAT, format, PER, KIND, SIZE, own_at[c], dealt[c][b % 2], own, more);\
                            value = avx2_nearest_half(value);                                                          \
                            UNROLLED for (int r = 0; r < R; r++)                                                       \
                                sums[r][c] = _mm256_fmadd_ps(_mm256_loadu_ps(rows[r] + b * DYNAMIC_BLOCK + 8 * i), value,\
                                                             sums[r][c]);                                              \
                        }                                                                                              \
                    }                                                                                                  \
            }                                                                                                          \
        }                                                                                                              \
        UNROLLED for (int r = 0; r < R; r++)                                                                           \
            kept[2 * r] = sums[r][0], kept[2 * r + 1] = sums[r][1];                                                    \
    }
/* From 8 `i` on of block b of group g. */
#define NUMBER(FORMAT, format, PER, KIND, SIZE, at, dealt, own, more)                                                  \
    avx2_number(KIND, SIZE, LONG(FORMAT), CODES_##SIZE(format, LONG(FORMAT), at, (int)(g % PER), dealt, more),         \
                KIND == TWO && i > 1 ? more : own, more)
#define CODES_MEDIUM(format, long_scales, at, part, dealt, more) avx2_more_by_128(dealt, i)
#define CODES_SMALL(format, long_scales, at, part, dealt, more) /* of long scales less a zero point */                 \
    _mm256_cvtepi32_ps(_mm256_sub_epi32(whole_avx2_##format(at, part, b, i),                                           \
                                        long_scales ? (__m256i)_mm256_set1_ps(more) : _mm256_setzero_si256()))
#define CODES_LARGE CODES_SMALL
#define CODES_SIGNED(format, long_scales, at, part, dealt, more) avx2_signed(dealt, i)
#define DEAL_MEDIUM(format, at, part, p, blocks) dealt_avx2_##format(at, part, p, blocks)
#define DEAL_SMALL(format, at, part, p, blocks)
#define DEAL_LARGE DEAL_SMALL
#define DEAL_SIGNED DEAL_MEDIUM
#define LONG(FORMAT) ((FORMAT) == INT4_WORDS)
/* Numbers are so many scales less than their codes. */
#define LESS(FORMAT, SIZE) (-((SIZE) == MEDIUM ? 128.0f : 0) - (float)dynamic_formats[FORMAT].bias)
/* Powers of two times numbers of two bits. */
#define EXACT(FORMAT) ((FORMAT) == MXFP4 || (FORMAT) == MXFP4_BLOCK)
#define AVX2_FILLED(OF)                                                                                                \
    DYNAMIC_BEGINS(OF) AVX2_NOT_LINEAR(OF) OF(MXFP4, mxfp4, 64, 1, BIASED, MEDIUM) OF(MXFP4_BLOCK, mxfp4_block, 4 * bytes_mxfp4_block, 1, BIASED, MEDIUM)
AVX2_FILLED(NUMBERS) DYNAMIC_SUPER(NUMBERS) DYNAMIC_PACKED4(NUMBERS) AVX2_BY_TABLE(NUMBERS) AVX2_SIGNED(NUMBERS)
#define OF(...) DOTS(__VA_ARGS__, 1) DOTS(__VA_ARGS__, 2)
DYNAMIC_SUPER(OF) DYNAMIC_PACKED4(OF) AVX2_SIGNED(OF)
#undef OF
#undef DEAL_SIGNED
#undef DEAL_LARGE
#undef DEAL_SMALL
#undef DEAL_MEDIUM
#undef CODES_SIGNED
#undef CODES_LARGE
#undef CODES_SMALL
#undef CODES_MEDIUM
#undef NUMBER
#undef DOTS
#undef NUMBERS

typedef struct {
    void (*fill)(const uint8_t *, int64_t, const float *, const float *, int, float *);
    void (*dots[AVX2_ROWS])(const float *, int64_t, const uint8_t *const *, int64_t, int, const float *const *, __m256 *);
} Avx2Numbers;
#define OF(FORMAT, format, B, P, K, S)                                                                                 \
    [FORMAT] = {avx2_fill_##format, {avx2_dots_##format##1, avx2_dots_##format##2}},
#define ONLY_FILLED(FORMAT, format, B, P, K, S) [FORMAT] = {avx2_fill_##format, {NULL}},
static const Avx2Numbers avx2_numbers_of[FORMATS_END + 1] = {
    AVX2_FILLED(ONLY_FILLED) DYNAMIC_SUPER(OF) DYNAMIC_PACKED4(OF) AVX2_BY_TABLE(OF) AVX2_SIGNED(OF)};
#undef AVX2_FILLED
#undef ONLY_FILLED
#undef OF

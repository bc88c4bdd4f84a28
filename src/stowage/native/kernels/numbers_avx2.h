/* Weights in block formats as floats with AVX2: to the bit what formats.h makes of them. */

/* Weights are computed 2^16 times as large: that minus the weight is rounded to where the eighth bit of the weight is, and what
 * is left is the weight, rounded there to the nearest of bfloat16, halfway cases to even. (Not plus, as by Veltkamp, because
 * that may have another exponent.) Of weights below 2^96. */
#define AVX2_LARGER 65536.0f
#define AVX2_ROWS 2 /* of so many at most are products made while weights are in registers */
static inline ALWAYS __m256 avx2_nearest_half(__m256 larger)
{
    return _mm256_sub_ps(larger, _mm256_fnmadd_ps(larger, _mm256_set1_ps(1 / AVX2_LARGER), larger));
}

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
WHOLE(q8_0, _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(at + 34 * b + 2 + 8 * i))))
WHOLE(q4_0, avx2_half_bytes(at + 18 * b + 2 + 8 * (i % 2), i / 2))
WHOLE(q4_1, avx2_half_bytes(at + 20 * b + 4 + 8 * (i % 2), i / 2))
WHOLE(q4_k, avx2_half_bytes(at + 16 + 64 * part + b / 2 * 32 + 8 * i, b % 2))
WHOLE(packed4, avx2_half_bytes(at + 32 * b + 8 * i, 0))
WHOLE(packed4_high, avx2_half_bytes(at + 32 * b + 8 * i, 1))
WHOLE(int4, avx2_turns(at + 16 * b + 4 * i))
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
#undef BOTH
#undef DEALT

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
    if (kind == TWO)
        codes = _mm256_sub_ps(codes, _mm256_set1_ps(160));
    if (kind == TWO || size == LARGE || long_scales)
        return _mm256_mul_ps(codes, own);
    codes = kind == LEAST && size == MEDIUM ? _mm256_sub_ps(codes, _mm256_set1_ps(128)) : codes;
    return _mm256_fmadd_ps(codes, own, _mm256_set1_ps(more));
}

/* `blocks` blocks of one output as numbers; and R rows of x times groups of two outputs, and then maybe half a group, whose
 * columns of sums go on. `own`: scales as of `avx2_ready`, then what lies beside them; in products those that blocks begin with
 * are read there, and 0 is returned where one is no number. Of half a group codes are read as of a whole one. */
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
    static int avx2_dots_##format##R(const float *x, int64_t x_row, const uint8_t *const at[2], int64_t groups, int half,\
                                     const float *const scales[4], __m256 *kept)                                       \
    {                                                                                                                  \
        __m256 sums[R][2], odd = _mm256_setzero_ps();                                                                  \
        float here[16];                                                                                                \
        UNROLLED for (int r = 0; r < R; r++)                                                                           \
            sums[r][0] = kept[2 * r], sums[r][1] = kept[2 * r + 1];                                                    \
        for (int64_t g = 0; g < groups + half; g++, x += DYNAMIC_GROUP) {                                              \
            const float *rows[R];                                                                                      \
            UNROLLED for (int r = 0; r < R; r++) {                                                                     \
                rows[r] = x + r * x_row;                                                                               \
                FROM_HERE(rows[r]);                                                                                    \
            }                                                                                                          \
            if (AT_BEGIN(FORMAT)) {                                                                                    \
                const uint8_t *first = at[0] + g * BYTES, *second = at[1] + g * BYTES;                                 \
                __m256 own = avx2_halves_of(first, second, BYTES / 4);                                                 \
                __m256 least = KIND == LEAST ? avx2_halves_of(first + 2, second + 2, BYTES / 4) : own;                 \
                odd = _mm256_or_ps(odd, _mm256_or_ps(_mm256_sub_ps(own, own), _mm256_sub_ps(least, least)));           \
                _mm256_storeu_ps(here, _mm256_mul_ps(own, _mm256_set1_ps(AVX2_LARGER)));                               \
                _mm256_storeu_ps(here + 8, _mm256_mul_ps(least, _mm256_set1_ps(AVX2_LARGER * (KIND == LEAST ? 1 : LESS(FORMAT, SIZE)))));\
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
                        float own = AT_BEGIN(FORMAT) ? here[4 * c + b] : scales[c][4 * g + b];                         \
                        float more = AT_BEGIN(FORMAT) ? here[8 + 4 * c + b] : scales[2 + c][4 * g + b];                \
                        FROM_HERE(own_at[c]);                                                                          \
                        UNROLLED for (int i = 0; i < 4; i++) {                                                         \
                            __m256 value = NUMBER(FORMAT, format, PER, KIND, SIZE, own_at[c], dealt[c][b % 2], own, more);\
                            if (!EXACT(FORMAT))                                                                        \
                                value = avx2_nearest_half(value);                                                      \
                            UNROLLED for (int r = 0; r < R; r++)                                                       \
                                sums[r][c] = _mm256_fmadd_ps(_mm256_loadu_ps(rows[r] + b * DYNAMIC_BLOCK + 8 * i), value,\
                                                             sums[r][c]);                                              \
                        }                                                                                              \
                    }                                                                                                  \
            }                                                                                                          \
        }                                                                                                              \
        UNROLLED for (int r = 0; r < R; r++)                                                                           \
            kept[2 * r] = sums[r][0], kept[2 * r + 1] = sums[r][1];                                                    \
        return _mm256_testz_si256((__m256i)odd, (__m256i)odd);                                                         \
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
#define DEAL_MEDIUM(format, at, part, p, blocks) dealt_avx2_##format(at, part, p, blocks)
#define DEAL_SMALL(format, at, part, p, blocks)
#define DEAL_LARGE DEAL_SMALL
#define LONG(FORMAT) ((FORMAT) == INT4_WORDS)
/* Numbers are so many scales less than their codes. */
#define LESS(FORMAT, SIZE) (-((SIZE) == MEDIUM ? 128.0f : 0) - (float)dynamic_formats[FORMAT].bias)
/* Powers of two times numbers of two bits. */
#define EXACT(FORMAT) ((FORMAT) == MXFP4 || (FORMAT) == MXFP4_BLOCK)
#define OF(FORMAT, format, B, P, K, S)                                                                                 \
    NUMBERS(FORMAT, format, B, P, K, S)                                                                                \
    DOTS(FORMAT, format, B, P, K, S, 1) DOTS(FORMAT, format, B, P, K, S, 2)
DYNAMIC_HERE(OF) DYNAMIC_PACKED4(OF) DYNAMIC_IN_TURN(OF)
#undef OF
#undef DEAL_LARGE
#undef DEAL_SMALL
#undef DEAL_MEDIUM
#undef CODES_LARGE
#undef CODES_SMALL
#undef CODES_MEDIUM
#undef NUMBER
#undef DOTS
#undef NUMBERS

typedef struct {
    void (*fill)(const uint8_t *, int64_t, const float *, const float *, int, float *);
    int (*dots[2])(const float *, int64_t, const uint8_t *const *, int64_t, int, const float *const *, __m256 *);
} Avx2Numbers;
#define OF(FORMAT, format, B, P, K, S)                                                                                 \
    [FORMAT] = {avx2_fill_##format, {avx2_dots_##format##1, avx2_dots_##format##2}},
static const Avx2Numbers avx2_numbers_of[FORMATS_END + 1] = {DYNAMIC_HERE(OF) DYNAMIC_PACKED4(OF) DYNAMIC_IN_TURN(OF)};
#undef OF

/* Whether they are computed so, and not one after the other. */
static int avx2_has_numbers(const Linear *job)
{
    return avx2_ways_of(job, 0) != NULL && avx2_numbers_of[job->format].fill != NULL;
}

/* How those of a piece are: INT4_WORDS also with zero points, which are not least values here. */
static const Avx2Numbers *avx2_numbers_way(const Avx2Piece *piece)
{
    int64_t number = piece->ways - avx2_ways;
    return avx2_numbers_of + (number == GPTQ ? INT4_WORDS : number);
}

/* Of an output's blocks from input k on: scales, and beside them what `avx2_number` adds, or second scales, or zero points (which
 * are whole numbers); of numbers that are `rounded` for `avx2_nearest_half`. 0: not all are below 2^79, or numbers may be below
 * the normal ones, which are not rounded as they are. */
static int avx2_ready(const Linear *job, int64_t n, int64_t k, int64_t blocks, int rounded, float *scales, float *more)
{
    Coded row = coded_row(job, n);
    int words = LONG(job->format), biased = words || dynamic_kind(job) == BIASED;
    __m256 sign = _mm256_set1_ps(-0.0f), most = _mm256_set1_ps(0x1p79f), odd = _mm256_setzero_ps(), none = odd;
    __m256 larger = _mm256_set1_ps(rounded && !EXACT(job->format) ? AVX2_LARGER : 1);
    __m256i zero = _mm256_set1_epi32(8);
    __m256 less = _mm256_set1_ps(LESS(job->format, avx2_ways[job->format].size));
    avx2_scales(job, &row, k, blocks, scales, more);
    for (int64_t b = blocks; b % 8; b++)
        scales[b] = more[b] = 0;
    for (int64_t b = 0; b < blocks; b += 8) {
        __m256 scale = _mm256_loadu_ps(scales + b), other = _mm256_loadu_ps(more + b), own = _mm256_andnot_ps(sign, scale);
        odd = _mm256_or_ps(odd, _mm256_cmp_ps(own, most, _CMP_NLT_UQ));
        if (!biased)
            odd = _mm256_or_ps(odd, _mm256_cmp_ps(_mm256_andnot_ps(sign, other), most, _CMP_NLT_UQ));
        if (words)
            odd = _mm256_or_ps(odd, _mm256_and_ps(_mm256_cmp_ps(own, _mm256_set1_ps(0x1p-120f), _CMP_NGT_UQ),
                                                  _mm256_cmp_ps(own, none, _CMP_NEQ_UQ)));
        scale = _mm256_mul_ps(scale, larger);
        _mm256_storeu_ps(scales + b, scale);
        other = biased ? _mm256_mul_ps(scale, less) : _mm256_mul_ps(other, larger);
        _mm256_storeu_ps(more + b, words ? (__m256)zero : other);
    }
    for (int64_t b = 0, group = k / row.group, end; words && row.zeros != NULL && b < blocks; group++) {
        end = (group + 1) * row.group - k;
        for (uint32_t own = (uint32_t)zero_of(&row, group); b < blocks && b * DYNAMIC_BLOCK < end; b++)
            more[b] = float_of(own);
    }
    return _mm256_testz_ps(odd, odd);
}

/* Floats of 8 and 16 bits, 32 at a time: how many were done before some that are no usual numbers. A float of 8 bits (e4m3) is
 * one of 16 times 2^8. */
static int64_t avx2_decode_floats(const Linear *job, int64_t n, int64_t k, int64_t end, float *to)
{
    Coded row = coded_row(job, n);
    int64_t begin = k;
    int bytes = job->format == FP8;
    for (; k + 32 <= end; k += 32, to += 32) {
        const uint8_t *at = row.w + (bytes ? k : 2 * k);
        float own = bytes ? scale_of(&row, k / row.group) : 1;
        __m256i odd = _mm256_setzero_si256(), all = bytes ? _mm256_set1_epi8(0x7f) : _mm256_set1_epi16(0x7c00);
        for (int i = 0; i < (bytes ? 1 : 2); i++) {
            __m256i v = _mm256_and_si256(avx2_32(at + 32 * i), all);
            odd = _mm256_or_si256(odd, bytes ? _mm256_cmpeq_epi8(v, all) : _mm256_cmpeq_epi16(v, all));
        }
        if (!_mm256_testz_si256(odd, odd) || !(own == 0 || (fabsf(own) < 0x1p80f && fabsf(own) > 0x1p-100f)))
            break;
        UNROLLED for (int i = 0; i < 4; i++) {
            __m128i half = _mm_loadu_si128((const __m128i *)(at + (bytes ? 0 : 16 * i)));
            if (bytes) {
                half = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)(at + 8 * i)));
                half = _mm_and_si128(_mm_slli_epi16(half, 7), _mm_set1_epi16((short)0xbf80));
            }
            __m256 value = _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(bytes ? own * 256 : 1));
            _mm256_storeu_ps(to + 8 * i, job->form == FLOAT32 ? value : avx2_nearest_half(_mm256_mul_ps(value, _mm256_set1_ps(AVX2_LARGER))));
        }
    }
    return k - begin;
}

/* As `decode` of at most DEPTH inputs, where their codes are whole numbers, or short floats: how many were done. */
static int64_t avx2_decode_whole(const Linear *job, int64_t n, int64_t k, int64_t end, float *to)
{
    float scales[DEPTH / DYNAMIC_BLOCK], more[DEPTH / DYNAMIC_BLOCK];
    uint8_t room[AVX2_BYTES];
    int64_t blocks = (end - k) / DYNAMIC_BLOCK;
    Avx2Piece pieces[4];
    if (job->format == FP8 || job->format == F16)
        return avx2_decode_floats(job, n, k, end, to);
    if (!avx2_has_numbers(job) || !avx2_ready(job, n, k, blocks, job->form != FLOAT32, scales, more))
        return 0;
    int count = avx2_pieces(job, k, blocks * DYNAMIC_BLOCK, pieces);
    for (const Avx2Piece *piece = pieces; piece < pieces + count; piece++) {
        int64_t b = 4 * piece->first - k / DYNAMIC_BLOCK;
        int64_t own = piece->left ? blocks % 4 : 4 * piece->count;
        avx2_numbers_way(piece)->fill(avx2_brought(job, piece, n, 1, room), own, scales + b, more + b, job->form != FLOAT32,
                                      to + b * DYNAMIC_BLOCK);
    }
    return blocks * DYNAMIC_BLOCK;
}

/* Whether `avx2_dots` may multiply it with so many rows: numbers are rounded, and made of whole codes. Of more rows numbers are
 * made once and read again. */
static int avx2_has_dots(const Linear *job, int64_t rows)
{
    return rows <= AVX2_ROWS && job->form != FLOAT32 && avx2_has_numbers(job);
}

/* Inputs from k on, of at most DEPTH, of one or two rows times the outputs n and n + wide - 1 in a block format, whose numbers
 * stay in registers; see linear.h for the order of sums. 0: it is not for these. */
static int avx2_dots(const Linear *job, int64_t row, int64_t rows, int64_t n, int64_t wide, int64_t k)
{
    float room[4][DEPTH / DYNAMIC_BLOCK];
    uint8_t brought[4][2][AVX2_BYTES];
    float edge[AVX2_ROWS * DYNAMIC_GROUP];
    __m256 kept[2 * AVX2_ROWS];
    int64_t depth = job->inputs - k < DEPTH ? job->inputs - k : DEPTH, left = depth % DYNAMIC_GROUP / DYNAMIC_BLOCK;
    Avx2Piece pieces[4];
    const uint8_t *at[4][2];
    if (depth % DYNAMIC_BLOCK != 0)
        return 0;
    int count = avx2_pieces(job, k, depth, pieces);
    for (int i = 0; i < 2; i++) {
        int64_t own = n + (i < wide ? i : 0);
        if (!AT_BEGIN(job->format) && !avx2_ready(job, own, k, depth / DYNAMIC_BLOCK, 1, room[i], room[2 + i]))
            return 0;
        int copied = left != 2 || own + 1 == job->outputs; /* else the next row's bytes are read, not used */
        for (int p = 0; p < count; p++)
            at[p][i] = avx2_brought(job, pieces + p, own, copied, brought[p][i]);
    }
    for (int64_t i = 0; i < 2 * rows; i++)
        kept[i] = _mm256_setzero_ps();
    for (int p = 0; p < count; p++) {
        const Avx2Numbers *way = avx2_numbers_way(pieces + p);
        int64_t first = pieces[p].first - k / DYNAMIC_GROUP, x_row = job->x_row, half = pieces[p].left && left == 2;
        const float *x = (const float *)job->x + row * x_row + k + first * DYNAMIC_GROUP, *scales[4];
        for (int i = 0; i < 4; i++)
            scales[i] = room[i] + 4 * first;
        if (pieces[p].left && !half) {
            memset(edge, 0, sizeof edge);
            for (int64_t r = 0; r < rows; r++)
                memcpy(edge + r * DYNAMIC_GROUP, x + r * x_row, (size_t)left * 128);
            x = edge, x_row = DYNAMIC_GROUP;
        }
        if (!way->dots[rows - 1](x, x_row, at[p], half ? 0 : pieces[p].count, (int)half, scales, kept))
            return 0;
    }
    for (int64_t i = 0; i < 2 * rows; i++) {
        float *to = (float *)job->y + (row + i / 2) * job->outputs + n + i % 2, sum = avx2_total(kept[i]);
        if (i % 2 < wide)
            *to = k == 0 ? sum : *to + sum;
    }
    return 1;
}
#undef EXACT
#undef LESS
#undef LONG
#undef AVX2_LARGER

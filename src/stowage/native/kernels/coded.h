/* Weights in block formats as bfloat16, 32 at a time in a register: what products of one row take at once, and what is
 * laid out for several. The numbers are those of formats.h, rounded to the nearest: so a product has the bits that it
 * has with weights that were rounded before.
 *
 * A block of codes of 4 or 5 bits has 16 or 32 different weights. They are computed and rounded once, and looked up.
 */
#define UNROLLED _Pragma("GCC unroll 8")
#define UNIT(format) static inline ALWAYS void coded_##format(const Coded *row, int64_t k, __m512bh w[8])

static inline ALWAYS __m512 coded_counting(float first)
{
    return _mm512_add_ps(_mm512_set1_ps(first),
                         _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
}

static inline ALWAYS __m512 coded_half(const uint8_t *from)
{
    return _mm512_cvtph_ps(_mm256_set1_epi16((short)read_short(from)));
}

static inline ALWAYS __m512bh coded_lookup(__m512i codes, __m512bh table)
{
    return (__m512bh)_mm512_permutexvar_epi16(codes, (__m512i)table);
}

static inline ALWAYS __m512bh coded_twice(__m512 values)
{
    return _mm512_cvtne2ps_pbh(values, values);
}

/* 32 codes of 16 bytes: low halves, then high ones; above them are bits that say nothing. */
static inline ALWAYS __m512i coded_split(const uint8_t *from)
{
    __m256i low = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)from));
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), _mm256_srli_epi16(low, 4), 1);
}

/* The same; low and high halves take turns. */
static inline ALWAYS __m512i coded_turns(const uint8_t *from)
{
    __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
    return _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12));
}

/* Codes with fifth bits where `high` says so. */
static inline ALWAYS __m512i coded_fifth(__m512i codes, uint32_t high)
{
    __m512i low = _mm512_and_si512(codes, _mm512_set1_epi16(15));
    return _mm512_mask_add_epi16(low, (__mmask32)high, low, _mm512_set1_epi16(16));
}

static inline ALWAYS __m512 coded_wide(__m128i codes)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
}

UNIT(q8_0)
{
    const uint8_t *block = row->w + k / 32 * 34;
    __m512 scale = coded_half(block);
    __m512 low = coded_wide(_mm_loadu_si128((const __m128i *)(block + 2)));
    __m512 high = coded_wide(_mm_loadu_si128((const __m128i *)(block + 18)));
    w[0] = _mm512_cvtne2ps_pbh(_mm512_mul_ps(scale, high), _mm512_mul_ps(scale, low));
}

UNIT(q4_0)
{
    const uint8_t *block = row->w + k / 32 * 18;
    w[0] = coded_lookup(coded_split(block + 2), coded_twice(_mm512_mul_ps(coded_half(block), coded_counting(-8))));
}

UNIT(q4_1)
{
    const uint8_t *block = row->w + k / 32 * 20;
    __m512 table = _mm512_fmadd_ps(coded_half(block), coded_counting(0), coded_half(block + 2));
    w[0] = coded_lookup(coded_split(block + 4), coded_twice(table));
}

UNIT(q5_0)
{
    const uint8_t *block = row->w + k / 32 * 22;
    __m512 scale = coded_half(block);
    __m512bh table = _mm512_cvtne2ps_pbh(_mm512_mul_ps(scale, coded_counting(0)),
                                         _mm512_mul_ps(scale, coded_counting(-16)));
    w[0] = coded_lookup(coded_fifth(coded_split(block + 6), read_word(block + 2)), table);
}

UNIT(q5_1)
{
    const uint8_t *block = row->w + k / 32 * 24;
    __m512 scale = coded_half(block), least = coded_half(block + 2);
    __m512bh table = _mm512_cvtne2ps_pbh(_mm512_fmadd_ps(scale, coded_counting(16), least),
                                         _mm512_fmadd_ps(scale, coded_counting(0), least));
    w[0] = coded_lookup(coded_fifth(coded_split(block + 8), read_word(block + 4)), table);
}

/* As `scales_k`, with the least values negated. */
static inline ALWAYS void coded_scales(const uint8_t *block, float scales[16])
{
    uint32_t a = read_word(block + 4), b = read_word(block + 8), c = read_word(block + 12);
    uint32_t a_high = (c & 0x0f0f0f0f) | (a >> 6 & 0x03030303) << 4;
    uint32_t b_high = (c >> 4 & 0x0f0f0f0f) | (b >> 6 & 0x03030303) << 4;
    __m128i bits = _mm_setr_epi32((int)(a & 0x3f3f3f3f), (int)a_high, (int)(b & 0x3f3f3f3f), (int)b_high);
    __m512 least = _mm512_sub_ps(_mm512_set1_ps(-0.0f), coded_half(block + 2));
    __m512 factors = _mm512_mask_mov_ps(least, 0x00ff, coded_half(block));
    _mm512_store_ps(scales, _mm512_mul_ps(factors, _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bits))));
}

UNIT(q4_k)
{
    const uint8_t *block = row->w + k / 256 * 144;
    float scales[16] __attribute__((aligned(64)));
    coded_scales(block, scales);
    UNROLLED for (int j = 0; j < 8; j++) {
        __m512i codes = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(block + 16 + j / 2 * 32)));
        __m512 table = _mm512_fmadd_ps(_mm512_set1_ps(scales[j]), coded_counting(0), _mm512_set1_ps(scales[8 + j]));
        w[j] = coded_lookup(j % 2 ? _mm512_srli_epi16(codes, 4) : codes, coded_twice(table));
    }
}

UNIT(q5_k)
{
    const uint8_t *block = row->w + k / 256 * 176;
    float scales[16] __attribute__((aligned(64)));
    coded_scales(block, scales);
    __m512i fifth = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(block + 16)));
    UNROLLED for (int j = 0; j < 8; j++) {
        __m512i codes = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(block + 48 + j / 2 * 32)));
        __m512i low = j % 2 ? _mm512_srli_epi16(codes, 4) : codes;
        __m512i high = j < 4 ? _mm512_slli_epi16(fifth, 4 - j) : _mm512_srli_epi16(fifth, j - 4);
        __m512i code = _mm512_ternarylogic_epi32(_mm512_set1_epi16(15), low, high, 0xca); /* 15: low, else: high */
        __m512 scale = _mm512_set1_ps(scales[j]), least = _mm512_set1_ps(scales[8 + j]);
        w[j] = coded_lookup(code, _mm512_cvtne2ps_pbh(_mm512_fmadd_ps(scale, coded_counting(16), least),
                                                      _mm512_fmadd_ps(scale, coded_counting(0), least)));
    }
}

/* 64 different weights are too many to look up. A scale times 32 is exact, and so is what is left of a code. */
UNIT(q6_k)
{
    const uint8_t *block = row->w + k / 256 * 210;
    float scales[16] __attribute__((aligned(64)));
    __m512 all = coded_wide(_mm_loadu_si128((const __m128i *)(block + 192)));
    _mm512_store_ps(scales, _mm512_mul_ps(coded_half(block + 208), all));
    UNROLLED for (int j = 0; j < 8; j++) {
        __m256i low = _mm256_loadu_si256((const __m256i *)(block + j / 4 * 64 + j % 2 * 32));
        __m256i high = _mm256_loadu_si256((const __m256i *)(block + 128 + j / 4 * 32));
        low = j % 4 / 2 ? _mm256_srli_epi16(low, 4) : low;
        high = j % 4 < 2 ? _mm256_slli_epi16(high, 4 - j % 4 * 2) : _mm256_srli_epi16(high, j % 4 * 2 - 4);
        __m256i code = _mm256_or_si256(_mm256_and_si256(low, _mm256_set1_epi8(15)),
                                       _mm256_and_si256(high, _mm256_set1_epi8(48)));
        code = _mm256_sub_epi8(code, _mm256_set1_epi8(32));
        __m512 first = _mm512_mul_ps(_mm512_set1_ps(scales[2 * j]), coded_wide(_mm256_castsi256_si128(code)));
        __m512 second = _mm512_mul_ps(_mm512_set1_ps(scales[2 * j + 1]),
                                      coded_wide(_mm256_extracti128_si256(code, 1)));
        w[j] = _mm512_cvtne2ps_pbh(second, first);
    }
}

UNIT(mxfp4_block)
{
    const uint8_t *block = row->w + k / 32 * 17;
    __m512 table = _mm512_mul_ps(_mm512_loadu_ps(fp4_values), _mm512_set1_ps(power_of(block[0])));
    w[0] = coded_lookup(coded_split(block + 1), coded_twice(table));
}

UNIT(mxfp4)
{
    __m512 table = _mm512_mul_ps(_mm512_loadu_ps(fp4_values), _mm512_set1_ps(power_of(row->scales[k / 32])));
    w[0] = coded_lookup(coded_turns(row->w + k / 2), coded_twice(table));
}

UNIT(int4)
{
    int64_t group = k / row->group;
    __m512 table = _mm512_sub_ps(coded_counting(0), _mm512_set1_ps(zero_of(row, group)));
    table = _mm512_mul_ps(table, _mm512_set1_ps(scale_of(row, group)));
    w[0] = coded_lookup(coded_turns(row->w + k / 2), coded_twice(table));
}

/* The low halves of a row's bytes are its first inputs, the high ones the rest; 32 inputs may be of both. */
UNIT(packed4)
{
    int64_t half = row->across, group = k / row->group;
    if (k < half && k + 32 > half) {
        float values[32] __attribute__((aligned(64)));
        avx512_decode_packed4(row, k, 32, values);
        w[0] = _mm512_cvtne2ps_pbh(_mm512_load_ps(values + 16), _mm512_load_ps(values));
        return;
    }
    __m512i codes = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(row->w + (k < half ? k : k - half))));
    __m512 table = _mm512_fmadd_ps(coded_half(row->scales + 2 * group), coded_counting(0),
                                   coded_half(row->zeros + 2 * group));
    codes = _mm512_srl_epi16(codes, _mm_cvtsi32_si128(k < half ? 0 : 4));
    w[0] = coded_lookup(codes, coded_twice(table));
}

/* A float of 8 bits (e4m3) is one of 16 divided by 256. */
UNIT(fp8)
{
    __m256i codes = _mm256_loadu_si256((const __m256i *)(row->w + k));
    __m512i bits = _mm512_slli_epi16(_mm512_cvtepi8_epi16(codes), 7);
    bits = _mm512_and_si512(bits, _mm512_set1_epi16((short)0xbf80));
    __mmask32 none = _mm256_cmpeq_epi8_mask(_mm256_and_si256(codes, _mm256_set1_epi8(127)), _mm256_set1_epi8(127));
    bits = _mm512_mask_mov_epi16(bits, none, _mm512_set1_epi16(0x7e00));
    __m512 scale = _mm512_mul_ps(_mm512_set1_ps(scale_of(row, k / row->group)), _mm512_set1_ps(256));
    w[0] = _mm512_cvtne2ps_pbh(_mm512_mul_ps(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits, 1)), scale),
                               _mm512_mul_ps(_mm512_cvtph_ps(_mm512_castsi512_si256(bits)), scale));
}

UNIT(f32)
{
    const float *from = (const float *)row->w + k;
    w[0] = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + 16), _mm512_loadu_ps(from));
}

UNIT(f16)
{
    const __m256i *from = (const __m256i *)(row->w + 2 * k);
    w[0] = _mm512_cvtne2ps_pbh(_mm512_cvtph_ps(_mm256_loadu_si256(from + 1)),
                               _mm512_cvtph_ps(_mm256_loadu_si256(from)));
}

UNIT(bf16)
{
    w[0] = (__m512bh)_mm512_loadu_si512(row->w + 2 * k);
}

/* Codes that lie across: one by one. */
#define ACROSS(format)                                                                                                 \
    UNIT(format)                                                                                                       \
    {                                                                                                                  \
        float values[32] __attribute__((aligned(64)));                                                                 \
        avx512_decode_##format(row, k, 32, values);                                                                    \
        w[0] = _mm512_cvtne2ps_pbh(_mm512_load_ps(values + 16), _mm512_load_ps(values));                               \
    }
ACROSS(gptq)
ACROSS(awq)
#undef ACROSS

/* Inputs [k, k + 32) of which there are only `count`, and zeros. */
static void coded_last(const Linear *job, const Coded *row, int64_t k, int count, uint16_t *to)
{
    float values[32];
    avx512_decoders[job->format](row, k, count, values);
    for (int i = 0; i < 32; i++)
        to[i] = i < count ? float_half(values[i]) : 0;
}

/* BYTES: of 32 * U values, about, where a row is read; what is fetched ahead. */
#define DOT(format, U, C)                                                                                              \
    static void coded_dot_##format##C(const uint16_t *x, const Coded *rows, int64_t depth, int64_t k, __m512 *sums)    \
    {                                                                                                                  \
        __m512 own[C];                                                                                                 \
        UNROLLED for (int c = 0; c < C; c++)                                                                           \
            own[c] = _mm512_setzero_ps();                                                                              \
        for (int64_t end = k + depth; k < end; k += 32 * U, x += 32 * U)                                               \
            UNROLLED for (int c = 0; c < C; c++) {                                                                     \
                __m512bh w[8];                                                                                         \
                coded_##format(rows + c, k, w);                                                                        \
                UNROLLED for (int u = 0; u < U; u++)                                                                   \
                    own[c] = _mm512_dpbf16_ps(own[c], halves_load_b(x + 32 * u), w[u]);                                \
            }                                                                                                          \
        UNROLLED for (int c = 0; c < C; c++)                                                                           \
            sums[c] = own[c];                                                                                          \
    }
#define FILL(format, U)                                                                                                \
    static void coded_fill_##format(const Coded *row, int64_t k, int64_t end, uint16_t *to)                            \
    {                                                                                                                  \
        for (; k + 32 * U <= end; k += 32 * U, to += 32 * U) {                                                         \
            __m512bh w[8];                                                                                             \
            coded_##format(row, k, w);                                                                                 \
            UNROLLED for (int u = 0; u < U; u++)                                                                       \
                _mm512_storeu_si512(to + 32 * u, (__m512i)w[u]);                                                       \
        }                                                                                                              \
    }
#define ALL(format, U) DOT(format, U, 1) DOT(format, U, 2) DOT(format, U, 3) FILL(format, U)
ALL(q8_0, 1) ALL(q4_0, 1) ALL(q4_1, 1) ALL(q5_0, 1) ALL(q5_1, 1) ALL(q4_k, 8) ALL(q5_k, 8) ALL(q6_k, 8)
ALL(mxfp4_block, 1) ALL(mxfp4, 1) ALL(fp8, 1) ALL(int4, 1) ALL(f32, 1) ALL(f16, 1) ALL(bf16, 1) ALL(gptq, 1)
ALL(awq, 1) ALL(packed4, 1)
#undef ALL
#undef FILL
#undef DOT
#undef UNIT
#undef UNROLLED

typedef void (*CodedDot)(const uint16_t *, const Coded *, int64_t, int64_t, __m512 *);
typedef void (*CodedFill)(const Coded *, int64_t, int64_t, uint16_t *);
#define OF(FORMAT, format) [FORMAT] = {coded_dot_##format##1, coded_dot_##format##2, coded_dot_##format##3}
static const CodedDot coded_dots[FORMATS_END][3] = {ALL_FORMATS(OF)};
#undef OF
#define OF(FORMAT, format) [FORMAT] = coded_fill_##format
static const CodedFill coded_fills[FORMATS_END] = {ALL_FORMATS(OF)};
#undef OF

/* Inputs [k, end) of output n in bfloat16, and zeros up to a multiple of 32. */
static void coded_fill(const Linear *job, int64_t n, int64_t k, int64_t end, uint16_t *to)
{
    Coded row = coded_row(job, n);
    coded_fills[job->format](&row, k, end, to);
    int64_t left = (end - k) % 32;
    if (left && format_values[job->format] == 32)
        coded_last(job, &row, end - left, (int)left, to + (end - k - left));
}

/* Outputs [begin, end) of one row of x, of a whole number of blocks. */
static void coded_one(const Linear *job, int64_t row, int64_t begin, int64_t end, float *sums)
{
    const uint16_t *x = (const uint16_t *)job->x + row * job->x_row;
    for (int64_t n = begin; n < end; n += 3) {
        int c = end - n < 3 ? (int)(end - n) : 3;
        Coded rows[3];
        for (int i = 0; i < c; i++)
            rows[i] = coded_row(job, n + i);
        for (int64_t k = 0; k < job->inputs; k += HALVES_DEPTH) {
            int64_t depth = job->inputs - k < HALVES_DEPTH ? job->inputs - k : HALVES_DEPTH;
            __m512 parts[3];
            coded_dots[job->format][c - 1](x + k, rows, depth, k, parts);
            for (int i = 0; i < c; i++) {
                float sum = avx512_total((avx512_vec)parts[i]);
                sums[n - begin + i] = k == 0 ? sum : sums[n - begin + i] + sum;
            }
        }
    }
}

/* What is laid out for several rows at a time: so much of the second cache. */
enum { CODED_BYTES = 384 << 10, CODED_STEP = 32 };

/* Outputs [begin, end) of all rows; 0: there is no memory for it. `multiply` does it with weights in bfloat16. */
static int coded_linear(const Linear *job, int64_t begin, int64_t end, void (*multiply)(const Linear *, int64_t, int64_t))
{
    if (job->rows == 1 && job->inputs % 32 == 0 && multiply == halves_linear) {
        float sums[HALVES_PANEL] __attribute__((aligned(64)));
        for (int64_t first = begin; first < end; first += HALVES_PANEL) {
            int64_t wide = end - first < HALVES_PANEL ? end - first : HALVES_PANEL;
            coded_one(job, 0, first, first + wide, sums);
            halves_finish(job, sums, 0, first, wide);
        }
        return 1;
    }
    int64_t stride = (job->inputs + 31) / 32 * 32 + 32, most = CODED_BYTES / 2 / stride;
    most = most > HALVES_PANEL ? HALVES_PANEL : most > CODED_STEP ? most / CODED_STEP * CODED_STEP : CODED_STEP;
    uint16_t *room = aligned_alloc(64, (size_t)(most * stride * 2));
    if (room == NULL)
        return 0;
    for (int64_t first = begin; first < end; first += most) {
        int64_t wide = end - first < most ? end - first : most;
        for (int64_t n = 0; n < wide; n++)
            coded_fill(job, first + n, 0, job->inputs, room + n * stride);
        Linear plain = *job;
        plain.format = PLAIN;
        plain.w = room;
        plain.w_row = stride;
        plain.y = (char *)job->y + first * (job->narrow ? 2 : 4);
        multiply(&plain, 0, wide);
    }
    free(room);
    return 1;
}

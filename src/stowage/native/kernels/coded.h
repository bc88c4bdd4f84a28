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
static inline ALWAYS __m512i coded_turns(__m128i from)
{
    __m512i bytes = _mm512_cvtepu8_epi32(from);
    return _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12));
}

static inline ALWAYS __m512i coded_turns_at(const uint8_t *from)
{
    return coded_turns(_mm_loadu_si128((const __m128i *)from));
}

/* What 16 codes of the group that input k is in mean: a code less its zero point, times its scale. */
static inline ALWAYS __m512bh coded_words(const Coded *row, int64_t k)
{
    int64_t group = k / row->group;
    __m512 table = _mm512_sub_ps(coded_counting(0), _mm512_set1_ps(zero_of(row, group)));
    return coded_twice(_mm512_mul_ps(table, _mm512_set1_ps(scale_of(row, group))));
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
    w[0] = coded_lookup(coded_turns_at(row->w + k / 2), coded_twice(table));
}

static inline ALWAYS __m512i coded_codes_int4(const Coded *row, int64_t k)
{
    return coded_turns_at(row->w + k / 2);
}

/* Of GPTQ, four words of eight inputs each, `across` bytes apart: together they are 32 codes as those of int4. */
static inline ALWAYS __m512i coded_codes_gptq(const Coded *row, int64_t k)
{
    const uint8_t *from = row->w + k / 8 * row->across;
    return coded_turns(_mm_setr_epi32((int)read_word(from), (int)read_word(from + row->across),
                                      (int)read_word(from + 2 * row->across), (int)read_word(from + 3 * row->across)));
}

/* Of AWQ, a word for each input. */
static inline ALWAYS __m512i coded_codes_awq(const Coded *row, int64_t k)
{
    const uint8_t *from = row->w + k * row->across;
    __m128i shift = _mm_cvtsi32_si128(row->shift);
    __m512i at = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                    _mm512_set1_epi32((int)row->across));
    __m512i low = _mm512_srl_epi32(_mm512_i32gather_epi32(at, from, 1), shift);
    __m512i high = _mm512_srl_epi32(_mm512_i32gather_epi32(at, from + 16 * row->across, 1), shift);
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(low)), _mm512_cvtepi32_epi16(high), 1);
}

/* One table for 32 inputs, or for 128 whose group is no smaller. */
#define WORDS(format)                                                                                                  \
    UNIT(format)                                                                                                       \
    {                                                                                                                  \
        w[0] = coded_lookup(coded_codes_##format(row, k), coded_words(row, k));                                        \
    }                                                                                                                  \
    UNIT(format##_wide)                                                                                                \
    {                                                                                                                  \
        __m512bh table = coded_words(row, k);                                                                          \
        UNROLLED for (int u = 0; u < 4; u++)                                                                           \
            w[u] = coded_lookup(coded_codes_##format(row, k + 32 * u), table);                                         \
    }
WORDS(int4)
WORDS(gptq)
WORDS(awq)
#undef WORDS

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
static inline ALWAYS __m512 coded_scale_fp8(const Coded *row, int64_t k)
{
    return _mm512_mul_ps(_mm512_set1_ps(scale_of(row, k / row->group)), _mm512_set1_ps(256));
}

static inline ALWAYS __m512bh coded_floats(const uint8_t *from, __m512 scale)
{
    __m256i codes = _mm256_loadu_si256((const __m256i *)from);
    __m512i bits = _mm512_slli_epi16(_mm512_cvtepi8_epi16(codes), 7);
    bits = _mm512_and_si512(bits, _mm512_set1_epi16((short)0xbf80));
    __mmask32 none = _mm256_cmpeq_epi8_mask(_mm256_and_si256(codes, _mm256_set1_epi8(127)), _mm256_set1_epi8(127));
    bits = _mm512_mask_mov_epi16(bits, none, _mm512_set1_epi16(0x7e00));
    return _mm512_cvtne2ps_pbh(_mm512_mul_ps(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits, 1)), scale),
                               _mm512_mul_ps(_mm512_cvtph_ps(_mm512_castsi512_si256(bits)), scale));
}

UNIT(fp8)
{
    w[0] = coded_floats(row->w + k, coded_scale_fp8(row, k));
}

UNIT(fp8_wide)
{
    __m512 scale = coded_scale_fp8(row, k);
    UNROLLED for (int u = 0; u < 4; u++)
        w[u] = coded_floats(row->w + k + 32 * u, scale);
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

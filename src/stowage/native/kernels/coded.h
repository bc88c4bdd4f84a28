/* Weights in block formats as bfloat16, 32 at a time in a register: what products of few rows take at once, and what is
 * laid out for many. The numbers are those of formats.h, rounded to the nearest: so a product has the bits that it has
 * with weights that were rounded before.
 *
 * A block of codes of 4 or 5 bits has 16 or 32 different weights. They are computed and rounded once, and looked up: once in a
 * process of every scale there may be, where that is of 16 or 8 bits and all that they depend on. A model has some hundreds or
 * thousands of different ones, whose weights lie in a processor's cache. Halves that other blocks begin with are looked up as
 * floats: the instructions that make these are as dear as the codes themselves. Further scales are floats already, those of a
 * piece of a row side by side: coded_scales.h.
 */

/* Format, its name here, bytes of a block, scales of one that are laid out before, and how many parts of it are computed after
 * each other, of so many registers each. FOUR: where inputs are a multiple of 128. WIDE: where those of a group are. */
#define CODED_NARROW(OF)                                                                                               \
    OF(Q8_0, q8_0, bytes_q8_0, 0, 1, 1) OF(Q4_0, q4_0, bytes_q4_0, 0, 1, 1) OF(Q4_1, q4_1, bytes_q4_1, 0, 1, 1)        \
    OF(Q5_0, q5_0, bytes_q5_0, 0, 1, 1) OF(Q5_1, q5_1, bytes_q5_1, 0, 1, 1) OF(IQ4_NL, iq4_nl, bytes_iq4_nl, 0, 1, 1)  \
    OF(MXFP4_BLOCK, mxfp4_block, bytes_mxfp4_block, 0, 1, 1)                                                           \
    OF(F32, f32, 128, 0, 1, 1) OF(F16, f16, 64, 0, 1, 1) OF(BF16, bf16, 64, 0, 1, 1) OF(MXFP4, mxfp4, 16, 1, 1, 1)     \
    OF(NVFP4, nvfp4, 16, 2, 1, 1) OF(FP8, fp8, 32, 1, 1, 1) OF(INT4_WORDS, int4, 16, 2, 1, 1)                          \
    OF(S8, s8, 32, 1, 1, 1) OF(U8, u8, 32, 1, 1, 1) OF(PACKED4, packed4, 32, 2, 1, 1) SUPER_BLOCKS(OF)
#define CODED_FOUR(OF)                                                                                                 \
    OF(INT4_WORDS, int4_four, 64, 8, 4, 1) OF(MXFP4, mxfp4_four, 64, 4, 4, 1) OF(NVFP4, nvfp4_four, 64, 8, 4, 1)
#define CODED_WIDE(OF) OF(INT4_WORDS, int4_wide, 64, 2, 4, 1) OF(FP8, fp8_wide, 128, 1, 4, 1)

/* Floats from the scales of one row to those of the next: of `fp8_tall` all rows have the same ones. */
#define OF(FORMAT, format, ...) coded_each_##format = CODED_SCALES,
enum {
    CODED_SCALES = 512 + 32, /* of HALVES_DEPTH inputs at most, and what is written behind them */
    CODED_NARROW(OF) CODED_FOUR(OF) CODED_WIDE(OF) coded_each_packed4_high = CODED_SCALES,
    coded_each_fp8_tall = 0
};
#undef OF

#define OF(FORMAT, format, BYTES, ...) coded_bytes_##format = BYTES,
enum { CODED_NARROW(OF) };
#undef OF

/* `part` of the block that lies `at` an address. */
#define UNIT(format)                                                                                                   \
    static inline ALWAYS void coded_##format(const uint8_t *at, const float *scales UNUSED, int part UNUSED, __m512bh *w)

static inline ALWAYS __m512 coded_counting(float first)
{
    return _mm512_add_ps(_mm512_set1_ps(first),
                         _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
}

static inline ALWAYS __m512bh coded_lookup(__m512i codes, __m512bh table)
{
    return (__m512bh)_mm512_permutexvar_epi16(codes, (__m512i)table);
}

/* 16 numbers, twice, or 32. */
static inline ALWAYS __m512bh coded_table(const uint16_t *numbers)
{
    return (__m512bh)_mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)numbers));
}

static inline ALWAYS __m512bh coded_table_of_32(const uint16_t *numbers)
{
    return (__m512bh)_mm512_loadu_si512(numbers);
}

/* The half word at an address as a float. */
static inline ALWAYS const float *coded_float(const uint8_t *at)
{
    return kept.floats + read_short(at);
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

/* The same; low and high halves take turns. Byte i goes to both halves of lane i. */
static inline ALWAYS __m512i coded_turns(const uint8_t *from)
{
    __m512i spread = _mm512_setr_epi32(0x00000000, 0x00010001, 0x00020002, 0x00030003, 0x00040004, 0x00050005,
                                       0x00060006, 0x00070007, 0x00080008, 0x00090009, 0x000a000a, 0x000b000b,
                                       0x000c000c, 0x000d000d, 0x000e000e, 0x000f000f);
    __m512i bytes = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)from));
    return _mm512_srlv_epi16(_mm512_shuffle_epi8(bytes, spread), _mm512_set1_epi32(4 << 16));
}

/* The same of quarter `part` of 64 bytes, which are loaded once. */
static inline ALWAYS __m512i coded_turns_of(const uint8_t *from, int part)
{
    __m512i words = _mm512_setr_epi32(0x00000000, 0x00000000, 0x00010001, 0x00010001, 0x00020002, 0x00020002,
                                      0x00030003, 0x00030003, 0x00040004, 0x00040004, 0x00050005, 0x00050005,
                                      0x00060006, 0x00060006, 0x00070007, 0x00070007);
    __m512i shifts = _mm512_set1_epi64((long long)12 << 48 | (long long)8 << 32 | 4 << 16);
    words = _mm512_add_epi16(words, _mm512_set1_epi16((short)(8 * part)));
    return _mm512_srlv_epi16(_mm512_permutexvar_epi16(words, _mm512_loadu_si512(from)), shifts);
}

static inline ALWAYS __m512i coded_bytes(const uint8_t *from)
{
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)from));
}

/* Codes with fifth bits where `high` says so. */
static inline ALWAYS __m512i coded_fifth(__m512i codes, uint32_t high)
{
    __m512i low = _mm512_and_si512(codes, _mm512_set1_epi16(15));
    return _mm512_mask_add_epi16(low, (__mmask32)high, low, _mm512_set1_epi16(16));
}

static inline ALWAYS __m512 coded_whole(__m128i codes)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
}

/* Values times a scale, plus others. The scale is read with each product: to put it into a register takes as long as a
 * shuffle, which codes need. */
static inline ALWAYS __m512 coded_scaled(__m512 values, const float *scale)
{
    __m512 found;
    __asm__("vmulps %2%{1to16%}, %1, %0" : "=v"(found) : "v"(values), "m"(*scale));
    return found;
}

static inline ALWAYS __m512 coded_scaled_more(__m512 values, const float *scale, __m512 more)
{
    __asm__("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(more) : "v"(values), "m"(*scale));
    return more;
}

/* Codes from `first` on, times a scale, plus a least value. */
static inline ALWAYS __m512 coded_line(float first, const float *scale, const float *least)
{
    return coded_scaled_more(coded_counting(first), scale, _mm512_set1_ps(*least));
}

/* Codes of 8 bits; `SIGN`: what a bit is to be flipped in for them to be whole numbers. */
#define OF(format, AT, SIGN, SCALE)                                                                                    \
    UNIT(format)                                                                                                       \
    {                                                                                                                  \
        __m128i sign = _mm_set1_epi8((char)(SIGN));                                                                    \
        __m512 low = coded_whole(_mm_xor_si128(_mm_loadu_si128((const __m128i *)(at + AT)), sign));                    \
        __m512 high = coded_whole(_mm_xor_si128(_mm_loadu_si128((const __m128i *)(at + AT + 16)), sign));              \
        const float *own = SCALE;                                                                                      \
        w[0] = _mm512_cvtne2ps_pbh(coded_scaled(high, own), coded_scaled(low, own));                                   \
    }
OF(q8_0, 2, 0, coded_float(at)) OF(s8, 0, 0, scales) OF(u8, 0, 0x80, scales)
#undef OF

static inline ALWAYS __m512bh coded_of_32(const float *scale, const float *least)
{
    return _mm512_cvtne2ps_pbh(coded_line(16, scale, least), coded_line(0, scale, least));
}

/* Numbers of FP4 whose scale is a float, and always a power of two: its exponent says which. */
static inline ALWAYS __m512bh coded_fp4(const float *scale)
{
    uint32_t bits;
    memcpy(&bits, scale, sizeof bits);
    return coded_table(coded_kept.fp4[bits >> 23]);
}

static inline ALWAYS __m512bh coded_not_linear(const float *scale)
{
    return coded_twice(coded_scaled(coded_whole(_mm_loadu_si128((const __m128i *)not_linear)), scale));
}

/* A code less its zero point, times its scale. */
static inline ALWAYS __m512bh coded_int4_table(const float *scale, const float *zero)
{
    __m512 table = _mm512_sub_ps(coded_counting(0), _mm512_set1_ps(*zero));
    return coded_twice(_mm512_mul_ps(table, _mm512_set1_ps(*scale)));
}

/* Formats of few codes: these, and what each means. */
#define BY_TABLE(format, CODES, TABLE)                                                                                 \
    UNIT(format)                                                                                                       \
    {                                                                                                                  \
        w[0] = coded_lookup(CODES, TABLE);                                                                             \
    }
BY_TABLE(q4_0, coded_split(at + 2), coded_table(coded_kept.q4_0[read_short(at)]))
BY_TABLE(q4_1, coded_split(at + 4), coded_twice(coded_line(0, coded_float(at), coded_float(at + 2))))
BY_TABLE(q5_0, coded_fifth(coded_split(at + 6), read_word(at + 2)), coded_table_of_32(coded_kept.q5_0[read_short(at)]))
BY_TABLE(q5_1, coded_fifth(coded_split(at + 8), read_word(at + 4)), coded_of_32(coded_float(at), coded_float(at + 2)))
BY_TABLE(iq4_nl, coded_split(at + 2), coded_table(coded_kept.iq4_nl[read_short(at)]))
BY_TABLE(iq4_xs, coded_split(at + 8 + 16 * part), coded_not_linear(scales + 2 * part))
BY_TABLE(mxfp4_block, coded_split(at + 1), coded_table(coded_kept.fp4[at[0]]))
BY_TABLE(mxfp4, coded_turns(at), coded_fp4(scales))
BY_TABLE(mxfp4_four, coded_turns_of(at, part), coded_fp4(scales + part))
BY_TABLE(int4, coded_turns(at), coded_int4_table(scales, scales + 1))
BY_TABLE(int4_four, coded_turns_of(at, part), coded_int4_table(scales + 2 * part, scales + 2 * part + 1))
BY_TABLE(int4_wide, coded_turns_of(at, part), coded_int4_table(scales, scales + 1))
/* The codes are in the low halves of bytes: what comes of a row's first inputs; and in high ones. */
BY_TABLE(packed4, coded_bytes(at), coded_twice(coded_line(0, scales, scales + 1)))
BY_TABLE(packed4_high, _mm512_srli_epi16(coded_bytes(at), 4), coded_twice(coded_line(0, scales, scales + 1)))
#undef BY_TABLE

/* Low and high halves of the same bytes have scales of their own, whose 16 weights fill half of a table each. */
UNIT(q4_k)
{
    const float *own = scales + 2 * part;
    __m512i codes = coded_bytes(at + 16 + 32 * part);
    __m512bh table = _mm512_cvtne2ps_pbh(coded_line(0, own + 1, own + 9), coded_line(0, own, own + 8));
    w[0] = coded_lookup(_mm512_and_si512(codes, _mm512_set1_epi16(15)), table);
    w[1] = coded_lookup(_mm512_or_si512(_mm512_srli_epi16(codes, 4), _mm512_set1_epi16(16)), table);
}

UNIT(q5_k)
{
    __m512i codes = coded_bytes(at + 48 + 32 * part), fifth = coded_bytes(at + 16);
    UNROLLED for (int i = 0; i < 2; i++) {
        int j = 2 * part + i;
        __m512i low = i ? _mm512_srli_epi16(codes, 4) : codes;
        __m512i high = j < 4 ? _mm512_slli_epi16(fifth, 4 - j) : _mm512_srli_epi16(fifth, j - 4);
        __m512i code = _mm512_ternarylogic_epi32(_mm512_set1_epi16(15), low, high, 0xca); /* 15: low, else: high */
        w[i] = coded_lookup(code, coded_of_32(scales + j, scales + 8 + j));
    }
}

/* Codes of at most `most` in the lowest bits, whose first 16 have a table of their own. */
static inline ALWAYS __m512bh coded_sixteens(__m512i codes, short most, __m512 first, __m512 second)
{
    __m512i later = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
    codes = _mm512_ternarylogic_epi32(codes, _mm512_set1_epi16(most), later, 0xea); /* (a & b) | c */
    return coded_lookup(codes, _mm512_cvtne2ps_pbh(second, first));
}

#define OF_TWO(format, CODES)                                                                                          \
    UNIT(format)                                                                                                       \
    {                                                                                                                  \
        const float *own = scales + 2 * part;                                                                          \
        __m512 values = _mm512_loadu_ps(fp4_values);                                                                   \
        w[0] = coded_sixteens(CODES, 15, coded_scaled(values, own), coded_scaled(values, own + 1));                    \
    }
OF_TWO(nvfp4, coded_turns(at))
OF_TWO(nvfp4_four, coded_turns_of(at, part))
#undef OF_TWO

UNIT(q2_k)
{
    const float *own = scales + 2 * part;
    __m512i codes = _mm512_srli_epi16(coded_bytes(at + 16 + part / 4 * 32), part % 4 * 2);
    w[0] = coded_sixteens(codes, 3, coded_line(0, own, own + 16), coded_line(0, own + 1, own + 17));
}

UNIT(q3_k)
{
    const float *own = scales + 2 * part;
    __m512i low = _mm512_srli_epi16(coded_bytes(at + 32 + part / 4 * 32), part % 4 * 2), high = coded_bytes(at);
    high = part < 2 ? _mm512_slli_epi16(high, 2 - part) : _mm512_srli_epi16(high, part - 2);
    __m512i codes = _mm512_ternarylogic_epi32(_mm512_set1_epi16(3), low, high, 0xca);
    w[0] = coded_sixteens(codes, 7, coded_scaled(coded_counting(-4), own), coded_scaled(coded_counting(-4), own + 1));
}

static inline ALWAYS __m512bh coded_wholes(__m256i codes, const float *scales)
{
    __m512 first = coded_scaled(coded_whole(_mm256_castsi256_si128(codes)), scales);
    __m512 second = coded_scaled(coded_whole(_mm256_extracti128_si256(codes, 1)), scales + 1);
    return _mm512_cvtne2ps_pbh(second, first);
}

/* Four values have a code, whose ninth bit is in `high`. */
static inline ALWAYS __m256i coded_fours(const uint32_t *grid, const uint8_t *codes, int high)
{
    __m256i at = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)codes));
    __m256i ninth = _mm256_sllv_epi32(_mm256_set1_epi32(high), _mm256_setr_epi32(8, 7, 6, 5, 4, 3, 2, 1));
    at = _mm256_or_si256(at, _mm256_and_si256(ninth, _mm256_set1_epi32(256)));
    return _mm256_i32gather_epi32((const int *)grid, at, 4);
}

#define EIGHT(of, I) (long long)of(at, 4 * part + I)
#define EIGHTS(of) _mm256_setr_epi64x(EIGHT(of, 0), EIGHT(of, 1), EIGHT(of, 2), EIGHT(of, 3))
#define NEGATED _mm256_sub_epi8(_mm256_xor_si256(values, signs), signs)
#define MASKED(AT) _mm256_mask_sub_epi8(values, read_word(at + AT + 4 * part), _mm256_setzero_si256(), values)
#define I_QUANT(format, SIGNS, VALUES, CODES)                                                                          \
    UNIT(format)                                                                                                       \
    {                                                                                                                  \
        __m256i signs UNUSED = SIGNS, values = VALUES;                                                                 \
        w[0] = coded_wholes(CODES, scales + 2 * part);                                                                 \
    }
I_QUANT(iq2_xxs, EIGHTS(signs_iq2_xxs), EIGHTS(values_iq2_xxs), NEGATED)
I_QUANT(iq2_xs, EIGHTS(signs_iq2_xs), EIGHTS(values_iq2_xs), NEGATED)
I_QUANT(iq2_s, _mm256_setzero_si256(), EIGHTS(values_iq2_s), MASKED(34))
I_QUANT(iq3_xxs, EIGHTS(signs_iq3_xxs), coded_fours(grids.iq3_xxs, at + 2 + 8 * part, 0), NEGATED)
I_QUANT(iq3_s, _mm256_setzero_si256(), coded_fours(grids.iq3_s, at + 2 + 8 * part, at[66 + part]), MASKED(74))
I_QUANT(iq1_s, _mm256_setzero_si256(), EIGHTS(values_iq1_s), values)
I_QUANT(iq1_m, _mm256_setzero_si256(), EIGHTS(values_iq1_m), values)
#undef EIGHT
#undef EIGHTS
#undef NEGATED
#undef MASKED
#undef I_QUANT

UNIT(tq1_0)
{
    int8_t codes[32];
    codes_tq1_0(at, part, codes);
    w[0] = coded_wholes(_mm256_loadu_si256((const __m256i *)codes), scales + 2 * part);
}

UNIT(tq2_0)
{
    const float *own = scales + 2 * part;
    __m512i codes = _mm512_srli_epi16(coded_bytes(at + part / 4 * 32), part % 4 * 2);
    w[0] = coded_sixteens(codes, 3, coded_scaled(coded_counting(-1), own), coded_scaled(coded_counting(-1), own + 1));
}

UNIT(q1_0)
{
    __m512i less = (__m512i)coded_twice(_mm512_set1_ps(-scales[2 * part])), more = (__m512i)coded_twice(_mm512_set1_ps(scales[2 * part]));
    w[0] = (__m512bh)_mm512_mask_mov_epi16(less, read_word(at + part / 4 * 18 + 2 + part % 4 * 4), more);
}

/* 64 different weights are too many to look up. A scale times 32 is exact, and so is what is left of a code. */
UNIT(q6_k)
{
    __m256i low = _mm256_loadu_si256((const __m256i *)(at + part / 4 * 64 + part % 2 * 32));
    __m256i high = _mm256_loadu_si256((const __m256i *)(at + 128 + part / 4 * 32));
    low = part % 4 / 2 ? _mm256_srli_epi16(low, 4) : low;
    high = part % 4 < 2 ? _mm256_slli_epi16(high, 4 - part % 4 * 2) : _mm256_srli_epi16(high, part % 4 * 2 - 4);
    __m256i code = _mm256_or_si256(_mm256_and_si256(low, _mm256_set1_epi8(15)),
                                   _mm256_and_si256(high, _mm256_set1_epi8(48)));
    code = _mm256_sub_epi8(code, _mm256_set1_epi8(32));
    w[0] = coded_wholes(code, scales + 2 * part);
}

/* A float of 8 bits (e4m3) is one of 16 divided by 256: a scale has these already. */
UNIT(fp8_wide)
{
    __m256i codes = _mm256_loadu_si256((const __m256i *)(at + 32 * part));
    __m512i bits = _mm512_slli_epi16(_mm512_cvtepi8_epi16(codes), 7);
    bits = _mm512_and_si512(bits, _mm512_set1_epi16((short)0xbf80));
    __mmask32 none = _mm256_cmpeq_epi8_mask(_mm256_and_si256(codes, _mm256_set1_epi8(127)), _mm256_set1_epi8(127));
    bits = _mm512_mask_mov_epi16(bits, none, _mm512_set1_epi16(0x7e00));
    w[0] = _mm512_cvtne2ps_pbh(coded_scaled(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits, 1)), scales),
                               coded_scaled(_mm512_cvtph_ps(_mm512_castsi512_si256(bits)), scales));
}

/* Sizes of 32 codes from `first` on, times a scale. */
static inline ALWAYS __m512bh coded_fp8_sizes(int first, __m512 scale)
{
    __m512i codes = _mm512_add_epi16(_mm512_set1_epi16((short)first),
                                     _mm512_cvtepu8_epi16(_mm256_setr_epi8(
                                         0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
                                         22, 23, 24, 25, 26, 27, 28, 29, 30, 31)));
    __mmask32 none = _mm512_cmpeq_epi16_mask(codes, _mm512_set1_epi16(127));
    __m512i bits = _mm512_mask_mov_epi16(_mm512_slli_epi16(codes, 7), none, _mm512_set1_epi16(0x7e00));
    return _mm512_cvtne2ps_pbh(_mm512_mul_ps(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits, 1)), scale),
                               _mm512_mul_ps(_mm512_cvtph_ps(_mm512_castsi512_si256(bits)), scale));
}

/* Where several outputs have a scale in common, all of its 128 sizes are computed once for them. */
UNIT(fp8_tall)
{
    __m512 scale = _mm512_set1_ps(scales[0]);
    __m512i codes = coded_bytes(at + 32 * part);
    __m512i low = _mm512_permutex2var_epi16((__m512i)coded_fp8_sizes(0, scale), codes,
                                            (__m512i)coded_fp8_sizes(32, scale));
    __m512i high = _mm512_permutex2var_epi16((__m512i)coded_fp8_sizes(64, scale), codes,
                                             (__m512i)coded_fp8_sizes(96, scale));
    __m512i size = _mm512_mask_mov_epi16(low, _mm512_test_epi16_mask(codes, _mm512_set1_epi16(64)), high);
    __m512i sign = _mm512_slli_epi16(codes, 8);
    w[0] = (__m512bh)_mm512_ternarylogic_epi32(sign, _mm512_set1_epi16((short)0x8000), size, 0x6a); /* (a & b) ^ c */
}

#define coded_fp8 coded_fp8_wide

UNIT(f32)
{
    w[0] = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(at + 64), _mm512_loadu_ps(at));
}

UNIT(f16)
{
    const __m256i *from = (const __m256i *)at;
    w[0] = _mm512_cvtne2ps_pbh(_mm512_cvtph_ps(_mm256_loadu_si256(from + 1)),
                               _mm512_cvtph_ps(_mm256_loadu_si256(from)));
}

UNIT(bf16)
{
    w[0] = (__m512bh)_mm512_loadu_si512(at);
}
#undef UNIT

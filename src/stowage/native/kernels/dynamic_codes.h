/* Weights in block formats as codes of 8 bits (dynamic.h), four blocks at a time in two registers: the first 16 of each
 * block, then the others. And their scales, those of a piece of a row side by side.
 */

/* Group `part` of those that lie `at` an address. */
#define UNPACK(format)                                                                                                 \
    static inline ALWAYS void dynamic_##format(const uint8_t *at, int part UNUSED, __m512i *first, __m512i *second)

/* 16 bytes of each four blocks, or outputs, that are `apart`, of which so many are there. */
static inline ALWAYS __m512i dynamic_brought(const uint8_t *at, int64_t apart, __mmask16 there)
{
    __m512i v = _mm512_castsi128_si512(_mm_maskz_loadu_epi8(there, at));
    v = _mm512_inserti32x4(v, _mm_maskz_loadu_epi8(there, at + apart), 1);
    v = _mm512_inserti32x4(v, _mm_maskz_loadu_epi8(there, at + 2 * apart), 2);
    return _mm512_inserti32x4(v, _mm_maskz_loadu_epi8(there, at + 3 * apart), 3);
}

static inline ALWAYS __m512i dynamic_four(const uint8_t *at, int apart)
{
    return dynamic_brought(at, apart, 0xffff);
}

/* The same of `bytes`, from byte `first` on, of which all begin at even ones: two loads and a shuffle instead of four and
 * three. */
static inline ALWAYS __m512i dynamic_four_of(const uint8_t *at, int bytes, int first, int apart)
{
    int second = bytes < 128 ? bytes - 64 : 64; /* where the other 64 bytes begin that are looked at */
    __m512i lane = _mm512_inserti64x4(_mm512_inserti32x4(_mm512_setzero_si512(), _mm_set1_epi16(1), 1),
                                      _mm256_inserti128_si256(_mm256_set1_epi16(2), _mm_set1_epi16(3), 1), 1);
    __m512i word = _mm512_broadcast_i32x4(_mm_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7));
    word = _mm512_add_epi16(word, _mm512_mullo_epi16(lane, _mm512_set1_epi16((short)(apart / 2))));
    word = _mm512_add_epi16(word, _mm512_set1_epi16((short)(first / 2)));
    __mmask32 beyond = _mm512_cmpge_epi16_mask(word, _mm512_set1_epi16(32));
    word = _mm512_mask_add_epi16(word, beyond, word, _mm512_set1_epi16((short)(32 - second / 2)));
    return _mm512_permutex2var_epi16(_mm512_loadu_si512(at), word, _mm512_loadu_si512(at + second));
}

static inline ALWAYS __m512i dynamic_low(__m512i v)
{
    return _mm512_and_si512(v, _mm512_set1_epi8(15));
}

static inline ALWAYS __m512i dynamic_high(__m512i v)
{
    return dynamic_low(_mm512_srli_epi16(v, 4));
}

/* Of 128 codes in their order. */
static inline ALWAYS void dynamic_parted(__m512i a, __m512i b, __m512i *first, __m512i *second)
{
    *first = _mm512_shuffle_i32x4(a, b, 0x88);
    *second = _mm512_shuffle_i32x4(a, b, 0xdd);
}

/* 16 bits of each of four words that are `apart`. */
static inline ALWAYS __mmask64 dynamic_bits(const uint8_t *at, int apart)
{
    return (__mmask64)read_short(at) | (__mmask64)read_short(at + apart) << 16
           | (__mmask64)read_short(at + 2 * apart) << 32 | (__mmask64)read_short(at + 3 * apart) << 48;
}

static inline ALWAYS void dynamic_fifth(const uint8_t *at, const uint8_t *high, int apart, __m512i *first,
                                        __m512i *second)
{
    __m512i v = dynamic_four_of(at, 4 * apart, apart - 16, apart), low = dynamic_low(v), more = dynamic_high(v), bit = _mm512_set1_epi8(16);
    *first = _mm512_mask_add_epi8(low, dynamic_bits(high, apart), low, bit);
    *second = _mm512_mask_add_epi8(more, dynamic_bits(high + 2, apart), more, bit);
}

/* Codes with a sign, and a bias of 128. */
static inline ALWAYS __m512i dynamic_biased(__m512i v)
{
    return _mm512_xor_si512(v, _mm512_set1_epi8((char)128));
}

/* Of 128 bytes, which have a code each. */
#define PARTED(format, CODES)                                                                                          \
    UNPACK(format)                                                                                                     \
    {                                                                                                                  \
        dynamic_parted(CODES(_mm512_loadu_si512(at)), CODES(_mm512_loadu_si512(at + 64)), first, second);              \
    }
PARTED(plain, dynamic_biased)
PARTED(packed4, dynamic_low)
PARTED(packed4_high, dynamic_high)
#undef PARTED

UNPACK(q8_0)
{
    *first = dynamic_biased(dynamic_four_of(at, 128, 2, 34));
    *second = dynamic_biased(dynamic_four_of(at + 8, 128, 10, 34));
}

/* Of 64 bytes, whose low halves are the first 16. */
#define HALVED(format, BYTES)                                                                                          \
    UNPACK(format)                                                                                                     \
    {                                                                                                                  \
        __m512i v = BYTES;                                                                                             \
        *first = dynamic_low(v);                                                                                       \
        *second = dynamic_high(v);                                                                                     \
    }
HALVED(q4_0, dynamic_four_of(at, 72, 2, 18))
HALVED(q4_1, dynamic_four_of(at, 80, 4, 20))
HALVED(fp4_block, dynamic_four(at + 1, 17))
HALVED(int4_turns, _mm512_loadu_si512(at))
#define dynamic_int4_least_turns dynamic_int4_turns
#undef HALVED

/* Low and high halves take turns. */
UNPACK(int4)
{
    __m512i v = _mm512_loadu_si512(at), low = dynamic_low(v), high = dynamic_high(v);
    *first = _mm512_unpacklo_epi8(low, high);
    *second = _mm512_unpackhi_epi8(low, high);
}
#define dynamic_int4_least dynamic_int4

/* The same codes, and what those of FP4 mean. */
#define OF_FP4(format, codes)                                                                                          \
    UNPACK(format)                                                                                                     \
    {                                                                                                                  \
        __m512i values = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)dynamic_fp4));                        \
        dynamic_##codes(at, part, first, second);                                                                      \
        *first = _mm512_shuffle_epi8(values, *first);                                                                  \
        *second = _mm512_shuffle_epi8(values, *second);                                                                \
    }
OF_FP4(mxfp4_block, fp4_block)
OF_FP4(mxfp4, int4)
OF_FP4(mxfp4_turns, int4_turns)
#undef OF_FP4

UNPACK(q5_0)
{
    dynamic_fifth(at, at + 2, 22, first, second);
}

UNPACK(q5_1)
{
    dynamic_fifth(at, at + 4, 24, first, second);
}

/* Of two pairs of blocks in low and high halves of the same bytes. */
static inline ALWAYS void dynamic_woven(__m512i low, __m512i high, __m512i *first, __m512i *second)
{
    *first = _mm512_permutex2var_epi64(low, _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13), high);
    *second = _mm512_permutex2var_epi64(low, _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15), high);
}

UNPACK(q4_k)
{
    __m512i v = _mm512_loadu_si512(at + 16 + 64 * part);
    dynamic_woven(dynamic_low(v), dynamic_high(v), first, second);
}

static inline ALWAYS __m512i dynamic_twice(__m256i v)
{
    return _mm512_broadcast_i64x4(v);
}

static inline ALWAYS __m512i dynamic_both(int low, int high)
{
    return _mm512_inserti64x4(_mm512_set1_epi8((char)low), _mm256_set1_epi8((char)high), 1);
}

UNPACK(q5_k)
{
    __m512i v = _mm512_loadu_si512(at + 48 + 64 * part), low = dynamic_low(v), high = dynamic_high(v);
    __m512i fifth = dynamic_twice(_mm256_loadu_si256((const __m256i *)(at + 16))), bit = _mm512_set1_epi8(16);
    int b = 4 * part;
    __mmask64 lows = _mm512_test_epi8_mask(fifth, dynamic_both(1 << b, 4 << b));
    __mmask64 highs = _mm512_test_epi8_mask(fifth, dynamic_both(2 << b, 8 << b));
    dynamic_woven(_mm512_mask_add_epi8(low, lows, low, bit), _mm512_mask_add_epi8(high, highs, high, bit), first, second);
}

UNPACK(q6_k)
{
    __m512i v = _mm512_loadu_si512(at + 64 * part), keep = _mm512_set1_epi8(48);
    __m512i high = dynamic_twice(_mm256_loadu_si256((const __m256i *)(at + 128 + 32 * part)));
    __m512i left = _mm512_inserti64x4(_mm512_set1_epi16(4), _mm256_set1_epi16(2), 1);
    __m512i right = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(2), 1);
    __m512i a = _mm512_and_si512(_mm512_sllv_epi16(high, left), keep);
    __m512i b = _mm512_and_si512(_mm512_srlv_epi16(high, right), keep);
    dynamic_parted(_mm512_or_si512(dynamic_low(v), a), _mm512_or_si512(dynamic_high(v), b), first, second);
}
#undef UNPACK

enum { DYNAMIC_SCALES = HALVES_DEPTH / DYNAMIC_BLOCK + 32 }; /* of a piece of a row, and what is written behind them */
enum { DYNAMIC_GROUPS = HALVES_DEPTH / DYNAMIC_GROUP };      /* of a piece of a row */

/* Numbers of which `each` lie side by side, then as many of the others: these two apart. */
static inline ALWAYS void dynamic_apart(const float *from, int each, int64_t blocks, float *scales, float *more)
{
    __m512i even = each == 1 ? _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
                             : _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
    __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(each));
    for (int64_t b = 0; b < blocks; b += 16, from += 32) {
        __m512 low = _mm512_loadu_ps(from), high = _mm512_loadu_ps(from + 16);
        _mm512_storeu_ps(scales + b, _mm512_permutex2var_ps(low, even, high));
        _mm512_storeu_ps(more + b, _mm512_permutex2var_ps(low, odd, high));
    }
}

/* Numbers of which each is that of so many blocks, a power of two up to 16. */
static inline ALWAYS void dynamic_repeated(const float *from, int64_t each, int64_t blocks, float *to)
{
    __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    lanes = _mm512_srl_epi32(lanes, _mm_cvtsi32_si128(__builtin_ctzll((unsigned long long)each)));
    for (int64_t b = 0; b < blocks; b += 16)
        _mm512_storeu_ps(to + b, _mm512_permutexvar_ps(lanes, _mm512_loadu_ps(from + b / each)));
}

/* Scales of one row, whose blocks from input k on begin `at` an address, and least values or second scales; and zeros up
 * to a whole group. */
static void dynamic_scales(const Linear *job, const Coded *row, const uint8_t *at, int64_t k, int64_t depth,
                           float *scales, float *more)
{
    float both[CODED_SCALES] __attribute__((aligned(64)));
    int64_t blocks = depth / DYNAMIC_BLOCK;
    int format = job->format, one = format == Q8_0 || format == Q4_0 || format == Q5_0;
    int64_t each = row->group / DYNAMIC_BLOCK;
    int wide = (format == INT4_WORDS || format == PACKED4) && (each == 2 || each == 4 || each == 8) && k % row->group == 0;
    if (format == PLAIN)
        for (int64_t b = 0; b < blocks; b += 16)
            _mm512_storeu_ps(scales + b, _mm512_set1_ps(scale_of(row, 0)));
    else
        coded_scales(job, row, at, k, depth, wide ? row->group : DYNAMIC_BLOCK,
                     one || format == MXFP4 || format == MXFP4_BLOCK ? scales : both);
    if (format == MXFP4 || format == MXFP4_BLOCK)
        for (int64_t b = 0; b < blocks; b += 16)
            _mm512_storeu_ps(scales + b, _mm512_mul_ps(_mm512_loadu_ps(scales + b), _mm512_set1_ps(0.5f)));
    else if (wide) {
        float own[2][DYNAMIC_SCALES];
        dynamic_apart(both, 1, (blocks + each - 1) / each, own[0], own[1]);
        dynamic_repeated(own[0], each, blocks, scales);
        dynamic_repeated(own[1], each, blocks, more);
    } else if (format != PLAIN && !one)
        dynamic_apart(both, format == Q4_K || format == Q5_K ? 8 : 1, blocks, scales, more);
    if (format == INT4_WORDS) /* zero points */
        for (int64_t b = 0; b < blocks; b += 16) {
            __m512 least = _mm512_mul_ps(_mm512_loadu_ps(more + b), _mm512_loadu_ps(scales + b));
            _mm512_storeu_ps(more + b, (__m512)_mm512_xor_si512((__m512i)least, _mm512_set1_epi32((int)0x80000000)));
        }
    for (int64_t b = blocks; b % 4; b++)
        scales[b] = more[b] = 0;
}

/* Weights in block formats as codes of 8 bits (dynamic.h) with AVX2: of four blocks in registers, the first 16 of blocks 0
 * and 1, of 2 and 3, then the others of these. Where all 8 bits count, codes have a sign and no bias. */

/* Group `part` of those that lie `at` an address. */
#define UNPACK(format)                                                                                                 \
    static inline ALWAYS void codes_avx2_##format(const uint8_t *at, int part UNUSED, __m256i w[4])
#define PAIRS_OF_BLOCKS UNROLLED for (int p = 0; p < 2; p++)

/* 16 bytes of each of two blocks. */
static inline ALWAYS __m256i avx2_two(const uint8_t *at, int apart)
{
    __m128i first = _mm_loadu_si128((const __m128i *)at), second = _mm_loadu_si128((const __m128i *)(at + apart));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1);
}

static inline ALWAYS __m256i avx2_32(const uint8_t *at)
{
    return _mm256_loadu_si256((const __m256i *)at);
}

static inline ALWAYS __m256i avx2_low(__m256i v)
{
    return _mm256_and_si256(v, _mm256_set1_epi8(15));
}

static inline ALWAYS __m256i avx2_high(__m256i v)
{
    return avx2_low(_mm256_srli_epi16(v, 4));
}

/* Of two blocks in their order, or back. */
static inline ALWAYS void avx2_parted(__m256i a, __m256i b, __m256i *first, __m256i *second)
{
    *first = _mm256_permute2x128_si256(a, b, 0x20);
    *second = _mm256_permute2x128_si256(a, b, 0x31);
}

/* 16 where a bit is set of the two bytes from `byte` on of each half's words. */
static inline ALWAYS __m256i avx2_fifth(__m256i words, char byte)
{
    __m256i which = _mm256_set_epi64x(0x0101010101010101, 0, 0x0101010101010101, 0);
    __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201);
    words = _mm256_shuffle_epi8(words, _mm256_add_epi8(which, _mm256_set1_epi8(byte)));
    return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(words, bit), bit), _mm256_set1_epi8(16));
}

UNPACK(q8_0)
{
    PAIRS_OF_BLOCKS {
        w[p] = avx2_two(at + 2 + 68 * p, 34);
        w[2 + p] = avx2_two(at + 18 + 68 * p, 34);
    }
}

UNPACK(plain)
{
    PAIRS_OF_BLOCKS avx2_parted(avx2_32(at + 64 * p), avx2_32(at + 64 * p + 32), &w[p], &w[2 + p]);
}

/* Blocks of 16 bytes, whose low halves are the first 16, behind so many others; and the same with fifth bits. */
#define HALVED(format, BYTES, FIRST, FIFTH)                                                                            \
    UNPACK(format)                                                                                                     \
    {                                                                                                                  \
        PAIRS_OF_BLOCKS {                                                                                              \
            const uint8_t *own = at + 2 * BYTES * p;                                                                   \
            __m256i v = avx2_two(own + BYTES - 16, BYTES);                                                             \
            w[p] = avx2_low(v);                                                                                        \
            w[2 + p] = avx2_high(v);                                                                                   \
            if (FIFTH) {                                                                                               \
                __m256i words = _mm256_set_m128i(_mm_set1_epi32((int)read_word(own + BYTES + FIRST)),                  \
                                                 _mm_set1_epi32((int)read_word(own + FIRST)));                         \
                w[p] = _mm256_or_si256(w[p], avx2_fifth(words, 0));                                                    \
                w[2 + p] = _mm256_or_si256(w[2 + p], avx2_fifth(words, 2));                                            \
            }                                                                                                          \
        }                                                                                                              \
    }
HALVED(q4_0, 18, 0, 0) HALVED(q4_1, 20, 0, 0) HALVED(fp4_block, 17, 0, 0) HALVED(q5_0, 22, 2, 1) HALVED(q5_1, 24, 4, 1)
#undef HALVED

/* Low and high halves take turns. */
UNPACK(int4)
{
    PAIRS_OF_BLOCKS {
        __m256i v = avx2_32(at + 32 * p), low = avx2_low(v), high = avx2_high(v);
        w[p] = _mm256_unpacklo_epi8(low, high);
        w[2 + p] = _mm256_unpackhi_epi8(low, high);
    }
}
#define codes_avx2_int4_least codes_avx2_int4

/* The same codes, and what those of FP4 mean. */
#define OF_FP4(format, codes)                                                                                          \
    UNPACK(format)                                                                                                     \
    {                                                                                                                  \
        __m256i values = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)dynamic_fp4));                   \
        codes_avx2_##codes(at, part, w);                                                                               \
        UNROLLED for (int i = 0; i < 4; i++)                                                                           \
            w[i] = _mm256_shuffle_epi8(values, w[i]);                                                                  \
    }
OF_FP4(mxfp4_block, fp4_block)
OF_FP4(mxfp4, int4)
#undef OF_FP4

/* Of 128 bytes, of which one half each is a code. */
#define ONE_HALF(format, HALF)                                                                                         \
    UNPACK(format)                                                                                                     \
    {                                                                                                                  \
        PAIRS_OF_BLOCKS avx2_parted(HALF(avx2_32(at + 64 * p)), HALF(avx2_32(at + 64 * p + 32)), &w[p], &w[2 + p]);    \
    }
ONE_HALF(packed4, avx2_low)
ONE_HALF(packed4_high, avx2_high)
#undef ONE_HALF

UNPACK(q4_k)
{
    PAIRS_OF_BLOCKS {
        __m256i v = avx2_32(at + 16 + 64 * part + 32 * p);
        avx2_parted(avx2_low(v), avx2_high(v), &w[p], &w[2 + p]);
    }
}

static inline ALWAYS __m256i avx2_with_bit(__m256i v, __m256i bits, int bit)
{
    __m256i set = _mm256_set1_epi8((char)(1 << bit));
    set = _mm256_cmpeq_epi8(_mm256_and_si256(bits, set), set);
    return _mm256_or_si256(v, _mm256_and_si256(set, _mm256_set1_epi8(16)));
}

UNPACK(q5_k)
{
    __m256i fifth = avx2_32(at + 16);
    PAIRS_OF_BLOCKS {
        __m256i v = avx2_32(at + 48 + 64 * part + 32 * p);
        int bit = 4 * part + 2 * p;
        avx2_parted(avx2_with_bit(avx2_low(v), fifth, bit), avx2_with_bit(avx2_high(v), fifth, bit + 1), &w[p], &w[2 + p]);
    }
}

UNPACK(q6_k)
{
    __m256i a = avx2_32(at + 64 * part), b = avx2_32(at + 64 * part + 32), high = avx2_32(at + 128 + 32 * part);
    __m256i two = _mm256_set1_epi8(48), more[4] = {_mm256_slli_epi16(high, 4), _mm256_slli_epi16(high, 2), high,
                                                   _mm256_srli_epi16(high, 2)};
    UNROLLED for (int i = 0; i < 4; i++)
        more[i] = _mm256_or_si256(i < 2 ? avx2_low(i ? b : a) : avx2_high(i > 2 ? b : a), _mm256_and_si256(more[i], two));
    avx2_parted(more[0], more[1], &w[0], &w[2]);
    avx2_parted(more[2], more[3], &w[1], &w[3]);
}
#undef UNPACK

/* Halves that the four blocks of two groups begin with. */
static inline ALWAYS __m256 avx2_halves_of(const uint8_t *a, const uint8_t *b, int apart)
{
    return _mm256_cvtph_ps(_mm_setr_epi16((short)read_short(a), (short)read_short(a + apart), (short)read_short(a + 2 * apart),
                                          (short)read_short(a + 3 * apart), (short)read_short(b), (short)read_short(b + apart),
                                          (short)read_short(b + 2 * apart), (short)read_short(b + 3 * apart)));
}

/* Floats of eight scales in the lower bytes. */
static inline ALWAYS __m256 avx2_floats_of(int kind, __m256i v)
{
    __m128i halves = _mm256_castsi256_si128(v);
    return kind == SCALES_F16    ? _mm256_cvtph_ps(halves)
           : kind == SCALES_BF16 ? (__m256)_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16)
                                 : (__m256)v;
}

/* Scales of eight blocks, of which each `alike` (1, 2 or 4) have one; of 4 bytes also what is no float. */
static inline ALWAYS __m256 avx2_shared(const uint8_t *from, int kind, int64_t alike)
{
    __m256i which = _mm256_srlv_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32((int)alike / 2));
    int64_t bytes = 8 / alike * scale_bytes[kind];
    __m256i v = bytes == 32 ? avx2_32(from)
                            : _mm256_castsi128_si256(bytes == 16  ? _mm_loadu_si128((const __m128i *)from)
                                                     : bytes == 8 ? _mm_loadl_epi64((const __m128i *)from)
                                                                  : _mm_cvtsi32_si128((int)read_word(from)));
    return _mm256_permutevar8x32_ps(avx2_floats_of(kind, v), which);
}

/* Whether blocks begin with their scale. */
#define AT_BEGIN(FORMAT) ((FORMAT) == Q8_0 || (FORMAT) == Q4_0 || (FORMAT) == Q4_1 || (FORMAT) == Q5_0 || (FORMAT) == Q5_1)

static inline ALWAYS __m256 avx2_floats(__m128i bytes, int with_sign)
{
    return _mm256_cvtepi32_ps(with_sign ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
}

/* As `scales_k`, of which the least values are negated. */
static inline ALWAYS void avx2_scales_k(const uint8_t *block, float *scales, float *more)
{
    uint32_t a = read_word(block + 4), b = read_word(block + 8), c = read_word(block + 12);
    __m128i bits = _mm_setr_epi32((int)(a & 0x3f3f3f3f), (int)((c & 0x0f0f0f0f) | (a >> 2 & 0x30303030)),
                                  (int)(b & 0x3f3f3f3f), (int)((c >> 4 & 0x0f0f0f0f) | (b >> 2 & 0x30303030)));
    __m128 halves = _mm_cvtph_ps(_mm_cvtsi32_si128((int)read_word(block)));
    __m256 scale = _mm256_broadcastss_ps(halves), least = _mm256_broadcastss_ps(_mm_movehdup_ps(halves));
    least = _mm256_xor_ps(least, _mm256_set1_ps(-0.0f));
    _mm256_storeu_ps(scales, _mm256_mul_ps(scale, avx2_floats(bits, 0)));
    _mm256_storeu_ps(more, _mm256_mul_ps(least, avx2_floats(_mm_srli_si128(bits, 8), 0)));
}

/* Those of the first 16 and of the others take turns. */
static inline ALWAYS void avx2_scales_6(const uint8_t *block, float *scales, float *more)
{
    __m128i order = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    __m128i bytes = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(block + 192)), order);
    __m256 scale = _mm256_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(read_short(block + 208))));
    _mm256_storeu_ps(scales, _mm256_mul_ps(scale, avx2_floats(bytes, 1)));
    _mm256_storeu_ps(more, _mm256_mul_ps(scale, avx2_floats(_mm_srli_si128(bytes, 8), 1)));
}

/* Four bits of each, of which two more are elsewhere, less 32. */
static inline ALWAYS void avx2_scales_4(const uint8_t *block, float *scales)
{
    __m256i places = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14), low = _mm256_set1_epi32((int)read_word(block + 4));
    __m256i high = _mm256_srlv_epi32(_mm256_set1_epi32(read_short(block + 2)), places);
    low = _mm256_and_si256(_mm256_srlv_epi32(low, _mm256_add_epi32(places, places)), _mm256_set1_epi32(15));
    high = _mm256_and_si256(_mm256_slli_epi32(high, 4), _mm256_set1_epi32(48));
    __m256 numbers = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_or_si256(low, high), _mm256_set1_epi32(32)));
    __m128 scale = _mm_cvtph_ps(_mm_cvtsi32_si128(read_short(block)));
    _mm256_storeu_ps(scales, _mm256_mul_ps(_mm256_broadcastss_ps(scale), numbers));
}

static inline int avx2_has_sixteens(int format)
{
    return format == Q3_K || (format > IQ4_XS && format < FORMATS_END);
}

/* Of formats with a scale of each 16, those that `scales_*` find: of the first 16 of a block and of the others. */
static void avx2_scales_16(int format, const uint8_t *block, float *scales, float *more)
{
    float all[16];
    switch (format) {
#define OF(FORMAT, format, ...)                                                                                        \
    case FORMAT:                                                                                                       \
        scales_##format(block, all);                                                                                   \
        break;
        I_QUANTS(OF)
        SIGNS(OF)
#undef OF
    default:
        scales_q3_k(block, all);
    }
    for (int b = 0; b < 8; b++)
        scales[b] = all[2 * b], more[b] = all[2 * b + 1];
}

/* Halves of powers of two, whose exponents are bytes: see `power_of`. */
static inline ALWAYS __m256 avx2_powers(__m128i bytes)
{
    __m256i v = _mm256_cvtepu8_epi32(bytes), quiet = _mm256_set1_epi32(0x400000);
    __m256i odd = _mm256_or_si256(_mm256_cmpeq_epi32(v, _mm256_setzero_si256()), _mm256_cmpeq_epi32(v, _mm256_set1_epi32(255)));
    v = _mm256_or_si256(_mm256_slli_epi32(v, 23), _mm256_and_si256(odd, quiet));
    return _mm256_mul_ps((__m256)v, _mm256_set1_ps(0.5f));
}

/* Halves of scales of E4M3 of eight blocks: of the first 16 inputs of each, and of the others. A float of 8 bits is one of 16
 * times 2^8. */
static inline ALWAYS void avx2_scales_e4m3(const Coded *row, const uint8_t *at, float *scales, float *more)
{
    __m256i v = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)at)), 7);
    __m256i most = _mm256_set1_epi16(0x3f80), none = _mm256_cmpeq_epi16(_mm256_and_si256(v, most), most);
    v = _mm256_or_si256(_mm256_and_si256(v, _mm256_set1_epi16((short)0xbf80)), _mm256_and_si256(none, _mm256_set1_epi16(0x7e00)));
    __m256 own[2], whole = _mm256_set1_ps(row->whole), half = _mm256_set1_ps(0.5f);
    UNROLLED for (int i = 0; i < 2; i++) {
        own[i] = _mm256_cvtph_ps(i ? _mm256_extracti128_si256(v, 1) : _mm256_castsi256_si128(v));
        own[i] = _mm256_mul_ps(own[i], _mm256_set1_ps(256));
        own[i] = row->kind == SCALES_DIVIDED ? _mm256_div_ps(own[i], whole) : _mm256_mul_ps(own[i], whole);
        own[i] = _mm256_mul_ps(own[i], half);
    }
    __m256 turns[2] = {_mm256_shuffle_ps(own[0], own[1], 0x88), _mm256_shuffle_ps(own[0], own[1], 0xdd)};
    _mm256_storeu_ps(scales, (__m256)_mm256_permute4x64_epi64((__m256i)turns[0], 0xd8));
    _mm256_storeu_ps(more, (__m256)_mm256_permute4x64_epi64((__m256i)turns[1], 0xd8));
}

/* Of `blocks` blocks of a row from input k on, which begins one of 256 if these have scales in common: scales, and least
 * values or second scales, and zeros up to a whole group. */
static void avx2_scales(const Linear *job, const Coded *row, int64_t k, int64_t blocks, float *scales, float *more)
{
    int64_t b = 0, eights = blocks / 8 * 8;
    int format = job->format, bytes = block_bytes_of[format];
    const uint8_t *at = dynamic_block(format, row, k);
    if (format == Q4_K || format == Q5_K)
        for (; b < eights; b += 8)
            avx2_scales_k(at + b / 8 * bytes, scales + b, more + b);
    else if (format == Q6_K)
        for (; b < eights; b += 8)
            avx2_scales_6(at + b / 8 * bytes, scales + b, more + b);
    else if (avx2_has_sixteens(format))
        for (; b < eights; b += 8)
            avx2_scales_16(format, at + b / 8 * bytes, scales + b, more + b);
    else if (format == IQ4_XS)
        for (; b < eights; b += 8) /* other ones are none */
            avx2_scales_4(at + b / 8 * bytes, scales + b);
    else if (format == NVFP4)
        for (; b < eights; b += 8)
            avx2_scales_e4m3(row, row->scales + k / 16 + 2 * b, scales + b, more + b);
    else if ((AT_BEGIN(format) || format == IQ4_NL) && eights > 0) {
        for (; b < blocks; b += 8) {
            b = b < blocks - 8 ? b : blocks - 8; /* some of the last eight again */
            const uint8_t *own = at + b * bytes, *after = own + 4 * bytes;
            _mm256_storeu_ps(scales + b, avx2_halves_of(own, after, bytes));
            if (dynamic_kind(job) == LEAST)
                _mm256_storeu_ps(more + b, avx2_halves_of(own + 2, after + 2, bytes));
        }
    } else if (format == MXFP4 && job->kind == SCALES_E8M0)
        for (; b < eights; b += 8)
            _mm256_storeu_ps(scales + b, avx2_powers(_mm_loadl_epi64((const __m128i *)(row->scales + k / DYNAMIC_BLOCK + b))));
    else if (format == MXFP4_BLOCK)
        for (; b < eights; b += 8) {
            const uint8_t *own = at + b * bytes;
            uint64_t powers = 0; /* made elsewhere than numbers are */
            UNROLLED for (int i = 0; i < 8; i++)
                powers |= (uint64_t)own[17 * i] << 8 * i;
            _mm256_storeu_ps(scales + b, avx2_powers(_mm_cvtsi64_si128((long long)powers)));
        }
    else if (format == PLAIN)
        for (float own = scale_of(row, 0); b < blocks; b++)
            scales[b] = own, more[b] = 0;
    else if ((format == INT4_WORDS || format == PACKED4) && DYNAMIC_GROUP % row->group == 0 && row->kind != SCALES_E8M0)
        for (int64_t alike = row->group / DYNAMIC_BLOCK, end = blocks % alike == 0 && eights > 0 ? blocks : eights; b < end; b += 8) {
            b = b < blocks - 8 ? b : blocks - 8;
            int64_t group = (k / DYNAMIC_BLOCK + b) / alike;
            __m256 own = avx2_shared(row->scales + group * scale_bytes[row->kind], row->kind, alike), less = _mm256_setzero_ps();
            if (format == PACKED4)
                less = avx2_shared(row->zeros + 2 * group, SCALES_F16, alike);
            else if (row->zeros != NULL) {
                __m256i zero = (__m256i)avx2_shared(row->zeros + 4 * group, SCALES_F32, alike);
                zero = _mm256_and_si256(_mm256_srli_epi32(zero, row->zero_shift), _mm256_set1_epi32(15));
                less = _mm256_xor_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(zero), own), _mm256_set1_ps(-0.0f));
            }
            _mm256_storeu_ps(scales + b, own);
            _mm256_storeu_ps(more + b, less);
        }
    else if (format == INT4_WORDS || format == PACKED4)
        for (int64_t group = k / job->group, end = (group + 1) * job->group - k; b < blocks; group++, end += job->group) {
            float own, less = 0;
            dynamic_scale_of_group(job, row, group, &own, &less);
            for (; b < blocks && b * DYNAMIC_BLOCK < end; b++)
                scales[b] = own, more[b] = less;
        }
    for (; b < blocks; b++)
        dynamic_scale(job, row, k + b * DYNAMIC_BLOCK, scales + b, more + b);
    for (; b % 4; b++)
        scales[b] = more[b] = 0;
}

/* The codes of a group, as those of inputs lie. */
typedef void (*Avx2Lay)(const uint8_t *at, int part, __m256i codes[4]);
#define OF(FORMAT, format, B, P, K, S)                                                                                 \
    static void avx2_lay_##format(const uint8_t *at, int part, __m256i codes[4])                                       \
    {                                                                                                                  \
        codes_avx2_##format(at, part, codes);                                                                          \
    }
DYNAMIC_HERE(OF) DYNAMIC_LAID(OF) DYNAMIC_TURNS(OF)
#undef OF

/* As `dynamic_round`. */
static void dynamic_round_avx2(const void *from, int half, int64_t inputs, int bias, DynamicInputs *to)
{
    for (int64_t k = 0; k < dynamic_groups(inputs) * DYNAMIC_GROUP; k += DYNAMIC_BLOCK) {
        __m256i v[4], size = _mm256_set1_epi32(0x7fffffff), peaks = _mm256_setzero_si256();
        UNROLLED for (int i = 0; i < 4; i++) {
            int64_t at = k + 8 * i;
            v[i] = k >= inputs ? peaks
                   : half      ? (__m256i)avx2_load_b((const uint16_t *)from + at)
                               : (__m256i)_mm256_loadu_ps((const float *)from + at);
        }
        UNROLLED for (int i = 0; i < 4; i++)
            peaks = _mm256_max_epi32(peaks, _mm256_and_si256(v[i], size));
        __m128i most = _mm_max_epi32(_mm256_castsi256_si128(peaks), _mm256_extracti128_si256(peaks, 1));
        most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4e));
        int32_t peak = _mm_cvtsi128_si32(_mm_max_epi32(most, _mm_shuffle_epi32(most, 0xb1)));
        int none = peak >= 0x7f800000;
        __m256 inverse = _mm256_set1_ps(peak < 0x10000000 || none ? 0 : 127 / float_of((uint32_t)peak));
        UNROLLED for (int i = 0; i < 4; i++)
            v[i] = none ? _mm256_setzero_si256() : _mm256_cvtps_epi32(_mm256_mul_ps((__m256)v[i], inverse));
        __m256i codes = _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
        codes = _mm256_permutevar8x32_epi32(codes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        DynamicInputs *own = to + k / DYNAMIC_GROUP;
        int at = (int)(k % DYNAMIC_GROUP / DYNAMIC_BLOCK);
        _mm_storeu_si128((__m128i *)(own->codes[0] + 16 * at), _mm256_castsi256_si128(codes));
        _mm_storeu_si128((__m128i *)(own->codes[1] + 16 * at), _mm256_extracti128_si256(codes, 1));
        int64_t sums[4]; /* of eight, and 128 each */
        codes = _mm256_sad_epu8(_mm256_xor_si256(codes, _mm256_set1_epi8((char)128)), _mm256_setzero_si256());
        _mm256_storeu_si256((__m256i *)sums, codes);
        dynamic_finish(own, at, peak, (int)(sums[0] + sums[1]) - 2048, (int)(sums[2] + sums[3]) - 2048, bias);
    }
}

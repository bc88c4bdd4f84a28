/* Weights in block formats as codes of 8 bits (dynamic.h) with AVX2: of four blocks in registers, the first 16 of blocks 0
 * and 1, of 2 and 3, then the others of these. Where all 8 bits count, codes have a sign and no bias. */

/* Group `part` of those that lie `at` an address. */
#define UNPACK(format)                                                                                                 \
    static inline ALWAYS void codes_avx2_##format(const uint8_t *at, int part UNUSED, __m256i w[4])
#define PAIRS_OF_BLOCKS UNROLLED for (int p = 0; p < 2; p++)
/* The same codes, each block in a register; and either of the other. */
#define BLOCKS(format)                                                                                                 \
    static inline ALWAYS void blocks_avx2_##format(const uint8_t *at, int part UNUSED, __m256i blocks[4])
#define PARTED(format)                                                                                                 \
    UNPACK(format)                                                                                                     \
    {                                                                                                                  \
        __m256i blocks[4];                                                                                             \
        blocks_avx2_##format(at, part, blocks);                                                                        \
        PAIRS_OF_BLOCKS avx2_parted(blocks[2 * p], blocks[2 * p + 1], &w[p], &w[2 + p]);                               \
    }
#define JOINED(format)                                                                                                 \
    BLOCKS(format)                                                                                                     \
    {                                                                                                                  \
        __m256i w[4];                                                                                                  \
        codes_avx2_##format(at, part, w);                                                                              \
        PAIRS_OF_BLOCKS avx2_parted(w[p], w[2 + p], &blocks[2 * p], &blocks[2 * p + 1]);                               \
    }

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

static inline ALWAYS __m256i avx2_twice(const void *from)
{
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)from));
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

BLOCKS(q8_0)
{
    UNROLLED for (int i = 0; i < 4; i++)
        blocks[i] = avx2_32(at + 2 + 34 * i);
}

BLOCKS(plain)
{
    UNROLLED for (int i = 0; i < 4; i++)
        blocks[i] = avx2_32(at + 32 * i);
}
PARTED(plain)
#define blocks_avx2_s8 blocks_avx2_plain

BLOCKS(u8)
{
    UNROLLED for (int i = 0; i < 4; i++)
        blocks[i] = _mm256_xor_si256(avx2_32(at + 32 * i), _mm256_set1_epi8((char)0x80));
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
HALVED(sixteens, 16, 0, 0)
JOINED(q4_0) JOINED(q4_1) JOINED(q5_0) JOINED(q5_1)
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

JOINED(int4)

/* The same codes, and what they mean by a table. */
#define MEANT(format, codes, table)                                                                                    \
    UNPACK(format)                                                                                                     \
    {                                                                                                                  \
        __m256i values = avx2_twice(table);                                                                            \
        codes_avx2_##codes;                                                                                            \
        UNROLLED for (int i = 0; i < 4; i++)                                                                           \
            w[i] = _mm256_shuffle_epi8(values, w[i]);                                                                  \
    }                                                                                                                  \
    JOINED(format)
static const int8_t avx2_fp4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}; /* twice the numbers */
MEANT(mxfp4_block, fp4_block(at, part, w), dynamic_fp4)
MEANT(mxfp4, int4(at, part, w), dynamic_fp4)
MEANT(nvfp4, int4(at, part, w), avx2_fp4)
MEANT(iq4_nl, q4_0(at, part, w), not_linear)
MEANT(iq4_xs, sixteens(at + 8 + 64 * part, part, w), not_linear)
#undef MEANT

/* Of 128 bytes, of which one half each is a code. */
#define ONE_HALF(format, HALF)                                                                                         \
    BLOCKS(format)                                                                                                     \
    {                                                                                                                  \
        UNROLLED for (int i = 0; i < 4; i++)                                                                           \
            blocks[i] = HALF(avx2_32(at + 32 * i));                                                                    \
    }                                                                                                                  \
    PARTED(format)
ONE_HALF(packed4, avx2_low)
ONE_HALF(packed4_high, avx2_high)
#undef ONE_HALF

BLOCKS(q4_k)
{
    PAIRS_OF_BLOCKS {
        __m256i v = avx2_32(at + 16 + 64 * part + 32 * p);
        blocks[2 * p] = avx2_low(v), blocks[2 * p + 1] = avx2_high(v);
    }
}
PARTED(q4_k)

static inline ALWAYS __m256i avx2_with_bit(__m256i v, __m256i bits, int bit)
{
    __m256i set = _mm256_set1_epi8((char)(1 << bit));
    set = _mm256_cmpeq_epi8(_mm256_and_si256(bits, set), set);
    return _mm256_or_si256(v, _mm256_and_si256(set, _mm256_set1_epi8(16)));
}

BLOCKS(q5_k)
{
    __m256i fifth = avx2_32(at + 16);
    PAIRS_OF_BLOCKS {
        __m256i v = avx2_32(at + 48 + 64 * part + 32 * p);
        int bit = 4 * part + 2 * p;
        blocks[2 * p] = avx2_with_bit(avx2_low(v), fifth, bit), blocks[2 * p + 1] = avx2_with_bit(avx2_high(v), fifth, bit + 1);
    }
}
PARTED(q5_k)

BLOCKS(q6_k)
{
    __m256i a = avx2_32(at + 64 * part), b = avx2_32(at + 64 * part + 32), high = avx2_32(at + 128 + 32 * part);
    __m256i two = _mm256_set1_epi8(48), more[4] = {_mm256_slli_epi16(high, 4), _mm256_slli_epi16(high, 2), high,
                                                   _mm256_srli_epi16(high, 2)};
    UNROLLED for (int i = 0; i < 4; i++)
        blocks[i] = _mm256_or_si256(i < 2 ? avx2_low(i ? b : a) : avx2_high(i > 2 ? b : a), _mm256_and_si256(more[i], two));
}
PARTED(q6_k)
#undef JOINED
#undef PARTED
#undef BLOCKS
#undef UNPACK

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

/* Scales of four blocks of four outputs: lane 4 q + i has that of block q of output i. They are found in the blocks. Of
 * formats whose scales lie elsewhere they are laid out so before a piece of rows is read.
 */

/* Group `at` of each output: scales, and least values or second scales, of as many groups as lie together. */
#define FOUND(format)                                                                                                  \
    static inline ALWAYS void dynamic_found_##format(const uint8_t *const at[4], __m512 *own, __m512 *more)

/* Half words of groups of so many bytes, one for each of 16 lanes, and the next one in the lanes above. Lanes that were
 * not found yet still say where they are. `near`: all are in the first 64 bytes. */
static inline ALWAYS __m512i dynamic_halves_of(const uint8_t *const at[4], __m256i words, int bytes, int near)
{
    __m512i index = _mm512_inserti64x4(_mm512_castsi256_si512(words), _mm256_add_epi16(words, _mm256_set1_epi16(1)), 1);
    __mmask32 beyond = _mm512_cmpge_epi16_mask(index, _mm512_set1_epi16(32));
    int second = bytes < 128 ? bytes - 64 : 64;
    __m512i found = _mm512_mask_add_epi16(index, beyond, index, _mm512_set1_epi16((short)(32 - second / 2)));
    UNROLLED for (int i = 0; i < 4; i++) {
        __m512i low = _mm512_loadu_si512(at[i]);
        if (near)
            found = _mm512_mask_permutexvar_epi16(found, 0x11111111u << i, index, low);
        else
            found = _mm512_mask2_permutex2var_epi16(low, found, 0x11111111u << i, _mm512_loadu_si512(at[i] + second));
    }
    return found;
}

/* Of blocks that begin with a half word, or with two. */
static inline ALWAYS void dynamic_halves_at(const uint8_t *const at[4], int apart, int two, __m512 *own, __m512 *more)
{
    __m256i block = _mm256_setr_epi16(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    __m512i found = dynamic_halves_of(at, _mm256_mullo_epi16(block, _mm256_set1_epi16((short)(apart / 2))), 4 * apart,
                                       3 * apart + 4 <= 64);
    *own = _mm512_cvtph_ps(_mm512_castsi512_si256(found));
    *more = two ? _mm512_cvtph_ps(_mm512_extracti64x4_epi64(found, 1)) : *own;
}

#define BEGINS(format, apart, two)                                                                                     \
    FOUND(format)                                                                                                      \
    {                                                                                                                  \
        dynamic_halves_at(at, apart, two, own, more);                                                                  \
    }
BEGINS(q8_0, 34, 0) BEGINS(q4_0, 18, 0) BEGINS(q4_1, 20, 1) BEGINS(q5_0, 22, 0) BEGINS(q5_1, 24, 1)
#undef BEGINS

/* A byte of every block, whose exponent is that of twice the scale. */
FOUND(mxfp4_block)
{
    __m256i words = _mm256_setr_epi16(0, 0, 0, 0, 8, 8, 8, 8, 17, 17, 17, 17, 25, 25, 25, 25);
    __m512i shifts = _mm512_setr_epi32(0, 0, 0, 0, 8, 8, 8, 8, 0, 0, 0, 0, 8, 8, 8, 8);
    __m512i found = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(dynamic_halves_of(at, words, 68, 1)));
    found = _mm512_and_si512(_mm512_srlv_epi32(found, shifts), _mm512_set1_epi32(255));
    *own = *more = _mm512_mul_ps(coded_powers(found), _mm512_set1_ps(0.5f));
}

/* Byte `order[4 q + j]` of output i to byte j of lane 4 q + i. */
static inline ALWAYS __m512i dynamic_dealt(__m512i v, __m512i order)
{
    __m512i lanes = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(lanes, _mm512_shuffle_epi8(v, order));
}

/* Half word `at` of 16 bytes of each output i, in lanes 4 q + i. */
static inline ALWAYS __m512 dynamic_half_at(__m512i v, int at)
{
    __m512i index = _mm512_setr_epi64(0x0018001000080000, 0x0018001000080000, 0x0018001000080000, 0x0018001000080000, 0, 0, 0, 0);
    index = _mm512_add_epi16(index, _mm512_set1_epi16((short)at));
    return _mm512_cvtph_ps(_mm512_castsi512_si256(_mm512_permutexvar_epi16(index, v)));
}

static inline ALWAYS __m512 dynamic_byte(__m512i v, int byte)
{
    return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(v, 8 * byte), _mm512_set1_epi32(255)));
}

/* As `scales_k`, with the least values negated. */
FOUND(q4_k)
{
    __m512i v = coded_quarters(at, 0);
    __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512i bits = dynamic_dealt(coded_numbers_k(v), _mm512_broadcast_i32x4(order));
    __m512 scale = dynamic_half_at(v, 0), least = dynamic_half_at(v, 1);
    least = (__m512)_mm512_xor_si512((__m512i)least, _mm512_set1_epi32((int)0x80000000));
    own[0] = _mm512_mul_ps(scale, dynamic_byte(bits, 0));
    own[1] = _mm512_mul_ps(scale, dynamic_byte(bits, 1));
    more[0] = _mm512_mul_ps(least, dynamic_byte(bits, 2));
    more[1] = _mm512_mul_ps(least, dynamic_byte(bits, 3));
}

#define dynamic_found_q5_k dynamic_found_q4_k

static inline ALWAYS __m512 dynamic_signed_byte(__m512i v, int byte)
{
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(v, 24 - 8 * byte), 24));
}

FOUND(q6_k)
{
    __m512 scale = dynamic_half_at(coded_quarters(at, 194), 7);
    __m128i order = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    __m512i bits = dynamic_dealt(coded_quarters(at, 192), _mm512_broadcast_i32x4(order));
    own[0] = _mm512_mul_ps(scale, dynamic_signed_byte(bits, 0));
    more[0] = _mm512_mul_ps(scale, dynamic_signed_byte(bits, 1));
    own[1] = _mm512_mul_ps(scale, dynamic_signed_byte(bits, 2));
    more[1] = _mm512_mul_ps(scale, dynamic_signed_byte(bits, 3));
}
#undef FOUND

/* For each group of a piece of four outputs: scales, and least values. */
typedef struct {
    float scales[DYNAMIC_GROUPS][16], more[DYNAMIC_GROUPS][16];
} DynamicLaid;

/* How a byte shuffle brings numbers of a scale's type, each of `each` blocks, to the four lanes of four blocks. */
static __m512i dynamic_places(int kind, int64_t each)
{
    int size = scale_bytes[kind], first = kind == SCALES_BF16 ? 2 : 0; /* bfloat16 is the upper half of a float */
    uint8_t places[16];
    for (int i = 0; i < 16; i++) {
        int byte = i % 4 - first, number = each >= 4 ? 0 : i / 4 / (int)each;
        places[i] = (uint8_t)(byte < 0 || byte >= size ? 128 : number * size + byte);
    }
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)places));
}

static inline ALWAYS __m512i dynamic_placed(__m512i v, __m512i places, int first)
{
    return dynamic_dealt(v, _mm512_add_epi8(places, _mm512_set1_epi8((char)first))); /* what is to be zero stays so */
}

static inline ALWAYS __m512 dynamic_numbers(int kind, __m512i v)
{
    if (kind == SCALES_F16)
        return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(v));
    return kind == SCALES_E8M0 ? coded_powers(v) : (__m512)v;
}

/* How scales of a matrix lie: one for `each` blocks, `all` of an output, of which `step` are those of a group. */
typedef struct {
    __m512i places, word_places;
    int64_t each, all, step;
    int size;
} DynamicLaying;

/* 0: scales may begin within a group of blocks. */
static int dynamic_laying(const Linear *job, DynamicLaying *how)
{
    int64_t all = (job->inputs + job->group - 1) / job->group, each = all == 1 ? INT64_MAX / 2 : job->group / DYNAMIC_BLOCK;
    how->all = all;
    how->each = each;
    how->step = each >= 4 ? 1 : 4 / each;
    how->size = scale_bytes[job->kind];
    how->places = dynamic_places(job->kind, each);
    how->word_places = dynamic_places(SCALES_F32, each);
    return all == 1 || each < 3 || each % 4 == 0;
}

/* Lanes that are there of 16, of which `left` are there from the first on. */
static inline ALWAYS __mmask16 dynamic_there(int64_t left)
{
    return left >= 16 ? 0xffff : left > 0 ? (__mmask16)((1 << left) - 1) : 0;
}

/* Of a piece of `row` and the next three from input k on. They are read 16 bytes of each output at a time, or four
 * numbers where zero points are words. */
static inline ALWAYS void dynamic_lay_of(int kind, int size, int packed, int words, const DynamicLaying *how,
                                         const Coded *row, int64_t k, int64_t blocks, DynamicLaid *to)
{
    int numbers = words ? 4 : 16 / size;
    int64_t at = k / DYNAMIC_BLOCK / how->each, inside = k / DYNAMIC_BLOCK % how->each, apart = how->all * size, g = 0;
    __m512i shifts = _mm512_add_epi32(_mm512_broadcast_i32x4(_mm_setr_epi32(0, 4, 8, 12)), _mm512_set1_epi32(row->zero_shift));
    for (; 4 * g < blocks; at += numbers) {
        __mmask16 there = dynamic_there((how->all - at) * size);
        __m512i raw = dynamic_brought(row->scales + at * size, apart, there), zeros = raw;
        if (packed)
            zeros = dynamic_brought(row->zeros + at * size, apart, there);
        if (words)
            zeros = dynamic_brought(row->zeros + 4 * at, 0, dynamic_there((how->all - at) * 4));
        for (int64_t i = 0; i < numbers && 4 * g < blocks; i += how->step) {
            __m512 own = dynamic_numbers(kind, dynamic_placed(raw, how->places, (int)i * size)), more = own;
            if (kind == SCALES_E8M0)
                own = _mm512_mul_ps(own, _mm512_set1_ps(0.5f));
            if (packed)
                more = dynamic_numbers(kind, dynamic_placed(zeros, how->places, (int)i * size));
            if (words) {
                __m512i v = _mm512_srlv_epi32(dynamic_placed(zeros, how->word_places, 4 * (int)i), shifts);
                more = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_and_si512(v, _mm512_set1_epi32(15))), own);
                more = (__m512)_mm512_xor_si512((__m512i)more, _mm512_set1_epi32((int)0x80000000));
            }
            do {
                _mm512_storeu_ps(to->scales[g], own);
                if (packed || words)
                    _mm512_storeu_ps(to->more[g], more);
                g++;
                inside += 4;
            } while (inside < how->each && 4 * g < blocks);
            inside = 0;
        }
    }
    if (blocks % 4 != 0) {
        __mmask16 blocks_there = (__mmask16)((1 << 4 * (blocks % 4)) - 1);
        _mm512_storeu_ps(to->scales[g - 1], _mm512_maskz_loadu_ps(blocks_there, to->scales[g - 1]));
        _mm512_storeu_ps(to->more[g - 1], _mm512_maskz_loadu_ps(blocks_there, to->more[g - 1]));
    }
}

static void dynamic_lay_four(const Linear *job, const DynamicLaying *how, const Coded *row, int64_t k, int64_t blocks,
                             DynamicLaid *to)
{
    int words = job->format == INT4_WORDS && job->zeros != NULL;
    if (job->kind == SCALES_E8M0)
        dynamic_lay_of(SCALES_E8M0, 1, 0, 0, how, row, k, blocks, to);
    else if (job->kind == SCALES_F32)
        dynamic_lay_of(SCALES_F32, 4, 0, words, how, row, k, blocks, to);
    else if (job->format == PACKED4)
        dynamic_lay_of(SCALES_F16, 2, 1, 0, how, row, k, blocks, to);
    else
        dynamic_lay_of(job->kind, 2, 0, words, how, row, k, blocks, to);
}

/* The same of scales that lie side by side in rows. */
static void dynamic_deal(float (*scales)[DYNAMIC_SCALES], float (*more)[DYNAMIC_SCALES], int64_t blocks, DynamicLaid *to)
{
    for (int64_t b = 0; b < blocks; b++)
        for (int i = 0; i < 4; i++) {
            to->scales[b / 4][b % 4 * 4 + i] = scales[i][b];
            to->more[b / 4][b % 4 * 4 + i] = more[i][b];
        }
}

/* Scales of a piece of an output's row as floats, those of a block side by side as coded.h takes them.
 *
 * That it is done for a whole piece before its codes are looked at leaves a load of each scale for the loop over codes.
 */
/* 16 bytes of each of four rows. */
static inline ALWAYS __m512i coded_quarters(const uint8_t *const at[4], int first)
{
    __m512i v = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(at[0] + first)));
    v = _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)(at[1] + first)), 1);
    v = _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)(at[2] + first)), 2);
    return _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)(at[3] + first)), 3);
}

/* Of 16 bytes that blocks begin with, one in each quarter: the eight numbers that scales are multiplied with, and then those of
 * the least values. See `scales_k`. */
static inline ALWAYS __m512i coded_numbers_k(__m512i v)
{
    __m512i low = _mm512_srlv_epi32(_mm512_shuffle_epi32(v, 0xed), _mm512_set4_epi32(4, 0, 0, 0));
    __m512i high = _mm512_srli_epi32(_mm512_shuffle_epi32(v, 0x84), 2);
    low = _mm512_and_si512(low, _mm512_set4_epi32(0x0f0f0f0f, 0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f));
    high = _mm512_and_si512(high, _mm512_set4_epi32(0x30303030, 0, 0x30303030, 0));
    return _mm512_or_si512(low, high);
}

/* As `scales_k` of one block or of four, whose scales are CODED_SCALES apart, with the least values negated. */
static inline ALWAYS void coded_scales_k(const uint8_t *const *blocks, int rows, float *to)
{
    __m512i v = rows == 4 ? coded_quarters(blocks, 0) : _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)blocks[0]));
    __m512i numbers = coded_numbers_k(v), quarters[4] = {numbers};
    __m512i first = _mm512_setr_epi64(0x0009000800010000, 0x0019001800110010, 0, 0, 0, 0, 0, 0); /* words of quarters */
    __m512 halves = _mm512_cvtph_ps(_mm512_castsi512_si256(_mm512_permutexvar_epi16(first, v)));
    halves = (__m512)_mm512_xor_si512((__m512i)halves, _mm512_set1_epi64((long long)0x8000000000000000));
    if (rows == 4) {
        quarters[1] = _mm512_castsi128_si512(_mm512_extracti32x4_epi32(numbers, 1));
        quarters[2] = _mm512_castsi128_si512(_mm512_extracti32x4_epi32(numbers, 2));
        quarters[3] = _mm512_castsi128_si512(_mm512_extracti32x4_epi32(numbers, 3));
    }
    __m512i lanes = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    UNROLLED for (int i = 0; i < rows; i++) {
        __m512 factors = _mm512_permutexvar_ps(_mm512_add_epi32(lanes, _mm512_set1_epi32(2 * i)), halves);
        __m512 own = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm512_castsi512_si128(quarters[i])));
        _mm512_storeu_ps(to + i * CODED_SCALES, _mm512_mul_ps(factors, own));
    }
}

static inline ALWAYS void coded_scales_q4_k(const uint8_t *block, float *to)
{
    coded_scales_k(&block, 1, to);
}

#define coded_scales_q5_k coded_scales_q4_k
#define coded_scales_q2_k scales_q2_k
#define coded_scales_q1_0 scales_q1_0

typedef uint32_t CodedLanes __attribute__((vector_size(64)));
#define WORD(OFFSET) (CodedLanes) _mm512_set1_epi32((int)read_word(block + OFFSET))
#define WORDS(OFFSET, COUNT, INDEX)                                                                                    \
    (CodedLanes) _mm512_permutexvar_epi32((__m512i)(INDEX), _mm512_maskz_loadu_epi32((1 << COUNT) - 1, block + OFFSET))
#define OF(format, SCALE, ADDED, NUMBER)                                                                               \
    static inline ALWAYS void coded_scales_##format(const uint8_t *block, float *to)                                   \
    {                                                                                                                  \
        const CodedLanes j = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};                                   \
        __m512 own = _mm512_add_ps(_mm512_cvtepi32_ps((__m512i)(NUMBER)), _mm512_set1_ps(ADDED));                      \
        _mm512_storeu_ps(to, _mm512_mul_ps(_mm512_set1_ps(SCALE), own));                                               \
    }
SUPER_SCALES(OF)
#undef OF
#undef WORD
#undef WORDS

/* Halves that blocks of so many bytes begin with, one each or `two`. */
static void coded_scales_halves(const uint8_t *at, int bytes, int two, int64_t count, float *to)
{
    have_scales();
    for (; count > 0; count--, at += bytes) {
        *to++ = *coded_float(at);
        if (two)
            *to++ = *coded_float(at + 2);
    }
}

/* As `power_of`. */
static inline ALWAYS __m512 coded_powers(__m512i e)
{
    __mmask16 ends = _mm512_cmpeq_epi32_mask(_mm512_and_si512(_mm512_add_epi32(e, _mm512_set1_epi32(1)),
                                                              _mm512_set1_epi32(0xfe)), _mm512_setzero_si512());
    e = _mm512_slli_epi32(e, 23);
    return (__m512)_mm512_mask_or_epi32(e, ends, e, _mm512_set1_epi32(1 << 22));
}

/* Numbers of a scale's type that lie side by side, up to 16 at once, and zeros. */
static inline ALWAYS __m512 coded_numbers(int kind, __mmask16 there, const uint8_t *from, int64_t at)
{
    if (kind == SCALES_F32)
        return (__m512)_mm512_maskz_loadu_epi32(there, from + 4 * at);
    if (kind == SCALES_E8M0)
        return coded_powers(_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(there, from + at)));
    __m256i raw = _mm256_maskz_loadu_epi16(there, from + 2 * at);
    return kind == SCALES_F16 ? _mm512_cvtph_ps(raw) : (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16);
}

/* 16 scales, each with what is told of its group besides. */
static inline ALWAYS void coded_pairs(__m512 scales, __m512 others, float *to)
{
    __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    _mm512_storeu_ps(to, _mm512_permutex2var_ps(scales, low, others));
    _mm512_storeu_ps(to + 16, _mm512_permutex2var_ps(scales, high, others));
}

/* Scales of `count` groups that lie side by side, 16 at a time; up to 15 more are written. */
static void coded_scales_beside(const Linear *job, const Coded *row, int64_t first, int64_t count, float *to)
{
    for (int64_t i = 0; i < count; i += 16) {
        __mmask16 there = count - i < 16 ? (__mmask16)((1 << (count - i)) - 1) : 0xffff;
        __m512 scales = coded_numbers(row->kind, there, row->scales, first + i), others = _mm512_set1_ps(8);
        if (job->format != INT4_WORDS && job->format != PACKED4) {
            _mm512_storeu_ps(to + i, scales);
            continue;
        }
        if (job->format == PACKED4)
            others = coded_numbers(SCALES_F16, there, row->zeros, first + i);
        else if (row->zeros != NULL) {
            __m512i words = _mm512_maskz_loadu_epi32(there, row->zeros + 4 * (first + i));
            words = _mm512_srl_epi32(words, _mm_cvtsi32_si128(row->zero_shift));
            others = _mm512_cvtepi32_ps(_mm512_and_si512(words, _mm512_set1_epi32(15)));
        }
        coded_pairs(scales, others, to + 2 * i);
    }
}

/* Scales of NVFP4, of each 16 inputs. A float of 8 bits (e4m3) is one of 16 times 2^8. */
static void coded_scales_e4m3(const Coded *row, int64_t first, int64_t count, float *to)
{
    __m512 whole = _mm512_set1_ps(row->whole);
    for (int64_t i = 0; i < count; i += 16) {
        __mmask16 there = count - i < 16 ? (__mmask16)((1 << (count - i)) - 1) : 0xffff;
        __m256i v = _mm256_cvtepi8_epi16(_mm_maskz_loadu_epi8(there, row->scales + first + i));
        __m256i most = _mm256_set1_epi16(0x3f80), none;
        v = _mm256_slli_epi16(v, 7);
        none = _mm256_cmpeq_epi16(_mm256_and_si256(v, most), most);
        v = _mm256_and_si256(v, _mm256_set1_epi16((short)0xbf80));
        v = _mm256_or_si256(v, _mm256_and_si256(none, _mm256_set1_epi16(0x7e00)));
        __m512 own = _mm512_mul_ps(_mm512_cvtph_ps(v), _mm512_set1_ps(256));
        _mm512_storeu_ps(to + i, row->kind == SCALES_DIVIDED ? _mm512_div_ps(own, whole) : _mm512_mul_ps(own, whole));
    }
}

/* Of formats whose scales lie apart: one, or two, for every `step` inputs from input k on. */
static void coded_scales_apart(const Linear *job, const Coded *row, int64_t k, int64_t depth, int64_t step, float *to)
{
    int64_t count = (depth + step - 1) / step;
    int words = job->format == INT4_WORDS, packed = job->format == PACKED4;
    if (job->format != FP8 && row->scale_step == 1 && step == row->group && k % step == 0) {
        coded_scales_beside(job, row, k / step, count, to);
        return;
    }
    float scale = 0, zero = 0;
    for (int64_t i = 0, end = 0; i < count; i++) {
        int64_t at = k + i * step;
        if (at >= end) {
            int64_t group = at / row->group;
            end = (group + 1) * row->group;
            scale = packed ? read_half(row->scales + 2 * group) : scale_of(row, group);
            zero = packed ? read_half(row->zeros + 2 * group) : words ? zero_of(row, group) : 0;
        }
        if (words || packed) {
            to[2 * i] = scale;
            to[2 * i + 1] = zero;
        } else
            to[i] = job->format == FP8 ? scale * 256 : scale;
    }
}

/* Of one row, whose blocks from input k on begin `at` an address; one or more for every `step` inputs. */
static void coded_scales(const Linear *job, const Coded *row, const uint8_t *at, int64_t k, int64_t depth, int64_t step,
                         float *to)
{
#define HALVES_OF(FORMAT, format, TWO)                                                                                 \
    case FORMAT:                                                                                                       \
        coded_scales_halves(at, coded_bytes_##format, TWO, depth / 32, to);                                            \
        return;
#define SCALES_OF(FORMAT, format, BYTES, COUNT, ...)                                                                   \
    case FORMAT:                                                                                                       \
        for (int64_t i = 0; i < depth / 256; i++)                                                                      \
            coded_scales_##format(at + i * BYTES, to + COUNT * i);                                                     \
        return;
    switch (job->format) {
        HALVES_OF(Q8_0, q8_0, 0)
        HALVES_OF(Q4_0, q4_0, 0)
        HALVES_OF(Q4_1, q4_1, 1)
        HALVES_OF(Q5_0, q5_0, 0)
        HALVES_OF(Q5_1, q5_1, 1)
        SUPER_BLOCKS(SCALES_OF)
    case MXFP4_BLOCK:
        for (int64_t i = 0; i < depth / 32; i++)
            to[i] = power_of(at[i * coded_bytes_mxfp4_block]);
        return;
    case NVFP4:
        coded_scales_e4m3(row, k / 16, depth / 16, to);
        return;
    default:
        coded_scales_apart(job, row, k, depth, step, to);
    }
}
#undef HALVES_OF
#undef SCALES_OF

/* Of four rows, CODED_SCALES apart, where that takes less time than one by one; else 0. */
static int coded_scales_of_four(const Linear *job, const uint8_t *const at[4], int64_t depth, float *to)
{
    if (job->format != Q4_K && job->format != Q5_K)
        return 0;
    for (int64_t b = 0; b < depth / 256; b++) {
        int64_t first = b * block_bytes_of[job->format];
        const uint8_t *blocks[4] = {at[0] + first, at[1] + first, at[2] + first, at[3] + first};
        coded_scales_k(blocks, 4, to + 16 * b);
    }
    return 1;
}

/* Of GPTQ and AWQ: scales and zero points of a group of inputs and outputs [n, n + wide). */
static void coded_across(const Linear *job, int64_t n, int64_t wide, int64_t group, float *scales, float *zeros)
{
    int awq = job->format == AWQ, size = job->kind == SCALES_F32 ? 4 : 2;
    const uint8_t *from = (const uint8_t *)job->scales + (group * job->outputs + n) * size;
    const uint8_t *words = (const uint8_t *)job->zeros + (group * job->outputs + n) / 2;
    uint32_t more = awq ? 0 : GPTQ_MORE;
    __m256i nibbles = awq ? _mm256_setr_epi32(0, 16, 4, 20, 8, 24, 12, 28) : _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    for (int64_t i = 0; i < wide; i += 8) {
        __m256i v = _mm256_srlv_epi32(_mm256_set1_epi32((int)(read_word(words + i / 2) + more)), nibbles);
        v = _mm256_and_si256(v, _mm256_set1_epi32(15));
        __m512i raw = _mm512_castsi256_si512(_mm256_maskz_loadu_epi8(0xffffffff >> (32 - 8 * size), from + i * size));
        __m512 own = (__m512)raw;
        if (job->kind == SCALES_F16)
            own = _mm512_cvtph_ps(_mm512_castsi512_si256(raw));
        else if (job->kind == SCALES_BF16)
            own = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(raw)), 16);
        _mm256_storeu_ps(scales + i, _mm512_castps512_ps256(own));
        _mm256_storeu_ps(zeros + i, _mm256_cvtepi32_ps(v));
    }
}

/* Products of a few rows with weights in blocks of 32 with AVX2: GGUF's that begin with their scale, and codes of 4 bits whose
 * scales, of whole blocks, lie elsewhere.
 *
 * Where numbers depend on a code and a scale of 16 or 8 bits alone, those of a scale are rounded to bfloat16 once in a process, and
 * looked up: of SmolLM2 in Q4_0, 757 scales are those of 99 % of all blocks, and their numbers take 24 KB; of random weights there
 * are 8,000, which do not fit beside x, so that numbers are fetched some blocks before. Those of other groups are rounded once for
 * all of a group. The two bytes of a number are looked up by themselves, and joined:
 *
 *     codes      0  8  1  9  2 10  3 11   16 24 ...    4 12  5 13  6 14  7 15   20 28 ...    bytes of two halves of a register
 *     bfloat16   0  8  1  9  2 10  3 11                4 12  5 13  6 14  7 15                and others of 16 and so on
 *     floats     0     1     2     3                   4     5     6     7                   shifted up; cut off below: 8 to 15
 */

#define AVX2_GROUPED(OF) OF(MXFP4, mxfp4, 16) OF(INT4_WORDS, int4, 16)
#define AVX2_HAS_GROUPS(FORMAT) ((FORMAT) == MXFP4 || (FORMAT) == INT4_WORDS)

/* The low and high bytes of bfloat16 of 16 codes. */
typedef struct {
    uint8_t low[16], high[16];
} Avx2Kept;

static struct {
    Avx2Kept q4_0[KEPT_HALVES], iq4_nl[KEPT_HALVES], q5_0[2 * KEPT_HALVES], fp4[256];
} avx2_kept;

static void avx2_keep(Avx2Kept *to, int format, int first, int scale)
{
    for (int code = 0; code < 16; code++) {
        uint16_t number = kept_number(format, first + code, scale);
        to->low[code] = (uint8_t)number;
        to->high[code] = (uint8_t)(number >> 8);
    }
}

KEEP(avx2_q4_0, KEPT_HALVES, avx2_keep(avx2_kept.q4_0 + i, Q4_0, 0, i))
KEEP(avx2_iq4_nl, KEPT_HALVES, avx2_keep(avx2_kept.iq4_nl + i, IQ4_NL, 0, i))
KEEP(avx2_q5_0, 2 * KEPT_HALVES, avx2_keep(avx2_kept.q5_0 + i, Q5_0, i % 2 * 16, i / 2))
KEEP(avx2_mxfp4, 256, avx2_keep(avx2_kept.fp4 + i, MXFP4, 0, i))
#define have_avx2_q8_0 NULL
#define have_avx2_q4_1 NULL
#define have_avx2_q5_1 NULL
#define have_avx2_mxfp4_block have_avx2_mxfp4
#define have_avx2_int4 NULL

/* The codes 0 to 31 themselves. */
static const Avx2Kept avx2_codes[2] = {
    {{0, 0x80, 0, 0x40, 0x80, 0xa0, 0xc0, 0xe0, 0, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70},
     {0, 0x3f, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41}},
    {{0x80, 0x88, 0x90, 0x98, 0xa0, 0xa8, 0xb0, 0xb8, 0xc0, 0xc8, 0xd0, 0xd8, 0xe0, 0xe8, 0xf0, 0xf8},
     {0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41}},
};

/* Constants, in registers: otherwise they are made again for each block. */
typedef struct {
    __m256i order, shifts, four_bits, upper;
} Avx2Held;

/* Of blocks whose bytes have a code of the first 16 and one of the others; or neighbours, which `take_turns`. */
static inline ALWAYS Avx2Held avx2_hold(int take_turns)
{
    __m256i order = _mm256_setr_epi64x(0x0b030a0209010800, 0x0b030a0209010800, 0x0f070e060d050c04, 0x0f070e060d050c04);
    if (take_turns)
        order = _mm256_setr_epi64x(0x0501050104000400, 0x0d090d090c080c08, 0x0703070306020602, 0x0f0b0f0b0e0a0e0a);
    Avx2Held held = {order, _mm256_setr_epi64x(0, 4, 0, 4), _mm256_set1_epi8(15), _mm256_set1_epi32((int)0xffff0000)};
    SETTLE(held.order);
    SETTLE(held.shifts);
    SETTLE(held.four_bits);
    SETTLE(held.upper);
    return held;
}

static inline ALWAYS void avx2_joined(const Avx2Held *held, __m256i low, __m256i high, __m256 to[4])
{
    UNROLLED for (int i = 0; i < 2; i++) {
        __m256i halves = i ? _mm256_unpackhi_epi8(low, high) : _mm256_unpacklo_epi8(low, high);
        to[2 * i] = (__m256)_mm256_slli_epi32(halves, 16);
        to[2 * i + 1] = (__m256)_mm256_and_si256(halves, held->upper);
    }
}

static inline ALWAYS void avx2_looked_up(const Avx2Held *held, const Avx2Kept *kept, const uint8_t *codes, __m256 to[4])
{
    __m256i v = _mm256_srlv_epi64(_mm256_shuffle_epi8(avx2_twice(codes), held->order), held->shifts);
    v = _mm256_and_si256(v, held->four_bits);
    avx2_joined(held, _mm256_shuffle_epi8(avx2_twice(kept->low), v), _mm256_shuffle_epi8(avx2_twice(kept->high), v), to);
}

/* Where codes take turns. */
static inline ALWAYS void avx2_looked_up_in_turn(const Avx2Held *held, const Avx2Kept *kept, const uint8_t *codes, __m256 to[4])
{
    __m256i v = _mm256_shuffle_epi8(avx2_twice(codes), held->order);
    v = _mm256_and_si256(_mm256_blend_epi16(v, _mm256_srli_epi16(v, 4), 0xaa), held->four_bits);
    avx2_joined(held, _mm256_shuffle_epi8(avx2_twice(kept->low), v), _mm256_shuffle_epi8(avx2_twice(kept->high), v), to);
}

/* Also by a fifth bit. */
static inline ALWAYS void avx2_looked_up_5(const Avx2Held *held, const Avx2Kept kept[2], const uint8_t *fifths, const uint8_t *codes,
                                           __m256 to[4])
{
    __m256i v = _mm256_srlv_epi64(_mm256_shuffle_epi8(avx2_twice(codes), held->order), held->shifts);
    __m256i which = _mm256_setr_epi64x(0x0100010001000100, 0x0302030203020302, 0x0100010001000100, 0x0302030203020302);
    __m256i bit = _mm256_setr_epi64x(0x0808040402020101, 0x0808040402020101, (long long)0x8080404020201010, (long long)0x8080404020201010);
    __m256i set = _mm256_shuffle_epi8(_mm256_set1_epi32((int)read_word(fifths)), which), low, high;
    set = _mm256_cmpeq_epi8(_mm256_and_si256(set, bit), bit);
    v = _mm256_and_si256(v, held->four_bits);
    low = _mm256_blendv_epi8(_mm256_shuffle_epi8(avx2_twice(kept[0].low), v), _mm256_shuffle_epi8(avx2_twice(kept[1].low), v), set);
    high = _mm256_blendv_epi8(_mm256_shuffle_epi8(avx2_twice(kept[0].high), v), _mm256_shuffle_epi8(avx2_twice(kept[1].high), v), set);
    avx2_joined(held, low, high, to);
}

/* Codes as numbers with a least value, rounded (then of halves that are numbers) or `exact`. */
static inline ALWAYS void avx2_with_least(int exact, const uint8_t *at, __m256 to[4])
{
    __m256 scale = _mm256_broadcast_ss(kept.floats + read_short(at));
    __m256 least = _mm256_broadcast_ss(kept.floats + read_short(at + 2)), larger = _mm256_set1_ps(AVX2_LARGER);
    if (!exact)
        scale = _mm256_mul_ps(scale, larger), least = _mm256_mul_ps(least, larger);
    UNROLLED for (int i = 0; i < 4; i++) {
        to[i] = _mm256_fmadd_ps(to[i], scale, least);
        to[i] = exact ? to[i] : avx2_nearest_half(to[i]);
    }
}

enum { AVX2_ONE = 0x3c00, AVX2_ONE_POWER = 127 };

/* The numbers of the half that a block begins with, of the formats that have them. */
static inline ALWAYS const Avx2Kept *avx2_kept_of(int format, int exact, const uint8_t *at)
{
    int half = exact ? AVX2_ONE : read_short(at);
    return format == Q4_0     ? avx2_kept.q4_0 + half
           : format == IQ4_NL ? avx2_kept.iq4_nl + half
           : format == Q5_0   ? avx2_kept.q5_0 + 2 * half
                              : NULL;
}

/* The numbers of a block, of a group whose numbers are `own`; if they are to be `exact`, those of a scale of one, which all are, or
 * with least values what they are. */
#define OF(format)                                                                                                     \
    static inline ALWAYS void avx2_of_block_##format(const Avx2Held *held UNUSED, int exact UNUSED, const Avx2Kept *own UNUSED, \
                                                     const uint8_t *at, __m256 to[4])
OF(q8_0)
{
    __m256 scale = _mm256_broadcast_ss(kept.floats + read_short(at)), large = _mm256_mul_ps(scale, _mm256_set1_ps(AVX2_LARGER));
    UNROLLED for (int i = 0; i < 4; i++) {
        __m256 code = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(at + 2 + 8 * i))));
        __m256 larger = _mm256_mul_ps(code, large); /* rounded as by avx2_nearest_half: all products are exact */
        to[i] = exact ? code : _mm256_sub_ps(larger, _mm256_fnmadd_ps(code, scale, larger));
    }
}

OF(q4_0)
{
    avx2_looked_up(held, avx2_kept_of(Q4_0, exact, at), at + 2, to);
}

OF(iq4_nl)
{
    avx2_looked_up(held, avx2_kept_of(IQ4_NL, exact, at), at + 2, to);
}

OF(mxfp4_block)
{
    avx2_looked_up(held, avx2_kept.fp4 + (exact ? AVX2_ONE_POWER : at[0]), at + 1, to);
}

OF(mxfp4)
{
    avx2_looked_up_in_turn(held, own, at, to);
}

OF(int4)
{
    avx2_looked_up_in_turn(held, own, at, to);
}

OF(q5_0)
{
    avx2_looked_up_5(held, avx2_kept_of(Q5_0, exact, at), at + 2, at + 6, to);
}

OF(q4_1)
{
    avx2_looked_up(held, avx2_codes, at + 4, to);
    avx2_with_least(exact, at, to);
}

OF(q5_1)
{
    avx2_looked_up_5(held, avx2_codes, at + 4, at + 8, to);
    avx2_with_least(exact, at, to);
}
#undef OF

/* Not 0: a scale of a block is no number. Of looked up ones all are right. */
#define ODD(FORMAT, at)                                                                                                \
    ((FORMAT) == Q8_0                          ? avx2_is_odd(at)                                                       \
     : (FORMAT) == Q4_1 || (FORMAT) == Q5_1 ? avx2_is_odd(at) | avx2_is_odd((at) + 2)                                  \
                                               : 0)

/* Floats that are numbers of bfloat16, of four codes after the other. */
static inline ALWAYS __m256i avx2_pack_halves(__m256 first, __m256 second)
{
    return _mm256_packus_epi32(_mm256_srli_epi32((__m256i)first, 16), _mm256_srli_epi32((__m256i)second, 16));
}

/* Of a scale that is 2^16 times as large: codes less a zero point, which is a whole number. */
static inline ALWAYS void avx2_numbers_of_group(float scale, const float *zero, Avx2Kept *to)
{
    __m256 less = _mm256_cvtepi32_ps((__m256i)_mm256_broadcast_ss(zero)), own = _mm256_set1_ps(scale);
    __m256 first = _mm256_mul_ps(_mm256_sub_ps(_mm256_setr_ps(0, 1, 2, 3, 8, 9, 10, 11), less), own);
    __m256 second = _mm256_mul_ps(_mm256_sub_ps(_mm256_setr_ps(4, 5, 6, 7, 12, 13, 14, 15), less), own);
    __m256i halves = avx2_pack_halves(avx2_nearest_half(first), avx2_nearest_half(second));
    __m256i bytes = _mm256_packus_epi16(_mm256_and_si256(halves, _mm256_set1_epi16(255)), _mm256_srli_epi16(halves, 8));
    _mm256_storeu_si256((__m256i *)to, _mm256_permute4x64_epi64(bytes, 0xd8));
}

/* Numbers of groups of the first output, of the next `apart` ones behind, and so on, and their scales, if numbers are exact and so
 * those of a scale of one; or scales that are powers of two. Of the first of some blocks that of group `first` / 2^shift. */
typedef struct {
    const Avx2Kept *numbers;
    const float *scales;
    const uint8_t *powers;
    int64_t apart, first;
    int shift;
} Avx2Groups;

static inline ALWAYS const Avx2Kept *avx2_group(int format, int exact, Avx2Groups groups, int output)
{
    int64_t at = output * groups.apart + (groups.first >> groups.shift);
    if (format == MXFP4)
        return avx2_kept.fp4 + (exact ? AVX2_ONE_POWER : groups.powers[at]);
    return format == INT4_WORDS ? groups.numbers + at : NULL;
}

/* What exact numbers of a block are multiplied with. */
static inline ALWAYS __m256 avx2_scale(int format, Avx2Groups groups, int output, const uint8_t *block)
{
    int64_t at = output * groups.apart + (groups.first >> groups.shift);
    return _mm256_broadcast_ss(format == MXFP4         ? kept.powers + groups.powers[at]
                               : format == INT4_WORDS  ? groups.scales + at
                               : format == MXFP4_BLOCK ? kept.powers + block[0]
                                                       : kept.floats + read_short(block));
}

/* R rows of x times `blocks` blocks of C outputs, as columns of sums; see linear.h for the order of sums. What is computed
 * next lies `ahead` of them. Not 0: a scale was no number. */
enum { AVX2_SOON = 3 };
#define PRODUCTS(FORMAT, format, BYTES, EXACT, R, C)                                                                   \
    static unsigned avx2_blocks_##format##EXACT##R##C(const float *from, int64_t x_row, const uint8_t *at, int64_t w_row, int64_t blocks, \
                                               int64_t ahead, Avx2Groups groups UNUSED, __m256 *kept)                  \
    {                                                                                                                  \
        unsigned odd = 0;                                                                                              \
        Avx2Held held = avx2_hold(AVX2_HAS_GROUPS(FORMAT));                                                            \
        __m256 sums[C][R];                                                                                             \
        const float *x[R];                                                                                             \
        UNROLLED for (int r = 0; r < R; r++)                                                                           \
            x[r] = from + r * x_row;                                                                                   \
        UNROLLED for (int i = 0; i < R * C; i++)                                                                       \
            sums[i / R][i % R] = _mm256_setzero_ps();                                                                  \
        for (; blocks > 0; blocks--, at += BYTES, groups.first++) {                                                    \
            int64_t soon = blocks > AVX2_SOON ? AVX2_SOON * BYTES : 0;                                                 \
            UNROLLED for (int c = 0; c < C; c++) {                                                                     \
                const uint8_t *own = at + c * w_row;                                                                   \
                __m256 numbers[4];                                                                                     \
                avx2_of_block_##format(&held, EXACT, avx2_group(FORMAT, EXACT, groups, c), own, numbers);              \
                FETCH_FAR(own + ahead);                                                                                \
                const Avx2Kept *next = EXACT ? NULL : avx2_kept_of(FORMAT, 0, own + soon);                             \
                if (next != NULL) /* with thousands of scales they are not in the nearest cache */                     \
                    __builtin_prefetch(next);                                                                          \
                odd |= EXACT ? 0 : ODD(FORMAT, own);                                                                   \
                UNROLLED for (int i = 0; EXACT && FORMAT != Q4_1 && FORMAT != Q5_1 && i < 4; i++)                      \
                    numbers[i] = _mm256_mul_ps(numbers[i], avx2_scale(FORMAT, groups, c, own));                        \
                UNROLLED for (int r = 0; r < R; r++) {                                                                 \
                    FROM_HERE(x[r]);                                                                                   \
                    UNROLLED for (int i = 0; i < 4; i++)                                                               \
                        sums[c][r] = _mm256_fmadd_ps(_mm256_loadu_ps(x[r] + 8 * i), numbers[i], sums[c][r]);           \
                }                                                                                                      \
            }                                                                                                          \
            UNROLLED for (int r = 0; r < R; r++)                                                                       \
                x[r] += DYNAMIC_BLOCK;                                                                                 \
        }                                                                                                              \
        UNROLLED for (int i = 0; i < R * C; i++)                                                                       \
            kept[i] = sums[i / R][i % R];                                                                              \
        return odd;                                                                                                    \
    }
/* The numbers of blocks. */
#define FILL(FORMAT, format, BYTES)                                                                                    \
    static unsigned avx2_fill_blocks_##format(const uint8_t *at, int64_t blocks, float *to)                            \
    {                                                                                                                  \
        unsigned odd = 0;                                                                                              \
        Avx2Held held = avx2_hold(0);                                                                                  \
        for (; blocks > 0; blocks--, at += BYTES, to += DYNAMIC_BLOCK) {                                               \
            __m256 numbers[4];                                                                                         \
            avx2_of_block_##format(&held, 0, NULL, at, numbers);                                                       \
            odd |= ODD(FORMAT, at);                                                                                    \
            UNROLLED for (int i = 0; i < 4; i++)                                                                       \
                _mm256_storeu_ps(to + 8 * i, numbers[i]);                                                              \
        }                                                                                                              \
        return odd;                                                                                                    \
    }
BLOCKS_OF_32(FILL)
#undef FILL

#define SIZES(...)                                                                                                     \
    PRODUCTS(__VA_ARGS__, 1, 1) PRODUCTS(__VA_ARGS__, 2, 1) PRODUCTS(__VA_ARGS__, 3, 1) PRODUCTS(__VA_ARGS__, 4, 1)    \
    PRODUCTS(__VA_ARGS__, 1, 6) PRODUCTS(__VA_ARGS__, 2, 2) PRODUCTS(__VA_ARGS__, 3, 2) PRODUCTS(__VA_ARGS__, 4, 2)
#define OF(...) SIZES(__VA_ARGS__, 0) SIZES(__VA_ARGS__, 1)
BLOCKS_OF_32(OF) AVX2_GROUPED(OF)
#undef OF
#undef SIZES
#undef PRODUCTS
#undef ODD

/* Of rounded and of exact numbers, of 1 to 4 rows and one output; and of more outputs, of one row six, and of others two. */
typedef unsigned (*Avx2Blocks)(const float *, int64_t, const uint8_t *, int64_t, int64_t, int64_t, Avx2Groups, __m256 *);
typedef struct {
    int bytes;
    void (*have)(void);
    unsigned (*fill)(const uint8_t *, int64_t, float *); /* NULL: numbers_avx2.h has it */
    Avx2Blocks one[2][4], wide[2][4];
} Avx2BlockWays;
#define ONE(format, EXACT)                                                                                             \
    {avx2_blocks_##format##EXACT##11, avx2_blocks_##format##EXACT##21, avx2_blocks_##format##EXACT##31,                \
     avx2_blocks_##format##EXACT##41}
#define WIDE(format, EXACT)                                                                                            \
    {avx2_blocks_##format##EXACT##16, avx2_blocks_##format##EXACT##22, avx2_blocks_##format##EXACT##32,                \
     avx2_blocks_##format##EXACT##42}
#define WAYS(FORMAT, format, BYTES, FILL)                                                                              \
    [FORMAT] = {BYTES, have_avx2_##format, FILL, {ONE(format, 0), ONE(format, 1)}, {WIDE(format, 0), WIDE(format, 1)}},
#define SCALED(FORMAT, format, BYTES) WAYS(FORMAT, format, BYTES, avx2_fill_blocks_##format)
#define GROUPED(FORMAT, format, BYTES) WAYS(FORMAT, format, BYTES, NULL)
static const Avx2BlockWays avx2_block_ways[FORMATS_END] = {BLOCKS_OF_32(SCALED) AVX2_GROUPED(GROUPED)};
#undef GROUPED
#undef SCALED
#undef WAYS
#undef WIDE
#undef ONE
#undef have_avx2_q8_0
#undef have_avx2_q4_1
#undef have_avx2_q5_1
#undef have_avx2_mxfp4_block
#undef have_avx2_int4

/* How many blocks have a scale in common, as a power of two; -1: of these it is not known. */
static int avx2_shared_by(const Linear *job)
{
    int64_t shift = 0, e8m0 = job->kind == SCALES_E8M0;
    if (job->inputs % DYNAMIC_BLOCK != 0 || e8m0 != (job->format == MXFP4) || (job->format == MXFP4 && job->group != DYNAMIC_BLOCK))
        return -1;
    while (shift < 5 && DYNAMIC_BLOCK << shift < job->group)
        shift++;
    return job->group < job->inputs && job->group % (DYNAMIC_BLOCK << shift) != 0 ? -1 : (int)shift;
}

/* How so many rows are multiplied with a format so, if they are, and its numbers made. Tables are there then. Rounded numbers of
 * small groups are not looked up often enough by one row, and those of many rows are made once, elsewhere. */
static const Avx2BlockWays *avx2_blocks_of(const Linear *job, int64_t rows)
{
    const Avx2BlockWays *ways = avx2_block_ways + job->format;
    int exact = job->form == FLOAT32, words = job->format == INT4_WORDS;
    if (job->format >= FORMATS_END || ways->bytes == 0 || (words && rows > 4))
        return NULL;
    if (AVX2_HAS_GROUPS(job->format) && avx2_shared_by(job) < (words && rows == 1 && !exact))
        return NULL;
    have_scales();
    if (ways->have != NULL)
        ways->have();
    return ways;
}

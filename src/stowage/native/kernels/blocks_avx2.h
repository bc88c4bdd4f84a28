/* Products of up to eight rows with weights in blocks of 32 that begin with their scale, a half, with AVX2.
 *
 * Where numbers depend on a code and that half alone, those of a half are rounded to bfloat16 once in a process, and looked up: of
 * SmolLM2 in Q4_0, 757 halves are those of 99 % of all blocks, and their numbers take 24 KB. The two bytes of a number are looked up
 * by themselves, and joined:
 *
 *     codes      0  8  1  9  2 10  3 11   16 24 ...    4 12  5 13  6 14  7 15   20 28 ...    bytes of two halves of a register
 *     bfloat16   0  8  1  9  2 10  3 11                4 12  5 13  6 14  7 15                and others of 16 and so on
 *     floats     0     1     2     3                   4     5     6     7                   shifted up; cut off below: 8 to 15
 */

/* Of `AVX2_LARGER` see tables_avx2.h. */
#define AVX2_BLOCKS(OF)                                                                                                \
    OF(Q8_0, q8_0, 34) OF(Q4_0, q4_0, 18) OF(IQ4_NL, iq4_nl, 18) OF(Q4_1, q4_1, 20) OF(Q5_0, q5_0, 22) OF(Q5_1, q5_1, 24)

/* The low and high bytes of bfloat16 of 16 codes. */
typedef struct {
    uint8_t low[16], high[16];
} Avx2Kept;

enum { AVX2_HALVES = 1 << 16 };
static struct {
    float floats[AVX2_HALVES];
    Avx2Kept q4_0[AVX2_HALVES], iq4_nl[AVX2_HALVES], q5_0[2 * AVX2_HALVES];
} avx2_kept;

static void avx2_keep(Avx2Kept *to, const int8_t *values, float scale)
{
    for (int code = 0; code < 16; code++) {
        uint16_t number = float_half((float)values[code] * scale);
        to->low[code] = (uint8_t)number;
        to->high[code] = (uint8_t)(number >> 8);
    }
}

/* What formats need of this, made when it is first asked for. */
#define KEEP(name, HALF)                                                                                               \
    static void avx2_keep_##name(void)                                                                                 \
    {                                                                                                                  \
        int8_t codes[32];                                                                                              \
        for (int i = 0; i < 32; i++)                                                                                   \
            codes[i] = (int8_t)(i - 16);                                                                               \
        for (int half = 0; half < AVX2_HALVES; half++) {                                                               \
            float scale = half_float((uint16_t)half);                                                                  \
            HALF;                                                                                                      \
        }                                                                                                              \
        (void)codes;                                                                                                   \
    }                                                                                                                  \
    static void avx2_have_##name(void)                                                                                 \
    {                                                                                                                  \
        static pthread_once_t once = PTHREAD_ONCE_INIT;                                                                \
        pthread_once(&once, avx2_keep_##name);                                                                         \
    }
KEEP(q4_0, avx2_keep(avx2_kept.q4_0 + half, codes + 8, scale))
KEEP(iq4_nl, avx2_keep(avx2_kept.iq4_nl + half, not_linear, scale))
KEEP(q5_0, avx2_keep(avx2_kept.q5_0 + 2 * half, codes, scale); avx2_keep(avx2_kept.q5_0 + 2 * half + 1, codes + 16, scale))
KEEP(q8_0, avx2_kept.floats[half] = scale)
#undef KEEP
#define avx2_have_q4_1 avx2_have_q8_0
#define avx2_have_q5_1 avx2_have_q8_0

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

static inline ALWAYS Avx2Held avx2_hold(void)
{
    long long first = 0x0b030a0209010800, second = 0x0f070e060d050c04;
    Avx2Held held = {_mm256_setr_epi64x(first, first, second, second), _mm256_setr_epi64x(0, 4, 0, 4), _mm256_set1_epi8(15),
                     _mm256_set1_epi32((int)0xffff0000)};
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

/* Also by a fifth bit. */
static inline ALWAYS void avx2_looked_up_5(const Avx2Held *held, const Avx2Kept kept[2], const uint8_t *fifths, const uint8_t *codes,
                                           __m256 to[4])
{
    __m256i v = _mm256_srlv_epi64(_mm256_shuffle_epi8(avx2_twice(codes), held->order), held->shifts);
    __m256i which = _mm256_set1_epi64x(0x0100010001000100), bit = _mm256_setr_epi64x(0, 0, 0, 0);
    which = _mm256_add_epi8(which, _mm256_setr_epi64x(0, 0x0202020202020202, 0, 0x0202020202020202));
    bit = _mm256_setr_epi64x(0x0808040402020101, 0x0808040402020101, (long long)0x8080404020201010, (long long)0x8080404020201010);
    __m256i set = _mm256_shuffle_epi8(_mm256_set1_epi32((int)read_word(fifths)), which), low, high;
    set = _mm256_cmpeq_epi8(_mm256_and_si256(set, bit), bit);
    v = _mm256_and_si256(v, held->four_bits);
    low = _mm256_blendv_epi8(_mm256_shuffle_epi8(avx2_twice(kept[0].low), v), _mm256_shuffle_epi8(avx2_twice(kept[1].low), v), set);
    high = _mm256_blendv_epi8(_mm256_shuffle_epi8(avx2_twice(kept[0].high), v), _mm256_shuffle_epi8(avx2_twice(kept[1].high), v), set);
    avx2_joined(held, low, high, to);
}

/* Codes as numbers with a least value: of halves that are numbers. */
static inline ALWAYS void avx2_with_least(const uint8_t *at, __m256 to[4])
{
    __m256 larger = _mm256_set1_ps(AVX2_LARGER), scale = _mm256_mul_ps(_mm256_broadcast_ss(avx2_kept.floats + read_short(at)), larger);
    __m256 least = _mm256_mul_ps(_mm256_broadcast_ss(avx2_kept.floats + read_short(at + 2)), larger);
    UNROLLED for (int i = 0; i < 4; i++)
        to[i] = avx2_nearest_half(_mm256_fmadd_ps(to[i], scale, least));
}

/* The numbers of a block. */
#define OF(format) static inline ALWAYS void avx2_of_block_##format(const Avx2Held *held UNUSED, const uint8_t *at, __m256 to[4])
OF(q8_0)
{
    __m256 scale = _mm256_broadcast_ss(avx2_kept.floats + read_short(at)), large = _mm256_mul_ps(scale, _mm256_set1_ps(AVX2_LARGER));
    UNROLLED for (int i = 0; i < 4; i++) {
        __m256 code = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(at + 2 + 8 * i))));
        __m256 larger = _mm256_mul_ps(code, large); /* rounded as by avx2_nearest_half: all products are exact */
        to[i] = _mm256_sub_ps(larger, _mm256_fnmadd_ps(code, scale, larger));
    }
}

OF(q4_0)
{
    avx2_looked_up(held, avx2_kept.q4_0 + read_short(at), at + 2, to);
}

OF(iq4_nl)
{
    avx2_looked_up(held, avx2_kept.iq4_nl + read_short(at), at + 2, to);
}

OF(q5_0)
{
    avx2_looked_up_5(held, avx2_kept.q5_0 + 2 * read_short(at), at + 2, at + 6, to);
}

OF(q4_1)
{
    avx2_looked_up(held, avx2_codes, at + 4, to);
    avx2_with_least(at, to);
}

OF(q5_1)
{
    avx2_looked_up_5(held, avx2_codes, at + 4, at + 8, to);
    avx2_with_least(at, to);
}
#undef OF

/* Not 0: one of these halves is infinite or none. */
static inline ALWAYS unsigned avx2_is_odd(const uint8_t *half)
{
    return ((read_short(half) & 0x7fffu) + 0x400) & 0x8000;
}

/* Not 0: a scale of a block is no number. Of looked up ones all are right. */
#define ODD(FORMAT, at)                                                                                                \
    ((FORMAT) == Q8_0                          ? avx2_is_odd(at)                                                       \
     : (FORMAT) == Q4_1 || (FORMAT) == Q5_1 ? avx2_is_odd(at) | avx2_is_odd((at) + 2)                                  \
                                               : 0)

/* R rows of x times `blocks` blocks of C outputs, whose columns of sums go on; see linear.h for the order of sums. Not 0: a scale
 * was no number. */
#define PRODUCTS(FORMAT, format, BYTES, R, C)                                                                          \
    static unsigned avx2_blocks_##format##R##C(const float *from, int64_t x_row, const uint8_t *at, int64_t w_row, int64_t blocks, \
                                               __m256 *kept)                                                           \
    {                                                                                                                  \
        unsigned odd = 0;                                                                                              \
        Avx2Held held = avx2_hold();                                                                                   \
        __m256 sums[C][R];                                                                                             \
        const float *x[R];                                                                                             \
        UNROLLED for (int r = 0; r < R; r++)                                                                           \
            x[r] = from + r * x_row;                                                                                   \
        UNROLLED for (int i = 0; i < R * C; i++)                                                                       \
            sums[i / R][i % R] = kept[i];                                                                              \
        for (; blocks > 0; blocks--, at += BYTES) {                                                                    \
            UNROLLED for (int c = 0; c < C; c++) {                                                                     \
                const uint8_t *own = at + c * w_row;                                                                   \
                __m256 numbers[4];                                                                                     \
                avx2_of_block_##format(&held, own, numbers);                                                           \
                FETCH_FAR(own + AVX2_AHEAD);                                                                           \
                odd |= ODD(FORMAT, own);                                                                               \
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
        Avx2Held held = avx2_hold();                                                                                   \
        for (; blocks > 0; blocks--, at += BYTES, to += DYNAMIC_BLOCK) {                                               \
            __m256 numbers[4];                                                                                         \
            avx2_of_block_##format(&held, at, numbers);                                                                \
            odd |= ODD(FORMAT, at);                                                                                    \
            UNROLLED for (int i = 0; i < 4; i++)                                                                       \
                _mm256_storeu_ps(to + 8 * i, numbers[i]);                                                              \
        }                                                                                                              \
        return odd;                                                                                                    \
    }
AVX2_BLOCKS(FILL)
#undef FILL

#define ONE(...) PRODUCTS(__VA_ARGS__, 1)
#define OF(...)                                                                                                        \
    ONE(__VA_ARGS__, 1) ONE(__VA_ARGS__, 2) ONE(__VA_ARGS__, 3) ONE(__VA_ARGS__, 4) ONE(__VA_ARGS__, 5)                \
    ONE(__VA_ARGS__, 6) ONE(__VA_ARGS__, 7) ONE(__VA_ARGS__, 8) PRODUCTS(__VA_ARGS__, 1, 4) PRODUCTS(__VA_ARGS__, 2, 2)    \
    PRODUCTS(__VA_ARGS__, 3, 2) PRODUCTS(__VA_ARGS__, 4, 2)
AVX2_BLOCKS(OF)
#undef OF
#undef ONE
#undef PRODUCTS
#undef ODD

/* Of one output and 1 to 8 rows; and of more outputs, of one row four, and of 2 to 4 rows two. */
typedef unsigned (*Avx2Blocks)(const float *, int64_t, const uint8_t *, int64_t, int64_t, __m256 *);
typedef struct {
    int bytes;
    void (*have)(void);
    unsigned (*fill)(const uint8_t *, int64_t, float *);
    Avx2Blocks one[FEW], wide[4];
} Avx2BlockWays;
#define OF(FORMAT, format, BYTES)                                                                                      \
    [FORMAT] = {BYTES, avx2_have_##format, avx2_fill_blocks_##format,                                                                      \
                {avx2_blocks_##format##11, avx2_blocks_##format##21, avx2_blocks_##format##31, avx2_blocks_##format##41, \
                 avx2_blocks_##format##51, avx2_blocks_##format##61, avx2_blocks_##format##71, avx2_blocks_##format##81}, \
                {avx2_blocks_##format##14, avx2_blocks_##format##22, avx2_blocks_##format##32, avx2_blocks_##format##42}},
static const Avx2BlockWays avx2_block_ways[FORMATS_END] = {AVX2_BLOCKS(OF)};
#undef OF
#undef avx2_have_q4_1
#undef avx2_have_q5_1

/* How numbers of a format are made so, if they are, and rounded. Tables are there then. */
static const Avx2BlockWays *avx2_blocks_of(const Linear *job)
{
    const Avx2BlockWays *ways = avx2_block_ways + job->format;
    if (job->form == FLOAT32 || job->format >= FORMATS_END || ways->bytes == 0)
        return NULL;
    ways->have();
    return ways;
}

/* Of more than four rows so many inputs are multiplied with so many outputs, while they are in the nearest cache. */
enum { AVX2_NEAR = 256, AVX2_STRIP = 12 };

/* All rows, from `row` on, times outputs [n, n + count). 0: a scale is no number. */
static int avx2_blocks(const Linear *job, const Avx2BlockWays *ways, int64_t row, int64_t rows, int64_t n, int64_t count)
{
    int64_t wide = rows == 1 ? 4 : rows <= 4 ? 2 : 1, most = rows > 4 ? AVX2_NEAR : DEPTH;
    Avx2Blocks of_wide = rows <= 4 ? ways->wide[rows - 1] : ways->one[rows - 1];
    __m256 sums[AVX2_STRIP * FEW];
    unsigned odd = 0;
    for (int64_t k = 0, step; k < job->inputs; k += step) {
        step = job->inputs - k < most ? job->inputs - k : most;
        if (k % DEPTH == 0)
            for (int64_t i = 0; i < count * rows; i++)
                sums[i] = _mm256_setzero_ps();
        for (int64_t c = 0, some; c < count; c += some) {
            some = count - c < wide ? 1 : wide;
            odd |= (some == wide ? of_wide : ways->one[rows - 1])(
                (const float *)job->x + row * job->x_row + k, job->x_row,
                (const uint8_t *)job->w + (n + c) * job->w_row + k / DYNAMIC_BLOCK * ways->bytes, job->w_row, step / DYNAMIC_BLOCK,
                sums + c * rows);
        }
        if ((k + step) % DEPTH != 0 && k + step < job->inputs)
            continue;
        for (int64_t i = 0; i < count * rows; i++) {
            float *to = (float *)job->y + (row + i % rows) * job->outputs + n + i / rows, sum = avx2_total(sums[i]);
            *to = k < DEPTH ? sum : *to + sum;
        }
    }
    return !odd;
}

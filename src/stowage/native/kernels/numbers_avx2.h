/* Weights in block formats as floats with AVX2: to the bit what formats.h makes of them.
 *
 * The codes of a piece of an output are laid out first, a byte each, whatever the format: what is done for each number then is
 * the same for all formats, and it is that which takes the time.
 */

enum { AVX2_ROWS = 4 }; /* of so many at most are products made while weights are in registers */

/* Weights are computed 2^16 times as large: that minus the weight is rounded to where the eighth bit of the weight is, and what
 * is left is the weight, rounded there to the nearest of bfloat16, halfway cases to even. (Not plus, as by Veltkamp, because
 * that may have another exponent.) Of weights below 2^96. */
#define AVX2_LARGER 65536.0f
static inline ALWAYS __m256 avx2_less_itself(__m256 larger)
{
    return _mm256_fnmadd_ps(larger, _mm256_set1_ps(1 / AVX2_LARGER), larger);
}

static inline ALWAYS __m256 avx2_nearest_half(__m256 larger)
{
    return _mm256_sub_ps(larger, avx2_less_itself(larger));
}

#define SIGNED_CODES(FORMAT, format, B, P, K, S)                                                                       \
    static inline ALWAYS void blocks_avx2_##format(const uint8_t *at, int part, __m256i blocks[4])                     \
    {                                                                                                                  \
        UNROLLED for (int b = 0; b < 4; b++)                                                                           \
            codes_##format(at, 4 * part + b, (int8_t *)(blocks + b));                                                  \
    }
AVX2_SIGNED(SIGNED_CODES)
#undef SIGNED_CODES

/* Codes less their bias, or less a zero point each block; those with a least value as they are. */
#define LESS(FORMAT, KIND, SIZE) ((KIND) == LEAST || (SIZE) == LARGE || (SIZE) == SIGNED ? 0 : dynamic_formats[FORMAT].bias)
#define CODES(FORMAT, format, BYTES, PER, KIND, SIZE)                                                                  \
    static void avx2_codes_##format(const uint8_t *at, int64_t groups, const float *zeros UNUSED, int8_t *to)          \
    {                                                                                                                  \
        for (int64_t g = 0; g < groups; g++, to += DYNAMIC_GROUP) {                                                    \
            const uint8_t *from = at + g / PER * BYTES;                                                                \
            __m256i blocks[4], less = _mm256_set1_epi8((char)LESS(FORMAT, KIND, SIZE));                                \
            blocks_avx2_##format(from, PER == 1 ? 0 : (int)(g % PER), blocks);                                         \
            UNROLLED for (int i = 0; i < BYTES / PER; i += 64)                                                         \
                FETCH_FAR(from + AVX2_AHEAD + i);                                                                      \
            UNROLLED for (int b = 0; b < 4; b++) {                                                                     \
                if (FORMAT == INT4_WORDS)                                                                              \
                    less = _mm256_set1_epi8(*(const char *)(zeros + 4 * g + b));                                       \
                _mm256_storeu_si256((__m256i *)to + b, _mm256_sub_epi8(blocks[b], less));                              \
            }                                                                                                          \
        }                                                                                                              \
    }
#define AVX2_NUMBERS(OF)                                                                                               \
    DYNAMIC_BEGINS(OF) DYNAMIC_SUPER(OF) DYNAMIC_PACKED4(OF) DYNAMIC_IN_TURN(OF) DYNAMIC_FP4_BLOCK(OF) AVX2_NUMBERS_ALONE(OF) AVX2_SIGNED(OF)
AVX2_NUMBERS(CODES)
#undef CODES
#undef LESS

typedef void (*Avx2Codes)(const uint8_t *, int64_t, const float *, int8_t *);
#define OF(FORMAT, format, B, P, K, S) [FORMAT] = avx2_codes_##format,
static const Avx2Codes avx2_codes_of[FORMATS_END + 1] = {AVX2_NUMBERS(OF)};
#undef OF
#undef AVX2_NUMBERS

/* Two outputs' codes of at most DEPTH inputs, or floats of 16 bits, their scales as of `avx2_ready`, and what lies beside these. */
enum { AVX2_BLOCKS = DEPTH / DYNAMIC_BLOCK };
typedef struct {
    union {
        int8_t codes[DEPTH + DYNAMIC_GROUP];
        uint16_t halves[DEPTH];
    } of[2];
    float scales[2][AVX2_BLOCKS], more[2][AVX2_BLOCKS];
} Avx2Laid;

/* What is done for eight numbers, from number k on: they are read, times their scale, and rounded in two steps. Of no kind: floats
 * of 16 bits. */
static inline ALWAYS __m256 avx2_read(DynamicKind kind, const Avx2Laid *w, int output, int64_t k)
{
    if (kind == DYNAMIC_NONE)
        return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(w->of[output].halves + k)));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(w->of[output].codes + k))));
}

static inline ALWAYS __m256 avx2_scaled(DynamicKind kind, __m256 codes, int i, const float *scale, const float *more)
{
    __m256 own = _mm256_broadcast_ss(kind == TWO && i > 1 ? more : scale);
    return kind == LEAST ? _mm256_fmadd_ps(codes, own, _mm256_broadcast_ss(more)) : _mm256_mul_ps(codes, own);
}

/* Columns of sums of R rows of x times both outputs; see linear.h for the order of sums. Eight numbers are read while others of a
 * block, which come before, are in the next steps: a processor does not look as far ahead as all of these take. */
#define DOTS(KIND, ROUNDED, R)                                                                                         \
    static void avx2_dots_##KIND##ROUNDED##R(const float *from, int64_t x_row, const Avx2Laid *w, int64_t blocks, __m256 *kept) \
    {                                                                                                                  \
        __m256 sums[R][2], numbers[8], less[8];                                                                      \
        const float *scales = w->scales[0], *x[R];                                                                     \
        UNROLLED for (int r = 0; r < R; r++)                                                                           \
            x[r] = from + r * x_row;                                                                                   \
        UNROLLED for (int i = 0; i < 2 * R; i++)                                                                       \
            sums[i / 2][i % 2] = _mm256_setzero_ps();                                                                  \
        for (int64_t k = 0; k < blocks * DYNAMIC_BLOCK; k += DYNAMIC_BLOCK, scales++) {                                \
            UNROLLED for (int step = 0; step < 12; step++) {                                                           \
                int read = step, scale = step - 1, round = step - 2, ready = step - 3, done = step - 4;                \
                const float *own = scales + scale / 4 * AVX2_BLOCKS;                                                   \
                if (read < 8)                                                                                          \
                    numbers[read] = avx2_read(KIND, w, read / 4, k + read % 4 * 8);                                    \
                if (scale >= 0 && scale < 8)                                                                           \
                    numbers[scale] = avx2_scaled(KIND, numbers[scale], scale % 4, own, own + 2 * AVX2_BLOCKS);         \
                if (ROUNDED && round >= 0 && round < 8)                                                                \
                    less[round] = avx2_less_itself(numbers[round]);                                                    \
                if (ROUNDED && ready >= 0 && ready < 8)                                                                \
                    numbers[ready] = _mm256_sub_ps(numbers[ready], less[ready]);                                       \
                UNROLLED for (int r = 0; r < R && done >= 0; r++)                                                      \
                    sums[r][done / 4] = _mm256_fmadd_ps(_mm256_loadu_ps(x[r] + done % 4 * 8), numbers[done], sums[r][done / 4]); \
            }                                                                                                          \
            UNROLLED for (int r = 0; r < R; r++)                                                                       \
                x[r] += DYNAMIC_BLOCK;                                                                                 \
        }                                                                                                              \
        UNROLLED for (int i = 0; i < 2 * R; i++)                                                                       \
            kept[i] = sums[i / 2][i % 2];                                                                              \
    }
/* The first output's numbers. */
#define FILL(KIND, ROUNDED)                                                                                            \
    static void avx2_fill_##KIND##ROUNDED(const Avx2Laid *w, int64_t blocks, float *to)                                \
    {                                                                                                                  \
        for (int64_t b = 0; b < blocks; b++, to += DYNAMIC_BLOCK) {                                                    \
            UNROLLED for (int i = 0; i < 4; i++) {                                                                     \
                __m256 value = avx2_read(KIND, w, 0, b * DYNAMIC_BLOCK + 8 * i);                                       \
                value = avx2_scaled(KIND, value, i, w->scales[0] + b, w->more[0] + b);                                 \
                _mm256_storeu_ps(to + 8 * i, ROUNDED ? avx2_nearest_half(value) : value);                              \
            }                                                                                                          \
        }                                                                                                              \
    }

typedef struct {
    void (*fill)(const Avx2Laid *, int64_t, float *);
    void (*dots[AVX2_ROWS])(const float *, int64_t, const Avx2Laid *, int64_t, __m256 *);
} Avx2Numbers;
#define ROUNDED_OR_NOT(OF)                                                                                             \
    OF(DYNAMIC_NONE, 0) OF(DYNAMIC_NONE, 1) OF(BIASED, 0) OF(BIASED, 1) OF(LEAST, 0) OF(LEAST, 1) OF(TWO, 0) OF(TWO, 1)
#define OF(KIND, ROUNDED)                                                                                              \
    FILL(KIND, ROUNDED) DOTS(KIND, ROUNDED, 1) DOTS(KIND, ROUNDED, 2) DOTS(KIND, ROUNDED, 3) DOTS(KIND, ROUNDED, 4)
ROUNDED_OR_NOT(OF)
#undef OF
#define OF(KIND, ROUNDED)                                                                                              \
    [2 * KIND + ROUNDED] = {avx2_fill_##KIND##ROUNDED, {avx2_dots_##KIND##ROUNDED##1, avx2_dots_##KIND##ROUNDED##2,    \
                                                        avx2_dots_##KIND##ROUNDED##3, avx2_dots_##KIND##ROUNDED##4}},
static const Avx2Numbers avx2_numbers_of[] = {ROUNDED_OR_NOT(OF)};
#undef OF
#undef ROUNDED_OR_NOT
#undef FILL
#undef DOTS

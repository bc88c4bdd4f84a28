/* y = x w^T of numbers in bfloat16, with instructions that multiply pairs of them (AVX512_BF16) and sum in float32.
 *
 * As in linear.h every element is summed in one order: 32 columns of HALVES_DEPTH inputs at a time, what is left of
 * them filled up with zeros. Tiles of up to 8 rows by 3 outputs stay in registers.
 */
enum { HALVES_DEPTH = 4096, HALVES_ROWS = 8, HALVES_PANEL = 96 };

/* 32 weights, or those of the mask and zeros: bfloat16, and codes of one byte, which bfloat16 has all. */
static inline ALWAYS __m512bh halves_load_b(const uint16_t *from)
{
    return (__m512bh)_mm512_loadu_epi16(from);
}

static inline ALWAYS __m512bh halves_some_b(__mmask32 there, const uint16_t *from)
{
    return (__m512bh)_mm512_maskz_loadu_epi16(there, from);
}

static inline ALWAYS __m512bh halves_of(__m256i codes)
{
    __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(codes)));
    __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(codes, 1)));
    return _mm512_cvtne2ps_pbh(high, low);
}

static inline ALWAYS __m512bh halves_load_c(const int8_t *from)
{
    return halves_of(_mm256_loadu_si256((const __m256i *)from));
}

static inline ALWAYS __m512bh halves_some_c(__mmask32 there, const int8_t *from)
{
    return halves_of(_mm256_maskz_loadu_epi8(there, from));
}

#define UNROLLED _Pragma("GCC unroll 8")
#define STEP(T, R, C, WEIGHTS, INPUTS)                                                                                 \
    {                                                                                                                  \
        __m512bh weights[C];                                                                                           \
        UNROLLED for (int c = 0; c < C; c++) {                                                                         \
            const T *from = w + c * w_row + k;                                                                         \
            weights[c] = WEIGHTS;                                                                                      \
            FETCH(from + C * w_row);                                                                                   \
        }                                                                                                              \
        UNROLLED for (int r = 0; r < R; r++) {                                                                         \
            const uint16_t *from = x + r * x_row + k;                                                                  \
            __m512bh inputs = INPUTS;                                                                                  \
            UNROLLED for (int c = 0; c < C; c++)                                                                       \
                sums[r][c] = _mm512_dpbf16_ps(sums[r][c], inputs, weights[c]);                                         \
        }                                                                                                              \
    }
#define TILE(F, T, R, C)                                                                                               \
    static void halves_tile_##F##R##C(const uint16_t *x, int64_t x_row, const void *at, int64_t w_row, int64_t depth,  \
                                      float *y, int64_t y_row, int first)                                              \
    {                                                                                                                  \
        const T *w = at;                                                                                               \
        __m512 sums[R][C];                                                                                             \
        UNROLLED for (int r = 0; r < R; r++)                                                                           \
            UNROLLED for (int c = 0; c < C; c++)                                                                       \
                sums[r][c] = _mm512_setzero_ps();                                                                      \
        int64_t k = 0;                                                                                                 \
        for (; k + 32 <= depth; k += 32)                                                                               \
            STEP(T, R, C, halves_load_##F(from), halves_load_b(from))                                                  \
        __mmask32 left = ((__mmask32)1 << (depth - k)) - 1;                                                            \
        if (left)                                                                                                      \
            STEP(T, R, C, halves_some_##F(left, from), halves_some_b(left, from))                                      \
        UNROLLED for (int r = 0; r < R; r++)                                                                           \
            UNROLLED for (int c = 0; c < C; c++) {                                                                     \
                float sum = avx512_total((avx512_vec)sums[r][c]);                                                      \
                y[r * y_row + c] = first ? sum : y[r * y_row + c] + sum;                                               \
            }                                                                                                          \
    }
#define ROW(F, T, R) TILE(F, T, R, 1) TILE(F, T, R, 2) TILE(F, T, R, 3)
#define ALL(F, T)                                                                                                      \
    ROW(F, T, 1) ROW(F, T, 2) ROW(F, T, 3) ROW(F, T, 4) ROW(F, T, 5) ROW(F, T, 6) ROW(F, T, 7) ROW(F, T, 8)
ALL(b, uint16_t)
ALL(c, int8_t)
#undef ALL
#undef ROW
#undef TILE
#undef STEP
#undef UNROLLED

typedef void (*HalvesTile)(const uint16_t *, int64_t, const void *, int64_t, int64_t, float *, int64_t, int);
#define ROW(F, R) {halves_tile_##F##R##1, halves_tile_##F##R##2, halves_tile_##F##R##3}
#define ALL(F) {ROW(F, 1), ROW(F, 2), ROW(F, 3), ROW(F, 4), ROW(F, 5), ROW(F, 6), ROW(F, 7), ROW(F, 8)}
static const HalvesTile halves_tiles[2][HALVES_ROWS][3] = {ALL(b), ALL(c)};
#undef ALL
#undef ROW

/* Outputs [begin, end) of all rows: the inputs of a few rows stay in the first cache while weights pass, which come
 * from the second one after the first rows. */
static void halves_linear(const Linear *job, int64_t begin, int64_t end)
{
    const uint16_t *x = job->x;
    int coded = job->form == INT8_HALVES, shift = !coded; /* bytes of a weight, as a power of two */
    for (int64_t k = 0; k < job->inputs; k += HALVES_DEPTH) {
        int64_t depth = job->inputs - k < HALVES_DEPTH ? job->inputs - k : HALVES_DEPTH;
        for (int64_t first = begin; first < end; first += HALVES_PANEL) {
            int64_t last = first + HALVES_PANEL < end ? first + HALVES_PANEL : end;
            for (int64_t row = 0; row < job->rows; row += HALVES_ROWS) {
                int r = job->rows - row < HALVES_ROWS ? (int)(job->rows - row) : HALVES_ROWS;
                for (int64_t n = first; n < last; n += 3) {
                    int c = last - n < 3 ? (int)(last - n) : 3;
                    const char *w = (const char *)job->w + ((n * job->w_row + k) << shift);
                    halves_tiles[coded][r - 1][c - 1](x + row * job->x_row + k, job->x_row, w, job->w_row, depth,
                                                      job->y + row * job->outputs + n, job->outputs, k == 0);
                }
            }
        }
    }
    if (coded)
        scale_outputs(job, begin, end);
}

/* y = x w^T of numbers in bfloat16, with instructions that multiply pairs of them (AVX512_BF16) and sum in float32.
 *
 * As in linear.h every element is summed in one order: 32 columns of HALVES_DEPTH inputs at a time, what is left of
 * them filled up with zeros. Tiles of up to 8 rows by 3 outputs stay in registers, or of few rows by 4, which lie in four
 * quarters of a panel: four long runs of memory arrive sooner than one, or many short ones. Where the inputs of their
 * rows are more than the first cache holds beside weights, all outputs of a panel go through HALVES_NEAR of them at a
 * time, and the columns are kept meanwhile as they are. These inputs are copied side by side first: rows that are 4 KiB
 * apart would share a few lines of that cache.
 */
enum { HALVES_DEPTH = 4096, HALVES_ROWS = 8, HALVES_PANEL = 96, HALVES_NEAR = 8192, HALVES_APART = 32 };
enum { FIRST = 1, GOES_ON = 2, ENDS = 4 }; /* the first HALVES_DEPTH; in these not the first inputs, the last ones */

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


/* Totals of 8 vectors at once, to[(i % 4) * 4 + i / 4] of vector i: halves of a vector are added, their halves, and so
 * on, as in `total`, and so with its bits. */
static inline ALWAYS void halves_totals(const __m512 v[8], float to[16])
{
    __m512 quarters[2];
    UNROLLED for (int i = 0; i < 2; i++) {
        const __m512 *four = v + 4 * i;
        __m512 first = _mm512_add_ps(_mm512_shuffle_f32x4(four[0], four[1], 0x44),
                                     _mm512_shuffle_f32x4(four[0], four[1], 0xee));
        __m512 second = _mm512_add_ps(_mm512_shuffle_f32x4(four[2], four[3], 0x44),
                                      _mm512_shuffle_f32x4(four[2], four[3], 0xee));
        quarters[i] = _mm512_add_ps(_mm512_shuffle_f32x4(first, second, 0x88),
                                    _mm512_shuffle_f32x4(first, second, 0xdd));
    }
    __m512 twos = _mm512_add_ps(_mm512_shuffle_ps(quarters[0], quarters[1], 0x44),
                                _mm512_shuffle_ps(quarters[0], quarters[1], 0xee));
    _mm512_storeu_ps(to, _mm512_add_ps(_mm512_shuffle_ps(twos, twos, 0x88), _mm512_shuffle_ps(twos, twos, 0xdd)));
}

#define STEP(T, R, C, WEIGHTS, INPUTS)                                                                                 \
    {                                                                                                                  \
        __m512bh weights[C];                                                                                           \
        UNROLLED for (int c = 0; c < C; c++) {                                                                         \
            const T *from = w + c * apart + k;                                                                         \
            weights[c] = WEIGHTS;                                                                                      \
            FETCH_FAR((const char *)from + ahead);                                                                     \
        }                                                                                                              \
        UNROLLED for (int r = 0; r < R; r++) {                                                                         \
            const uint16_t *from = x + r * x_row + k;                                                                  \
            __m512bh inputs = INPUTS;                                                                                  \
            UNROLLED for (int c = 0; c < C; c++)                                                                       \
                sums[r][c] = _mm512_dpbf16_ps(sums[r][c], inputs, weights[c]);                                         \
        }                                                                                                              \
    }
#define TILE(F, T, R, C)                                                                                               \
    static void halves_tile_##F##R##C(const uint16_t *x, int64_t x_row, const void *at, int64_t apart, int64_t depth,  \
                                      int64_t ahead, __m512 *kept, float *y, int64_t y_apart, int part)                \
    {                                                                                                                  \
        const T *w = at;                                                                                               \
        __m512 sums[R][C];                                                                                             \
        UNROLLED for (int r = 0; r < R; r++)                                                                           \
            UNROLLED for (int c = 0; c < C; c++)                                                                       \
                sums[r][c] = part & GOES_ON ? kept[r * C + c] : _mm512_setzero_ps();                                   \
        int64_t k = 0;                                                                                                 \
        for (; k + 32 <= depth; k += 32)                                                                               \
            STEP(T, R, C, halves_load_##F(from), halves_load_b(from))                                                  \
        __mmask32 left = ((__mmask32)1 << (depth - k)) - 1;                                                            \
        if (left)                                                                                                      \
            STEP(T, R, C, halves_some_##F(left, from), halves_some_b(left, from))                                      \
        if (!(part & ENDS)) {                                                                                          \
            UNROLLED for (int r = 0; r < R; r++)                                                                       \
                UNROLLED for (int c = 0; c < C; c++)                                                                   \
                    kept[r * C + c] = sums[r][c];                                                                      \
            return;                                                                                                    \
        }                                                                                                              \
        UNROLLED for (int c = 0; c < C; c++) {                                                                         \
            float totals[16];                                                                                          \
            if (R >= 4) {                                                                                              \
                __m512 column[8];                                                                                      \
                UNROLLED for (int r = 0; r < 8; r++)                                                                   \
                    column[r] = r < R ? sums[r < R ? r : 0][c] : _mm512_setzero_ps();                                  \
                halves_totals(column, totals);                                                                         \
            } else                                                                                                     \
                UNROLLED for (int r = 0; r < R; r++)                                                                   \
                    totals[r % 4 * 4 + r / 4] = avx512_total((avx512_vec)sums[r][c]);                                  \
            UNROLLED for (int r = 0; r < R; r++) {                                                                     \
                float sum = totals[r % 4 * 4 + r / 4];                                                                 \
                float *to = y + r * HALVES_PANEL + c * y_apart;                                                        \
                *to = part & FIRST ? sum : *to + sum;                                                                  \
            }                                                                                                          \
        }                                                                                                              \
    }
#define ROW(F, T, R) TILE(F, T, R, 1) TILE(F, T, R, 3)
#define FEW_ROWS(F, T, R) TILE(F, T, R, 1) TILE(F, T, R, 4)
#define ALL(F, T)                                                                                                      \
    FEW_ROWS(F, T, 1) FEW_ROWS(F, T, 2) FEW_ROWS(F, T, 3) FEW_ROWS(F, T, 4)                                            \
    ROW(F, T, 5) ROW(F, T, 6) ROW(F, T, 7) ROW(F, T, 8)
ALL(b, uint16_t)
ALL(c, int8_t)
#undef ALL
#undef FEW_ROWS
#undef ROW
#undef TILE
#undef STEP

typedef void (*HalvesTile)(const uint16_t *, int64_t, const void *, int64_t, int64_t, int64_t, __m512 *, float *,
                           int64_t, int);
#define ROW(F, R, C) {halves_tile_##F##R##1, halves_tile_##F##R##C}
#define ALL(F)                                                                                                         \
    {ROW(F, 1, 4), ROW(F, 2, 4), ROW(F, 3, 4), ROW(F, 4, 4), ROW(F, 5, 3), ROW(F, 6, 3), ROW(F, 7, 3), ROW(F, 8, 3)}
static const HalvesTile halves_tiles[2][HALVES_ROWS][2] = {ALL(b), ALL(c)};
#undef ALL
#undef ROW

/* Rows [row, row + r) against outputs [first, first + wide): their sums to `sums`, HALVES_PANEL for each row. */
static void halves_panel(const Linear *job, int64_t row, int r, int64_t first, int64_t wide, __m512 *kept, float *sums)
{
    uint16_t near[HALVES_NEAR + HALVES_ROWS * HALVES_APART] __attribute__((aligned(64)));
    int coded = job->form == INT8_HALVES, shift = !coded; /* bytes of a weight, as a power of two */
    int64_t row_bytes = job->w_row << shift;
    for (int64_t k = 0, depth; k < job->inputs; k += depth) {
        int64_t block = k / HALVES_DEPTH * HALVES_DEPTH, left = job->inputs - k;
        depth = block + HALVES_DEPTH - k < left ? block + HALVES_DEPTH - k : left;
        int part = (block == 0 ? FIRST : 0) | (k > block ? GOES_ON : 0) | (depth <= HALVES_NEAR / r ? ENDS : 0);
        if (!(part & ENDS))
            depth = HALVES_NEAR / r / 32 * 32;
        const uint16_t *x = (const uint16_t *)job->x + row * job->x_row + k;
        int64_t x_row = job->x_row;
        if (r > 1) {
            x_row = depth + HALVES_APART;
            for (int i = 0; i < r; i++)
                memcpy(near + i * x_row, x + i * job->x_row, (size_t)depth * sizeof *x);
            x = near;
        }
        int far = r <= FAR_ROWS, columns = far ? 4 : 3;
        int64_t passes = wide / columns, apart = far ? passes : 1, next = far ? 1 : columns;
        int64_t ahead = !far ? 2 * columns * row_bytes : depth < job->inputs ? row_bytes : AHEAD;
        const char *w = (const char *)job->w + first * row_bytes + (k << shift);
        for (int64_t n = 0; n < passes; n++)
            halves_tiles[coded][r - 1][1](x, x_row, w + n * next * row_bytes, apart * job->w_row, depth, ahead,
                                          kept + n * columns * r, sums + n * next, apart, part);
        for (int64_t n = passes * columns; n < wide; n++)
            halves_tiles[coded][r - 1][0](x, x_row, w + n * row_bytes, 0, depth, ahead, kept + n * r, sums + n, 0, part);
    }
}

/* Sums of one row, for outputs [first, first + wide), to where they belong. */
static void halves_finish(const Linear *job, float *sums, int64_t row, int64_t first, int64_t wide)
{
    int64_t at = row * job->outputs + first;
    if (job->form == INT8_HALVES)
        scale_sums(sums, (const float *)job->scales + first, wide);
    if (job->narrow)
        avx512_narrow(sums, (uint16_t *)job->y + at, wide);
    else
        memcpy((float *)job->y + at, sums, (size_t)wide * sizeof *sums);
}

/* Outputs [begin, end) of all rows: the inputs of a few rows stay in the first cache while weights pass, which come
 * from the second one after the first rows. */
static void halves_linear(const Linear *job, int64_t begin, int64_t end)
{
    float part[HALVES_ROWS * HALVES_PANEL] __attribute__((aligned(64)));
    __m512 kept[HALVES_ROWS * HALVES_PANEL];
    for (int64_t first = begin; first < end; first += HALVES_PANEL) {
        int64_t wide = end - first < HALVES_PANEL ? end - first : HALVES_PANEL;
        for (int64_t row = 0; row < job->rows; row += HALVES_ROWS) {
            int r = job->rows - row < HALVES_ROWS ? (int)(job->rows - row) : HALVES_ROWS;
            halves_panel(job, row, r, first, wide, kept, part);
            for (int i = 0; i < r; i++)
                halves_finish(job, part + i * HALVES_PANEL, row + i, first, wide);
        }
    }
}

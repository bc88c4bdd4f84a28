/* y = x w^T, every element summed in one order: the same row gives the same bits in a batch of any size.
 *
 * Each sum runs over blocks of DEPTH inputs, in a block over LANES columns of partial sums, then over what is left of
 * the block. Tiles of 4 rows by 3 outputs stay in registers, or by 6 where there are 32 of them; nothing of a sum depends
 * on the tile. Weights of many rows are not fetched ahead: the next 4 rows find them in the cache.
 */
#if defined(__x86_64__) && defined(__GNUC__)
#define HOLD(inputs) SETTLE(inputs) /* keeps it in a register: otherwise it is loaded again for each product */
#else
#define HOLD(inputs) ((void)(inputs))
#endif
#if LANES == 16
#define COLUMNS 6
#else
#define COLUMNS 3
#endif
#define SCRATCH 12 /* outputs that are dequantized at a time */

#define TILE(FETCHES, KIND, F, T, R, C)                                                                                \
    static void NAME(KIND##_##F##R##C)(const float *x, int64_t x_row, const void *at, int64_t w_apart, int64_t depth,  \
                                       float *y, int64_t y_row, int64_t y_apart, int first, Ahead ahead)               \
    {                                                                                                                  \
        const T *w = at;                                                                                               \
        NAME(vec) sums[R][C];                                                                                          \
        for (int r = 0; r < R; r++)                                                                                    \
            for (int c = 0; c < C; c++)                                                                                \
                sums[r][c] = (NAME(vec)){0};                                                                           \
        int64_t k = 0;                                                                                                 \
        for (; k + LANES <= depth; k += LANES) {                                                                       \
            NAME(vec) weights[C];                                                                                      \
            for (int c = 0; c < C; c++) {                                                                              \
                weights[c] = NAME(load_##F)(w + c * w_apart + k);                                                      \
                if (FETCHES)                                                                                           \
                    FETCH_FAR(ahead.at + c * ahead.row + (k << ahead.shift));                                          \
            }                                                                                                          \
            for (int r = 0; r < R; r++) {                                                                              \
                NAME(vec) inputs = NAME(load)(x + r * x_row + k);                                                      \
                HOLD(inputs);                                                                                          \
                for (int c = 0; c < C; c++)                                                                            \
                    sums[r][c] += inputs * weights[c];                                                                 \
            }                                                                                                          \
        }                                                                                                              \
        for (int r = 0; r < R; r++)                                                                                    \
            for (int c = 0; c < C; c++) {                                                                              \
                float sum = NAME(total)(sums[r][c]);                                                                   \
                for (int64_t i = k; i < depth; i++) {                                                                  \
                    sum += x[r * x_row + i] * NAME(one_##F)(w[c * w_apart + i]);                                       \
                    SETTLE(sum);                                                                                       \
                }                                                                                                      \
                float *to = y + r * y_row + c * y_apart;                                                               \
                *to = first ? sum : *to + sum;                                                                         \
            }                                                                                                          \
    }

#define FEW_TILES(F, T, R) TILE(1, few, F, T, R, 1) TILE(1, few, F, T, R, 2) TILE(1, few, F, T, R, 3)
#define MANY_TILES(F, T) TILE(0, many, F, T, 4, 1) TILE(0, many, F, T, 4, 2) TILE(0, many, F, T, 4, 3)
#if COLUMNS == 6
#define WIDE_TILES(F, T) TILE(0, many, F, T, 4, 4) TILE(0, many, F, T, 4, 5) TILE(0, many, F, T, 4, 6)
#else
#define WIDE_TILES(F, T)
#endif
#define TILES(F, T)                                                                                                    \
    FEW_TILES(F, T, 1) FEW_TILES(F, T, 2) FEW_TILES(F, T, 3) FEW_TILES(F, T, 4) MANY_TILES(F, T) WIDE_TILES(F, T)

TILES(f, float)
TILES(b, uint16_t)
TILES(c, int8_t)
#undef TILES
#undef WIDE_TILES
#undef MANY_TILES
#undef FEW_TILES
#undef TILE
#undef HOLD

typedef void (*NAME(tile))(const float *, int64_t, const void *, int64_t, int64_t, float *, int64_t, int64_t, int,
                           Ahead);
#define ROW(KIND, F, R) NAME(KIND##_##F##R##1), NAME(KIND##_##F##R##2), NAME(KIND##_##F##R##3)
#define FEW_ROWS(F) {{ROW(few, F, 1)}, {ROW(few, F, 2)}, {ROW(few, F, 3)}, {ROW(few, F, 4)}}
#if COLUMNS == 6
#define MANY_ROWS(F) {ROW(many, F, 4), NAME(many_##F##44), NAME(many_##F##45), NAME(many_##F##46)}
#else
#define MANY_ROWS(F) {ROW(many, F, 4)}
#endif
static const NAME(tile) NAME(few_tiles)[3][4][3] = {
    [FLOAT32] = FEW_ROWS(f), [BFLOAT16] = FEW_ROWS(b), [INT8] = FEW_ROWS(c)};
static const NAME(tile) NAME(many_tiles)[3][COLUMNS] = {
    [FLOAT32] = MANY_ROWS(f), [BFLOAT16] = MANY_ROWS(b), [INT8] = MANY_ROWS(c)};
#undef MANY_ROWS
#undef FEW_ROWS
#undef ROW

/* Dequantizes inputs [k, end) of output n, codes of four bits. */
static void NAME(unpack)(const Linear *job, int64_t n, int64_t k, int64_t end, float *to)
{
    int64_t half = job->inputs / 2, groups = job->inputs / job->group;
    const uint8_t *codes = (const uint8_t *)job->w + n * job->w_row;
    const uint16_t *scales = (const uint16_t *)job->scales + n * groups, *leasts = scales + job->outputs * groups;
    while (k < end) {
        int64_t at = k / job->group, stop = (at + 1) * job->group;
        if (k < half && stop > half)
            stop = half;
        if (stop > end)
            stop = end;
        NAME(decode_halves)(codes + (k < half ? k : k - half), k < half ? 0 : 4, half_float(scales[at]),
                            half_float(leasts[at]), to, stop - k);
        to += stop - k;
        k = stop;
    }
}

/* With how many rows at most a weight's row is read to its end. Numbers of block formats are better made once for five, where
 * registers are short. */
static inline int NAME(rows_that_are_few)(const Linear *job)
{
    return LANES == 8 && job->format != PLAIN ? FEW / 2 : FEW;
}

/* `rows` rows of x, from `row`, against c outputs that are `apart` outputs apart, from n on; inputs [k, k + depth).
 * Weights become numbers in registers, which is quicker than once for all rows in the cache; but for those of four bits
 * and of block formats. */
static void NAME(strip)(const Linear *job, int64_t row, int64_t rows, int64_t n, int c, int64_t apart, int64_t k,
                        float *scratch)
{
    static const int bytes[] = {[FLOAT32] = 2, [BFLOAT16] = 1, [INT8] = 0, [INT4] = 0}; /* powers of two */
    int64_t depth = job->inputs - k < DEPTH ? job->inputs - k : DEPTH, w_apart = apart * job->w_row;
    int form = job->form, shift = bytes[form];
    const char *w = (const char *)job->w + ((n * job->w_row + k) << shift);
    const float *x = job->x;
    /* Two strips on: outputs are gone through one by one with all of their inputs (see `linear`), or inputs first. */
    int64_t blocks = (job->inputs + DEPTH - 1) / DEPTH, then = k / DEPTH + 2;
    int64_t on = rows <= FEW ? then / blocks * 3 * job->w_row + then % blocks * DEPTH - k : 6 * job->w_row;
    Ahead ahead = {w + (rows <= FAR_ROWS ? AHEAD : on << shift), w_apart << shift, shift};
    if (form == INT4 || job->format != PLAIN) {
        for (int i = 0; i < c; i++)
            (job->format != PLAIN ? NAME(decode) : NAME(unpack))(job, n + i * apart, k, k + depth, scratch + i * DEPTH);
        if (job->format != PLAIN)
            ahead = (Ahead){job->w, 0, 0};
        w = (const char *)scratch;
        w_apart = DEPTH;
        form = FLOAT32;
        shift = bytes[form];
    }
    for (int64_t end = row + rows; row < end; row += 4) {
        int r = end - row < 4 ? (int)(end - row) : 4, many = rows > NAME(rows_that_are_few)(job) && r == 4, most = many ? COLUMNS : 3;
        for (int at = 0; at < c; at += most) {
            int wide = c - at < most ? c - at : most;
            (many ? NAME(many_tiles)[form][wide - 1] : NAME(few_tiles)[form][r - 1][wide - 1])(
                x + row * job->x_row + k, job->x_row, w + (at * w_apart << shift), w_apart, depth,
                (float *)job->y + row * job->outputs + n + at * apart, job->outputs, apart, k == 0, ahead);
        }
    }
}

/* Outputs [begin, end) of all rows. Few rows: weights' rows are read to their ends, and of very few one after the other
 * in each of three thirds: a processor fetches a few long runs ahead better than many short ones. Many: a block of inputs
 * of PANEL rows stays in the cache while all weights pass. */
static void NAME(linear)(const Linear *job, int64_t begin, int64_t end)
{
    float scratch[SCRATCH * DEPTH] __attribute__((aligned(64)));
    int columns = job->form == INT4 || job->format != PLAIN ? SCRATCH : LANES == 8 ? 24 : COLUMNS, few = NAME(rows_that_are_few)(job);
    for (int64_t row = 0; row < job->rows; row += PANEL) {
        int64_t rows = job->rows - row < PANEL ? job->rows - row : PANEL;
#if LANES == 8
        const Avx2BlockWays *ways = rows <= few ? avx2_blocks_of(job, rows) : NULL;
        if (ways != NULL) {
            for (int64_t n = begin, count; n < end; n += count) {
                count = end - n < AVX2_STRIP ? end - n : AVX2_STRIP;
                for (int64_t r = 0, some; r < rows; r += some) {
                    some = rows - r < 4 ? rows - r : 4;
                    int done = avx2_blocks(job, ways, row + r, some, n, count);
                    for (int64_t k = 0; !done && k < job->inputs; k += DEPTH)
                        NAME(strip)(job, row + r, some, n, (int)count, 1, k, scratch);
                }
            }
            continue;
        }
        if (avx2_has_dots(job, rows)) {
            for (int64_t n = begin, wide; n < end; n += wide) {
                wide = end - n < 2 ? 1 : 2;
                for (int64_t k = 0; k < job->inputs; k += DEPTH)
                    if (!avx2_dots(job, row, rows, n, wide, k))
                        NAME(strip)(job, row, rows, n, (int)wide, 1, k, scratch);
            }
            continue;
        }
#endif
        if (rows <= few) {
            int64_t passes = (end - begin) / 3, apart = rows <= FAR_ROWS ? passes : 1, next = rows <= FAR_ROWS ? 1 : 3;
            for (int64_t n = 0; n < passes; n++)
                for (int64_t k = 0; k < job->inputs; k += DEPTH)
                    NAME(strip)(job, row, rows, begin + n * next, 3, apart, k, scratch);
            for (int64_t n = begin + 3 * passes; n < end; n++)
                for (int64_t k = 0; k < job->inputs; k += DEPTH)
                    NAME(strip)(job, row, rows, n, 1, 1, k, scratch);
        } else
            for (int64_t k = 0; k < job->inputs; k += DEPTH)
                for (int64_t n = begin; n < end; n += columns)
                    NAME(strip)(job, row, rows, n, end - n < columns ? (int)(end - n) : columns, 1, k, scratch);
    }
    for (int64_t row = 0; job->form == INT8 && row < job->rows; row++)
        scale_sums((float *)job->y + row * job->outputs + begin, (const float *)job->scales + begin, end - begin);
}
#undef COLUMNS
#undef SCRATCH

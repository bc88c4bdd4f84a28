/* y = x w^T, every element summed in one order: the same row gives the same bits in a batch of any size.
 *
 * Each sum runs over blocks of DEPTH inputs, in a block over LANES columns of partial sums, then over what is left of
 * the block. Tiles of up to 4 rows by 3 outputs stay in registers; nothing of a sum depends on the tile.
 */
#define TILE(R, C)                                                                                                     \
    static void NAME(tile_##R##C)(const float *x, int64_t x_row, const float *w, int64_t w_row, int64_t depth,         \
                                  float *y, int64_t y_row, int first)                                                  \
    {                                                                                                                  \
        NAME(vec) sums[R][C];                                                                                          \
        for (int r = 0; r < R; r++)                                                                                    \
            for (int c = 0; c < C; c++)                                                                                \
                sums[r][c] = (NAME(vec)){0};                                                                           \
        int64_t k = 0;                                                                                                 \
        for (; k + LANES <= depth; k += LANES) {                                                                       \
            NAME(vec) weights[C];                                                                                      \
            for (int c = 0; c < C; c++)                                                                                \
                weights[c] = NAME(load)(w + c * w_row + k);                                                            \
            for (int r = 0; r < R; r++) {                                                                              \
                NAME(vec) inputs = NAME(load)(x + r * x_row + k);                                                      \
                for (int c = 0; c < C; c++)                                                                            \
                    sums[r][c] += inputs * weights[c];                                                                 \
            }                                                                                                          \
        }                                                                                                              \
        for (int r = 0; r < R; r++)                                                                                    \
            for (int c = 0; c < C; c++) {                                                                              \
                float sum = NAME(total)(sums[r][c]);                                                                   \
                for (int64_t i = k; i < depth; i++)                                                                    \
                    sum += x[r * x_row + i] * w[c * w_row + i];                                                        \
                y[r * y_row + c] = first ? sum : y[r * y_row + c] + sum;                                               \
            }                                                                                                          \
    }

TILE(1, 1) TILE(1, 2) TILE(1, 3) TILE(2, 1) TILE(2, 2) TILE(2, 3)
TILE(3, 1) TILE(3, 2) TILE(3, 3) TILE(4, 1) TILE(4, 2) TILE(4, 3)
#undef TILE

typedef void (*NAME(tile))(const float *, int64_t, const float *, int64_t, int64_t, float *, int64_t, int);
static const NAME(tile) NAME(tiles)[4][3] = {
    {NAME(tile_11), NAME(tile_12), NAME(tile_13)},
    {NAME(tile_21), NAME(tile_22), NAME(tile_23)},
    {NAME(tile_31), NAME(tile_32), NAME(tile_33)},
    {NAME(tile_41), NAME(tile_42), NAME(tile_43)},
};

/* `rows` rows of x, from `row`, against outputs [n, n + c), inputs [k, k + depth). */
static void NAME(strip)(const Linear *job, int64_t row, int64_t rows, int64_t n, int c, int64_t k, float *scratch)
{
    int64_t depth = job->inputs - k < DEPTH ? job->inputs - k : DEPTH;
    const float *w;
    int64_t w_row;
    if (job->form == INT8) {
        const int8_t *from = (const int8_t *)job->w + n * job->w_row + k;
        for (int i = 0; i < c; i++)
            NAME(decode)(from + i * job->w_row, scratch + i * DEPTH, depth);
        w = scratch;
        w_row = DEPTH;
    } else if (job->form == BFLOAT16) {
        const uint16_t *from = (const uint16_t *)job->w + n * job->w_row + k;
        for (int i = 0; i < c; i++)
            NAME(widen)(from + i * job->w_row, scratch + i * DEPTH, depth);
        w = scratch;
        w_row = DEPTH;
    } else {
        w = (const float *)job->w + n * job->w_row + k;
        w_row = job->w_row;
    }
    for (int64_t end = row + rows; row < end; row += 4) {
        int r = end - row < 4 ? (int)(end - row) : 4;
        NAME(tiles)[r - 1][c - 1](job->x + row * job->x_row + k, job->x_row, w, w_row, depth,
                                  job->y + row * job->outputs + n, job->outputs, k == 0);
    }
}

/* Outputs [begin, end) of all rows. Few rows: a weight's row is read to its end, as memory likes it. Many: a block of
 * inputs of PANEL rows stays in the cache while all weights pass. */
static void NAME(linear)(const Linear *job, int64_t begin, int64_t end)
{
    float scratch[3 * DEPTH] __attribute__((aligned(64)));
    for (int64_t row = 0; row < job->rows; row += PANEL) {
        int64_t rows = job->rows - row < PANEL ? job->rows - row : PANEL;
        if (rows <= 8)
            for (int64_t n = begin; n < end; n += 3)
                for (int64_t k = 0; k < job->inputs; k += DEPTH)
                    NAME(strip)(job, row, rows, n, end - n < 3 ? (int)(end - n) : 3, k, scratch);
        else
            for (int64_t k = 0; k < job->inputs; k += DEPTH)
                for (int64_t n = begin; n < end; n += 3)
                    NAME(strip)(job, row, rows, n, end - n < 3 ? (int)(end - n) : 3, k, scratch);
        for (int64_t r = row; job->form == INT8 && r < row + rows; r++)
            for (int64_t n = begin; n < end; n++)
                job->y[r * job->outputs + n] *= job->scales[n];
    }
}

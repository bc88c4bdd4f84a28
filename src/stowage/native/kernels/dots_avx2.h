/* Inputs [k, k + depth) of some rows times two outputs in a block format, whose numbers stay in registers; see linear.h for
 * the order of sums. 0: it is not for these. `n` and `n + wide - 1` are the outputs. */
static int avx2_dots(const Linear *job, int64_t row, int64_t rows, int64_t n, int64_t wide, int64_t k)
{
    float room[4][DEPTH / DYNAMIC_BLOCK];
    uint8_t last[2][DYNAMIC_GROUP + 8] = {{0}};
    float edge[4 * DYNAMIC_GROUP];
    int64_t depth = job->inputs - k < DEPTH ? job->inputs - k : DEPTH, blocks = depth / DYNAMIC_BLOCK, groups = blocks / 4;
    const Avx2Numbers *way = avx2_numbers_way(job);
    if (way == NULL || job->form == FLOAT32 || depth % DYNAMIC_BLOCK != 0)
        return 0;
    const Avx2Ways *ways = avx2_ways_of(job, 0);
    const float *scales[4] = {room[0], room[1], room[2], room[3]}, *last_scales[4];
    const uint8_t *at[2], *last_at[2] = {last[0], last[1]};
    for (int i = 0; i < 2; i++) {
        int64_t own = n + (i < wide ? i : 0);
        if (!avx2_ready(job, own, k, blocks, room[i], room[2 + i]))
            return 0;
        at[i] = avx2_at(job, ways, (const uint8_t *)job->w + own * job->w_row, k / DYNAMIC_GROUP);
        memcpy(last[i], at[i] + groups * ways->bytes, (size_t)(blocks % 4 * ways->bytes / 4));
    }
    for (int64_t end = row + rows, step; row < end; row += step) {
        int power = end - row >= 4 ? 2 : end - row >= 2 ? 1 : 0;
        __m256 kept[8] = {{0}};
        step = 1 << power;
        const float *x = (const float *)job->x + row * job->x_row + k;
        way->dots[power](x, job->x_row, at, groups, scales, kept);
        if (blocks % 4) {
            memset(edge, 0, sizeof edge);
            for (int64_t r = 0; r < step; r++)
                memcpy(edge + r * DYNAMIC_GROUP, x + r * job->x_row + groups * DYNAMIC_GROUP, (size_t)(blocks % 4) * 128);
            for (int i = 0; i < 4; i++)
                last_scales[i] = room[i] + 4 * groups;
            way->dots[power](edge, DYNAMIC_GROUP, last_at, 1, last_scales, kept);
        }
        for (int64_t i = 0; i < 2 * step; i++) {
            float *to = (float *)job->y + (row + i / 2) * job->outputs + n + i % 2, sum = avx2_total(kept[i]);
            if (i % 2 < wide)
                *to = k == 0 ? sum : *to + sum;
        }
    }
    return 1;
}


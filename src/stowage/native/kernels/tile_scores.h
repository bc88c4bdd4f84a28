/* Scores of many rows and keys in bfloat16 by whole tiles (AMX), with the bits of attention_scores.h.
 *
 * TDPBF16PS sums the products of even numbers of pairs one after the other from 0, and those of odd ones, adds both sums,
 * and adds that to what is there. So one product of tiles does two lanes, if they are the pairs' even and odd numbers,
 * and one step of adding lanes up:
 *
 *     tile j of 4, from 0:  pairs (lane j, lane j + 8) of up to 16 steps, then pairs (lane j + 4, lane j + 12)
 *     total:                (tile 0 + tile 2) + (tile 1 + tile 3)
 *
 * A lane has a number of each 16 of a width, so tiles are as deep as it has steps: 4 for heads of 64 numbers, 16 for those
 * of 256. Numbers must be in range as for pairs (pair_scores.h).
 *
 * Weighing values cannot be done so with the bits that there are: see docs/internals.md.
 */

static int64_t tile_steps(int64_t width) /* 0: tiles are not deep enough */
{
    return width / 16 <= TILE_SIDE ? width / 16 : 0;
}

static void tile_scores_begin(int64_t width)
{
    int64_t steps = tile_steps(width);
    if (steps > 0)
        tiles_begin_rows((int)steps);
}

static void tile_scores_end(void)
{
    TILES_END();
}

/* Of 16 rows, for each of 8 pairs of lanes: a tile, whose row m has the pairs of row m. */
static int tiles_lay_queries(int64_t width, int rows, Scratch *s)
{
    int64_t steps = tile_steps(width);
    if (steps == 0)
        return 0;
    for (int r = 0; r < (rows + 15) / 16 * 16; r++) {
        const uint16_t *q = s->query[r < rows ? r : rows - 1];
        if (!in_range(q, steps * 16))
            return 0;
        for (int j = 0; j < 8; j++)
            for (int64_t step = 0; step < steps; step++)
                s->query_pairs[((r / 16 * 8 + j) * 16 + r % 16) * steps + step] =
                    q[16 * step + j] | (uint32_t)q[16 * step + 8 + j] << 16;
    }
    return 1;
}

/* Of 16 keys, for each of 8 pairs of lanes: a tile, whose row has that pair of each key. */
static int tiles_lay_keys(int64_t width, int low, int high, Scratch *s)
{
    int64_t steps = tile_steps(width);
    const __m512i two = _mm512_set_epi32(23, 22, 21, 20, 19, 18, 17, 16, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i order = _mm512_or_si512(two, _mm512_slli_epi32(_mm512_add_epi32(two, _mm512_set1_epi32(8)), 16));
    for (int i = low / 16 * 16; i < high; i += 16)
        for (int64_t t = 0; 2 * t < steps; t++) {
            __m512i v[16];
            uint32_t *to = s->key_pairs + (i / 16 * 8 * steps + 2 * t) * 16;
            if (turned_pairs(s, low, high, i, t, steps * 16, order, v))
                return 0;
            UNROLLED for (int j = 0; j < 8; j++)
                _mm512_store_si512(to + j * steps * 16, v[j]);
            if (2 * t + 1 < steps)
                UNROLLED for (int j = 0; j < 8; j++)
                    _mm512_store_si512(to + (j * steps + 1) * 16, v[8 + j]);
        }
    return 1;
}

/* Up to 2 by 2 blocks of 16 rows and 16 keys, to s->lanes: tile j, rows' block, keys' block, row, key. */
static void tiles_score(const uint32_t *rows, const uint32_t *keys, int64_t steps, int rows_too, int keys_too, float *to)
{
    int64_t tile = 16 * steps, block = 8 * tile;
    size_t bytes = (size_t)block * sizeof *rows;
    for (int j = 0; j < 4; j++, to += 4 * 256) {
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
        for (int64_t at = j * tile; at < block; at += 4 * tile)
            tiles_add(rows + at, bytes, 4 * steps, keys + at, bytes, rows_too, keys_too);
        TILE_STORE(0, to);
        if (keys_too)
            TILE_STORE(1, to + 256);
        if (rows_too)
            TILE_STORE(2, to + 512);
        if (rows_too && keys_too)
            TILE_STORE(3, to + 768);
    }
}

/* Tiles j added up, of `rows` rows and 16 keys. */
static void tiles_sum(const float *lanes, int rows, float *to)
{
    for (int m = 0; m < rows; m++) {
        __m512 v[4];
        UNROLLED for (int j = 0; j < 4; j++)
            v[j] = _mm512_load_ps(lanes + j * 1024 + m * 16);
        _mm512_store_ps(to + m * KEYS, _mm512_add_ps(_mm512_add_ps(v[0], v[2]), _mm512_add_ps(v[1], v[3])));
    }
}

static int tiles_scores(int64_t width, int rows, int low, int high, const int *from, const int *until, Scratch *s)
{
    int64_t steps = tile_steps(width), block = 8 * 16 * steps;
    if (!tiles_lay_keys(width, low, high, s))
        return 0;
    for (int i = low / 16 * 16; i < high; i += 32)
        for (int row = 0; row < rows; row += 32) {
            int some = rows - row < 32 ? rows - row : 32, keys_too = i + 16 < high, seen = 0;
            for (int r = row; r < row + some; r++)
                seen |= from[r] < i + 32 && until[r] > i;
            if (!seen)
                continue;
            tiles_score(s->query_pairs + row / 16 * block, s->key_pairs + i / 16 * block, steps, some > 16, keys_too,
                        s->lanes);
            for (int part = 0; part < 4; part++)
                if ((part < 2 || some > 16) && (part % 2 == 0 || keys_too))
                    tiles_sum(s->lanes + part * 256, part < 2 ? (some < 16 ? some : 16) : some - 16,
                              s->scores + (row + part / 2 * 16) * KEYS + i + part % 2 * 16);
        }
    add_rest(width, rows, low, high, s);
    return 1;
}

static const Scoring by_tiles = {tile_scores_begin, tile_scores_end, tiles_lay_queries, tiles_scores, pairs_lay_values, pairs_add};

/* As dynamic_avx2.h, of many rows: 16 outputs are laid out first, so that a register has four codes of 8 outputs. */

/* 16 outputs laid out: of each block eight times four codes of each; those of 8 bits have a sign and no bias. */
typedef struct {
    uint8_t *codes;
    float *scales, *more; /* [blocks, 16] */
    int64_t blocks;
    int size; /* of codes */
} Avx2Panel;

/* The codes of a group that is not all there, as those of inputs lie. */
static void avx2_lay_last(const Linear *job, int64_t n, int64_t g, int64_t blocks, int size, __m256i codes[4])
{
    Coded row = coded_row(job, n);
    __m128i *to = (__m128i *)codes, sign = _mm_set1_epi8((char)(size == LARGE ? 128 : 0));
    for (int64_t b = 0; b < blocks; b++) {
        __m128i own[2];
        dynamic_codes(job, &row, g * DYNAMIC_GROUP + b * DYNAMIC_BLOCK, (uint8_t *)own);
        to[b] = _mm_xor_si128(own[0], sign);
        to[4 + b] = _mm_xor_si128(own[1], sign);
    }
}

/* Eight words of eight rows: their columns. */
static inline ALWAYS void avx2_transpose_words(__m256i v[8])
{
    avx2_transpose_fours(v);
    avx2_transpose_fours(v + 4);
    UNROLLED for (int i = 0; i < 4; i++) {
        __m256i first = v[i], second = v[i + 4];
        v[i] = _mm256_permute2x128_si256(first, second, 0x20);
        v[i + 4] = _mm256_permute2x128_si256(first, second, 0x31);
    }
}

static void avx2_lay_out(const Linear *job, int64_t n, int64_t wide, float *scales, float *more, const Avx2Panel *panel)
{
    __m256i codes[8][4] = {{{0}}}, v[8];
    for (int64_t o = 0; o < AVX2_WIDE; o++) {
        Coded row = coded_row(job, n + (o < wide ? o : 0));
        avx2_scales(job, &row, 0, panel->blocks, scales, more);
        for (int64_t b = 0; b < panel->blocks; b++) {
            panel->scales[b * AVX2_WIDE + o] = scales[b];
            panel->more[b * AVX2_WIDE + o] = more[b];
        }
    }
    for (int64_t g = 0; 4 * g < panel->blocks; g++) {
        const Avx2Ways *ways = avx2_ways_of(job, g);
        int64_t blocks = panel->blocks - 4 * g < 4 ? panel->blocks - 4 * g : 4, at = ways == NULL ? 0 : avx2_at(job, ways, g);
        uint8_t *to = panel->codes + g * DYNAMIC_GROUP * AVX2_WIDE;
        for (int64_t half = 0; half < AVX2_WIDE; half += 8, to += 32) {
            for (int64_t o = 0; o < 8; o++) {
                int64_t own = n + (half + o < wide ? half + o : 0);
                if (ways != NULL && blocks == 4 && !avx2_is_mixed(job, g))
                    ways->lay((const uint8_t *)job->w + own * job->w_row + at, (int)(g % ways->per), codes[o]);
                else
                    avx2_lay_last(job, own, g, blocks, panel->size, codes[o]);
            }
            for (int j = 0; j < 4; j++) {
                uint8_t *block = to + (j % 2 * 16 + j / 2 * 4) * 4 * AVX2_WIDE;
                UNROLLED for (int o = 0; o < 8; o++)
                    v[o] = codes[o][j];
                avx2_transpose_words(v);
                UNROLLED for (int i = 0; i < 8; i++)
                    _mm256_storeu_si256((__m256i *)(block + (i / 4 * 8 + i % 4) * 4 * AVX2_WIDE), v[i]);
            }
        }
    }
}

/* Sums of products of a block, from quad `begin` to `end` of its eight, are added to those that are there; as many quads
 * as fit are added in 16 bits first. */
static inline ALWAYS void avx2_quads(int rows, DynamicKind kind, int size, const uint8_t *w, const DynamicInputs *x,
                                     int64_t x_row, int s, int begin, int end, __m256i whole[AVX2_TILE][2])
{
    int run = size == SMALL ? 8 : size == LARGE ? 1 : kind == TWO ? 2 : 4;
    UNROLLED for (int first = begin; first < end; first += run) {
        __m256i sums[AVX2_TILE][2];
        UNROLLED for (int q = first; q < first + run; q++) {
            __m256i v[2] = {avx2_32(w + q * 4 * AVX2_WIDE), avx2_32(w + q * 4 * AVX2_WIDE + 32)};
            UNROLLED for (int r = 0; r < rows; r++) {
                __m256i four = _mm256_set1_epi32((int)read_word((const uint8_t *)x[r * x_row].codes[q / 4] + 16 * s + q % 4 * 4));
                UNROLLED for (int c = 0; c < 2; c++) {
                    __m256i more = avx2_products(size, v[c], four);
                    sums[r][c] = q == first ? more : _mm256_add_epi16(sums[r][c], more);
                    if (size == LARGE)
                        whole[r][c] = _mm256_add_epi32(whole[r][c], more);
                    SETTLE(*(size == LARGE ? &whole[r][c] : &sums[r][c])); /* in this order: else all products are kept first */
                }
            }
        }
        UNROLLED for (int r = 0; r < rows && size != LARGE; r++)
            UNROLLED for (int c = 0; c < 2; c++)
                whole[r][c] = _mm256_add_epi32(whole[r][c], _mm256_madd_epi16(sums[r][c], _mm256_set1_epi16(1)));
    }
}

/* `rows` rows of 16 outputs. */
static inline ALWAYS void avx2_dynamic_tile(int rows, DynamicKind kind, int size, const DynamicInputs *from, int64_t x_row,
                                            const Avx2Panel *panel, float *to)
{
    for (int s = 0; s < 4 && s < panel->blocks; s++) {
        __m256 sums[AVX2_TILE][2];
        UNROLLED for (int r = 0; r < rows; r++)
            sums[r][0] = sums[r][1] = _mm256_setzero_ps();
        for (int64_t b = s; b < panel->blocks; b += 4) {
            const DynamicInputs *x = from + b / 4;
            const uint8_t *w = panel->codes + b * DYNAMIC_BLOCK * AVX2_WIDE;
            const float *own = panel->scales + b * AVX2_WIDE, *more = panel->more + b * AVX2_WIDE;
            __m256i whole[AVX2_TILE][2];
            __m256 value[AVX2_TILE][2];
            UNROLLED for (int half = 0; half < 2; half++) {
                if (kind != TWO && half == 1)
                    break;
                UNROLLED for (int r = 0; r < rows; r++) {
                    const DynamicInputs *in = x + r * x_row;
                    int less = kind == LEAST || size == LARGE ? 0 : kind == BIASED ? in->less[s] : half ? in->less[s] - in->first_less[s] : in->first_less[s];
                    whole[r][0] = whole[r][1] = _mm256_set1_epi32(less);
                }
                int begin = half * 4, end = kind == TWO ? begin + 4 : 8;
                avx2_quads(rows, kind, size, w, x, x_row, s, begin, end, whole);
                UNROLLED for (int r = 0; r < rows; r++)
                    UNROLLED for (int c = 0; c < 2; c++) {
                        __m256 scale = _mm256_broadcast_ss(x[r * x_row].scale + s), other;
                        __m256 found = avx2_value(whole[r][c], scale, _mm256_loadu_ps((half ? more : own) + 8 * c));
                        if (kind == LEAST) {
                            other = _mm256_mul_ps(_mm256_broadcast_ss(x[r * x_row].sum + s), _mm256_loadu_ps(more + 8 * c));
                            SETTLE(other);
                            found = _mm256_add_ps(found, other);
                        }
                        value[r][c] = half ? _mm256_add_ps(found, value[r][c]) : found;
                    }
            }
            UNROLLED for (int r = 0; r < rows; r++)
                UNROLLED for (int c = 0; c < 2; c++)
                    sums[r][c] = _mm256_add_ps(sums[r][c], value[r][c]);
        }
        UNROLLED for (int r = 0; r < rows; r++)
            UNROLLED for (int c = 0; c < 2; c++) {
                float *own = to + r * AVX2_WIDE + 8 * c;
                _mm256_storeu_ps(own, s == 0 ? sums[r][c] : _mm256_add_ps(_mm256_loadu_ps(own), sums[r][c]));
            }
    }
}

#define TILE_OF(KIND, SIZE, R)                                                                                         \
    static void avx2_tile_##KIND##SIZE##R(const DynamicInputs *x, int64_t x_row, const Avx2Panel *panel, float *to)    \
    {                                                                                                                  \
        avx2_dynamic_tile(R, KIND, SIZE, x, x_row, panel, to);                                                         \
    }
#define TILES_OF(KIND, SIZE) TILE_OF(KIND, SIZE, 1) TILE_OF(KIND, SIZE, 2) TILE_OF(KIND, SIZE, 4)
TILES_OF(BIASED, SMALL) TILES_OF(BIASED, MEDIUM) TILES_OF(BIASED, LARGE)
TILES_OF(LEAST, SMALL) TILES_OF(LEAST, MEDIUM) TILES_OF(TWO, MEDIUM)
#undef TILES_OF
#undef TILE_OF
#define TILES_OF(KIND, SIZE) [KIND][SIZE] = {avx2_tile_##KIND##SIZE##1, avx2_tile_##KIND##SIZE##2, avx2_tile_##KIND##SIZE##4}
static void (*const avx2_tiles[4][3][3])(const DynamicInputs *, int64_t, const Avx2Panel *, float *) = {
    TILES_OF(BIASED, SMALL), TILES_OF(BIASED, MEDIUM), TILES_OF(BIASED, LARGE),
    TILES_OF(LEAST, SMALL), TILES_OF(LEAST, MEDIUM), TILES_OF(TWO, MEDIUM)};
#undef TILES_OF

/* How many rows are few. Laying out pays sooner where a row's products take long: codes of 8 bits, scales of super blocks. */
static int64_t avx2_few_rows(const Linear *job, const Avx2Ways *ways)
{
    return ways->size == LARGE || avx2_has_super_scales(job->format) ? AVX2_FEW / 2 : AVX2_FEW;
}

/* Outputs [begin, end) of all rows; 0: there is no memory for it. */
static int dynamic_avx2(const Linear *job, int64_t begin, int64_t end)
{
    int64_t groups = dynamic_groups(job->inputs), blocks = 4 * groups;
    const Avx2Ways *ways = avx2_ways_of(job, 0);
    int few = ways != NULL && job->rows <= avx2_few_rows(job, ways);
    int64_t codes = few ? 0 : blocks * DYNAMIC_BLOCK * AVX2_WIDE;
    int64_t scales = blocks * (few ? 2 * avx2_few_wide(blocks) : 4 + 2 * AVX2_WIDE) * (int64_t)sizeof(float);
    float *room = aligned_alloc(64, (size_t)(codes + scales));
    if (room == NULL)
        return 0;
    Avx2Panel panel = {.scales = room + 4 * blocks, .more = room + (4 + AVX2_WIDE) * blocks,
                       .codes = (uint8_t *)(room + (4 + 2 * AVX2_WIDE) * blocks), .blocks = job->inputs / DYNAMIC_BLOCK,
                       .size = ways != NULL ? ways->size : SMALL};
    if (few)
        avx2_few(job, begin, end, room);
    for (int64_t n = begin, wide; !few && n < end; n += wide) {
        wide = end - n < AVX2_WIDE ? end - n : AVX2_WIDE;
        avx2_lay_out(job, n, wide, room, room + blocks, &panel);
        for (int64_t r = 0, step; r < job->rows; r += step) {
            float sums[AVX2_TILE][AVX2_WIDE];
            int way = job->rows - r >= 4 ? 2 : job->rows - r >= 2 ? 1 : 0;
            step = 1 << way;
            avx2_tiles[dynamic_kind(job)][panel.size][way]((const DynamicInputs *)job->packed + r * groups, groups, &panel, sums[0]);
            for (int64_t i = 0; i < step; i++)
                avx2_finish(job, sums[i], r + i, n, wide);
        }
    }
    free(room);
    return 1;
}

/* Products of inputs that were rounded to 8 bits (dynamic.h) with AVX2, which multiplies bytes in pairs.
 *
 * Of up to 8 rows a group of four blocks of two outputs at once, whose 8 sums fill a register. Of many, 16 outputs are laid
 * out first, so that a register has four codes of 8 outputs.
 */
enum { AVX2_FEW = 8, AVX2_WIDE = 16, AVX2_TILE = 4, AVX2_AHEAD = 4096 };

static inline ALWAYS __m256i avx2_twice(const void *from)
{
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)from));
}

static inline ALWAYS __m256 avx2_both(const float *first, const float *second)
{
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(first)), _mm_loadu_ps(second), 1);
}

/* Sums of pairs of products; of codes with a sign sums of four. */
static inline ALWAYS __m256i avx2_products(int size, __m256i w, __m256i x)
{
    if (size != LARGE)
        return _mm256_maddubs_epi16(w, x);
    return _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)), _mm256_set1_epi16(1));
}

/* Sums of the blocks of two outputs, of products that are those of blocks 0 and 1, and of 2 and 3. Sums that fit 16 bits
 * are added so. */
static inline ALWAYS __m256i avx2_sums(int size, __m256i v[2][2])
{
    __m256i ones = _mm256_set1_epi16(1), sums;
    if (size == SMALL)
        sums = _mm256_madd_epi16(_mm256_hadd_epi16(_mm256_hadd_epi16(v[0][0], v[0][1]), _mm256_hadd_epi16(v[1][0], v[1][1])), ones);
    else if (size == MEDIUM)
        sums = _mm256_hadd_epi32(_mm256_madd_epi16(_mm256_hadd_epi16(v[0][0], v[0][1]), ones),
                                 _mm256_madd_epi16(_mm256_hadd_epi16(v[1][0], v[1][1]), ones));
    else
        sums = _mm256_hadd_epi32(_mm256_hadd_epi32(v[0][0], v[0][1]), _mm256_hadd_epi32(v[1][0], v[1][1]));
    return _mm256_permutevar8x32_epi32(sums, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

/* Whole numbers of blocks, times the scales of their inputs and of their weights. */
static inline ALWAYS __m256 avx2_value(__m256i sums, __m256 of_inputs, __m256 of_weights)
{
    __m256 value = _mm256_mul_ps(_mm256_cvtepi32_ps(sums), _mm256_mul_ps(of_inputs, of_weights));
    SETTLE(value);
    return value;
}

/* R rows of x, two outputs whose groups are `at`: columns of sums go on from those `kept`. `scales`: of both outputs, then
 * least values or second scales; of blocks that begin with them they are read there. */
#define ROWS_OF(FORMAT, format, BYTES, PER, KIND, SIZE, R)                                                                     \
    static void avx2_few_##format##R(const DynamicInputs *x, int64_t x_row, const uint8_t *const at[2], int64_t groups,\
                                     const float *const scales[4], __m256 *kept)                                       \
    {                                                                                                                  \
        __m256 all[R];                                                                                                 \
        UNROLLED for (int r = 0; r < R; r++)                                                                           \
            all[r] = kept[r];                                                                                          \
        for (int64_t g = 0; g < groups; g++) {                                                                         \
            const uint8_t *own_at[2] = {at[0] + g / PER * BYTES, at[1] + g / PER * BYTES};                             \
            __m256i w[2][4];                                                                                           \
            UNROLLED for (int c = 0; c < 2; c++) {                                                                     \
                codes_avx2_##format(own_at[c], PER == 1 ? 0 : (int)(g % PER), w[c]);                                   \
                UNROLLED for (int i = 0; i < BYTES / PER; i += 64)                                                     \
                    FETCH_FAR(own_at[c] + AVX2_AHEAD + i);                                                             \
            }                                                                                                          \
            __m256 own, more;                                                                                          \
            if (AT_BEGIN(FORMAT)) {                                                                                      \
                own = avx2_halves_of(own_at[0], own_at[1], BYTES / 4);                                                 \
                more = KIND == LEAST ? avx2_halves_of(own_at[0] + 2, own_at[1] + 2, BYTES / 4) : own;                  \
            } else {                                                                                                   \
                own = avx2_both(scales[0] + 4 * g, scales[1] + 4 * g);                                                 \
                more = KIND == BIASED ? own : avx2_both(scales[2] + 4 * g, scales[3] + 4 * g);                         \
            }                                                                                                          \
            UNROLLED for (int r = 0; r < R; r++) {                                                                     \
                const DynamicInputs *in = x + r * x_row + g;                                                           \
                __m256i first[2][2], second[2][2], less = avx2_twice(in->less);                                        \
                __m256 scale = (__m256)avx2_twice(in->scale), other = own, value;                                      \
                UNROLLED for (int p = 0; p < 2; p++)                                                                   \
                    UNROLLED for (int c = 0; c < 2; c++) {                                                             \
                        first[c][p] = avx2_products(SIZE, w[c][p], avx2_32((const uint8_t *)in->codes[0] + 32 * p));   \
                        second[c][p] = avx2_products(SIZE, w[c][2 + p], avx2_32((const uint8_t *)in->codes[1] + 32 * p)); \
                        if (KIND != TWO)                                                                               \
                            second[c][p] = SIZE == LARGE ? _mm256_add_epi32(first[c][p], second[c][p])                 \
                                                         : _mm256_add_epi16(first[c][p], second[c][p]);                \
                    }                                                                                                  \
                if (KIND == TWO) {                                                                                     \
                    __m256i part_less = avx2_twice(in->first_less);                                                    \
                    other = avx2_value(_mm256_add_epi32(avx2_sums(SIZE, first), part_less), scale, own);               \
                    less = _mm256_sub_epi32(less, part_less);                                                          \
                }                                                                                                      \
                __m256i sums = avx2_sums(SIZE, second);                                                                \
                if (KIND != LEAST && SIZE != LARGE)                                                                    \
                    sums = _mm256_add_epi32(sums, less);                                                               \
                value = avx2_value(sums, scale, KIND == TWO ? more : own);                                             \
                if (KIND == LEAST) {                                                                                   \
                    other = _mm256_mul_ps((__m256)avx2_twice(in->sum), more);                                          \
                    SETTLE(other);                                                                                     \
                }                                                                                                      \
                all[r] = _mm256_add_ps(all[r], KIND == BIASED ? value : _mm256_add_ps(value, other));                  \
            }                                                                                                          \
        }                                                                                                              \
        UNROLLED for (int r = 0; r < R; r++)                                                                           \
            kept[r] = all[r];                                                                                          \
    }
#define OF(FORMAT, format, B, P, K, S)                                                                                 \
    ROWS_OF(FORMAT, format, B, P, K, S, 1) ROWS_OF(FORMAT, format, B, P, K, S, 2) ROWS_OF(FORMAT, format, B, P, K, S, 4)
DYNAMIC_HERE(OF) DYNAMIC_LAID(OF) DYNAMIC_TURNS(OF)
#undef OF
#undef ROWS_OF

typedef struct {
    int64_t bytes, per; /* of so many groups */
    int size; /* of codes */
    void (*few[3])(const DynamicInputs *, int64_t, const uint8_t *const *, int64_t, const float *const *, __m256 *);
    Avx2Lay lay;
} Avx2Ways;
#define OF(FORMAT, format, B, P, K, S)                                                                                 \
    [FORMAT] = {B, P, S, {avx2_few_##format##1, avx2_few_##format##2, avx2_few_##format##4}, avx2_lay_##format},
static const Avx2Ways avx2_ways[FORMATS_END + 1] = {DYNAMIC_HERE(OF) DYNAMIC_LAID(OF) DYNAMIC_TURNS(OF)};
#undef OF

/* How what begins at group g of a row is computed; NULL: groups are nowhere in one piece. */
static const Avx2Ways *avx2_ways_of(const Linear *job, int64_t g)
{
    if (lies_by_inputs(job) || (job->format == PACKED4 && job->inputs % (2 * DYNAMIC_GROUP) != 0))
        return NULL;
    if (job->format == INT4_WORDS && job->zeros != NULL)
        return avx2_ways + GPTQ;
    return avx2_ways + (job->format == PACKED4 && g >= dynamic_groups(job->inputs) / 2 ? FORMATS_END : job->format);
}

/* How many bytes from the begin of an output's row group g begins. */
static int64_t avx2_at(const Linear *job, const Avx2Ways *ways, int64_t g)
{
    return (ways == avx2_ways + FORMATS_END ? g - dynamic_groups(job->inputs) / 2 : g) / ways->per * ways->bytes;
}

/* Sums of one row and outputs [n, n + wide), to where they belong. */
static void avx2_finish(const Linear *job, const float *sums, int64_t row, int64_t n, int64_t wide)
{
    if (job->narrow)
        avx2_narrow(sums, (uint16_t *)job->y + row * job->outputs + n, wide);
    else
        memcpy((float *)job->y + row * job->outputs + n, sums, (size_t)wide * sizeof *sums);
}

/* A run of groups of a row's `depth` inputs from k on that are computed alike: from group `first` on, which lies so many bytes
 * from the row's begin. Of the last group maybe not all is there, but `left` bytes. */
typedef struct {
    const Avx2Ways *ways;
    int64_t first, count, bytes;
    size_t left;
} Avx2Piece;

static int avx2_pieces(const Linear *job, int64_t k, int64_t depth, Avx2Piece pieces[3])
{
    int64_t groups = dynamic_groups(k + depth), whole = (k + depth) / DYNAMIC_GROUP, half = job->inputs / DYNAMIC_GROUP / 2, end;
    int count = 0;
    for (int64_t g = k / DYNAMIC_GROUP; g < groups; g = end, count++) {
        end = job->format == PACKED4 && g < half && half < whole ? half : g < whole ? whole : groups;
        const Avx2Ways *ways = avx2_ways_of(job, g);
        pieces[count] = (Avx2Piece){ways, g, end - g, avx2_at(job, ways, g),
                                    g < whole ? 0 : (size_t)((k + depth) % DYNAMIC_GROUP / DYNAMIC_BLOCK * ways->bytes / 4)};
    }
    return count;
}

/* Outputs [begin, end) of up to 8 rows. `room`: for scales of two rows, and least values or second scales. */
static void avx2_few(const Linear *job, int64_t begin, int64_t end, float *room)
{
    Avx2Piece pieces[3];
    int count = avx2_pieces(job, 0, job->inputs, pieces);
    uint8_t last[2][DYNAMIC_GROUP + 8] = {{0}};
    int64_t groups = dynamic_groups(job->inputs), blocks = 4 * groups;
    for (int64_t n = begin, wide; n < end; n += wide) {
        wide = end - n < 2 ? 1 : 2;
        for (int i = 0; i < 2 && !AT_BEGIN(job->format); i++) {
            Coded row = coded_row(job, n + (i < wide ? i : 0));
            avx2_scales(job, &row, 0, job->inputs / DYNAMIC_BLOCK, room + i * blocks, room + (2 + i) * blocks);
        }
        for (int64_t r = 0, step; r < job->rows; r += step) {
            int way = job->rows - r >= 4 ? 2 : job->rows - r >= 2 ? 1 : 0;
            const DynamicInputs *x = (const DynamicInputs *)job->packed + r * groups;
            __m256 kept[4] = {{0}, {0}, {0}, {0}};
            step = 1 << way;
            for (const Avx2Piece *piece = pieces; piece < pieces + count; piece++) {
                const uint8_t *at[2];
                const float *scales[4];
                for (int i = 0; i < 2; i++) {
                    at[i] = (const uint8_t *)job->w + (n + (i < wide ? i : 0)) * job->w_row + piece->bytes;
                    if (piece->left)
                        at[i] = memcpy(last[i], at[i], piece->left);
                }
                for (int i = 0; i < 4; i++)
                    scales[i] = room + i * blocks + 4 * piece->first;
                piece->ways->few[way](x + piece->first, groups, at, piece->count, scales, kept);
            }
            for (int64_t i = 0; i < step; i++) {
                float sums[8], two[2];
                _mm256_storeu_ps(sums, kept[i]);
                for (int c = 0; c < 2; c++)
                    two[c] = ((sums[4 * c] + sums[4 * c + 1]) + sums[4 * c + 2]) + sums[4 * c + 3];
                avx2_finish(job, two, r + i, n, wide);
            }
        }
    }
}

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
                if (ways != NULL && blocks == 4)
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

/* Outputs [begin, end) of all rows; 0: there is no memory for it. */
static int dynamic_avx2(const Linear *job, int64_t begin, int64_t end)
{
    int64_t groups = dynamic_groups(job->inputs), blocks = 4 * groups;
    const Avx2Ways *ways = avx2_ways_of(job, 0);
    int few = ways != NULL && job->rows <= AVX2_FEW;
    int64_t codes = few ? 0 : blocks * DYNAMIC_BLOCK * AVX2_WIDE;
    float *room = aligned_alloc(64, (size_t)(codes + blocks * (4 + 2 * AVX2_WIDE) * (int64_t)sizeof(float)));
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

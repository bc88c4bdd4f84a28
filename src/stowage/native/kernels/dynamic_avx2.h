/* Products of inputs that were rounded to 8 bits (dynamic.h) with AVX2, which multiplies bytes in pairs.
 *
 * Of few rows two groups of four blocks at once, of one output or of two, whose 8 sums fill a register. Of many see
 * dynamic_avx2_tiles.h.
 */
/* Inputs of 8 bits are not multiplied with these, but with AVX2 their numbers are made alike. */
#define AVX2_NUMBERS_ALONE(OF)                                                                                         \
    OF(IQ4_NL, iq4_nl, 4 * bytes_iq4_nl, 1, BIASED, LARGE)                                                             \
    OF(IQ4_XS, iq4_xs, bytes_iq4_xs, 2, BIASED, LARGE)                                                                 \
    OF(NVFP4, nvfp4, 64, 1, TWO, SIGNED)                                                                               \
    OF(S8, s8, 128, 1, BIASED, SIGNED)                                                                                 \
    OF(U8, u8, 128, 1, BIASED, SIGNED)
#define AVX2_SIGNED(OF)                                                                                                \
    OF(Q3_K, q3_k, bytes_q3_k, 2, TWO, SIGNED)                                                                         \
    OF(IQ2_XXS, iq2_xxs, bytes_iq2_xxs, 2, TWO, SIGNED)                                                                \
    OF(IQ2_XS, iq2_xs, bytes_iq2_xs, 2, TWO, SIGNED)                                                                   \
    OF(IQ2_S, iq2_s, bytes_iq2_s, 2, TWO, SIGNED)                                                                      \
    OF(IQ3_XXS, iq3_xxs, bytes_iq3_xxs, 2, TWO, SIGNED)                                                                \
    OF(IQ3_S, iq3_s, bytes_iq3_s, 2, TWO, SIGNED)                                                                      \
    OF(IQ1_S, iq1_s, bytes_iq1_s, 2, TWO, SIGNED)                                                                      \
    OF(IQ1_M, iq1_m, bytes_iq1_m, 2, TWO, SIGNED)                                                                      \
    OF(TQ1_0, tq1_0, bytes_tq1_0, 2, TWO, SIGNED)                                                                      \
    OF(TQ2_0, tq2_0, bytes_tq2_0, 2, TWO, SIGNED)                                                                      \
    OF(Q1_0, q1_0, bytes_q1_0, 2, TWO, SIGNED)
enum { AVX2_FEW = 8, AVX2_WIDE = 16, AVX2_TILE = 4, AVX2_AHEAD = 4096, AVX2_FEW_WIDE = 64,
       AVX2_BYTES = DYNAMIC_GROUP + 8 }; /* of a group at most */

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

/* Of each of two groups what is there for its four blocks; both are the same group's, of two outputs, if `alike`. */
#define OF_INPUTS(WHAT) (alike ? (__m256)avx2_twice(x[0]->WHAT) : avx2_both((const float *)x[0]->WHAT, (const float *)x[1]->WHAT))

/* What the blocks of two groups add, whose scales are `own`, and `more` their least values or second scales. */
static inline ALWAYS __m256 avx2_of_groups(DynamicKind kind, int size, int alike, const __m256i codes[2][4],
                                           const DynamicInputs *const x[2], __m256 own, __m256 more)
{
    __m256i first[2][2], second[2][2], less = (__m256i)OF_INPUTS(less);
    __m256 scale = OF_INPUTS(scale), other = own;
    UNROLLED for (int p = 0; p < 2; p++)
        UNROLLED for (int c = 0; c < 2; c++) {
            first[c][p] = avx2_products(size, codes[c][p], avx2_32((const uint8_t *)x[c]->codes[0] + 32 * p));
            second[c][p] = avx2_products(size, codes[c][2 + p], avx2_32((const uint8_t *)x[c]->codes[1] + 32 * p));
            if (kind != TWO)
                second[c][p] = size == LARGE ? _mm256_add_epi32(first[c][p], second[c][p])
                                             : _mm256_add_epi16(first[c][p], second[c][p]);
        }
    if (kind == TWO) {
        __m256i part_less = (__m256i)OF_INPUTS(first_less);
        other = avx2_value(_mm256_add_epi32(avx2_sums(size, first), part_less), scale, own);
        less = _mm256_sub_epi32(less, part_less);
    }
    __m256i sums = avx2_sums(size, second);
    if (kind != LEAST && size != LARGE)
        sums = _mm256_add_epi32(sums, less);
    __m256 value = avx2_value(sums, scale, kind == TWO ? more : own);
    if (kind == LEAST) {
        other = _mm256_mul_ps(OF_INPUTS(sum), more);
        SETTLE(other);
    }
    return kind == BIASED ? value : _mm256_add_ps(value, other);
}
#undef OF_INPUTS

/* Scales of two groups of a format whose blocks begin with them, and least values, of blocks that are `there`: others may be no
 * numbers. */
static inline ALWAYS void avx2_scales_at(int kind, const uint8_t *const at[2], int apart, __m256 there, __m256 *own, __m256 *more)
{
    *own = *more = _mm256_and_ps(avx2_halves_of(at[0], at[1], apart), there);
    if (kind == LEAST)
        *more = _mm256_and_ps(avx2_halves_of(at[0] + 2, at[1] + 2, apart), there);
}

/* R rows of x, two outputs whose groups are `at`: columns of sums go on from those `kept`. `scales`: of both outputs, then
 * least values or second scales, where blocks do not begin with them. `there[1]` is for the last group, `there[0]` for others. */
#define ROWS_OF(FORMAT, format, BYTES, PER, KIND, SIZE, R)                                                             \
    static void avx2_few_##format##R(const DynamicInputs *x, int64_t x_row, const uint8_t *const at[2], int64_t groups,\
                                     float *const scales[4], const __m256 *there UNUSED, __m256 *kept)                 \
    {                                                                                                                  \
        __m256 all[R], own, more;                                                                                      \
        UNROLLED for (int r = 0; r < R; r++)                                                                           \
            all[r] = kept[r];                                                                                          \
        for (int64_t g = 0; g < groups; g++) {                                                                         \
            const uint8_t *own_at[2] = {at[0] + g / PER * BYTES, at[1] + g / PER * BYTES};                             \
            __m256i codes[2][4];                                                                                       \
            UNROLLED for (int c = 0; c < 2; c++) {                                                                     \
                codes_avx2_##format(own_at[c], PER == 1 ? 0 : (int)(g % PER), codes[c]);                               \
                UNROLLED for (int i = 0; i < BYTES / PER; i += 64)                                                     \
                    FETCH_FAR(own_at[c] + AVX2_AHEAD + i);                                                             \
            }                                                                                                          \
            if (AT_BEGIN(FORMAT))                                                                                      \
                avx2_scales_at(KIND, own_at, BYTES / 4, there[g + 1 == groups], &own, &more);                          \
            else {                                                                                                     \
                own = avx2_both(scales[0] + 4 * g, scales[1] + 4 * g);                                                 \
                more = KIND == BIASED ? own : avx2_both(scales[2] + 4 * g, scales[3] + 4 * g);                         \
            }                                                                                                          \
            UNROLLED for (int r = 0; r < R; r++) {                                                                     \
                const DynamicInputs *const in[2] = {x + r * x_row + g, x + r * x_row + g};                             \
                all[r] = _mm256_add_ps(all[r], avx2_of_groups(KIND, SIZE, 1, codes, in, own, more));                   \
            }                                                                                                          \
        }                                                                                                              \
        UNROLLED for (int r = 0; r < R; r++)                                                                           \
            kept[r] = all[r];                                                                                          \
    }
/* The same of one row: two groups of an output at once, the other output's then, and what is left of both last. So memory is read
 * in its order, which is half as quick again. Scales of blocks of 256 inputs come here: a pass over the blocks before waits for
 * memory. `there[2]`: of the last two groups. */
#define ONE_OF(FORMAT, format, BYTES, PER, KIND, SIZE)                                                                 \
    static void avx2_one_##format(const DynamicInputs *x, int64_t x_row, const uint8_t *const at[2], int64_t groups,    \
                                  float *const scales[4], const __m256 *there, __m256 *kept)                            \
    {                                                                                                                  \
        __m128 all[2] = {_mm256_castps256_ps128(*kept), _mm256_extractf128_ps(*kept, 1)};                              \
        __m256i codes[2][4];                                                                                           \
        __m256 own, more, value;                                                                                       \
        UNROLLED for (int o = 0; o < 2; o++)                                                                           \
            for (int64_t g = 0; g + 2 <= groups; g += 2) {                                                             \
                const uint8_t *own_at[2] = {at[o] + g / PER * BYTES, at[o] + (PER == 1 ? g + 1 : g / PER) * BYTES};    \
                const DynamicInputs *const in[2] = {x + g, x + g + 1};                                                 \
                UNROLLED for (int c = 0; c < 2; c++) {                                                                 \
                    codes_avx2_##format(own_at[c], PER == 1 ? 0 : c, codes[c]);                                        \
                    UNROLLED for (int i = 0; i < BYTES / PER; i += 64)                                                 \
                        FETCH_FAR(own_at[0] + AVX2_AHEAD + c * (BYTES / PER) + i);                                     \
                }                                                                                                      \
                if (AT_BEGIN(FORMAT))                                                                                  \
                    avx2_scales_at(KIND, own_at, BYTES / 4, there[g + 2 == groups ? 2 : 0], &own, &more);              \
                else {                                                                                                 \
                    if (avx2_has_super_scales(FORMAT))                                                                 \
                        avx2_scales_super(FORMAT, own_at[0], 8, 1, scales[o] + 4 * g, scales[2 + o] + 4 * g);          \
                    own = _mm256_loadu_ps(scales[o] + 4 * g);                                                          \
                    more = KIND == BIASED ? own : _mm256_loadu_ps(scales[2 + o] + 4 * g);                              \
                }                                                                                                      \
                value = avx2_of_groups(KIND, SIZE, 0, codes, in, own, more);                                           \
                all[o] = _mm_add_ps(all[o], _mm256_castps256_ps128(value));                                            \
                all[o] = _mm_add_ps(all[o], _mm256_extractf128_ps(value, 1));                                          \
            }                                                                                                          \
        *kept = _mm256_set_m128(all[1], all[0]);                                                                       \
        if (groups % 2 == 1) {                                                                                         \
            int64_t g = groups - 1;                                                                                    \
            const uint8_t *last[2] = {at[0] + g / PER * BYTES, at[1] + g / PER * BYTES};                               \
            float *own_scales[4] = {scales[0] + 4 * g, scales[1] + 4 * g, scales[2] + 4 * g, scales[3] + 4 * g};       \
            avx2_few_##format##1(x + g, x_row, last, 1, own_scales, there, kept);                                      \
        }                                                                                                              \
    }
#define OF(FORMAT, format, B, P, K, S)                                                                                 \
    ROWS_OF(FORMAT, format, B, P, K, S, 1) ROWS_OF(FORMAT, format, B, P, K, S, 2) ROWS_OF(FORMAT, format, B, P, K, S, 4) \
    ONE_OF(FORMAT, format, B, P, K, S)
DYNAMIC_HERE(OF) DYNAMIC_LAID(OF) DYNAMIC_TURNS(OF)
#undef OF
#undef ROWS_OF
#undef ONE_OF

typedef struct {
    int64_t bytes, per; /* of so many groups */
    DynamicKind kind;
    int size; /* of codes */
    void (*few[3])(const DynamicInputs *, int64_t, const uint8_t *const *, int64_t, float *const *, const __m256 *, __m256 *);
    Avx2Lay lay;
} Avx2Ways;
#define OF(FORMAT, format, B, P, K, S)                                                                                 \
    [FORMAT] = {B, P, K, S, {avx2_one_##format, avx2_few_##format##2, avx2_few_##format##4}, avx2_lay_##format},
#define ONLY_NUMBERS(FORMAT, format, B, P, K, S) [FORMAT] = {.bytes = B, .per = P, .kind = K, .size = S},
static const Avx2Ways avx2_ways[FORMATS_END + 1] = {DYNAMIC_HERE(OF) DYNAMIC_LAID(OF) DYNAMIC_TURNS(OF)
                                                AVX2_NUMBERS_ALONE(ONLY_NUMBERS) AVX2_SIGNED(ONLY_NUMBERS)};
#undef ONLY_NUMBERS
#undef OF

/* Whether a group of PACKED4 is in low halves of bytes and in high ones. */
static int avx2_is_mixed(const Linear *job, int64_t g)
{
    int64_t half = job->inputs / 2;
    return job->format == PACKED4 && g * DYNAMIC_GROUP < half && half < (g + 1) * DYNAMIC_GROUP;
}

/* How what begins at group g of a row is computed; NULL: groups are nowhere in one piece. */
static const Avx2Ways *avx2_ways_of(const Linear *job, int64_t g)
{
    if (lies_by_inputs(job))
        return NULL;
    if (job->format == INT4_WORDS && job->zeros != NULL)
        return avx2_ways + GPTQ;
    return avx2_ways + (job->format == PACKED4 && 2 * g * DYNAMIC_GROUP >= job->inputs ? FORMATS_END : job->format);
}

/* How many bytes from the begin of an output's row group g begins. */
static int64_t avx2_at(const Linear *job, const Avx2Ways *ways, int64_t g)
{
    return ways == avx2_ways + FORMATS_END ? g * DYNAMIC_GROUP - job->inputs / 2 : g / ways->per * ways->bytes;
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

static int avx2_pieces(const Linear *job, int64_t k, int64_t depth, Avx2Piece pieces[4])
{
    int64_t groups = dynamic_groups(k + depth), whole = (k + depth) / DYNAMIC_GROUP, half = job->inputs / 2 / DYNAMIC_GROUP, end;
    int count = 0;
    for (int64_t g = k / DYNAMIC_GROUP; g < groups; g = end, count++) {
        if (avx2_is_mixed(job, g))
            end = g + 1;
        else if (job->format == PACKED4 && g < half && half < whole)
            end = half;
        else
            end = g < whole ? whole : groups;
        const Avx2Ways *ways = avx2_ways_of(job, g);
        pieces[count] = (Avx2Piece){ways, g, end - g, avx2_at(job, ways, g),
                                    g < whole ? 0 : (size_t)((k + depth) % DYNAMIC_GROUP / DYNAMIC_BLOCK * ways->bytes / 4)};
    }
    return count;
}

/* Where a piece of output n lies: in `room`, with zeros behind it, if it is mixed, or not all there and so to be `copied`. */
static const uint8_t *avx2_brought(const Linear *job, const Avx2Piece *piece, int64_t n, int copied, uint8_t room[AVX2_BYTES])
{
    const uint8_t *row = (const uint8_t *)job->w + n * job->w_row;
    int64_t k = piece->first * DYNAMIC_GROUP, half = job->inputs / 2;
    int mixed = avx2_is_mixed(job, piece->first);
    if (!mixed && !(piece->left && copied))
        return row + piece->bytes;
    memset(room, 0, AVX2_BYTES);
    if (!mixed)
        return memcpy(room, row + piece->bytes, piece->left);
    for (int64_t i = k; i < k + DYNAMIC_GROUP && i < job->inputs; i += 16) { /* of which half is a multiple */
        __m128i v = _mm_loadu_si128((const __m128i *)(row + (i < half ? i : i - half)));
        _mm_storeu_si128((__m128i *)(room + i - k), i < half ? v : _mm_srli_epi16(v, 4)); /* low halves alone are looked at */
    }
    return room;
}

/* A piece of outputs, one `row` bytes behind the other. */
typedef struct {
    const uint8_t *at;
    int64_t row, groups;
} Avx2Outputs;

/* That of outputs [n, n + wide): where it is not to be copied it is read where it lies, and codes of what follows may be read,
 * which zeros are multiplied with. */
static Avx2Outputs avx2_outputs(const Linear *job, const Avx2Piece *piece, int64_t n, int64_t wide,
                                uint8_t room[AVX2_FEW_WIDE][AVX2_BYTES])
{
    int copied = (job->outputs - n - wide) * job->w_row < piece->ways->bytes;
    if (!avx2_is_mixed(job, piece->first) && !(copied && piece->left))
        return (Avx2Outputs){(const uint8_t *)job->w + n * job->w_row + piece->bytes, job->w_row, piece->count};
    for (int64_t i = 0; i < wide; i++)
        avx2_brought(job, piece, n + i, copied, room[i]);
    return (Avx2Outputs){room[0], AVX2_BYTES, piece->count};
}

/* Columns of sums of pairs of outputs, `step` rows of each: of row r, `to`. */
static void avx2_totals(const __m256 *kept, int64_t step, int64_t pairs, float *to)
{
    for (int64_t p = 0; p < pairs; p += 4, to += 8) {
        __m256i v[4];
        UNROLLED for (int i = 0; i < 4; i++)
            v[i] = (__m256i)kept[(p + i < pairs ? p + i : p) * step];
        avx2_transpose_fours(v);
        __m256 sums = (__m256)v[0];
        UNROLLED for (int i = 1; i < 4; i++)
            sums = _mm256_add_ps(sums, (__m256)v[i]);
        _mm256_storeu_ps(to, _mm256_permutevar8x32_ps(sums, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
    }
}

/* How many outputs at a time: their scales stay in the first cache. */
static inline int64_t avx2_few_wide(int64_t blocks)
{
    int64_t wide = 512 / blocks / 2 * 2;
    return wide < 2 ? 2 : wide < AVX2_FEW_WIDE ? wide : AVX2_FEW_WIDE;
}

/* Outputs [begin, end) of a few rows. `room`: scales of some outputs, and least values or second scales of each behind them. */
static void avx2_few(const Linear *job, int64_t begin, int64_t end, float *room)
{
    Avx2Piece pieces[4];
    int count = avx2_pieces(job, 0, job->inputs, pieces);
    int scaled = AT_BEGIN(job->format) || (job->rows == 1 && avx2_has_super_scales(job->format)); /* scales come with products */
    uint8_t brought[AVX2_FEW_WIDE][AVX2_BYTES];
    __m256 kept[AVX2_FEW_WIDE / 2 * AVX2_TILE];
    int64_t groups = dynamic_groups(job->inputs), blocks = 4 * groups, left = job->inputs % DYNAMIC_GROUP / DYNAMIC_BLOCK;
    int64_t most = !scaled && avx2_has_super_scales(job->format) ? 2 : avx2_few_wide(blocks);
    __m256 all = (__m256)_mm256_set1_epi32(-1), some;
    some = (__m256)_mm256_cmpgt_epi32(_mm256_set1_epi32((int)left), _mm256_setr_epi32(0, 1, 2, 3, 0, 1, 2, 3));
    __m256 there[2][3] = {{all, all, all}, {all, some, _mm256_blend_ps(all, some, 0xf0)}}; /* of whole groups, and if one is not */
    const Avx2Piece *last = pieces + count - 1;
    int joins = count > 1 && left > 0 && last->ways == last[-1].ways && !avx2_is_mixed(job, last->first) &&
                !avx2_is_mixed(job, last[-1].first);
    for (int64_t n = begin, wide; n < end; n += wide) {
        float sums[AVX2_FEW_WIDE];
        wide = end - n < most ? end - n : most;
        int joined = joins && (job->outputs - n - wide) * job->w_row >= last->ways->bytes; /* the last two pieces are one */
        for (int64_t i = 0; !scaled && i < wide; i++) {
            Coded row = coded_row(job, n + i);
            avx2_scales(job, &row, 0, job->inputs / DYNAMIC_BLOCK, room + 2 * i * blocks, room + (2 * i + 1) * blocks);
        }
        for (int64_t r = 0, step; r < job->rows; r += step) {
            const DynamicInputs *x = (const DynamicInputs *)job->packed + r * groups;
            step = job->rows - r >= 4 ? 4 : job->rows - r >= 2 ? 2 : 1;
            memset(kept, 0, sizeof *kept * (size_t)(step * ((wide + 1) / 2)));
            for (const Avx2Piece *piece = pieces; piece <= last - joined; piece++) {
                Avx2Outputs w = avx2_outputs(job, piece, n, wide, brought);
                int more = joined && piece + 1 == last;
                for (int64_t i = 0; i < wide; i += 2) {
                    int64_t next = i + 1 < wide ? 1 : 0; /* else the same twice */
                    const uint8_t *at[2] = {w.at + i * w.row, w.at + (i + next) * w.row};
                    float *own = room + 2 * i * blocks + 4 * piece->first, *other = own + 2 * next * blocks;
                    float *scales[4] = {own, other, own + blocks, other + blocks};
                    piece->ways->few[step / 2](x + piece->first, groups, at, w.groups + more, scales, there[more || piece->left],
                                               kept + i / 2 * step);
                }
            }
            for (int64_t i = 0; i < step; i++) {
                avx2_totals(kept + i, step, (wide + 1) / 2, sums);
                avx2_finish(job, sums, r + i, n, wide);
            }
        }
    }
}

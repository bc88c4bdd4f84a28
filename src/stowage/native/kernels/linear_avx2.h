/* How matrices of numbers_avx2.h and blocks_avx2.h are multiplied with a few rows, and made numbers for more. */

static inline int avx2_are_floats(int format)
{
    return format == FP8 || format == F16;
}

/* Whether numbers are rounded to bfloat16: those of MXFP4 are short enough. */
static inline int avx2_rounds(const Linear *job)
{
    return job->form != FLOAT32 && job->format != MXFP4 && job->format != MXFP4_BLOCK;
}

/* Whether they are computed so, and not one after the other. */
static int avx2_has_numbers(const Linear *job)
{
    return avx2_ways_of(job, 0) != NULL && (avx2_codes_of[job->format] != NULL || avx2_are_floats(job->format));
}

/* Eight scales, or zero points, of which `count` are there. */
static inline ALWAYS __m256i avx2_eight_of(const uint8_t *from, int bytes, int64_t count)
{
    uint8_t room[32] = {0};
    if (count < 8)
        from = memcpy(room, from, (size_t)(count * bytes));
    return bytes == 4 ? avx2_32(from) : _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)from));
}

/* Whether `avx2_ready_words` takes these, of groups of 1, 2 or 4 blocks. */
static inline int avx2_has_few_scales(const Coded *row, int64_t k)
{
    return (row->group == 32 || row->group == 64 || row->group == 128) && k % row->group == 0 && row->kind != SCALES_E8M0;
}

/* As `avx2_ready`. */
static int avx2_ready_words(const Coded *row, int64_t k, int64_t blocks, float larger, float *scales, float *more)
{
    int64_t alike = row->group / DYNAMIC_BLOCK, first = k / DYNAMIC_BLOCK / alike, groups = (blocks + alike - 1) / alike;
    int bytes = scale_bytes[row->kind];
    __m256i which = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), zero = _mm256_set1_epi32(8);
    __m256 odd = _mm256_setzero_ps(), none = odd, sign = _mm256_set1_ps(-0.0f);
    for (int64_t g = 0; g < groups; g += 8) {
        int64_t count = groups < 8 ? groups : 8;
        g = g <= groups - count ? g : groups - count; /* some of the last eight again */
        __m256i v = avx2_eight_of(row->scales + (first + g) * bytes, bytes, count);
        __m256 scale = avx2_floats_of(row->kind, v), own = _mm256_andnot_ps(sign, scale);
        if (row->zeros != NULL) {
            zero = _mm256_srli_epi32(avx2_eight_of(row->zeros + 4 * (first + g), 4, count), row->zero_shift);
            zero = _mm256_and_si256(zero, _mm256_set1_epi32(15));
        }
        odd = _mm256_or_ps(odd, _mm256_cmp_ps(own, _mm256_set1_ps(0x1p79f), _CMP_NLT_UQ));
        odd = _mm256_or_ps(odd, _mm256_and_ps(_mm256_cmp_ps(own, _mm256_set1_ps(0x1p-120f), _CMP_NGT_UQ),
                                              _mm256_cmp_ps(own, none, _CMP_NEQ_UQ)));
        scale = _mm256_mul_ps(scale, _mm256_set1_ps(larger));
        for (int64_t i = 0; i < alike; i++) { /* each as often as it has blocks */
            __m256i from = _mm256_srl_epi32(_mm256_add_epi32(which, _mm256_set1_epi32(8 * (int)i)), _mm_cvtsi32_si128((int)alike / 2));
            _mm256_storeu_ps(scales + g * alike + 8 * i, _mm256_permutevar8x32_ps(scale, from));
            _mm256_storeu_si256((__m256i *)(more + g * alike + 8 * i), _mm256_permutevar8x32_epi32(zero, from));
        }
    }
    for (int64_t b = blocks; b % 4; b++) /* of no inputs */
        scales[b] = 0, more[b] = float_of(8);
    return _mm256_testz_ps(odd, odd);
}

/* Of an output's blocks from input k on: scales, and beside them what is added, or second scales, or zero points (which
 * are whole numbers); of numbers that are `rounded` for `avx2_nearest_half`. 0: not all are below 2^79, or numbers may be below
 * the normal ones, which are not rounded as they are. */
static int avx2_ready(const Linear *job, const Coded *row, int64_t k, int64_t blocks, int rounded, float *scales, float *more)
{
    if (job->format == INT4_WORDS && avx2_has_few_scales(row, k))
        return avx2_ready_words(row, k, blocks, rounded ? AVX2_LARGER : 1, scales, more);
    if (avx2_has_super_scales(job->format))
        return avx2_scales_super(job->format, dynamic_block(job->format, row, k), blocks, rounded ? AVX2_LARGER : 1, scales, more);
    int words = job->format == INT4_WORDS, biased = words || avx2_ways[job->format].kind == BIASED;
    __m256 sign = _mm256_set1_ps(-0.0f), most = _mm256_set1_ps(0x1p79f), odd = _mm256_setzero_ps(), none = odd;
    __m256 larger = _mm256_set1_ps(rounded ? AVX2_LARGER : 1);
    __m256i zero = _mm256_set1_epi32(8);
    __m256 least = _mm256_set1_ps((avx2_has_scales_apart(job->format) && job->format != PACKED4) || job->format == NVFP4 ? 0x1p-120f : 0);
    avx2_scales(job, row, k, blocks, scales, more);
    for (int64_t b = blocks; b % 8; b++)
        scales[b] = more[b] = 0;
    for (int64_t b = 0; b < blocks; b += 8) {
        __m256 scale = _mm256_loadu_ps(scales + b), other = _mm256_loadu_ps(more + b), own = _mm256_andnot_ps(sign, scale);
        for (int i = 0; i < (biased ? 1 : 2); i++) {
            __m256 size = i ? _mm256_andnot_ps(sign, other) : own;
            odd = _mm256_or_ps(odd, _mm256_cmp_ps(size, most, _CMP_NLT_UQ));
            odd = _mm256_or_ps(odd, _mm256_and_ps(_mm256_cmp_ps(size, least, _CMP_LE_OQ), _mm256_cmp_ps(size, none, _CMP_NEQ_UQ)));
        }
        scale = _mm256_mul_ps(scale, larger);
        _mm256_storeu_ps(scales + b, scale);
        _mm256_storeu_ps(more + b, words ? (__m256)zero : _mm256_mul_ps(other, larger));
    }
    for (int64_t b = 0, group = k / row->group, end; words && row->zeros != NULL && b < blocks; group++) {
        end = (group + 1) * row->group - k;
        for (uint32_t own = (uint32_t)zero_of(row, group); b < blocks && b * DYNAMIC_BLOCK < end; b++)
            more[b] = float_of(own);
    }
    return _mm256_testz_ps(odd, odd);
}

/* Lays out floats of 16 bits, or of 8 (e4m3); scales of floats that are `rounded` for
 * `avx2_nearest_half`. 0: not all are usual numbers. */
static int avx2_lay_floats(const Linear *job, const Coded *row, int64_t k, int64_t blocks, int rounded, int i, Avx2Laid *to)
{
    int bytes = job->format == FP8;
    const uint8_t *at = row->w + (bytes ? k : 2 * k);
    __m256i none = _mm256_setzero_si256(), all = _mm256_set1_epi16(0x7c00);
    __m256i *halves = (__m256i *)to->of[i].halves;
    float larger = (rounded ? AVX2_LARGER : 1) * (bytes ? 256.0f : 1.0f), own = 1;
    for (int64_t b = 0, end = 0; b < blocks; b++) {
        if (bytes && b * DYNAMIC_BLOCK >= end) {
            end = (k + b * DYNAMIC_BLOCK) / row->group;
            own = scale_of(row, end);
            end = (end + 1) * row->group - k;
            if (!(own == 0 || (fabsf(own) < 0x1p80f && fabsf(own) > 0x1p-100f)))
                return 0;
        }
        to->scales[i][b] = own * larger;
        FETCH_FAR(at + AVX2_AHEAD);
        UNROLLED for (int part = 0; part < 2; part++, halves++, at += bytes ? 16 : 32) {
            __m256i odd, v = bytes ? avx2_halves_of_e4m3(at, &odd) : avx2_32(at);
            if (!bytes)
                odd = _mm256_cmpeq_epi16(_mm256_and_si256(v, all), all);
            none = _mm256_or_si256(none, odd);
            _mm256_storeu_si256(halves, v);
        }
    }
    return _mm256_testz_si256(none, none);
}

/* How numbers of a matrix are made. */
static const Avx2Numbers *avx2_numbers(const Linear *job)
{
    DynamicKind kind = job->format == INT4_WORDS ? BIASED : avx2_ways[job->format].kind;
    return avx2_numbers_of + 2 * kind + avx2_rounds(job);
}

/* Inputs from k on, and the pieces of their groups. */
typedef struct {
    int64_t k, blocks;
    int count;
    Avx2Piece pieces[4];
} Avx2Pieces;

static inline ALWAYS Avx2Pieces avx2_pieces_from(const Linear *job, int64_t k, int64_t blocks)
{
    Avx2Pieces found;
    found.k = k, found.blocks = blocks, found.count = 0;
    if (avx2_are_floats(job->format))
        return found;
    if (job->format == PACKED4 || blocks % 4 != 0)
        found.count = avx2_pieces(job, k, blocks * DYNAMIC_BLOCK, found.pieces);
    else {
        int64_t first = k / DYNAMIC_GROUP;
        const Avx2Ways *ways = avx2_ways_of(job, first);
        found.count = 1;
        found.pieces[0] = (Avx2Piece){ways, first, blocks / 4, avx2_at(job, ways, first), 0};
    }
    return found;
}

/* Lays them out of output n, as output i of those laid out. 0: see `avx2_ready`. */
static int avx2_lay_codes(const Linear *job, int64_t n, const Avx2Pieces *from, int i, Avx2Laid *to)
{
    Coded row = coded_row(job, n);
    uint8_t room[AVX2_BYTES];
    int rounded = avx2_rounds(job);
    if (avx2_are_floats(job->format))
        return avx2_lay_floats(job, &row, from->k, from->blocks, rounded, i, to);
    if (!avx2_ready(job, &row, from->k, from->blocks, rounded, to->scales[i], to->more[i]))
        return 0;
    for (const Avx2Piece *piece = from->pieces; piece < from->pieces + from->count; piece++) {
        int64_t first = piece->first - from->k / DYNAMIC_GROUP;
        int format = piece->ways == avx2_ways + FORMATS_END ? FORMATS_END : job->format;
        avx2_codes_of[format](avx2_brought(job, piece, n, 1, room), piece->count, to->more[i] + 4 * first,
                              to->of[i].codes + first * DYNAMIC_GROUP);
    }
    return 1;
}

/* As `decode` of at most DEPTH inputs, where their codes are whole numbers, or short floats: how many were done. */
static int64_t avx2_decode_whole(const Linear *job, int64_t n, int64_t k, int64_t end, float *to)
{
    Coded row = coded_row(job, n);
    int64_t blocks = (end - k) / DYNAMIC_BLOCK;
    Avx2Laid laid;
    const Avx2BlockWays *ways = job->form == FLOAT32 ? NULL : avx2_blocks_of(job, 1);
    if (ways != NULL && ways->fill != NULL)
        return ways->fill(row.w + k / DYNAMIC_BLOCK * ways->bytes, blocks, to) ? 0 : blocks * DYNAMIC_BLOCK;
    if (!avx2_has_numbers(job))
        return 0;
    Avx2Pieces from = avx2_pieces_from(job, k, blocks);
    if (!avx2_lay_codes(job, n, &from, 0, &laid))
        return 0;
    avx2_numbers(job)->fill(&laid, blocks, to);
    return blocks * DYNAMIC_BLOCK;
}

/* Whether `avx2_dots` may multiply it with so many rows. Of more rows numbers are made once and read again. */
static int avx2_has_dots(const Linear *job, int64_t rows)
{
    return rows <= AVX2_ROWS && avx2_has_numbers(job);
}

/* Inputs from k on, of at most DEPTH, of a few rows times the outputs n and n + wide - 1 in a block format; see linear.h for the
 * order of sums. 0: it is not for these. */
static int avx2_dots(const Linear *job, int64_t row, int64_t rows, int64_t n, int64_t wide, int64_t k)
{
    Avx2Laid laid;
    __m256 kept[2 * AVX2_ROWS];
    int64_t depth = job->inputs - k < DEPTH ? job->inputs - k : DEPTH;
    if (depth % DYNAMIC_BLOCK != 0)
        return 0;
    Avx2Pieces from = avx2_pieces_from(job, k, depth / DYNAMIC_BLOCK);
    for (int i = 0; i < 2; i++)
        if (!avx2_lay_codes(job, n + (i < wide ? i : 0), &from, i, &laid))
            return 0;
    avx2_numbers(job)->dots[rows - 1]((const float *)job->x + row * job->x_row + k, job->x_row, &laid, from.blocks, kept);
    for (int64_t i = 0; i < 2 * rows; i++) {
        float *to = (float *)job->y + (row + i / 2) * job->outputs + n + i % 2, sum = avx2_total(kept[i]);
        if (i % 2 < wide)
            *to = k == 0 ? sum : *to + sum;
    }
    return 1;
}

enum { AVX2_STRIP = 12, AVX2_GROUPS = DEPTH / DYNAMIC_BLOCK };

/* Numbers of the groups of output n, from input k on, which begins one; exact ones of a scale of one, and their scales. 0: see
 * `avx2_ready`. */
static int avx2_groups_of(const Linear *job, int64_t n, int64_t k, int64_t blocks, int shift, Avx2Kept *to, float *own)
{
    Coded row = coded_row(job, n);
    int exact = job->form == FLOAT32;
    float scales[AVX2_GROUPS], zeros[AVX2_GROUPS];
    if (!avx2_ready(job, &row, k, blocks, !exact, scales, zeros))
        return 0;
    for (int64_t b = 0; b < blocks; b += 1 << shift, own++) {
        avx2_numbers_of_group(exact ? AVX2_LARGER : scales[b], zeros + b, to++);
        *own = scales[b];
    }
    return 1;
}

/* Up to four rows, from `row` on, times outputs [n, n + count), of a format of blocks_avx2.h. 0: a scale is not for these. */
static int avx2_blocks(const Linear *job, const Avx2BlockWays *ways, int64_t row, int64_t rows, int64_t n, int64_t count)
{
    int64_t most = rows == 1 ? 6 : 2;
    Avx2Kept numbers[AVX2_STRIP * AVX2_GROUPS];
    float scales[AVX2_STRIP * AVX2_GROUPS];
    int exact = job->form == FLOAT32, words = job->format == INT4_WORDS, powers = job->format == MXFP4;
    Avx2Groups groups = {.apart = powers ? job->inputs / DYNAMIC_BLOCK : AVX2_GROUPS, .shift = words ? avx2_shared_by(job) : 0};
    unsigned odd = 0;
    for (int64_t k = 0; k < job->inputs; k += DEPTH) {
        int64_t blocks = (job->inputs - k < DEPTH ? job->inputs - k : DEPTH) / DYNAMIC_BLOCK, at = k / DYNAMIC_BLOCK * ways->bytes;
        int64_t ahead = k + DEPTH < job->inputs ? DEPTH / DYNAMIC_BLOCK * ways->bytes : AVX2_STRIP * job->w_row - at;
        for (int64_t c = 0; words && c < count; c++)
            if (!avx2_groups_of(job, n + c, k, blocks, groups.shift, numbers + c * AVX2_GROUPS, scales + c * AVX2_GROUPS))
                return 0;
        for (int64_t c = 0, wide; c < count; c += wide) {
            __m256 sums[8];
            wide = count - c < most ? 1 : most;
            groups.numbers = numbers + c * AVX2_GROUPS, groups.scales = scales + c * AVX2_GROUPS;
            groups.powers = powers ? coded_row(job, n + c).scales + k / DYNAMIC_BLOCK : NULL;
            odd |= (wide == most ? ways->wide : ways->one)[exact][rows - 1](
                (const float *)job->x + row * job->x_row + k, job->x_row,
                (const uint8_t *)job->w + (n + c) * job->w_row + at, job->w_row, blocks, ahead, groups, sums);
            for (int64_t i = 0; i < wide * rows; i++) {
                float *to = (float *)job->y + (row + i % rows) * job->outputs + n + c + i / rows, sum = avx2_total(sums[i]);
                *to = k == 0 ? sum : *to + sum;
            }
        }
    }
    return !odd;
}
#undef AVX2_LARGER

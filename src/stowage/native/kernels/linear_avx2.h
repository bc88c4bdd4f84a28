/* How matrices of numbers_avx2.h and tables_avx2.h are multiplied with one or two rows, and made numbers for more. */

/* Whether they are computed so, and not one after the other. */
static int avx2_has_numbers(const Linear *job)
{
    return avx2_ways_of(job, 0) != NULL && avx2_numbers_of[job->format].fill != NULL;
}

/* How those of a piece are: INT4_WORDS also with zero points, which are not least values here. */
static const Avx2Numbers *avx2_numbers_way(const Avx2Piece *piece)
{
    int64_t number = piece->ways - avx2_ways;
    return avx2_numbers_of + (number == GPTQ ? INT4_WORDS : number);
}

/* Of an output's blocks from input k on: scales, and beside them what `avx2_number` adds, or second scales, or zero points (which
 * are whole numbers); of numbers that are `rounded` for `avx2_nearest_half`. 0: not all are below 2^79, or numbers may be below
 * the normal ones, which are not rounded as they are. */
static int avx2_ready(const Linear *job, const Coded *row, int64_t k, int64_t blocks, int rounded, float *scales, float *more)
{
    if (LONG(job->format) && avx2_has_few_scales(row, k))
        return avx2_ready_words(row, k, blocks, rounded ? AVX2_LARGER : 1, scales, more);
    int words = LONG(job->format), biased = words || avx2_ways[job->format].kind == BIASED;
    __m256 sign = _mm256_set1_ps(-0.0f), most = _mm256_set1_ps(0x1p79f), odd = _mm256_setzero_ps(), none = odd;
    __m256 larger = _mm256_set1_ps(rounded && !EXACT(job->format) ? AVX2_LARGER : 1);
    __m256i zero = _mm256_set1_epi32(8);
    __m256 least = _mm256_set1_ps(words || job->format == NVFP4 ? 0x1p-120f : 0);
    __m256 less = _mm256_set1_ps(LESS(job->format, avx2_ways[job->format].size));
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
        other = biased ? _mm256_mul_ps(scale, less) : _mm256_mul_ps(other, larger);
        _mm256_storeu_ps(more + b, words ? (__m256)zero : other);
    }
    for (int64_t b = 0, group = k / row->group, end; words && row->zeros != NULL && b < blocks; group++) {
        end = (group + 1) * row->group - k;
        for (uint32_t own = (uint32_t)zero_of(row, group); b < blocks && b * DYNAMIC_BLOCK < end; b++)
            more[b] = float_of(own);
    }
    return _mm256_testz_ps(odd, odd);
}

/* Floats of 8 and 16 bits, 32 at a time: how many were done before some that are no usual numbers. A float of 8 bits (e4m3) is
 * one of 16 times 2^8. */
static int64_t avx2_decode_floats(const Linear *job, const Coded *row, int64_t k, int64_t end, float *to)
{
    int64_t begin = k;
    int bytes = job->format == FP8;
    for (; k + 32 <= end; k += 32, to += 32) {
        const uint8_t *at = row->w + (bytes ? k : 2 * k);
        float own = bytes ? scale_of(row, k / row->group) : 1;
        __m256i odd = _mm256_setzero_si256(), all = bytes ? _mm256_set1_epi8(0x7f) : _mm256_set1_epi16(0x7c00);
        for (int i = 0; i < (bytes ? 1 : 2); i++) {
            __m256i v = _mm256_and_si256(avx2_32(at + 32 * i), all);
            odd = _mm256_or_si256(odd, bytes ? _mm256_cmpeq_epi8(v, all) : _mm256_cmpeq_epi16(v, all));
        }
        if (!_mm256_testz_si256(odd, odd) || !(own == 0 || (fabsf(own) < 0x1p80f && fabsf(own) > 0x1p-100f)))
            break;
        UNROLLED for (int i = 0; i < 4; i++) {
            __m128i half = _mm_loadu_si128((const __m128i *)(at + (bytes ? 0 : 16 * i)));
            if (bytes) {
                half = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)(at + 8 * i)));
                half = _mm_and_si128(_mm_slli_epi16(half, 7), _mm_set1_epi16((short)0xbf80));
            }
            __m256 value = _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(bytes ? own * 256 : 1));
            _mm256_storeu_ps(to + 8 * i, job->form == FLOAT32 ? value : avx2_nearest_half(_mm256_mul_ps(value, _mm256_set1_ps(AVX2_LARGER))));
        }
    }
    return k - begin;
}

/* As `decode` of at most DEPTH inputs, where their codes are whole numbers, or short floats: how many were done. */
static int64_t avx2_decode_whole(const Linear *job, int64_t n, int64_t k, int64_t end, float *to)
{
    float scales[DEPTH / DYNAMIC_BLOCK], more[DEPTH / DYNAMIC_BLOCK];
    uint8_t room[AVX2_BYTES];
    Coded row = coded_row(job, n);
    int64_t blocks = (end - k) / DYNAMIC_BLOCK;
    Avx2Piece pieces[4];
    if (job->format == FP8 || job->format == F16)
        return avx2_decode_floats(job, &row, k, end, to);
    const Avx2BlockWays *ways = job->form == FLOAT32 ? NULL : avx2_blocks_of(job, 1);
    if (ways != NULL && ways->fill != NULL)
        return ways->fill(row.w + k / DYNAMIC_BLOCK * ways->bytes, blocks, to) ? 0 : blocks * DYNAMIC_BLOCK;
    if (!avx2_has_numbers(job) || !avx2_ready(job, &row, k, blocks, job->form != FLOAT32, scales, more))
        return 0;
    int count = avx2_pieces(job, k, blocks * DYNAMIC_BLOCK, pieces);
    for (const Avx2Piece *piece = pieces; piece < pieces + count; piece++) {
        int64_t b = 4 * piece->first - k / DYNAMIC_BLOCK;
        int64_t own = piece->left ? blocks % 4 : 4 * piece->count;
        avx2_numbers_way(piece)->fill(avx2_brought(job, piece, n, 1, room), own, scales + b, more + b, job->form != FLOAT32,
                                      to + b * DYNAMIC_BLOCK);
    }
    return blocks * DYNAMIC_BLOCK;
}

/* Whether `avx2_dots` may multiply it with so many rows: numbers are rounded, and made of whole codes. Of more rows numbers are
 * made once and read again. */
static int avx2_has_dots(const Linear *job, int64_t rows)
{
    return rows <= AVX2_ROWS && job->form != FLOAT32 && avx2_has_numbers(job) && avx2_numbers_of[job->format].dots[0] != NULL;
}

/* The pieces of inputs from k on: of short rows those of one output are those of all. */
typedef struct {
    int64_t k;
    int count;
    Avx2Piece pieces[4];
} Avx2Pieces;

/* Inputs from k on, of at most DEPTH, of one or two rows times the outputs n and n + wide - 1 in a block format, whose numbers
 * stay in registers; see linear.h for the order of sums. 0: it is not for these. */
static int avx2_dots(const Linear *job, int64_t row, int64_t rows, int64_t n, int64_t wide, int64_t k, Avx2Pieces *known)
{
    float room[4][DEPTH / DYNAMIC_BLOCK];
    uint8_t brought[4][2][AVX2_BYTES];
    float edge[AVX2_ROWS * DYNAMIC_GROUP];
    __m256 kept[2 * AVX2_ROWS];
    int64_t depth = job->inputs - k < DEPTH ? job->inputs - k : DEPTH, left = depth % DYNAMIC_GROUP / DYNAMIC_BLOCK;
    const uint8_t *at[4][2];
    if (depth % DYNAMIC_BLOCK != 0)
        return 0;
    if (known->k != k)
        *known = (Avx2Pieces){.k = k}, known->count = avx2_pieces(job, k, depth, known->pieces);
    const Avx2Piece *pieces = known->pieces;
    int count = known->count;
    for (int i = 0; i < 2; i++) {
        int64_t own = n + (i < wide ? i : 0);
        Coded coded = coded_row(job, own);
        if (!avx2_ready(job, &coded, k, depth / DYNAMIC_BLOCK, 1, room[i], room[2 + i]))
            return 0;
        int copied = left != 2 || own + 1 == job->outputs; /* else the next row's bytes are read, not used */
        for (int p = 0; p < count; p++)
            at[p][i] = avx2_brought(job, pieces + p, own, copied, brought[p][i]);
    }
    UNROLLED for (int i = 0; i < 2 * AVX2_ROWS; i++)
        kept[i] = _mm256_setzero_ps();
    for (int p = 0; p < count; p++) {
        const Avx2Numbers *way = avx2_numbers_way(pieces + p);
        int64_t first = pieces[p].first - k / DYNAMIC_GROUP, x_row = job->x_row, half = pieces[p].left && left == 2;
        const float *x = (const float *)job->x + row * x_row + k + first * DYNAMIC_GROUP, *scales[4];
        for (int i = 0; i < 4; i++)
            scales[i] = room[i] + 4 * first;
        if (pieces[p].left && !half) {
            memset(edge, 0, sizeof edge);
            for (int64_t r = 0; r < rows; r++)
                memcpy(edge + r * DYNAMIC_GROUP, x + r * x_row, (size_t)left * 128);
            x = edge, x_row = DYNAMIC_GROUP;
        }
        way->dots[rows - 1](x, x_row, at[p], half ? 0 : pieces[p].count, (int)half, scales, kept);
    }
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
    int64_t most = rows == 1 ? 4 : 2;
    Avx2Kept numbers[AVX2_STRIP * AVX2_GROUPS];
    float scales[AVX2_STRIP * AVX2_GROUPS];
    int exact = job->form == FLOAT32, words = job->format == INT4_WORDS, powers = job->format == MXFP4;
    Avx2Groups groups = {.apart = powers ? job->inputs / DYNAMIC_BLOCK : AVX2_GROUPS, .shift = words ? avx2_shared_by(job) : 0};
    unsigned odd = 0;
    for (int64_t k = 0; k < job->inputs; k += DEPTH) {
        int64_t blocks = (job->inputs - k < DEPTH ? job->inputs - k : DEPTH) / DYNAMIC_BLOCK;
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
                (const uint8_t *)job->w + (n + c) * job->w_row + k / DYNAMIC_BLOCK * ways->bytes, job->w_row, blocks, groups, sums);
            for (int64_t i = 0; i < wide * rows; i++) {
                float *to = (float *)job->y + (row + i % rows) * job->outputs + n + c + i / rows, sum = avx2_total(sums[i]);
                *to = k == 0 ? sum : *to + sum;
            }
        }
    }
    return !odd;
}
#undef EXACT
#undef LESS
#undef LONG
#undef AVX2_LARGER

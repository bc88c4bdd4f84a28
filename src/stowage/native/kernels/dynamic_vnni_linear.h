/* Linear layers of inputs that were rounded to 8 bits: which outputs and rows dynamic_vnni.h multiplies at a time.
 */
enum { DYNAMIC_AHEAD = 8192 }; /* bytes that are fetched before what is read */

/* How what begins at input k is computed. */
static const DynamicWays *dynamic_ways_of(const Linear *job, int64_t k)
{
    int format = job->format;
    if (format == INT4_WORDS && job->zeros != NULL)
        format = GPTQ;
    return dynamic_ways + (format == PACKED4 && k >= job->inputs / 2 ? FORMATS_END : format);
}

/* Whether four blocks may be in low halves of bytes and in high ones. */
static int dynamic_is_odd(const Linear *job)
{
    return job->format == PACKED4 && job->inputs % (2 * DYNAMIC_GROUP) != 0;
}

/* A piece of the rows of some outputs: where their blocks begin. The last group lies elsewhere where it would be read
 * beyond the last byte of all outputs: in `last`. */
typedef struct {
    const DynamicWays *ways;
    const uint8_t *at[DYNAMIC_WIDE], *last_at[DYNAMIC_WIDE];
    uint8_t last[DYNAMIC_WIDE][DYNAMIC_GROUP + 64];
    int64_t blocks, whole, left; /* blocks; groups of which all is there; groups in `last` */
} DynamicPiece;

/* Of outputs [n, n + wide), and the first of them again up to `most`. */
static void dynamic_begin(const Linear *job, int64_t n, int64_t wide, int64_t most, int64_t k, int64_t depth,
                          DynamicPiece *piece)
{
    const DynamicWays *ways = piece->ways = dynamic_ways_of(job, k);
    const uint8_t *begin = (const uint8_t *)job->w, *end = begin + job->outputs * job->w_row;
    int64_t half = job->inputs / 2, first = job->format == PACKED4 && k >= half ? k - half : k;
    int64_t groups = dynamic_groups(depth), row = job->w_row, ends = 0;
    begin += n * row + first / DYNAMIC_GROUP / (ways->per == 1 ? 1 : ways->per) * ways->bytes;
    int64_t bytes = (ways->per == 1 ? groups : groups / ways->per) * ways->bytes;
    for (int64_t i = 0; i < most; i++) {
        piece->at[i] = begin + (i < wide ? i : 0) * row;
        ends = ends || piece->at[i] + bytes > end;
    }
    piece->blocks = depth / DYNAMIC_BLOCK;
    piece->left = ends && piece->blocks % 4;
    piece->whole = groups - piece->left;
    for (int64_t i = 0; piece->left && i < most; i++) {
        const uint8_t *from = piece->at[i] + piece->whole * ways->bytes;
        piece->last_at[i] = memcpy(piece->last[i], from, (size_t)(piece->blocks % 4 * ways->bytes / 4));
    }
}

/* The sums of one row and `wide` outputs, of four, to where they belong. */
static inline ALWAYS void dynamic_store(const Linear *job, int64_t at, int64_t wide, __m128 sums)
{
    __mmask8 there = (__mmask8)((1 << wide) - 1);
    if (!job->narrow) {
        _mm_mask_storeu_ps((float *)job->y + at, there, sums);
        return;
    }
    __m128i bits = (__m128i)sums, odd = _mm_and_si128(_mm_srli_epi32(bits, 16), _mm_set1_epi32(1)); /* as `narrow` */
    bits = _mm_srli_epi32(_mm_add_epi32(bits, _mm_add_epi32(odd, _mm_set1_epi32(0x7fff))), 16);
    bits = _mm_cvtepi32_epi16(_mm_mask_mov_epi32(bits, _mm_cmp_ps_mask(sums, sums, _CMP_UNORD_Q), _mm_set1_epi32(0x7fc0)));
    if (wide == 4)
        _mm_storel_epi64((__m128i *)((uint16_t *)job->y + at), bits);
    else
        _mm_mask_storeu_epi16((uint16_t *)job->y + at, there, bits);
}

/* Sums of up to 8 rows and 4 outputs, whose columns are `kept`, to where they belong. Those that are no numbers of any. */
static inline ALWAYS int dynamic_finish_few(const Linear *job, int64_t n, int64_t wide, const __m512 *kept)
{
    int none = 0;
    for (int r = 0; r < job->rows; r++) {
        __m128 sums = _mm_add_ps(_mm512_castps512_ps128(kept[r]), _mm512_extractf32x4_ps(kept[r], 1));
        sums = _mm_add_ps(sums, _mm512_extractf32x4_ps(kept[r], 2));
        sums = _mm_add_ps(sums, _mm512_extractf32x4_ps(kept[r], 3));
        none |= _mm_cmp_ps_mask(sums, sums, _CMP_UNORD_Q);
        dynamic_store(job, r * job->outputs + n, wide, sums);
    }
    return none;
}

static inline int dynamic_way(int64_t rows)
{
    return rows > 4 ? 3 : rows > 2 ? 2 : (int)rows - 1;
}

/* Scales of outputs [n, n + wide), of at most four, for the piece that begins `at` addresses at input k; `how` they lie, if
 * it can be done quickly. */
static void dynamic_lay(const Linear *job, const DynamicLaying *how, int64_t n, int64_t wide, const uint8_t *const *at,
                        int64_t k, int64_t depth, DynamicLaid *to)
{
    Coded row = coded_row(job, n);
    if (how != NULL && wide == 4) {
        dynamic_lay_four(job, how, &row, k, depth / DYNAMIC_BLOCK, to);
        return;
    }
    float scales[2][4][DYNAMIC_SCALES] __attribute__((aligned(64)));
    for (int i = 0; i < 4; i++) {
        Coded own = coded_row(job, n + (i < wide ? i : 0));
        dynamic_scales(job, &own, at[i], k, depth, scales[0][i], scales[1][i]);
    }
    dynamic_deal(scales[0], scales[1], dynamic_groups(depth) * 4, to);
}

/* Fetch scales and zero points of four outputs that come DYNAMIC_AHEAD bytes of codes after n. */
static inline void dynamic_fetch_scales(const Linear *job, const DynamicLaying *how, int64_t n)
{
    n += (DYNAMIC_AHEAD / job->w_row + 4) / 4 * 4;
    if (n >= job->outputs || job->scales == NULL)
        return;
    int64_t bytes = 4 * how->all * how->size;
    for (int64_t i = 0; i < bytes; i += 64) {
        FETCH_FAR((const char *)job->scales + n / 4 * bytes + i);
        if (job->format == PACKED4)
            FETCH_FAR((const char *)job->zeros + n / 4 * bytes + i);
    }
    for (int64_t i = 0; job->zeros != NULL && job->format != PACKED4 && n % 8 == 0 && i < 4 * how->all; i += 64)
        FETCH_FAR((const char *)job->zeros + n / 8 * 4 * how->all + i);
}

/* Outputs [begin, end) of up to 8 rows. 0: there is no memory for it. */
static int dynamic_few(const Linear *job, int64_t begin, int64_t end)
{
    DynamicLaid laid __attribute__((aligned(64)));
    DynamicLaying laying;
    const DynamicLaying *how = dynamic_laying(job, &laying) ? &laying : NULL;
    DynamicPiece piece;
    memset(piece.last, 0, sizeof piece.last);
    int way = dynamic_way(job->rows);
    int64_t x_row = dynamic_groups(job->inputs), all = x_row << way;
    const DynamicInputs *from = (const DynamicInputs *)job->packed;
    DynamicInputs *turned = NULL;
    if (job->format == MXFP4 || job->format == INT4_WORDS) {
        turned = aligned_alloc(64, (size_t)all * sizeof *turned);
        if (turned == NULL)
            return 0;
        dynamic_reorder(from, all, 0, turned);
        from = turned;
    }
    for (int64_t n = begin; n < end; n += 4) {
        int64_t wide = end - n < 4 ? end - n : 4;
        __m512 kept[DYNAMIC_FEW];
        dynamic_fetch_scales(job, &laying, n);
        for (int i = 0; i < 1 << way; i++)
            kept[i] = _mm512_setzero_ps();
        for (int64_t k = 0, stop; k < job->inputs; k = stop) {
            const DynamicInputs *x = from + k / DYNAMIC_GROUP;
            stop = coded_end(job, k, HALVES_DEPTH);
            dynamic_begin(job, n, wide, 4, k, stop - k, &piece);
            dynamic_lay(job, how, n, wide, piece.at, k, stop - k, &laid);
            piece.ways->few[way](x, x_row, piece.at, piece.whole, piece.at[0] + DYNAMIC_AHEAD, laid.scales[0], kept);
            if (piece.left)
                piece.ways->few[way](x + piece.whole, x_row, piece.last_at, 1, piece.last_at[0], laid.scales[piece.whole],
                                     kept);
        }
        dynamic_finish_few(job, n, wide, kept);
    }
    free(turned);
    return 1;
}

/* The same of formats whose scales are in the blocks: a row of weights from its begin to its end.
 *
 * A last group that is no whole one goes on in the next row, whose blocks are multiplied by inputs that are zeros. That
 * changes nothing unless a scale there is no number, or infinite: then, and where no row follows, the blocks are copied
 * to where others are zeros. */
static void dynamic_few_here(const Linear *job, int64_t begin, int64_t end)
{
    const DynamicWays *ways = dynamic_ways + job->format;
    const DynamicInputs *x = (const DynamicInputs *)job->packed;
    int way = dynamic_way(job->rows);
    DynamicFew few = ways->few[way];
    int64_t x_row = dynamic_groups(job->inputs), whole = job->inputs / DYNAMIC_GROUP, tail = whole / ways->per * ways->bytes;
    uint8_t last[4][DYNAMIC_GROUP + 64] = {0};
    size_t left = (size_t)(job->inputs % DYNAMIC_GROUP / DYNAMIC_BLOCK * ways->bytes / 4);
    const uint8_t *w = (const uint8_t *)job->w, *after = w + job->outputs * job->w_row;
    for (int64_t n = begin; n < end; n += 4) {
        const uint8_t *at[4], *last_at[4];
        int64_t wide = end - n < 4 ? end - n : 4;
        for (int64_t i = 0; i < 4; i++)
            at[i] = w + (n + (i < wide ? i : 0)) * job->w_row;
        for (int copied = at[wide - 1] + tail + ways->bytes > after;; copied = 1) {
            __m512 kept[DYNAMIC_FEW];
            for (int r = 0; r < 1 << way; r++)
                kept[r] = _mm512_setzero_ps();
            few(x, x_row, at, whole, at[0] + DYNAMIC_AHEAD, NULL, kept);
            if (left) { /* and fetch on from where the whole groups ended */
                for (int64_t i = 0; i < 4; i++)
                    last_at[i] = copied ? memcpy(last[i], at[i] + tail, left) : at[i] + tail;
                few(x + whole, x_row, last_at, 1, at[0] + DYNAMIC_AHEAD + 4 * tail, NULL, kept);
            }
            if (!dynamic_finish_few(job, n, wide, kept) || copied || !left)
                break;
        }
    }
}

/* Numbers of 16 outputs, side by side by their blocks as codes are. */
static void dynamic_lay_scales(float (*from)[DYNAMIC_SCALES], int64_t blocks, int64_t first, int64_t groups, float *to)
{
    for (int64_t b = 0; b < blocks; b += 16) {
        __m512i v[16];
        for (int o = 0; o < 16; o++)
            v[o] = _mm512_loadu_si512(from[o] + b);
        coded_transpose(v);
        for (int64_t i = 0; i < 16 && b + i < blocks; i++) {
            int64_t at = first + b + i;
            _mm512_storeu_si512(to + (at % 4 * groups + at / 4) * DYNAMIC_WIDE, v[i]);
        }
    }
}

/* All rows by the outputs [n, n + wide) of a panel. 0: there is no memory for it. */
typedef int (*DynamicRows)(const Linear *job, const DynamicPanel *panel, int64_t n, int64_t wide);

static int dynamic_rows(const Linear *job, const DynamicPanel *panel, int64_t n, int64_t wide)
{
    DynamicKind kind = dynamic_kind(job);
    for (int64_t r = 0, rows; r < job->rows; r += rows) {
        float sums[DYNAMIC_TILE][DYNAMIC_WIDE];
        int64_t left = job->rows - r;
        int six = kind != TWO && (left == 6 || left >= 10); /* TWO has no registers for so many; 8 are twice 4 */
        rows = six ? 6 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
        const DynamicInputs *x = (const DynamicInputs *)job->packed + r * panel->groups;
        (kind == BIASED ? dynamic_tiles_BIASED : kind == LEAST ? dynamic_tiles_LEAST : dynamic_tiles_TWO)(
            x, rows, panel, sums[0]);
        for (int64_t i = 0; i < rows; i++)
            halves_finish(job, sums[i], r + i, n, wide);
    }
    return 1;
}

/* Outputs [begin, end) of many rows; 0: there is no memory for it. */
static int dynamic_many(const Linear *job, int64_t begin, int64_t end, DynamicRows multiplied)
{
    DynamicPanel panel = {.blocks = job->inputs / DYNAMIC_BLOCK, .groups = dynamic_groups(job->inputs)};
    int64_t each = 4 * panel.groups, scales_bytes = 2 * DYNAMIC_WIDE * DYNAMIC_SCALES * (int64_t)sizeof(float);
    char *memory = aligned_alloc(64, (size_t)(each * (DYNAMIC_CODES + 2 * DYNAMIC_WIDE * (int64_t)sizeof(float)) + scales_bytes));
    if (memory == NULL)
        return 0;
    panel.codes = (uint8_t *)memory;
    panel.scales = (float *)(memory + each * DYNAMIC_CODES);
    panel.more = panel.scales + each * DYNAMIC_WIDE;
    float(*scales)[DYNAMIC_SCALES] = (float(*)[DYNAMIC_SCALES])(panel.more + each * DYNAMIC_WIDE);
    float(*more)[DYNAMIC_SCALES] = scales + DYNAMIC_WIDE;
    DynamicKind kind = dynamic_kind(job);
    DynamicPiece piece;
    memset(piece.last, 0, sizeof piece.last);
    int there = 1;
    for (int64_t n = begin; there && n < end; n += DYNAMIC_WIDE) {
        int64_t wide = end - n < DYNAMIC_WIDE ? end - n : DYNAMIC_WIDE;
        if (lies_by_inputs(job))
            dynamic_lay_by_inputs(job, n, wide, &panel);
        for (int64_t k = 0, stop; k < job->inputs && !lies_by_inputs(job); k = stop) {
            stop = coded_end(job, k, HALVES_DEPTH);
            dynamic_begin(job, n, wide, DYNAMIC_WIDE, k, stop - k, &piece);
            uint8_t *to = panel.codes + k / DYNAMIC_GROUP * DYNAMIC_CODES;
            for (int c = 0; c < DYNAMIC_WIDE; c += 16) {
                piece.ways->pack(piece.at + c, piece.whole, DYNAMIC_WIDE * job->w_row, panel.groups, to + 4 * c);
                if (piece.left)
                    piece.ways->pack(piece.last_at + c, 1, 0, panel.groups, to + 4 * c + piece.whole * DYNAMIC_CODES);
            }
            for (int64_t i = 0; i < wide; i++) {
                Coded row = coded_row(job, n + i);
                dynamic_scales(job, &row, piece.at[i], k, stop - k, scales[i], more[i]);
            }
            for (int c = 0; c < DYNAMIC_WIDE; c += 16) {
                dynamic_lay_scales(scales + c, piece.blocks, k / DYNAMIC_BLOCK, panel.groups, panel.scales + c);
                if (kind != BIASED)
                    dynamic_lay_scales(more + c, piece.blocks, k / DYNAMIC_BLOCK, panel.groups, panel.more + c);
            }
        }
        there = multiplied(job, &panel, n, wide);
    }
    free(memory);
    return there;
}

/* Outputs [begin, end) of up to 8 rows. 0: there is no memory for it. */
static int dynamic_some(const Linear *job, int64_t begin, int64_t end)
{
    if (!dynamic_ways[job->format].here)
        return lies_by_inputs(job) ? dynamic_by_inputs(job, begin, end, dynamic_way(job->rows)) : dynamic_few(job, begin, end);
    dynamic_few_here(job, begin, end);
    return 1;
}

/* Outputs [begin, end) of all rows, many of them as `multiplied`; 0: there is no memory for it. */
static int dynamic_by(const Linear *job, int64_t begin, int64_t end, DynamicRows multiplied)
{
    if (dynamic_is_odd(job))
        return dynamic_linear(job, begin, end);
    if (job->rows <= DYNAMIC_FEW)
        return dynamic_some(job, begin, end);
    if (coded_pays_twice(job, 16))
        return coded_in_parts(job, begin, end, dynamic_groups(job->inputs) * (int64_t)sizeof(DynamicInputs), dynamic_some);
    return dynamic_many(job, begin, end, multiplied);
}

static int dynamic_vnni(const Linear *job, int64_t begin, int64_t end)
{
    return dynamic_by(job, begin, end, dynamic_rows);
}

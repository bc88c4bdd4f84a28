/* Products with the weights of coded.h: of a few rows of x with what is in registers, of many with what is laid out for
 * them. Sums are in the order of halves.h.
 */
enum { CODED_STEP = 64 };
enum { CODED_BYTES = 384 << 10 }; /* what is laid out for many rows at a time: so much of the second cache */

/* Inputs [k, k + 32) of which there are only `count`, and zeros. */
static void coded_last(const Linear *job, const Coded *row, int64_t k, int count, uint16_t *to)
{
    float values[32];
    avx512_decoders[job->format](row, k, count, values);
    for (int i = 0; i < 32; i++)
        to[i] = i < count ? float_half(values[i]) : 0;
}

/* R rows of x, C outputs whose blocks are at `rows`: columns of sums go on from those `kept`, if there are any. */
#define DOT(format, BYTES, SCALES, PARTS, U, R, C)                                                                     \
    static void coded_dot_##format##R(const uint16_t *x, int64_t x_row, const uint8_t *const *rows, int64_t blocks,    \
                                      int64_t ahead, const float *scales, __m512 *kept, int on)                        \
    {                                                                                                                  \
        __m512 sums[R][C];                                                                                             \
        const uint8_t *at[C];                                                                                          \
        UNROLLED for (int c = 0; c < C; c++) {                                                                         \
            at[c] = rows[c];                                                                                           \
            UNROLLED for (int r = 0; r < R; r++)                                                                       \
                sums[r][c] = on ? kept[c * R + r] : _mm512_setzero_ps();                                               \
        }                                                                                                              \
        for (; blocks > 0; blocks--, scales += SCALES) {                                                               \
            UNROLLED for (int part = 0; part < PARTS; part++, x += 32 * U) {                                           \
                __m512bh w[C][U];                                                                                      \
                UNROLLED for (int c = 0; c < C; c++) {                                                                 \
                    coded_##format(at[c], scales + c * coded_each_##format, part, w[c]);                               \
                    FETCH_FAR(at[c] + ahead + part * BYTES / PARTS);                                                   \
                }                                                                                                      \
                UNROLLED for (int u = 0; u < U; u++)                                                                   \
                    UNROLLED for (int r = 0; r < R; r++) {                                                             \
                        __m512bh inputs = halves_load_b(x + r * x_row + 32 * u);                                       \
                        UNROLLED for (int c = 0; c < C; c++)                                                           \
                            sums[r][c] = _mm512_dpbf16_ps(sums[r][c], inputs, w[c][u]);                                \
                    }                                                                                                  \
            }                                                                                                          \
            UNROLLED for (int c = 0; c < C; c++)                                                                       \
                at[c] += BYTES;                                                                                        \
        }                                                                                                              \
        UNROLLED for (int c = 0; c < C; c++)                                                                           \
            UNROLLED for (int r = 0; r < R; r++)                                                                       \
                kept[c * R + r] = sums[r][c];                                                                          \
    }
#define FILL(format, BYTES, SCALES, PARTS, U)                                                                          \
    static void coded_fill_##format(const uint8_t *at, int64_t blocks, const float *scales, uint16_t *to)              \
    {                                                                                                                  \
        for (; blocks > 0; blocks--, at += BYTES, scales += SCALES)                                                    \
            UNROLLED for (int part = 0; part < PARTS; part++, to += 32 * U) {                                          \
                __m512bh w[U];                                                                                         \
                coded_##format(at, scales, part, w);                                                                   \
                UNROLLED for (int u = 0; u < U; u++)                                                                   \
                    _mm512_storeu_si512(to + 32 * u, (__m512i)w[u]);                                                   \
            }                                                                                                          \
    }
#define OF(FORMAT, format, B, S, P, U)                                                                                 \
    DOT(format, B, S, P, U, 1, 4) DOT(format, B, S, P, U, 2, 4) DOT(format, B, S, P, U, 4, 4) DOT(format, B, S, P, U, 8, 2) \
    FILL(format, B, S, P, U)
CODED_NARROW(OF)
CODED_FOUR(OF)
CODED_WIDE(OF)
OF(, packed4_high, 32, 2, 1, 1)
#undef OF
#undef FILL
#define coded_fill_fp8_tall coded_fill_fp8_wide /* an output alone */
DOT(fp8_tall, 128, 1, 4, 1, 1, 4) DOT(fp8_tall, 128, 1, 4, 1, 2, 4) DOT(fp8_tall, 128, 1, 4, 1, 4, 4)
DOT(fp8_tall, 128, 1, 4, 1, 8, 2)
#undef DOT

typedef void (*CodedDot)(const uint16_t *, int64_t, const uint8_t *const *, int64_t, int64_t, const float *, __m512 *,
                         int);
typedef struct {
    int64_t bytes, inputs; /* of a block */
    int64_t step;          /* inputs with a scale, of formats whose scales lie apart */
    int scales;            /* of a block, which are laid out; 0: they are looked up with its codes */
    CodedDot dots[4];      /* of 1, 2, 4 and 8 rows */
    void (*fill)(const uint8_t *, int64_t, const float *, uint16_t *);
} CodedWays;

#define WAYS(format, B, S, P, U, STEP)                                                                                 \
    {B, 32 * (P) * (U), STEP, S, {coded_dot_##format##1, coded_dot_##format##2, coded_dot_##format##4, coded_dot_##format##8},  \
     coded_fill_##format}
#define OF(FORMAT, format, B, S, P, U) [FORMAT] = WAYS(format, B, S, P, U, 32),
static const CodedWays coded_narrow[FORMATS_END] = {CODED_NARROW(OF)};
static const CodedWays coded_four[FORMATS_END] = {CODED_FOUR(OF)};
#undef OF
#define OF(FORMAT, format, B, S, P, U) [FORMAT] = WAYS(format, B, S, P, U, 128),
static const CodedWays coded_wide[FORMATS_END] = {CODED_WIDE(OF)};
#undef OF
static const CodedWays coded_high = WAYS(packed4_high, 32, 2, 1, 1, 32), coded_tall = WAYS(fp8_tall, 128, 1, 4, 1, 128);
#undef WAYS

/* How what begins at input k is computed. */
static const CodedWays *coded_ways(const Linear *job, int64_t k)
{
    int format = job->format;
    if (format == PACKED4 && k >= job->inputs / 2)
        return &coded_high;
    if (format == FP8 && job->inputs % 128 == 0 && job->group % 128 == 0 && job->tall % 4 == 0)
        return &coded_tall;
    if (job->inputs % 128 == 0 && job->group % 128 == 0 && coded_wide[format].fill != NULL)
        return coded_wide + format;
    return (job->inputs % 128 == 0 && coded_four[format].fill != NULL ? coded_four : coded_narrow) + format;
}

/* Where the piece from input k on ends that is computed at once, of at most `most` inputs. */
static int64_t coded_end(const Linear *job, int64_t k, int64_t most)
{
    int64_t end = k / HALVES_DEPTH * HALVES_DEPTH + HALVES_DEPTH, half = job->inputs / 2;
    end = end < job->inputs ? end : job->inputs;
    end = end < k + most ? end : k + most;
    return job->format == PACKED4 && k < half && half < end ? half : end;
}

/* Where the blocks of output n begin, from input k on. */
static const uint8_t *coded_begin(const Linear *job, int64_t n, int64_t k)
{
    int64_t half = job->inputs / 2, first = job->format == PACKED4 && k >= half ? k - half : k;
    const CodedWays *ways = coded_ways(job, k);
    return (const uint8_t *)job->w + n * job->w_row + first / ways->inputs * ways->bytes;
}

/* Whether 32 inputs may be in low halves of bytes and in high ones. */
static int coded_is_odd(const Linear *job)
{
    return job->format == PACKED4 && job->inputs % 64 != 0;
}

static void coded_fill_plainly(const Linear *job, int64_t n, int64_t wide, uint16_t *to, int64_t stride)
{
    for (int64_t i = 0; i < wide; i++) {
        Coded row = coded_row(job, n + i);
        for (int64_t k = 0; k < job->inputs; k += 32)
            coded_last(job, &row, k, 32, to + i * stride + k);
    }
}

/* The same of GPTQ and AWQ. */
static void coded_fill_by_inputs(const Linear *job, int64_t n, int64_t wide, uint16_t *to, int64_t stride)
{
    CodedStrip strip = {.far = coded_far(job, 0, 0, 0)};
    for (int64_t k = 0, end; k < job->inputs; k = end) {
        end = coded_end(job, k, CODED_SPAN);
        coded_begin_strip(job, n, wide, k, end - k, &strip);
        for (int64_t o = 0; o < wide;)
            o += coded_lay(job, &strip, o, to + o * stride + k, stride);
    }
}

/* Outputs [n, n + wide), of at most CODED_STEP, in bfloat16, `stride` apart, and zeros up to a multiple of 32. */
static void coded_fill(const Linear *job, int64_t n, int64_t wide, uint16_t *to, int64_t stride)
{
    float scales[CODED_SCALES];
    if (coded_is_odd(job) || lies_by_inputs(job)) {
        (lies_by_inputs(job) ? coded_fill_by_inputs : coded_fill_plainly)(job, n, wide, to, stride);
        return;
    }
    for (int64_t k = 0, end; k < job->inputs; k = end) {
        end = coded_end(job, k, HALVES_DEPTH);
        const CodedWays *ways = coded_ways(job, k);
        const uint8_t *at = coded_begin(job, n, k);
        for (int64_t i = 0; i < wide; i++, at += job->w_row) {
            Coded row = coded_row(job, n + i);
            uint16_t *own = to + i * stride + k;
            int left = (int)((end - k) % 32);
            if (ways->scales)
                coded_scales(job, &row, at, k, end - k, ways->step, scales);
            ways->fill(at, (end - k) / ways->inputs, scales, own);
            if (left)
                coded_last(job, &row, end - left, left, own + (end - k - left));
        }
    }
}

/* A piece of up to 8 rows, side by side, and zeros up to a multiple of 32; what is no row repeats the last one. */
static int64_t coded_near(const Linear *job, int rows, int64_t k, int64_t depth, uint16_t *near)
{
    int64_t whole = (depth + 31) / 32 * 32, stride = rows > 1 ? whole + HALVES_APART : whole;
    for (int r = 0; r < rows; r++) {
        const uint16_t *from = (const uint16_t *)job->x + (r < job->rows ? r : job->rows - 1) * job->x_row + k;
        memcpy(near + r * stride, from, (size_t)depth * 2);
        memset(near + r * stride + depth, 0, (size_t)(whole - depth) * 2);
    }
    return stride;
}

/* What is left of the inputs after the last whole 32 of them, for outputs [first, first + wide). */
static void coded_rest(const Linear *job, int rows, int step, int64_t first, int64_t wide, int64_t k, const uint16_t *x,
                       int64_t x_row, __m512 *kept)
{
    uint16_t last[32] __attribute__((aligned(64)));
    for (int64_t n = 0; n < wide; n++) {
        Coded row = coded_row(job, first + n);
        coded_last(job, &row, k, (int)(job->inputs - k), last);
        __m512 *own = kept + n / step * step * rows + n % step * rows;
        for (int r = 0; r < rows; r++)
            own[r] = _mm512_dpbf16_ps(own[r], halves_load_b(x + r * x_row), halves_load_b(last));
    }
}

/* Totals of the columns of `wide` outputs are added to their sums, whose rows are `apart`; or these begin. */
static void coded_totals(int way, int64_t wide, const __m512 *kept, float *sums, int64_t apart, int begin)
{
    float totals[16];
    int rows = 1 << way;
    for (int64_t i = 0; i < wide * rows; i += 8) {
        halves_totals(kept + i, totals);
        for (int j = 0; j < 8 && i + j < wide * rows; j++) {
            float *sum = sums + ((i + j) & (rows - 1)) * apart + ((i + j) >> way), own = totals[j % 4 * 4 + j / 4];
            *sum = begin ? own : *sum + own;
        }
    }
}

/* Outputs [first, first + wide) of up to 8 rows, a piece of inputs after the other. */
static void coded_panel(const Linear *job, int way, int64_t first, int64_t wide, __m512 *kept, float *sums)
{
    uint16_t near[HALVES_NEAR + HALVES_ROWS * HALVES_APART] __attribute__((aligned(64)));
    float scales[4 * CODED_SCALES] __attribute__((aligned(64)));
    int rows = 1 << way, step = rows == 8 ? 2 : 4;
    for (int64_t k = 0, end; k < job->inputs; k = end) {
        end = coded_end(job, k, HALVES_NEAR / rows);
        const CodedWays *ways = coded_ways(job, k);
        const uint8_t *begin = coded_begin(job, first, k);
        int64_t x_row = coded_near(job, rows, k, end - k, near);
        for (int64_t n = 0; n < wide; n += step) {
            const uint8_t *at[4];
            int c = wide - n < step ? (int)(wide - n) : step;
            for (int i = 0; i < step; i++)
                at[i] = begin + (n + (i < c ? i : 0)) * job->w_row;
            int there = !ways->scales || (step == 4 && coded_scales_of_four(job, at, end - k, scales));
            for (int i = 0; !there && i < step; i++) {
                Coded own = coded_row(job, first + n + (i < c ? i : 0));
                coded_scales(job, &own, at[i], k, end - k, ways->step, scales + i * CODED_SCALES);
                there = ways == &coded_tall; /* outputs that have them in common */
            }
            ways->dots[way](near, x_row, at, (end - k) / ways->inputs, 2 * step * job->w_row, scales, kept + n * rows,
                            k % HALVES_DEPTH != 0);
        }
        if (end % 32)
            coded_rest(job, rows, step, first, wide, end / 32 * 32, near + (end - k) / 32 * 32, x_row, kept);
        if (end % HALVES_DEPTH == 0 || end == job->inputs)
            coded_totals(way, wide, kept, sums, HALVES_PANEL, end <= HALVES_DEPTH);
    }
}

/* The same of GPTQ and AWQ, `span` inputs at a time, and of these a strip after the other. `after`: outputs that come next. */
static void coded_panel_by_inputs(const Linear *job, int way, int64_t first, int64_t wide, int64_t after, int64_t span,
                                  __m512 *kept, float *sums)
{
    enum { STRIDE = CODED_SPAN + HALVES_APART };
    uint16_t near[HALVES_ROWS * STRIDE] __attribute__((aligned(64))), room[16 * STRIDE] __attribute__((aligned(64)));
    CodedStrip strip;
    int rows = 1 << way, step = rows == 8 ? 2 : 4;
    for (int64_t k = 0, end; k < job->inputs; k = end) {
        end = coded_end(job, k, span);
        strip.far = end < job->inputs ? coded_far(job, first, wide, end) : coded_far(job, first + wide, after, 0);
        int64_t x_row = coded_near(job, rows, k, end - k, near);
        for (int64_t n = 0, laid; n < wide; n += laid) {
            int64_t o = n % CODED_STRIP;
            if (o == 0)
                coded_begin_strip(job, first + n, wide - n, k, end - k, &strip);
            if (rows == 1 || (rows == 2 && job->format == AWQ)) {
                CodedUse use = {.x = near, .x_row = x_row, .kept = kept + n * rows, .on = k % HALVES_DEPTH != 0};
                laid = coded_multiply(job, &strip, o, &use, rows);
                continue;
            }
            laid = coded_lay(job, &strip, o, room, STRIDE);
            for (int64_t i = 0; i < laid; i += step) {
                const uint8_t *at[4];
                for (int c = 0; c < step; c++)
                    at[c] = (const uint8_t *)(room + (i + c) * STRIDE);
                coded_narrow[BF16].dots[way](near, x_row, at, (end - k) / 32, 0, NULL, kept + (n + i) * rows,
                                             k % HALVES_DEPTH != 0);
            }
        }
        if (end % HALVES_DEPTH == 0 || end == job->inputs)
            coded_totals(way, wide, kept, sums, CODED_PANEL >> way, end <= HALVES_DEPTH);
    }
}

/* Outputs [begin, end) of up to 8 rows. */
static int coded_few(const Linear *job, int64_t begin, int64_t end)
{
    float sums[CODED_PANEL] __attribute__((aligned(64)));
    __m512 kept[CODED_PANEL + HALVES_ROWS * 8]; /* GPTQ's last outputs may be half of what is computed at once */
    int way = job->rows > 4 ? 3 : job->rows > 2 ? 2 : (int)job->rows - 1, across = lies_by_inputs(job);
    int64_t panel = across ? CODED_PANEL >> way : HALVES_PANEL, span = way > 0 ? CODED_SPAN : CODED_SPAN / 2;
    if (across)
        coded_fetch_first(job, begin, end - begin < panel ? end - begin : panel, span < job->inputs ? span : job->inputs);
    for (int64_t first = begin; first < end; first += panel) {
        int64_t wide = end - first < panel ? end - first : panel, after = end - first - wide;
        if (across)
            coded_panel_by_inputs(job, way, first, wide, after < panel ? after : panel, span, kept, sums);
        else
            coded_panel(job, way, first, wide, kept, sums);
        for (int r = 0; r < job->rows; r++)
            halves_finish(job, sums + r * panel, r, first, wide);
    }
    return 1;
}

/* Whether it takes less time to read codes twice, the second time from the cache, than to lay them out for all of up to
 * `most` rows. */
static int coded_pays_twice(const Linear *job, int64_t most)
{
    return job->rows > FEW && job->rows <= most && !lies_by_inputs(job);
}

/* Outputs [begin, end) of some rows, FEW at a time, by `few`; a packed one takes so many bytes. 0: there is no memory for it. */
static int coded_in_parts(const Linear *job, int64_t begin, int64_t end, int64_t packed_row, int (*few)(const Linear *, int64_t, int64_t))
{
    int there = 1;
    for (int64_t n = begin, stop; n < end && there; n = stop) {
        stop = end - n < HALVES_PANEL ? end : n + HALVES_PANEL;
        for (int64_t row = 0; row < job->rows && there; row += FEW) {
            Linear some = some_rows(job, row, FEW, job->packed == NULL ? NULL : job->packed + row * packed_row);
            there = few(&some, n, stop);
        }
    }
    return there;
}

/* Those outputs in bfloat16, in rows so many bytes apart. */
static void coded_lay_out(const Linear *job, int64_t first, int64_t wide, char *to, int64_t stride)
{
    for (int64_t n = 0; n < wide; n += CODED_STEP)
        coded_fill(job, first + n, wide - n < CODED_STEP ? wide - n : CODED_STEP, (uint16_t *)(to + n * stride), stride / 2);
}

/* Outputs [begin, end) of many rows, which `multiply` does with weights in bfloat16. */
static int coded_many(const Linear *job, int64_t begin, int64_t end, void (*multiply)(const Linear *, int64_t, int64_t))
{
    int64_t most = CODED_BYTES / 2 / laid_stride(job);
    most = most > HALVES_PANEL ? HALVES_PANEL : most > CODED_STEP ? most / CODED_STEP * CODED_STEP : CODED_STEP;
    return multiply_laid(job, begin, end, 2, most, coded_lay_out, multiply);
}

/* Outputs [begin, end) of all rows; 0: there is no memory for it. `multiply` does it with weights in bfloat16. */
static int coded_linear(const Linear *job, int64_t begin, int64_t end, void (*multiply)(const Linear *, int64_t, int64_t))
{
    int ours = multiply == halves_linear && !coded_is_odd(job);
    coded_have(job->format);
    if (ours && job->rows <= HALVES_ROWS)
        return coded_few(job, begin, end);
    if (ours && coded_pays_twice(job, job->format == Q8_0 ? 16 : 12))
        return coded_in_parts(job, begin, end, 0, coded_few);
    return coded_many(job, begin, end, multiply);
}

/* Products with the weights of coded.h: of a few rows of x with what is in registers, of many with what is laid out for
 * them. Sums are in the order of halves.h.
 */
enum { CODED_STEP = 64, CODED_TURNED = HALVES_DEPTH / 2 + 64, CODED_ROOM = CODED_STEP * CODED_TURNED };
enum { CODED_PANEL = 128, CODED_SHORT = 512, CODED_SHORT_TURNED = CODED_SHORT / 2 + 64 }; /* outputs of few rows; of codes that lie apart, and inputs, at a time */
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
    CodedDot dots[4];      /* of 1, 2, 4 and 8 rows */
    void (*fill)(const uint8_t *, int64_t, const float *, uint16_t *);
} CodedWays;

#define WAYS(format, B, P, U, STEP)                                                                                    \
    {B, 32 * (P) * (U), STEP, {coded_dot_##format##1, coded_dot_##format##2, coded_dot_##format##4, coded_dot_##format##8},  \
     coded_fill_##format}
#define OF(FORMAT, format, B, S, P, U) [FORMAT] = WAYS(format, B, P, U, 32),
static const CodedWays coded_narrow[FORMATS_END] = {CODED_NARROW(OF)};
static const CodedWays coded_four[FORMATS_END] = {CODED_FOUR(OF)};
#undef OF
#define OF(FORMAT, format, B, S, P, U) [FORMAT] = WAYS(format, B, P, U, 128),
static const CodedWays coded_wide[FORMATS_END] = {CODED_WIDE(OF)};
#undef OF
static const CodedWays coded_high = WAYS(packed4_high, 32, 1, 1, 32), coded_tall = WAYS(fp8_tall, 128, 4, 1, 128);
#undef WAYS
#undef UNROLLED

static inline int coded_by_inputs(const Linear *job)
{
    return job->format == GPTQ || job->format == AWQ;
}

/* How what begins at input k is computed. */
static const CodedWays *coded_ways(const Linear *job, int64_t k)
{
    int format = coded_by_inputs(job) ? INT4_WORDS : job->format;
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

/* Where blocks of outputs [n, n + wide) begin, from input k on; `room`: for codes that lie apart, `stride` bytes each. */
static void coded_begin(const Linear *job, int64_t n, int64_t wide, int64_t k, int64_t depth, uint8_t *room,
                        int64_t stride, const uint8_t **at)
{
    if (job->format == GPTQ)
        coded_turn_gptq(job, n, wide, k, depth, room, stride);
    for (int64_t i = 0; job->format == AWQ && i < wide; i += 32)
        coded_turn_awq(job, n + i, wide - i < 32 ? wide - i : 32, k, depth, room + i * stride, stride);
    int64_t half = job->inputs / 2, first = job->format == PACKED4 && k >= half ? k - half : k;
    const CodedWays *ways = coded_ways(job, k);
    for (int64_t i = 0; i < wide; i++)
        at[i] = coded_by_inputs(job)
                    ? room + i * stride
                    : (const uint8_t *)job->w + (n + i) * job->w_row + first / ways->inputs * ways->bytes;
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

/* Outputs [n, n + wide), of at most CODED_STEP, in bfloat16, `stride` apart, and zeros up to a multiple of 32. */
static void coded_fill(const Linear *job, int64_t n, int64_t wide, uint8_t *room, uint16_t *to, int64_t stride)
{
    float scales[CODED_SCALES];
    const uint8_t *at[CODED_STEP];
    if (coded_is_odd(job)) {
        coded_fill_plainly(job, n, wide, to, stride);
        return;
    }
    for (int64_t k = 0, end; k < job->inputs; k = end) {
        end = coded_end(job, k, HALVES_DEPTH);
        const CodedWays *ways = coded_ways(job, k);
        coded_begin(job, n, wide, k, end - k, room, CODED_TURNED, at);
        for (int64_t i = 0; i < wide; i++) {
            Coded row = coded_row(job, n + i);
            uint16_t *own = to + i * stride + k;
            int left = (int)((end - k) % 32);
            coded_scales(job, &row, at[i], k, end - k, ways->step, scales);
            ways->fill(at[i], (end - k) / ways->inputs, scales, own);
            if (left)
                coded_last(job, &row, end - left, left, own + (end - k - left));
        }
    }
}

/* Scales and zero points of a piece of outputs whose codes lie by inputs: of output n, for step i, at index n of slot[i]. */
typedef struct {
    float scales[CODED_SHORT / 32][CODED_PANEL], zeros[CODED_SHORT / 32][CODED_PANEL];
    int slot[CODED_SHORT / 32], steps;
} CodedAcross;

static void coded_lay_across(const Linear *job, int64_t n, int64_t wide, int64_t k, int64_t depth, int64_t step,
                             CodedAcross *to)
{
    to->steps = (int)(depth / step);
    for (int i = 0; i < to->steps; i++) {
        int64_t group = (k + i * step) / job->group;
        to->slot[i] = i > 0 && group == (k + (i - 1) * step) / job->group ? to->slot[i - 1] : i;
        if (to->slot[i] == i)
            coded_across(job, n, wide, group, to->scales[i], to->zeros[i]);
    }
}

/* Of outputs n to n + 3 as `coded_scales` lays them out. */
static inline ALWAYS void coded_scales_across(const CodedAcross *from, int64_t n, float *to)
{
    for (int i = 0; i < from->steps; i++, to += 2) {
        __m128 scale = _mm_loadu_ps(from->scales[from->slot[i]] + n), zero = _mm_loadu_ps(from->zeros[from->slot[i]] + n);
        __m128 low = _mm_unpacklo_ps(scale, zero), high = _mm_unpackhi_ps(scale, zero);
        _mm_storel_pi((__m64 *)to, low);
        _mm_storeh_pi((__m64 *)(to + CODED_SCALES), low);
        _mm_storel_pi((__m64 *)(to + 2 * CODED_SCALES), high);
        _mm_storeh_pi((__m64 *)(to + 3 * CODED_SCALES), high);
    }
}

/* Fetch `part` of 32 of CODED_SHORT inputs from k on of CODED_PANEL outputs from n on, whose codes lie by inputs. */
static inline ALWAYS void coded_fetch(const Linear *job, int64_t n, int64_t k, int64_t part)
{
    int gptq = job->format == GPTQ, lines = gptq ? CODED_PANEL * 4 / 64 : 1, rows = 16 / lines;
    int64_t row = gptq ? 4 * job->outputs : job->outputs / 2;
    const char *at = (const char *)job->w + (gptq ? k / 8 * row + 4 * n : k * row + n / 2) + part * rows * row;
    for (int i = 0; i < rows; i++, at += row)
        for (int line = 0; line < lines; line++)
            FETCH_FAR(at + 64 * line);
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

/* Outputs [first, first + wide) of up to 8 rows, a piece of inputs after the other. */
static void coded_panel(const Linear *job, int way, int64_t first, int64_t wide, uint8_t *room, __m512 *kept, float *sums)
{
    uint16_t near[HALVES_NEAR + HALVES_ROWS * HALVES_APART] __attribute__((aligned(64)));
    float scales[4 * CODED_SCALES] __attribute__((aligned(64))), totals[16];
    const uint8_t *at[CODED_PANEL + 4];
    CodedAcross laid;
    int rows = 1 << way, step = rows == 8 ? 2 : 4, across = coded_by_inputs(job);
    int64_t ahead = across ? 0 : 2 * step * job->w_row;
    for (int64_t k = 0, end; k < job->inputs; k = end) {
        end = coded_end(job, k, across ? CODED_SHORT : HALVES_NEAR / rows);
        const CodedWays *ways = coded_ways(job, k);
        int64_t x_row = coded_near(job, rows, k, end - k, near);
        coded_begin(job, first, wide, k, end - k, room, CODED_SHORT_TURNED, at);
        if (across)
            coded_lay_across(job, first, wide, k, end - k, ways->step, &laid);
        for (int64_t n = 0; n < wide; n += step) {
            int c = wide - n < step ? (int)(wide - n) : step;
            if (across && n % 4 == 0) {
                coded_scales_across(&laid, n, scales);
                coded_fetch(job, end < job->inputs ? first : first + CODED_PANEL, end < job->inputs ? end : 0, n / 4);
            }
            for (int i = 0; i < step; i++) {
                at[n + i] = at[n + (i < c ? i : 0)];
                if (across || (i > 0 && ways == &coded_tall)) /* outputs that have them in common */
                    continue;
                Coded own = coded_row(job, first + n + (i < c ? i : 0));
                coded_scales(job, &own, at[n + i], k, end - k, ways->step, scales + i * CODED_SCALES);
            }
            ways->dots[way](near, x_row, at + n, (end - k) / ways->inputs, ahead,
                            scales + (across ? n % 4 * CODED_SCALES : 0), kept + n * rows, k % HALVES_DEPTH != 0);
        }
        if (end % 32)
            coded_rest(job, rows, step, first, wide, end / 32 * 32, near + (end - k) / 32 * 32, x_row, kept);
        for (int64_t i = 0; (end % HALVES_DEPTH == 0 || end == job->inputs) && i < wide * rows; i += 8) {
            halves_totals(kept + i, totals);
            for (int j = 0; j < 8 && i + j < wide * rows; j++) {
                float *sum = sums + ((i + j) & (rows - 1)) * CODED_PANEL + ((i + j) >> way), own = totals[j % 4 * 4 + j / 4];
                *sum = end <= HALVES_DEPTH ? own : *sum + own;
            }
        }
    }
}

/* Outputs [begin, end) of up to 8 rows. */
static void coded_few(const Linear *job, int64_t begin, int64_t end)
{
    uint8_t room[CODED_PANEL * CODED_SHORT_TURNED] __attribute__((aligned(64)));
    float sums[HALVES_ROWS * CODED_PANEL] __attribute__((aligned(64)));
    __m512 kept[HALVES_ROWS * (CODED_PANEL + 4) + 8];
    int way = job->rows > 4 ? 3 : job->rows > 2 ? 2 : (int)job->rows - 1, across = coded_by_inputs(job);
    int64_t panel = across ? CODED_PANEL : HALVES_PANEL;
    for (int part = 0; across && part < CODED_PANEL / 4; part++)
        coded_fetch(job, begin, 0, part);
    for (int64_t first = begin; first < end; first += panel) {
        int64_t wide = end - first < panel ? end - first : panel;
        coded_panel(job, way, first, wide, room, kept, sums);
        for (int r = 0; r < job->rows; r++)
            halves_finish(job, sums + r * CODED_PANEL, r, first, wide);
    }
}

/* Outputs [begin, end) of many rows, which `multiply` does with weights in bfloat16. */
static int coded_many(const Linear *job, int64_t begin, int64_t end, uint8_t *room,
                      void (*multiply)(const Linear *, int64_t, int64_t))
{
    int64_t stride = (job->inputs + 31) / 32 * 32 + 32, most = CODED_BYTES / 2 / stride;
    most = most > HALVES_PANEL ? HALVES_PANEL : most > CODED_STEP ? most / CODED_STEP * CODED_STEP : CODED_STEP;
    uint16_t *laid = aligned_alloc(64, (size_t)(most * stride * 2));
    if (laid == NULL)
        return 0;
    for (int64_t first = begin; first < end; first += most) {
        int64_t wide = end - first < most ? end - first : most;
        for (int64_t n = 0; n < wide; n += CODED_STEP)
            coded_fill(job, first + n, wide - n < CODED_STEP ? wide - n : CODED_STEP, room, laid + n * stride, stride);
        Linear plain = *job;
        plain.format = PLAIN;
        plain.w = laid;
        plain.w_row = stride;
        plain.y = (char *)job->y + first * (job->narrow ? 2 : 4);
        multiply(&plain, 0, wide);
    }
    free(laid);
    return 1;
}

/* Outputs [begin, end) of all rows; 0: there is no memory for it. `multiply` does it with weights in bfloat16. */
static int coded_linear(const Linear *job, int64_t begin, int64_t end, void (*multiply)(const Linear *, int64_t, int64_t))
{
    if (job->rows <= HALVES_ROWS && multiply == halves_linear && !coded_is_odd(job)) {
        coded_few(job, begin, end);
        return 1;
    }
    uint8_t *room = coded_by_inputs(job) ? aligned_alloc(64, CODED_ROOM) : NULL;
    int done = (room != NULL || !coded_by_inputs(job)) && coded_many(job, begin, end, room, multiply);
    free(room);
    return done;
}

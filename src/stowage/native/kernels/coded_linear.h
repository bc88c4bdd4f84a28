/* Products with the weights of coded.h: of one row of x in registers, of several with what is laid out for them. */

/* Inputs [k, k + 32) of which there are only `count`, and zeros. */
static void coded_last(const Linear *job, const Coded *row, int64_t k, int count, uint16_t *to)
{
    float values[32];
    avx512_decoders[job->format](row, k, count, values);
    for (int i = 0; i < 32; i++)
        to[i] = i < count ? float_half(values[i]) : 0;
}

/* BYTES: of 32 * U values, about, where a row is read; what is fetched ahead. */
#define DOT(format, U, C)                                                                                              \
    static void coded_dot_##format##C(const uint16_t *x, const Coded *rows, int64_t depth, int64_t k, __m512 *sums)    \
    {                                                                                                                  \
        __m512 own[C];                                                                                                 \
        UNROLLED for (int c = 0; c < C; c++)                                                                           \
            own[c] = _mm512_setzero_ps();                                                                              \
        for (int64_t end = k + depth; k < end; k += 32 * U, x += 32 * U)                                               \
            UNROLLED for (int c = 0; c < C; c++) {                                                                     \
                __m512bh w[8];                                                                                         \
                coded_##format(rows + c, k, w);                                                                        \
                UNROLLED for (int u = 0; u < U; u++)                                                                   \
                    own[c] = _mm512_dpbf16_ps(own[c], halves_load_b(x + 32 * u), w[u]);                                \
            }                                                                                                          \
        UNROLLED for (int c = 0; c < C; c++)                                                                           \
            sums[c] = own[c];                                                                                          \
    }
#define FILL(format, U)                                                                                                \
    static void coded_fill_##format(const Coded *row, int64_t k, int64_t end, uint16_t *to)                            \
    {                                                                                                                  \
        for (; k + 32 * U <= end; k += 32 * U, to += 32 * U) {                                                         \
            __m512bh w[8];                                                                                             \
            coded_##format(row, k, w);                                                                                 \
            UNROLLED for (int u = 0; u < U; u++)                                                                       \
                _mm512_storeu_si512(to + 32 * u, (__m512i)w[u]);                                                       \
        }                                                                                                              \
    }
#define ALL(format, U) DOT(format, U, 1) DOT(format, U, 2) DOT(format, U, 3) FILL(format, U)
ALL(q8_0, 1) ALL(q4_0, 1) ALL(q4_1, 1) ALL(q5_0, 1) ALL(q5_1, 1) ALL(q4_k, 8) ALL(q5_k, 8) ALL(q6_k, 8)
ALL(mxfp4_block, 1) ALL(mxfp4, 1) ALL(fp8, 1) ALL(int4, 1) ALL(f32, 1) ALL(f16, 1) ALL(bf16, 1) ALL(gptq, 1)
ALL(awq, 1) ALL(packed4, 1) ALL(int4_wide, 4) ALL(gptq_wide, 4) ALL(awq_wide, 4) ALL(fp8_wide, 4)
#undef ALL
#undef FILL
#undef DOT
#undef UNIT
#undef UNROLLED

typedef void (*CodedDot)(const uint16_t *, const Coded *, int64_t, int64_t, __m512 *);
typedef void (*CodedFill)(const Coded *, int64_t, int64_t, uint16_t *);
#define OF(FORMAT, format) [FORMAT] = {coded_dot_##format##1, coded_dot_##format##2, coded_dot_##format##3}
static const CodedDot coded_dots[FORMATS_END][3] = {ALL_FORMATS(OF)};
#undef OF
#define OF(FORMAT, format) [FORMAT] = coded_fill_##format
static const CodedFill coded_fills[FORMATS_END] = {ALL_FORMATS(OF)};
#undef OF
/* Of formats whose groups may be of 128 inputs or more; others have none. */
#define OF(FORMAT, format) [FORMAT] = {coded_dot_##format##_wide1, coded_dot_##format##_wide2, coded_dot_##format##_wide3}
static const CodedDot coded_wide_dots[FORMATS_END][3] = {OF(INT4_WORDS, int4), OF(GPTQ, gptq), OF(AWQ, awq), OF(FP8, fp8)};
#undef OF
#define OF(FORMAT, format) [FORMAT] = coded_fill_##format##_wide
static const CodedFill coded_wide_fills[FORMATS_END] = {OF(INT4_WORDS, int4), OF(GPTQ, gptq), OF(AWQ, awq), OF(FP8, fp8)};
#undef OF

static inline int coded_is_wide(const Linear *job)
{
    return job->group % 128 == 0 && job->inputs % 128 == 0 && coded_wide_fills[job->format] != NULL;
}

/* Inputs [k, end) of output n in bfloat16, and zeros up to a multiple of 32. */
static void coded_fill(const Linear *job, int64_t n, int64_t k, int64_t end, uint16_t *to)
{
    Coded row = coded_row(job, n);
    (coded_is_wide(job) ? coded_wide_fills : coded_fills)[job->format](&row, k, end, to);
    int64_t left = (end - k) % 32;
    if (left && format_values[job->format] == 32)
        coded_last(job, &row, end - left, (int)left, to + (end - k - left));
}

/* Outputs [begin, end) of one row of x, of a whole number of blocks. */
static void coded_one(const Linear *job, int64_t row, int64_t begin, int64_t end, float *sums)
{
    const uint16_t *x = (const uint16_t *)job->x + row * job->x_row;
    const CodedDot *dots = (coded_is_wide(job) ? coded_wide_dots : coded_dots)[job->format];
    for (int64_t n = begin; n < end; n += 3) {
        int c = end - n < 3 ? (int)(end - n) : 3;
        Coded rows[3];
        for (int i = 0; i < c; i++)
            rows[i] = coded_row(job, n + i);
        for (int64_t k = 0; k < job->inputs; k += HALVES_DEPTH) {
            int64_t depth = job->inputs - k < HALVES_DEPTH ? job->inputs - k : HALVES_DEPTH;
            __m512 parts[3];
            dots[c - 1](x + k, rows, depth, k, parts);
            for (int i = 0; i < c; i++) {
                float sum = avx512_total((avx512_vec)parts[i]);
                sums[n - begin + i] = k == 0 ? sum : sums[n - begin + i] + sum;
            }
        }
    }
}

/* What is laid out for several rows at a time: so much of the second cache. */
enum { CODED_BYTES = 384 << 10, CODED_STEP = 32 };

/* Outputs [begin, end) of all rows; 0: there is no memory for it. `multiply` does it with weights in bfloat16. */
static int coded_linear(const Linear *job, int64_t begin, int64_t end, void (*multiply)(const Linear *, int64_t, int64_t))
{
    if (job->rows == 1 && job->inputs % 32 == 0 && multiply == halves_linear) {
        float sums[HALVES_PANEL] __attribute__((aligned(64)));
        for (int64_t first = begin; first < end; first += HALVES_PANEL) {
            int64_t wide = end - first < HALVES_PANEL ? end - first : HALVES_PANEL;
            coded_one(job, 0, first, first + wide, sums);
            halves_finish(job, sums, 0, first, wide);
        }
        return 1;
    }
    int64_t stride = (job->inputs + 31) / 32 * 32 + 32, most = CODED_BYTES / 2 / stride;
    most = most > HALVES_PANEL ? HALVES_PANEL : most > CODED_STEP ? most / CODED_STEP * CODED_STEP : CODED_STEP;
    uint16_t *room = aligned_alloc(64, (size_t)(most * stride * 2));
    if (room == NULL)
        return 0;
    for (int64_t first = begin; first < end; first += most) {
        int64_t wide = end - first < most ? end - first : most;
        for (int64_t n = 0; n < wide; n++)
            coded_fill(job, first + n, 0, job->inputs, room + n * stride);
        Linear plain = *job;
        plain.format = PLAIN;
        plain.w = room;
        plain.w_row = stride;
        plain.y = (char *)job->y + first * (job->narrow ? 2 : 4);
        multiply(&plain, 0, wide);
    }
    free(room);
    return 1;
}

/* Weights of GPTQ and AWQ in bfloat16, whose codes lie by inputs: a row of them has one input of AWQ, or eight of GPTQ, and
 * all outputs side by side. They are read in strips, which are a line of memory wide. What comes next is fetched meanwhile
 * in its own order, all of a row before the next one: lines that are a row apart would each be in a page of memory, and in
 * a few sets of a cache, of their own.
 */
enum { CODED_PANEL = 1024, CODED_STRIP = 128, CODED_SPAN = 256 }; /* outputs of one row of x, outputs, and inputs: at most */

/* to[i] has word i of all, for 16 vectors of 16 words. */
static inline ALWAYS void coded_transpose(__m512i v[16])
{
    __m512i t[16];
    UNROLLED for (int i = 0; i < 16; i += 4)
        avx512_transpose_fours(v + i);
    UNROLLED for (int i = 0; i < 2; i++)
        UNROLLED for (int j = 0; j < 4; j++) {
            t[8 * i + j] = _mm512_shuffle_i32x4(v[8 * i + j], v[8 * i + 4 + j], 0x88);
            t[8 * i + 4 + j] = _mm512_shuffle_i32x4(v[8 * i + j], v[8 * i + 4 + j], 0xdd);
        }
    UNROLLED for (int j = 0; j < 8; j++) {
        v[j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0x88);
        v[8 + j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0xdd);
    }
}

/* Bytes from a row of codes to the next. */
static inline int64_t coded_across_bytes(const Linear *job)
{
    return job->format == GPTQ ? 4 * job->outputs : job->outputs / 2;
}

/* Input k of output n, which are the first of a row and of eight. */
static inline const uint8_t *coded_at(const Linear *job, int64_t n, int64_t k)
{
    return (const uint8_t *)job->w + (job->format == GPTQ ? k / 2 * job->outputs + 4 * n : (k * job->outputs + n) / 2);
}

/* What is fetched meanwhile: lines of memory in rows, `left` of which are left of the row before the next one begins. */
typedef struct {
    const uint8_t *at;
    int64_t across, lines, left;
} CodedFar;

/* Outputs [n, n + wide) from input k on; where there are none, one line again and again. */
static inline CodedFar coded_far(const Linear *job, int64_t n, int64_t wide, int64_t k)
{
    if (wide <= 0)
        return (CodedFar){job->w, 0, 1, 1};
    int64_t lines = job->format == GPTQ ? (wide + 15) / 16 : (wide + 127) / 128;
    return (CodedFar){coded_at(job, n, k), coded_across_bytes(job), lines, lines};
}

static inline ALWAYS void coded_fetch(CodedFar *far, int lines)
{
    for (int i = 0; i < lines; i++, far->at += 64) {
        if (far->left-- == 0) {
            far->at += far->across - 64 * far->lines;
            far->left = far->lines - 1;
        }
        FETCH_FAR(far->at);
    }
}

/* The first inputs, before anything is multiplied. */
static void coded_fetch_first(const Linear *job, int64_t n, int64_t wide, int64_t inputs)
{
    CodedFar far = coded_far(job, n, wide, 0);
    coded_fetch(&far, (int)(far.lines * (job->format == GPTQ ? inputs / 8 : inputs)));
}

/* A strip: outputs from n on, `wide` of which are there, and `depth` inputs from k on. Of each group of these: where it ends,
 * scales and zero points. Of AWQ: words of the inputs after each other, of up to 16 times eight outputs. */
typedef struct {
    int64_t n, k, wide, depth, ends[CODED_SPAN / 32 + 1];
    CodedFar far;
    float scales[CODED_SPAN / 32 + 1][CODED_STRIP], zeros[CODED_SPAN / 32 + 1][CODED_STRIP];
    uint32_t words[16][CODED_SPAN + 16] __attribute__((aligned(64)));
} CodedStrip;

static void coded_begin_strip(const Linear *job, int64_t n, int64_t wide, int64_t k, int64_t depth, CodedStrip *to)
{
    to->n = n;
    to->k = k;
    to->wide = wide = wide < CODED_STRIP ? wide : CODED_STRIP;
    to->depth = depth;
    for (int64_t first = k / job->group, group = first; group * job->group < k + depth; group++) {
        int64_t end = (group + 1) * job->group - k;
        to->ends[group - first] = end < depth ? end : depth;
        coded_across(job, n, wide, group, to->scales[group - first], to->zeros[group - first]);
    }
    __mmask16 there = (__mmask16)((1 << wide / 8) - 1);
    const uint8_t *at = coded_at(job, n, k);
    for (int64_t i = 0; job->format == AWQ && i < depth; i += 16) {
        __m512i v[16];
        UNROLLED for (int j = 0; j < 16; j++, at += job->outputs / 2)
            v[j] = _mm512_maskz_loadu_epi32(there, at);
        coded_transpose(v);
        UNROLLED for (int j = 0; j < 16; j++)
            _mm512_store_si512(to->words[j] + i, v[j]);
    }
}

/* What becomes of weights. One or two rows: columns of sums of their inputs x go on from those `kept`, if there are any. None:
 * weights are stored, those of an output `stride` after those of the one before. */
typedef struct {
    const uint16_t *x;
    int64_t x_row;
    __m512 *kept;
    int on;
    uint16_t *to;
    int64_t stride;
} CodedUse;

static inline ALWAYS void coded_use(const CodedUse *use, int rows, int c, int64_t i, __m512bh w, __m512 *sums)
{
    UNROLLED for (int r = 0; r < rows; r++)
        sums[c * rows + r] = _mm512_dpbf16_ps(sums[c * rows + r], halves_load_b(use->x + r * use->x_row + i), w);
    if (!rows)
        _mm512_store_si512(use->to + c * use->stride + i, (__m512i)w);
}

/* Inputs [i, end) of a strip, which are of group `g`, and `count` outputs from number o on: tables of their weights, and sums. */
#define CODED_GROUP(count)                                                                                             \
    int64_t i = g > 0 ? strip->ends[g - 1] : 0, end = strip->ends[g];                                                  \
    __m512bh tables[16];                                                                                               \
    __m512 sums[16];                                                                                                   \
    UNROLLED for (int c = 0; c < count; c++)                                                                           \
        tables[c] = coded_int4_table(strip->scales[g] + o + c, strip->zeros[g] + o + c);                               \
    UNROLLED for (int c = 0; c < count * rows; c++)                                                                    \
        sums[c] = use->on || i > 0 ? use->kept[c] : _mm512_setzero_ps();

/* Group `g` of a strip's inputs, of 16 outputs of GPTQ from number o on; of at most one row: the sums of two would not be in registers. */
static inline ALWAYS void coded_take_gptq(const Linear *job, CodedStrip *strip, int64_t o, int g, const CodedUse *use, int rows)
{
    CODED_GROUP(16)
    __m512i words = _mm512_set_epi64(0x0007000700070007, 0x0006000600060006, 0x0005000500050005, 0x0004000400040004,
                                     0x0003000300030003, 0x0002000200020002, 0x0001000100010001, 0);
    __m512i shifts = _mm512_set1_epi64(0x000c000800040000);
    __mmask16 there = strip->wide - o < 16 ? 0x00ff : 0xffff;
    const uint8_t *at = coded_at(job, strip->n + o, strip->k + i);
    for (; i < end; i += 32) {
        __m512i v[4];
        UNROLLED for (int j = 0; j < 4; j++, at += 4 * job->outputs)
            v[j] = _mm512_maskz_loadu_epi32(there, at);
        coded_fetch(&strip->far, 4);
        avx512_transpose_fours(v);
        UNROLLED for (int c = 0; c < 16; c++) {
            __m512i places = _mm512_add_epi16(words, _mm512_set1_epi16((short)(c / 4 * 8)));
            __m512i codes = _mm512_srlv_epi16(_mm512_permutexvar_epi16(places, v[c % 4]), shifts);
            coded_use(use, rows, c, i, coded_lookup(codes, tables[c]), sums);
        }
    }
    UNROLLED for (int c = 0; c < 16 * rows; c++)
        use->kept[c] = sums[c];
}

/* The same of eight outputs of AWQ: output c is in half byte c / 2 of the low halves of words, or of the high ones. */
static inline ALWAYS void coded_take_awq(CodedStrip *strip, int64_t o, int g, const CodedUse *use, int rows)
{
    CODED_GROUP(8)
    const uint32_t *words = strip->words[o / 8];
    __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i low = _mm512_add_epi32(_mm512_mullo_epi32(lanes, _mm512_set1_epi32(0x00040004)), _mm512_set1_epi32(0x00020000));
    __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(1));
    for (; i < end; i += 32) {
        __m512i a = _mm512_load_si512(words + i), b = _mm512_load_si512(words + i + 16);
        coded_fetch(&strip->far, 2);
        UNROLLED for (int c = 0; c < 8; c++) {
            __m512i half = _mm512_permutex2var_epi16(a, c % 2 ? high : low, b);
            coded_use(use, rows, c, i, coded_lookup(_mm512_srli_epi16(half, c / 2 * 4), tables[c]), sums);
        }
    }
    UNROLLED for (int c = 0; c < 8 * rows; c++)
        use->kept[c] = sums[c];
}
#undef CODED_GROUP

/* Outputs from number o of a strip on; how many. */
static inline ALWAYS int64_t coded_take(const Linear *job, CodedStrip *strip, int64_t o, const CodedUse *use, int rows)
{
    for (int g = 0; g == 0 || strip->ends[g - 1] < strip->depth; g++)
        if (job->format == GPTQ)
            coded_take_gptq(job, strip, o, g, use, rows ? 1 : 0);
        else
            coded_take_awq(strip, o, g, use, rows);
    return job->format == GPTQ ? 16 : 8;
}

static int64_t coded_lay(const Linear *job, CodedStrip *strip, int64_t o, uint16_t *to, int64_t stride)
{
    CodedUse use = {.to = to, .stride = stride};
    return coded_take(job, strip, o, &use, 0);
}

static int64_t coded_multiply(const Linear *job, CodedStrip *strip, int64_t o, const CodedUse *use, int rows)
{
    if (rows == 2) /* of AWQ */
        return coded_take(job, strip, o, use, 2);
    return coded_take(job, strip, o, use, 1);
}

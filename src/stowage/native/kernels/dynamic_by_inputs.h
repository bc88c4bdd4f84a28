/* Products of a few rows that were rounded to 8 bits with codes of GPTQ and AWQ, which lie by inputs: one of them has its
 * codes of many outputs side by side. So each lane of a register is an output, four inputs of which are multiplied at
 * once; nothing is laid out again.
 *
 * A strip of 128 outputs is read from its first inputs to its last, a group after the other. A `part` of it are 32
 * outputs in two registers: of GPTQ 32 in their order, of AWQ those of every fourth word of eight, whose low halves of
 * bytes go to the first register.
 */
enum { DYNAMIC_STRIP = 128, DYNAMIC_PARTS = 4, DYNAMIC_STRIPS = 4 }; /* strips that take turns, of one row */

/* A strip, from a group on. `across`: bytes from an input's codes (of GPTQ: eight inputs') to those of the next.
 * `left`: outputs that are there. */
typedef struct {
    const uint8_t *at;
    int64_t across;
    int left;
} DynamicStrip;

/* Scales and least values of the registers of a strip. */
typedef struct {
    float scales[DYNAMIC_PARTS][2][16], more[DYNAMIC_PARTS][2][16];
} DynamicStripScales;

/* Inputs in another order: of each 16 those at even places, and odd ones behind them, of 32 or (`eights`) of eight. */
static void dynamic_reorder(const DynamicInputs *from, int64_t count, int eights, DynamicInputs *to)
{
    __m128i order = eights ? _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15)
                           : _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    __m512i orders = _mm512_broadcast_i32x4(order);
    for (int64_t i = 0; i < count; i++) {
        __m512i a = _mm512_shuffle_epi8(_mm512_loadu_si512(from[i].codes[0]), orders);
        __m512i b = _mm512_shuffle_epi8(_mm512_loadu_si512(from[i].codes[1]), orders);
        to[i] = from[i];
        _mm512_storeu_si512(to[i].codes[0], eights ? a : _mm512_unpacklo_epi64(a, b));
        _mm512_storeu_si512(to[i].codes[1], eights ? b : _mm512_unpackhi_epi64(a, b));
    }
}

static inline ALWAYS __m512i dynamic_four_inputs(const DynamicInputs *x, int block, int four)
{
    int32_t codes;
    memcpy(&codes, x->codes[four / 4] + 16 * block + 4 * (four % 4), 4);
    return _mm512_set1_epi32(codes);
}

/* Block `b` of a group of `parts` from one on, of `rows` rows that were reordered: sums[part * rows + row]. */
static inline ALWAYS void dynamic_parts_gptq(int rows, int parts, const DynamicStrip *strip, int part, int b,
                                             const DynamicInputs *x, int64_t x_row, __m512i sums[][2])
{
    (void)parts; /* one */
    __mmask16 first = dynamic_there(strip->left - 32 * part), second = dynamic_there(strip->left - 32 * part - 16);
    const uint8_t *at = strip->at + 4 * b * strip->across + 128 * part;
    UNROLLED for (int i = 0; i < 4; i++, at += strip->across) {
        __m512i v[2] = {_mm512_maskz_loadu_epi32(first, at), _mm512_maskz_loadu_epi32(second, at + 64)};
        __m512i low[2] = {dynamic_low(v[0]), dynamic_low(v[1])}, high[2] = {dynamic_high(v[0]), dynamic_high(v[1])};
        UNROLLED for (int r = 0; r < rows; r++) {
            __m512i even = dynamic_four_inputs(x + r * x_row, b, 2 * i), odd = dynamic_four_inputs(x + r * x_row, b, 2 * i + 1);
            UNROLLED for (int c = 0; c < 2; c++)
                sums[r][c] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(sums[r][c], low[c], even), high[c], odd);
        }
    }
}

static inline ALWAYS void dynamic_parts_awq(int rows, int parts, const DynamicStrip *strip, int first, int b,
                                            const DynamicInputs *x, int64_t x_row, __m512i sums[][2])
{
    __mmask16 there = dynamic_there(strip->left / 8);
    const uint8_t *at = strip->at + 32 * b * strip->across;
    UNROLLED for (int i = 0; i < 8; i++, at += 4 * strip->across) {
        __m512i v[4];
        UNROLLED for (int j = 0; j < 4; j++)
            v[j] = _mm512_maskz_loadu_epi32(there, at + j * strip->across);
        UNROLLED for (int p = 0; p < parts; p++) {
            int part = first + p;
            __m512i a = part < 2 ? _mm512_unpacklo_epi8(v[0], v[1]) : _mm512_unpackhi_epi8(v[0], v[1]);
            __m512i c = part < 2 ? _mm512_unpacklo_epi8(v[2], v[3]) : _mm512_unpackhi_epi8(v[2], v[3]);
            __m512i both = part % 2 ? _mm512_unpackhi_epi16(a, c) : _mm512_unpacklo_epi16(a, c);
            __m512i low = dynamic_low(both), high = dynamic_high(both);
            UNROLLED for (int r = 0; r < rows; r++) {
                __m512i four = dynamic_four_inputs(x + r * x_row, b, i), *own = sums[p * rows + r];
                own[0] = _mm512_dpbusd_epi32(own[0], low, four);
                own[1] = _mm512_dpbusd_epi32(own[1], high, four);
            }
        }
    }
}

/* Blocks [b, end) of a group of a strip and of R rows, P parts at a time: sums of every fourth block go on from those
 * `kept`. */
#define STRIP(format, R, P)                                                                                            \
    static void dynamic_strip_##format##R(const DynamicStrip *strip, int b, int end, const DynamicStripScales *scales,  \
                                          const DynamicInputs *x, int64_t x_row, CodedFar *far, float *kept)         \
    {                                                                                                                  \
        for (; b < end; b++) {                                                                                         \
            UNROLLED for (int first = 0; first < DYNAMIC_PARTS; first += P) {                                          \
                __m512i sums[P * R][2];                                                                                \
                UNROLLED for (int i = 0; i < P * R; i++)                                                               \
                    sums[i][0] = sums[i][1] = _mm512_setzero_si512();                                                  \
                coded_fetch(far, 8 * P);                                                                             \
                dynamic_parts_##format(R, P, strip, first, b, x, x_row, sums);                                         \
                UNROLLED for (int i = 0; i < P * R; i++)                                                               \
                    UNROLLED for (int c = 0; c < 2; c++) {                                                             \
                        int part = first + i / R, r = i % R;                                                           \
                        float *own = kept + (((r * 4 + b) * DYNAMIC_PARTS + part) * 2 + c) * 16;                       \
                        const DynamicInputs *in = x + r * x_row;                                                       \
                        __m512 value = dynamic_value(sums[i][c], _mm512_set1_ps(in->scale[b]),                         \
                                                     _mm512_loadu_ps(scales->scales[part][c]));                        \
                        __m512 other = _mm512_mul_ps(_mm512_set1_ps(in->sum[b]), _mm512_loadu_ps(scales->more[part][c])); \
                        DYNAMIC_SETTLE(value);                                                                         \
                        DYNAMIC_SETTLE(other);                                                                         \
                        _mm512_storeu_ps(own, _mm512_add_ps(_mm512_loadu_ps(own), _mm512_add_ps(value, other)));       \
                    }                                                                                                  \
            }                                                                                                          \
        }                                                                                                              \
    }
STRIP(gptq, 1, 1) STRIP(gptq, 2, 1) STRIP(gptq, 4, 1) STRIP(gptq, 8, 1)
STRIP(awq, 1, 4) STRIP(awq, 2, 4) STRIP(awq, 4, 2) STRIP(awq, 8, 1)
#undef STRIP

typedef void (*DynamicStripWay)(const DynamicStrip *, int, int, const DynamicStripScales *, const DynamicInputs *, int64_t,
                                CodedFar *, float *);
static const DynamicStripWay dynamic_strips[2][4] = {
    {dynamic_strip_gptq1, dynamic_strip_gptq2, dynamic_strip_gptq4, dynamic_strip_gptq8},
    {dynamic_strip_awq1, dynamic_strip_awq2, dynamic_strip_awq4, dynamic_strip_awq8}};

/* Which output of a strip is in a lane. */
static inline int dynamic_lane_output(const Linear *job, int part, int half, int lane)
{
    static const int outputs[2][4] = {{0, 4, 1, 5}, {2, 6, 3, 7}}; /* of AWQ's eight: in low halves of bytes, in high ones */
    return job->format == GPTQ ? 32 * part + 16 * half + lane : 8 * (lane / 4 * 4 + part) + outputs[half][lane % 4];
}

/* Numbers of a strip's outputs, in the order of the registers of a part. */
static inline ALWAYS void dynamic_strip_order(int awq, const float *from, int part, __m512 to[2])
{
    if (!awq) {
        to[0] = _mm512_loadu_ps(from + 32 * part);
        to[1] = _mm512_loadu_ps(from + 32 * part + 16);
        return;
    }
    const uint8_t *at = (const uint8_t *)(from + 8 * part);
    __m512 a = (__m512)dynamic_four(at, 128), b = (__m512)dynamic_four(at + 16, 128);
    to[0] = _mm512_unpacklo_ps(a, b);
    to[1] = _mm512_unpackhi_ps(a, b);
}

/* Scales of a group of inputs and outputs [n, n + wide). */
static void dynamic_strip_scales(const Linear *job, int64_t n, int64_t wide, int64_t group, DynamicStripScales *to)
{
    float scales[DYNAMIC_STRIP] __attribute__((aligned(64))) = {0}, zeros[DYNAMIC_STRIP] __attribute__((aligned(64))) = {0};
    int awq = job->format == AWQ;
    coded_across(job, n, wide, group, scales, zeros);
    for (int part = 0; part < DYNAMIC_PARTS; part++) {
        __m512 own[2], zero[2];
        dynamic_strip_order(awq, scales, part, own);
        dynamic_strip_order(awq, zeros, part, zero);
        for (int half = 0; half < 2; half++) {
            __m512i least = (__m512i)_mm512_mul_ps(zero[half], own[half]);
            _mm512_storeu_ps(to->scales[part][half], own[half]);
            _mm512_storeu_si512(to->more[part][half], _mm512_xor_si512(least, _mm512_set1_epi32((int)0x80000000)));
        }
    }
}

/* Outputs [n, n + wide) of a strip, whose sums of every fourth block are `kept`, to where they belong. */
static void dynamic_finish_strip(const Linear *job, int64_t n, int64_t wide, const float *kept)
{
    enum { QUARTER = DYNAMIC_PARTS * 2 * 16 };
    for (int64_t r = 0; r < job->rows; r++, kept += 4 * QUARTER) {
        float sums[DYNAMIC_STRIP];
        for (int i = 0; i < QUARTER; i++)
            sums[dynamic_lane_output(job, i / 32, i / 16 % 2, i % 16)] =
                ((kept[i] + kept[QUARTER + i]) + kept[2 * QUARTER + i]) + kept[3 * QUARTER + i];
        halves_finish(job, sums, r, n, wide);
    }
}

/* Group `g` of the inputs of a strip: its blocks, which may have different scales. */
static void dynamic_group(const Linear *job, int way, int64_t n, int64_t wide, int64_t g, DynamicStripScales *scales,
                          const DynamicInputs *x, CodedFar *far, float *kept)
{
    int64_t groups = dynamic_groups(job->inputs), blocks = job->inputs / DYNAMIC_BLOCK, each = job->group / DYNAMIC_BLOCK;
    int64_t end = 4 * g + 4 < blocks ? 4 * g + 4 : blocks;
    DynamicStrip strip = {coded_at(job, n, g * DYNAMIC_GROUP), coded_across_bytes(job), (int)wide};
    for (int64_t b = 4 * g, stop; b < end; b = stop) {
        stop = (b / each + 1) * each;
        stop = stop < end ? stop : end;
        if (b % each == 0)
            dynamic_strip_scales(job, n, wide, b / each, scales);
        dynamic_strips[job->format == AWQ][way](&strip, (int)(b - 4 * g), (int)(stop - 4 * g), scales, x + g, groups, far, kept);
    }
}

/* Outputs [begin, end) of up to 8 rows, in the way of so many; 0: there is no memory for it.
 *
 * Groups of several strips take turns, so that memory is read in rows that are as long as all of them; a group is
 * fetched while the one before it is multiplied. */
static int dynamic_by_inputs(const Linear *job, int64_t begin, int64_t end, int way)
{
    int64_t groups = dynamic_groups(job->inputs), rows = 1 << way, strips = DYNAMIC_STRIPS >> way > 0 ? DYNAMIC_STRIPS >> way : 1;
    int64_t strip_floats = rows * 4 * DYNAMIC_STRIP, kept_bytes = strips * strip_floats * (int64_t)sizeof(float);
    int64_t scales_bytes = strips * (int64_t)sizeof(DynamicStripScales);
    char *memory = aligned_alloc(64, (size_t)(kept_bytes + scales_bytes + rows * groups * (int64_t)sizeof(DynamicInputs)));
    if (memory == NULL)
        return 0;
    float *kept = (float *)memory;
    DynamicStripScales *scales = (DynamicStripScales *)(memory + kept_bytes);
    const DynamicInputs *x = (const DynamicInputs *)job->packed;
    if (job->format == GPTQ) {
        DynamicInputs *reordered = (DynamicInputs *)(memory + kept_bytes + scales_bytes);
        dynamic_reorder(x, rows * groups, 1, reordered);
        x = reordered;
    }
    int64_t most = strips * DYNAMIC_STRIP;
    coded_fetch_first(job, begin, end - begin < most ? end - begin : most, job->inputs < DYNAMIC_GROUP ? job->inputs : DYNAMIC_GROUP);
    for (int64_t n = begin; n < end; n += most) {
        int64_t wide = end - n < most ? end - n : most, after = end - n - wide;
        memset(kept, 0, (size_t)kept_bytes);
        for (int64_t g = 0; g < groups; g++) {
            CodedFar far = g + 1 < groups ? coded_far(job, n, wide, (g + 1) * DYNAMIC_GROUP)
                                          : coded_far(job, n + wide, after < most ? after : most, 0);
            for (int64_t s = 0; s * DYNAMIC_STRIP < wide; s++) {
                int64_t left = wide - s * DYNAMIC_STRIP;
                dynamic_group(job, way, n + s * DYNAMIC_STRIP, left < DYNAMIC_STRIP ? left : DYNAMIC_STRIP, g, scales + s,
                              x, &far, kept + s * strip_floats);
            }
        }
        for (int64_t s = 0; s * DYNAMIC_STRIP < wide; s++) {
            int64_t left = wide - s * DYNAMIC_STRIP;
            dynamic_finish_strip(job, n + s * DYNAMIC_STRIP, left < DYNAMIC_STRIP ? left : DYNAMIC_STRIP, kept + s * strip_floats);
        }
    }
    free(memory);
    return 1;
}
/* A block of 32 outputs' codes of GPTQ as `dynamic_pack` lays them out, `wide` of which are there. */
static void dynamic_block_gptq(const uint8_t *at, int64_t across, int64_t wide, uint8_t *to)
{
    UNROLLED for (int i = 0; i < 4; i++, at += across, to += 256)
        UNROLLED for (int c = 0; c < 2; c++) {
            __m512i v = _mm512_maskz_loadu_epi32(dynamic_there(wide - 16 * c), at + 64 * c);
            __m512 a = (__m512)_mm512_unpacklo_epi8(dynamic_low(v), dynamic_high(v));
            __m512 b = (__m512)_mm512_unpackhi_epi8(dynamic_low(v), dynamic_high(v));
            FETCH_FAR(at + 64 * c + 16 * across);
            _mm512_storeu_ps(to + 64 * c, _mm512_shuffle_ps(a, b, 0x88));
            _mm512_storeu_ps(to + 64 * c + 128, _mm512_shuffle_ps(a, b, 0xdd));
        }
}

/* The same of AWQ. */
static void dynamic_block_awq(const uint8_t *at, int64_t across, int64_t wide, uint8_t *to)
{
    __m512i outputs = _mm512_setr_epi32(0, 2, 16, 18, 1, 3, 17, 19, 4, 6, 20, 22, 5, 7, 21, 23);
    UNROLLED for (int i = 0; i < 8; i++, to += 128) {
        __m128i v[4];
        UNROLLED for (int j = 0; j < 4; j++, at += across) {
            v[j] = _mm_maskz_loadu_epi32((__mmask8)dynamic_there(wide / 8), at);
            FETCH_FAR(at + 64 * across);
        }
        __m128i a = _mm_unpacklo_epi8(v[0], v[1]), b = _mm_unpacklo_epi8(v[2], v[3]);
        __m128i c = _mm_unpackhi_epi8(v[0], v[1]), d = _mm_unpackhi_epi8(v[2], v[3]);
        __m512i all = _mm512_inserti32x4(_mm512_castsi128_si512(_mm_unpacklo_epi16(a, b)), _mm_unpackhi_epi16(a, b), 1);
        all = _mm512_inserti32x4(_mm512_inserti32x4(all, _mm_unpacklo_epi16(c, d), 2), _mm_unpackhi_epi16(c, d), 3);
        __m512i low = dynamic_low(all), high = dynamic_high(all);
        _mm512_storeu_si512(to, _mm512_permutex2var_epi32(low, outputs, high));
        outputs = _mm512_add_epi32(outputs, _mm512_set1_epi32(8));
        _mm512_storeu_si512(to + 64, _mm512_permutex2var_epi32(low, outputs, high));
        outputs = _mm512_sub_epi32(outputs, _mm512_set1_epi32(8));
    }
}

/* Outputs [n, n + wide), of up to DYNAMIC_WIDE, for many rows. */
static void dynamic_lay_by_inputs(const Linear *job, int64_t n, int64_t wide, const DynamicPanel *panel)
{
    float scales[DYNAMIC_WIDE] = {0}, zeros[DYNAMIC_WIDE] = {0};
    for (int64_t b = 0; b < panel->blocks; b++) {
        int64_t k = b * DYNAMIC_BLOCK, to = b % 4 * panel->groups + b / 4;
        if (k % job->group == 0)
            coded_across(job, n, wide, k / job->group, scales, zeros);
        for (int i = 0; i < DYNAMIC_WIDE; i++) {
            panel->scales[to * DYNAMIC_WIDE + i] = scales[i];
            panel->more[to * DYNAMIC_WIDE + i] = -(zeros[i] * scales[i]);
        }
        (job->format == GPTQ ? dynamic_block_gptq : dynamic_block_awq)(coded_at(job, n, k), coded_across_bytes(job), wide,
                                                                       panel->codes + to * DYNAMIC_CODES);
    }
}

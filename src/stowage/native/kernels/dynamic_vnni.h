/* Products of inputs that were rounded to 8 bits (dynamic.h) with instructions that add up four products of bytes.
 *
 * Of up to 8 rows four blocks of four outputs are multiplied at once, whose 16 sums fill a register. Of many, 32 outputs are
 * laid out first, so that two registers have four codes of each, and sums are those of one block and 16 outputs.
 */
enum { DYNAMIC_FEW = 8, DYNAMIC_TILE = 6, DYNAMIC_WIDE = 32, DYNAMIC_CODES = 32 * DYNAMIC_WIDE };

/* The product is what it is here: it is not fused with a sum. */
#define DYNAMIC_SETTLE(value) __asm__("" : "+v"(value))

/* Four numbers, each in four lanes. */
static inline ALWAYS __m512i dynamic_spread(const void *from)
{
    __m512i index = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    return _mm512_permutexvar_epi32(index, _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)from)));
}

/* Sums, or largest ones, of each four lanes of four vectors: lane 4 q + i is that of quarter q of vector i. */
#define DYNAMIC_FOURS(name, OF)                                                                                        \
    static inline ALWAYS __m512i dynamic_##name(const __m512i v[4])                                                    \
    {                                                                                                                  \
        __m512i a = OF(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));                          \
        __m512i b = OF(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));                          \
        return OF(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));                                           \
    }
DYNAMIC_FOURS(whole, _mm512_add_epi32)
DYNAMIC_FOURS(peaks, _mm512_max_epi32)
#undef DYNAMIC_FOURS

/* The same sums, and `more`: of those that are below 2^15 two are added at once. */
static inline ALWAYS __m512i dynamic_sums(const __m512i v[4], int size, __m512i more)
{
    if (size == LARGE)
        return _mm512_add_epi32(dynamic_whole(v), more);
    __m512i ones = _mm512_set1_epi16(1);
    __m512i a = _mm512_madd_epi16(_mm512_packs_epi32(v[0], v[1]), ones);
    __m512i b = _mm512_madd_epi16(_mm512_packs_epi32(v[2], v[3]), ones);
    if (size == SMALL)
        return _mm512_dpwssd_epi32(more, _mm512_packs_epi32(a, b), ones);
    __m512i even = (__m512i)_mm512_shuffle_ps((__m512)a, (__m512)b, 0x88);
    __m512i odd = (__m512i)_mm512_shuffle_ps((__m512)a, (__m512)b, 0xdd);
    return _mm512_add_epi32(_mm512_add_epi32(even, odd), more);
}

/* The sums of 16 codes of each of four blocks. */
static inline ALWAYS __m128i dynamic_totals(__m512i codes)
{
    __m512i fours = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), codes);
    __m512i twos = _mm512_add_epi32(fours, _mm512_shuffle_epi32(fours, 0xb1));
    twos = _mm512_add_epi32(twos, _mm512_shuffle_epi32(twos, 0x4e));
    return _mm512_castsi512_si128(
        _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), twos));
}

/* The whole numbers nearest to 16 of each of four blocks, v[0], v[2], ..., times `by`: side by side. Sums of what was
 * stored in parts, and is read as a whole, would wait for memory. */
static inline ALWAYS __m512i dynamic_nearest(const __m512 *v, const __m512 *by)
{
    __m512i n[4];
    UNROLLED for (int b = 0; b < 4; b++)
        n[b] = _mm512_cvtps_epi32(_mm512_mul_ps(v[2 * b], by[b]));
    __m512i quarters = _mm512_packs_epi16(_mm512_packs_epi32(n[0], n[1]), _mm512_packs_epi32(n[2], n[3]));
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), quarters);
}

/* As `dynamic_round`. */
static void dynamic_round_quickly(const void *from, int half, int64_t inputs, int bias, DynamicInputs *to)
{
    for (int64_t k = 0; k < inputs; k += DYNAMIC_GROUP, to++) {
        __m512 values[8], by[4];
        __m512i peaks[4], size = _mm512_set1_epi32(0x7fffffff);
        UNROLLED for (int i = 0; i < 8; i++) {
            int64_t at = k + 16 * i;
            if (at >= inputs)
                values[i] = _mm512_setzero_ps();
            else if (half)
                values[i] = (__m512)avx512_load_b((const uint16_t *)from + at);
            else
                values[i] = _mm512_loadu_ps((const float *)from + at);
        }
        UNROLLED for (int b = 0; b < 4; b++)
            peaks[b] = _mm512_max_epi32(_mm512_and_si512((__m512i)values[2 * b], size),
                                        _mm512_and_si512((__m512i)values[2 * b + 1], size));
        __m512i quarters = dynamic_peaks(peaks);
        quarters = _mm512_max_epi32(quarters, _mm512_shuffle_i32x4(quarters, quarters, 0x4e));
        __m128i peak = _mm512_castsi512_si128(_mm512_max_epi32(quarters, _mm512_shuffle_i32x4(quarters, quarters, 0xb1)));
        __mmask8 small = _mm_cmplt_epi32_mask(peak, _mm_set1_epi32(0x10000000));
        __mmask8 none = _mm_cmpge_epi32_mask(peak, _mm_set1_epi32(0x7f800000));
        __m128 most = _mm_set1_ps(127), scale = _mm_maskz_div_ps((__mmask8)~small, (__m128)peak, most);
        scale = _mm_mask_mov_ps(scale, none, _mm_set1_ps(NAN));
        __m512 inverse = _mm512_castps128_ps512(_mm_maskz_div_ps((__mmask8) ~(small | none), most, (__m128)peak));
        UNROLLED for (int b = 0; b < 4; b++)
            by[b] = _mm512_permutexvar_ps(_mm512_set1_epi32(b), inverse);
        __m512i codes[2] = {dynamic_nearest(values, by), dynamic_nearest(values + 1, by)};
        for (int b = 0; none && b < 4; b++) /* what is no number times 0 is none either */
            if (none >> b & 1) {
                codes[0] = _mm512_mask_mov_epi32(codes[0], (__mmask16)(15 << 4 * b), _mm512_setzero_si512());
                codes[1] = _mm512_mask_mov_epi32(codes[1], (__mmask16)(15 << 4 * b), _mm512_setzero_si512());
            }
        __m128i first = dynamic_totals(codes[0]), all = _mm_add_epi32(first, dynamic_totals(codes[1]));
        __m128i less = _mm_set1_epi32(-bias);
        _mm512_storeu_si512(to->codes[0], codes[0]);
        _mm512_storeu_si512(to->codes[1], codes[1]);
        _mm_storeu_ps(to->scale, scale);
        _mm_storeu_si128((__m128i *)to->less, _mm_mullo_epi32(all, less));
        _mm_storeu_ps(to->sum, _mm_mul_ps(scale, _mm_cvtepi32_ps(all)));
        _mm_storeu_si128((__m128i *)to->first_less, _mm_mullo_epi32(first, less));
    }
}

/* Whole numbers of blocks, times the scales of their inputs and of their weights. */
static inline ALWAYS __m512 dynamic_value(__m512i sums, __m512 of_inputs, __m512 of_weights)
{
    return _mm512_mul_ps(_mm512_cvtepi32_ps(sums), _mm512_mul_ps(of_inputs, of_weights));
}

/* R rows of x, four outputs whose blocks are at `rows`: columns of sums go on from those `kept`. `far`: what is
 * fetched meanwhile. */
#define DYNAMIC_ROWS_OF(format, UNPACKED, BYTES, PER, KIND, SIZE, HERE, R)                                                       \
    static void dynamic_few_##format##R(const DynamicInputs *x, int64_t x_row, const uint8_t *const *rows,             \
                                        int64_t groups, const uint8_t *far, const float *scales, __m512 *kept)         \
    {                                                                                                                  \
        const uint8_t *at[4] = {rows[0], rows[1], rows[2], rows[3]};                                                   \
        __m512 all[R];                                                                                                 \
        UNROLLED for (int r = 0; r < R; r++)                                                                           \
            all[r] = kept[r];                                                                                          \
        for (; groups > 0; groups -= PER) {                                                                            \
            __m512 owns[PER], mores[PER];                                                                              \
            if (HERE)                                                                                                  \
                dynamic_found_##format(at, owns, mores);                                                               \
            UNROLLED for (int part = 0; part < PER; part++, x++, scales += 16) {                                       \
                __m512i w[4][2];                                                                                       \
                UNROLLED for (int c = 0; c < 4; c++)                                                                   \
                    UNPACKED(at[c], part, &w[c][0], &w[c][1]);                                                          \
                __m512 own = HERE ? owns[part] : _mm512_loadu_ps(scales), more = HERE ? mores[part] : own;             \
                if (!HERE && KIND != BIASED)                                                                           \
                    more = _mm512_loadu_ps(scales + 16 * DYNAMIC_GROUPS);                                              \
                UNROLLED for (int r = 0; r < R; r++) {                                                                 \
                    const DynamicInputs *in = x + r * x_row;                                                           \
                    __m512i a = _mm512_loadu_si512(in->codes[0]), b = _mm512_loadu_si512(in->codes[1]);                \
                    __m512i first[4], second[4], none = _mm512_setzero_si512();                                        \
                    UNROLLED for (int c = 0; c < 4; c++) {                                                             \
                        first[c] = _mm512_dpbusd_epi32(none, w[c][0], a);                                              \
                        second[c] = _mm512_dpbusd_epi32(KIND == TWO ? none : first[c], w[c][1], b);                    \
                    }                                                                                                  \
                    __m512 scale = (__m512)dynamic_spread(in->scale), value, other;                                    \
                    __m512i less = KIND == LEAST ? none : dynamic_spread(in->less);                                    \
                    if (KIND == TWO) {                                                                                 \
                        __m512i part_less = dynamic_spread(in->first_less);                                            \
                        other = dynamic_value(dynamic_sums(first, SIZE, part_less), scale, own);                       \
                        DYNAMIC_SETTLE(other);                                                                         \
                        less = _mm512_sub_epi32(less, part_less);                                                      \
                    }                                                                                                  \
                    value = dynamic_value(dynamic_sums(second, SIZE, less), scale, KIND == TWO ? more : own);          \
                    DYNAMIC_SETTLE(value);                                                                             \
                    if (KIND == LEAST) {                                                                               \
                        other = _mm512_mul_ps((__m512)dynamic_spread(in->sum), more);                                  \
                        DYNAMIC_SETTLE(other);                                                                         \
                    }                                                                                                  \
                    if (KIND != BIASED)                                                                                \
                        value = _mm512_add_ps(value, other);                                                           \
                    all[r] = _mm512_add_ps(all[r], value);                                                             \
                }                                                                                                      \
            }                                                                                                          \
            UNROLLED for (int i = 0; i < 4 * BYTES; i += 64)                                                           \
                FETCH_FAR(far + i);                                                                                    \
            far += 4 * BYTES;                                                                                          \
            UNROLLED for (int c = 0; c < 4; c++)                                                                       \
                at[c] += BYTES;                                                                                        \
        }                                                                                                              \
        UNROLLED for (int r = 0; r < R; r++)                                                                           \
            kept[r] = all[r];                                                                                          \
    }

/* Codes of 16 outputs, four of each in a register, of the 32 whose block b is number b % 4 * all + b / 4 of `to`. */
#define PACK(format, BYTES, PER)                                                                                       \
    static void dynamic_pack_##format(const uint8_t *const *rows, int64_t groups, int64_t ahead, int64_t all, uint8_t *to) \
    {                                                                                                                  \
        for (int64_t g = 0; g < groups; g++, to += DYNAMIC_CODES) {                                                    \
            __m512i v[2][16];                                                                                          \
            UNROLLED for (int o = 0; o < 16; o++) {                                                                    \
                const uint8_t *at = rows[o] + g / PER * BYTES;                                                         \
                dynamic_##format(at, (int)(g % PER), &v[0][o], &v[1][o]);                                              \
                UNROLLED for (int i = 0; i < BYTES / PER; i += 64)                                                     \
                    FETCH_FAR(at + ahead + g % PER * BYTES / PER + i);                                                 \
            }                                                                                                          \
            UNROLLED for (int part = 0; part < 2; part++) {                                                            \
                coded_transpose(v[part]);                                                                              \
                UNROLLED for (int i = 0; i < 16; i++)                                                                  \
                    _mm512_storeu_si512(to + i / 4 * all * DYNAMIC_CODES + (4 * part + i % 4) * 128, v[part][i]);      \
            }                                                                                                          \
        }                                                                                                              \
    }
#define OF_ALL(format, UNPACKED, B, P, K, S, HERE)                                                                     \
    DYNAMIC_ROWS_OF(format, UNPACKED, B, P, K, S, HERE, 1) DYNAMIC_ROWS_OF(format, UNPACKED, B, P, K, S, HERE, 2)      \
    DYNAMIC_ROWS_OF(format, UNPACKED, B, P, K, S, HERE, 4) DYNAMIC_ROWS_OF(format, UNPACKED, B, P, K, S, HERE, 8)      \
    PACK(format, B, P)
#define OF(FORMAT, format, B, P, K, S) OF_ALL(format, dynamic_##format, B, P, K, S, 1)
DYNAMIC_HERE(OF)
#undef OF
#define NOT_FOUND(format)                                                                                              \
    static inline ALWAYS void dynamic_found_##format(const uint8_t *const at[4], __m512 *own, __m512 *more)            \
    {                                                                                                                  \
        (void)at, (void)own, (void)more;                                                                               \
    }
#define OF(FORMAT, format, B, P, K, S) NOT_FOUND(format) OF_ALL(format, dynamic_##format, B, P, K, S, 0)
DYNAMIC_LAID(OF)
#undef OF
#define OF(FORMAT, format, B, P, K, S) NOT_FOUND(format) OF_ALL(format, dynamic_##format##_turns, B, P, K, S, 0)
DYNAMIC_TURNS(OF)
#undef OF
#undef NOT_FOUND
#undef OF_ALL
#undef PACK
#undef DYNAMIC_ROWS_OF

typedef void (*DynamicFew)(const DynamicInputs *, int64_t, const uint8_t *const *, int64_t, const uint8_t *, const float *,
                           __m512 *);
typedef struct {
    int64_t bytes, per; /* of so many groups */
    int here;           /* scales are in the blocks */
    DynamicFew few[4];  /* of 1, 2, 4 and 8 rows */
    void (*pack)(const uint8_t *const *, int64_t, int64_t, int64_t, uint8_t *);
} DynamicWays;
#define WAYS(format, B, P, HERE)                                                                                       \
    {B, P, HERE, {dynamic_few_##format##1, dynamic_few_##format##2, dynamic_few_##format##4, dynamic_few_##format##8},   \
     dynamic_pack_##format}
#define OF(FORMAT, format, B, P, K, S) [FORMAT] = WAYS(format, B, P, 1),
#define OF_LAID(FORMAT, format, B, P, K, S) [FORMAT] = WAYS(format, B, P, 0),
static const DynamicWays dynamic_ways[FORMATS_END + 1] = {DYNAMIC_HERE(OF) DYNAMIC_LAID(OF_LAID) DYNAMIC_TURNS(OF_LAID)};
#undef OF
#undef OF_LAID
#undef WAYS

/* What lies laid out of 32 outputs: see `dynamic_pack`. Scales are in the order of the blocks' codes. */
typedef struct {
    uint8_t *codes;
    float *scales, *more;
    int64_t blocks, groups;
} DynamicPanel;

/* Sums of products of 16 codes of `rows` rows and 32 outputs go on. */
static inline ALWAYS void dynamic_sixteen(int rows, const uint8_t *w, const DynamicInputs *x, int64_t x_row, int part,
                                          int s, __m512i sums[DYNAMIC_TILE][2])
{
    UNROLLED for (int i = 0; i < 4; i++) {
        __m512i low = _mm512_loadu_si512(w + (4 * part + i) * 128), high = _mm512_loadu_si512(w + (4 * part + i) * 128 + 64);
        UNROLLED for (int r = 0; r < rows; r++) {
            int32_t four;
            memcpy(&four, x[r * x_row].codes[part] + 16 * s + 4 * i, 4);
            sums[r][0] = _mm512_dpbusd_epi32(sums[r][0], low, _mm512_set1_epi32(four));
            sums[r][1] = _mm512_dpbusd_epi32(sums[r][1], high, _mm512_set1_epi32(four));
        }
    }
}

static inline ALWAYS void dynamic_tile(int rows, DynamicKind kind, const DynamicInputs *from, const DynamicPanel *panel,
                                       float *to)
{
    int64_t x_row = panel->groups;
    for (int s = 0; s < 4 && s < panel->blocks; s++) {
        __m512 sums[DYNAMIC_TILE][2];
        UNROLLED for (int r = 0; r < rows; r++)
            sums[r][0] = sums[r][1] = _mm512_setzero_ps();
        int64_t first = s * panel->groups, end = first + (panel->blocks - s + 3) / 4;
        const DynamicInputs *x = from;
        for (int64_t b = first; b < end; b++, x++) {
            __m512i whole[DYNAMIC_TILE][2];
            __m512 values[DYNAMIC_TILE][2];
            const uint8_t *w = panel->codes + b * DYNAMIC_CODES;
            const float *own = panel->scales + b * DYNAMIC_WIDE, *more = panel->more + b * DYNAMIC_WIDE;
            UNROLLED for (int r = 0; r < rows; r++) {
                const DynamicInputs *in = x + r * x_row;
                whole[r][0] = kind == LEAST ? _mm512_setzero_si512()
                                            : _mm512_set1_epi32(kind == TWO ? in->first_less[s] : in->less[s]);
                whole[r][1] = whole[r][0];
            }
            dynamic_sixteen(rows, w, x, x_row, 0, s, whole);
            if (kind == TWO)
                UNROLLED for (int r = 0; r < rows; r++) {
                    const DynamicInputs *in = x + r * x_row;
                    UNROLLED for (int c = 0; c < 2; c++) {
                        values[r][c] = dynamic_value(whole[r][c], _mm512_set1_ps(in->scale[s]), _mm512_loadu_ps(own + 16 * c));
                        whole[r][c] = _mm512_set1_epi32(in->less[s] - in->first_less[s]);
                    }
                }
            dynamic_sixteen(rows, w, x, x_row, 1, s, whole);
            UNROLLED for (int r = 0; r < rows; r++)
                UNROLLED for (int c = 0; c < 2; c++) {
                    const DynamicInputs *in = x + r * x_row;
                    __m512 scales = _mm512_loadu_ps((kind == TWO ? more : own) + 16 * c);
                    __m512 value = dynamic_value(whole[r][c], _mm512_set1_ps(in->scale[s]), scales);
                    DYNAMIC_SETTLE(value);
                    if (kind != BIASED) {
                        __m512 other = kind == TWO ? values[r][c]
                                                   : _mm512_mul_ps(_mm512_set1_ps(in->sum[s]), _mm512_loadu_ps(more + 16 * c));
                        DYNAMIC_SETTLE(other);
                        value = _mm512_add_ps(value, other);
                    }
                    sums[r][c] = _mm512_add_ps(sums[r][c], value);
                }
        }
        UNROLLED for (int r = 0; r < rows; r++)
            UNROLLED for (int c = 0; c < 2; c++) {
                float *own = to + r * DYNAMIC_WIDE + 16 * c;
                _mm512_storeu_ps(own, s == 0 ? sums[r][c] : _mm512_add_ps(_mm512_loadu_ps(own), sums[r][c]));
            }
    }
}

#define TILES_OF(KIND)                                                                                                 \
    static void dynamic_tiles_##KIND(const DynamicInputs *x, int64_t rows, const DynamicPanel *panel, float *to)       \
    {                                                                                                                  \
        if (rows == 6 && KIND != TWO)                                                                                  \
            dynamic_tile(6, KIND, x, panel, to);                                                                       \
        else if (rows >= 4)                                                                                            \
            dynamic_tile(4, KIND, x, panel, to);                                                                       \
        else if (rows >= 2)                                                                                            \
            dynamic_tile(2, KIND, x, panel, to);                                                                       \
        else                                                                                                           \
            dynamic_tile(1, KIND, x, panel, to);                                                                       \
    }
TILES_OF(BIASED)
TILES_OF(LEAST)
TILES_OF(TWO)
#undef TILES_OF

/* Weights in block formats as floats with AVX2, from the codes of codes_avx2.h: to the bit what formats.h makes of them. */

/* The nearest of bfloat16, halfway cases to even, of numbers whose size is below 2^96: v (2^16 - 1) is rounded to where the
 * eighth bit of v is, and what is left of v 2^16 is v, rounded there. (Not 2^16 + 1 as by Veltkamp, because that may have
 * another exponent than v 2^16.) */
static inline ALWAYS __m256 avx2_nearest_half(__m256 v)
{
    return _mm256_fmsub_ps(v, _mm256_set1_ps(65536), _mm256_mul_ps(v, _mm256_set1_ps(65535)));
}

/* Blocks 2 p and 2 p + 1 of a group, of each four codes that are even in their order, then the odd ones: so halves of a
 * register have what comes first of eight codes, and then. */
static inline ALWAYS void avx2_dealt(__m256i first, __m256i second, int large, __m256i blocks[2])
{
    __m256i sign = _mm256_set1_epi8((char)(large ? 128 : 0));
    __m256 a = (__m256)_mm256_xor_si256(first, sign), b = (__m256)_mm256_xor_si256(second, sign);
    avx2_parted((__m256i)_mm256_shuffle_ps(a, b, 0x88), (__m256i)_mm256_shuffle_ps(a, b, 0xdd), &blocks[0], &blocks[1]);
}

/* Such a block before its codes are numbers: floats of a fraction that ends with a code. One of 8 bits is the ninth to 16th
 * bit of it, which is 2^15 and the code; a smaller one the first to seventh, which is 2^7 and the code. That and the bias,
 * times a scale of at most 19 bits, is a float, so a fused product is the code's number. */
typedef struct {
    __m256i codes[4];
    __m256 scale[2], more[2]; /* of the first 16 and of the others; what is added or, of `long_scales`, subtracted first */
} Avx2Block;

/* `more`: a least value, or a second scale, or of scales of more bits what is to be subtracted from a code. */
static inline ALWAYS Avx2Block avx2_block(DynamicKind kind, int size, int bias, int long_scales, __m256i codes, float own,
                                          float more)
{
    __m256i none = _mm256_setzero_si256(), high = _mm256_set1_epi8(0x43), large = _mm256_set1_epi16(0x4700);
    __m256i low = size == LARGE ? none : codes, top = size == LARGE ? codes : high;
    __m256i halves[2] = {_mm256_unpacklo_epi8(low, top), _mm256_unpackhi_epi8(low, top)};
    __m256 less = _mm256_set1_ps((size == LARGE ? -32768.0f : -128.0f) - (float)bias);
    Avx2Block block = {.scale = {_mm256_set1_ps(own), _mm256_set1_ps(own)}};
    UNROLLED for (int i = 0; i < 2; i++) {
        __m256i first = size == LARGE ? halves[i] : none, then = size == LARGE ? large : halves[i];
        block.codes[2 * i] = _mm256_unpacklo_epi16(first, then);
        block.codes[2 * i + 1] = _mm256_unpackhi_epi16(first, then);
        if (kind == TWO && i == 1)
            block.scale[1] = _mm256_set1_ps(more);
        block.more[i] = kind == LEAST || long_scales ? _mm256_set1_ps(more) : _mm256_mul_ps(block.scale[i], less);
    }
    return block;
}

/* Its numbers from 8 `i` on. */
static inline ALWAYS __m256 avx2_number(DynamicKind kind, int long_scales, int rounded, const Avx2Block *block, int i)
{
    __m256 code = (__m256)block->codes[i], more = block->more[i / 2];
    if (kind == LEAST || long_scales)
        code = _mm256_sub_ps(code, long_scales ? more : _mm256_set1_ps(128));
    code = long_scales ? _mm256_mul_ps(code, block->scale[i / 2]) : _mm256_fmadd_ps(code, block->scale[i / 2], more);
    return rounded ? avx2_nearest_half(code) : code;
}

/* `blocks` blocks of one output as numbers; and R rows of x times groups of two outputs, and then maybe half a group, whose
 * columns of sums go on. Scales are those of `avx2_ready`. Of half a group codes are read as of a whole one. */
#define NUMBERS(FORMAT, format, BYTES, PER, KIND, SIZE)                                                                \
    static void avx2_fill_##format(const uint8_t *at, int64_t blocks, const float *scales, const float *more, int rounded, \
                                   float *to)                                                                          \
    {                                                                                                                  \
        __m256i w[4], codes[2];                                                                                        \
        for (int64_t b = 0; b < blocks; b++, to += DYNAMIC_BLOCK) {                                                    \
            int p = b % 4 / 2;                                                                                         \
            if (b % 4 == 0)                                                                                            \
                codes_avx2_##format(at + b / 4 / PER * BYTES, (int)(b / 4 % PER), w);                                  \
            if (b % 2 == 0)                                                                                            \
                avx2_dealt(w[p], w[2 + p], SIZE == LARGE, codes);                                                      \
            Avx2Block block = avx2_block(KIND, SIZE, BIAS(FORMAT), LONG(FORMAT), codes[b % 2], scales[b], more[b]);    \
            UNROLLED for (int i = 0; i < 4; i++)                                                                       \
                _mm256_storeu_ps(to + 8 * i, rounded ? avx2_number(KIND, LONG(FORMAT), 1, &block, i)                   \
                                                     : avx2_number(KIND, LONG(FORMAT), 0, &block, i));                 \
        }                                                                                                              \
    }
#define DOTS(FORMAT, format, BYTES, PER, KIND, SIZE, R)                                                                \
    static void avx2_dots_##format##R(const float *x, int64_t x_row, const uint8_t *const at[2], int64_t groups, int half, \
                                      const float *const scales[4], __m256 *kept)                                      \
    {                                                                                                                  \
        __m256 sums[R][2];                                                                                             \
        UNROLLED for (int r = 0; r < R; r++)                                                                           \
            sums[r][0] = kept[2 * r], sums[r][1] = kept[2 * r + 1];                                                    \
        for (int64_t g = 0; g < groups + half; g++, x += DYNAMIC_GROUP) {                                              \
            const float *rows[R];                                                                                      \
            UNROLLED for (int r = 0; r < R; r++) {                                                                     \
                rows[r] = x + r * x_row;                                                                               \
                FROM_HERE(rows[r]);                                                                                    \
            }                                                                                                          \
            UNROLLED for (int p = 0; p < 2; p++) {                                                                     \
                __m256i codes[2][2];                                                                                   \
                if (p == 1 && g == groups)                                                                             \
                    break;                                                                                             \
                UNROLLED for (int c = 0; c < 2; c++) {                                                                 \
                    __m256i w[4];                                                                                      \
                    codes_avx2_##format(at[c] + g / PER * BYTES, PER == 1 ? 0 : (int)(g % PER), w);                    \
                    avx2_dealt(w[p], w[2 + p], SIZE == LARGE, codes[c]);                                               \
                    FETCH_FAR(at[c] + g / PER * BYTES + AVX2_AHEAD + 64 * p);                                          \
                }                                                                                                      \
                UNROLLED for (int b = 0; b < 2; b++)                                                                   \
                    UNROLLED for (int c = 0; c < 2; c++) {                                                             \
                        int64_t own = 4 * g + 2 * p + b;                                                               \
                        Avx2Block block = avx2_block(KIND, SIZE, BIAS(FORMAT), LONG(FORMAT), codes[c][b],              \
                                                     scales[c][own], scales[2 + c][own]);                              \
                        UNROLLED for (int i = 0; i < 4; i++) {                                                         \
                            __m256 value = avx2_number(KIND, LONG(FORMAT), 1, &block, i);                              \
                            UNROLLED for (int r = 0; r < R; r++)                                                       \
                                sums[r][c] = _mm256_fmadd_ps(                                                          \
                                    _mm256_loadu_ps(rows[r] + (2 * p + b) * DYNAMIC_BLOCK + 8 * i), value, sums[r][c]); \
                        }                                                                                              \
                    }                                                                                                  \
            }                                                                                                          \
        }                                                                                                              \
        UNROLLED for (int r = 0; r < R; r++)                                                                           \
            kept[2 * r] = sums[r][0], kept[2 * r + 1] = sums[r][1];                                                    \
    }
#define BIAS(FORMAT) dynamic_formats[FORMAT].bias
#define LONG(FORMAT) ((FORMAT) == INT4_WORDS)
#define OF(FORMAT, format, B, P, K, S)                                                                                 \
    NUMBERS(FORMAT, format, B, P, K, S)                                                                                \
    DOTS(FORMAT, format, B, P, K, S, 1) DOTS(FORMAT, format, B, P, K, S, 2) DOTS(FORMAT, format, B, P, K, S, 4)
DYNAMIC_HERE(OF) DYNAMIC_PACKED4(OF) DYNAMIC_TURNS(OF)
#undef OF
#undef BIAS
#undef LONG
#undef DOTS
#undef NUMBERS

typedef struct {
    void (*fill)(const uint8_t *, int64_t, const float *, const float *, int, float *);
    void (*dots[3])(const float *, int64_t, const uint8_t *const *, int64_t, int, const float *const *, __m256 *);
} Avx2Numbers;
#define OF(FORMAT, format, B, P, K, S)                                                                                 \
    [FORMAT] = {avx2_fill_##format, {avx2_dots_##format##1, avx2_dots_##format##2, avx2_dots_##format##4}},
static const Avx2Numbers avx2_numbers_of[FORMATS_END + 1] = {DYNAMIC_HERE(OF) DYNAMIC_PACKED4(OF) DYNAMIC_TURNS(OF)};
#undef OF

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

/* Of an output's blocks from input k on: scales, and what `avx2_block` needs more. 0: not all are below 2^96, or numbers may
 * be below the normal ones, which `avx2_nearest_half` does not round as they are. */
static int avx2_ready(const Linear *job, int64_t n, int64_t k, int64_t blocks, float *scales, float *more)
{
    Coded row = coded_row(job, n);
    int words = job->format == INT4_WORDS, biased = words || dynamic_kind(job) == BIASED;
    __m256 sign = _mm256_set1_ps(-0.0f), most = _mm256_set1_ps(0x1p96f), odd = _mm256_setzero_ps(), none = odd;
    avx2_scales(job, &row, k, blocks, scales, more);
    for (int64_t b = blocks; b % 8; b++)
        scales[b] = more[b] = 0;
    for (int64_t b = 0; b < blocks; b += 8) {
        __m256 own = _mm256_andnot_ps(sign, _mm256_loadu_ps(scales + b)), second = own;
        if (!biased)
            second = _mm256_andnot_ps(sign, _mm256_loadu_ps(more + b));
        odd = _mm256_or_ps(odd, _mm256_cmp_ps(own, most, _CMP_NLT_UQ));
        odd = _mm256_or_ps(odd, _mm256_cmp_ps(second, most, _CMP_NLT_UQ));
        if (words)
            odd = _mm256_or_ps(odd, _mm256_and_ps(_mm256_cmp_ps(own, _mm256_set1_ps(0x1p-120f), _CMP_NGT_UQ),
                                                  _mm256_cmp_ps(own, none, _CMP_NEQ_UQ)));
    }
    for (int64_t b = 0, group = k / row.group, end; words && b < blocks; group++) {
        end = (group + 1) * row.group - k;
        for (float bias = 128 + zero_of(&row, group); b < blocks && b * DYNAMIC_BLOCK < end; b++)
            more[b] = bias;
    }
    return _mm256_testz_ps(odd, odd);
}

/* Floats of 8 and 16 bits, 32 at a time: how many were done before some that are no usual numbers. A float of 8 bits (e4m3) is
 * one of 16 times 2^8. */
static int64_t avx2_decode_floats(const Linear *job, int64_t n, int64_t k, int64_t end, float *to)
{
    Coded row = coded_row(job, n);
    int64_t begin = k;
    int bytes = job->format == FP8;
    for (; k + 32 <= end; k += 32, to += 32) {
        const uint8_t *at = row.w + (bytes ? k : 2 * k);
        float own = bytes ? scale_of(&row, k / row.group) : 1;
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
            _mm256_storeu_ps(to + 8 * i, job->form == FLOAT32 ? value : avx2_nearest_half(value));
        }
    }
    return k - begin;
}

/* As `decode` of at most DEPTH inputs, where their codes are whole numbers, or short floats: how many were done. */
static int64_t avx2_decode_whole(const Linear *job, int64_t n, int64_t k, int64_t end, float *to)
{
    float scales[DEPTH / DYNAMIC_BLOCK], more[DEPTH / DYNAMIC_BLOCK];
    uint8_t room[AVX2_BYTES];
    int64_t blocks = (end - k) / DYNAMIC_BLOCK;
    Avx2Piece pieces[4];
    if (job->format == FP8 || job->format == F16)
        return avx2_decode_floats(job, n, k, end, to);
    if (!avx2_has_numbers(job) || !avx2_ready(job, n, k, blocks, scales, more))
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

/* Whether `avx2_dots` may multiply it with some rows: numbers are rounded, and made of whole codes. */
static int avx2_has_dots(const Linear *job)
{
    return job->form != FLOAT32 && avx2_has_numbers(job);
}

/* Inputs from k on, of at most DEPTH, of some rows times the outputs n and n + wide - 1 in a block format, whose numbers stay
 * in registers; see linear.h for the order of sums. 0: it is not for these. */
static int avx2_dots(const Linear *job, int64_t row, int64_t rows, int64_t n, int64_t wide, int64_t k)
{
    float room[4][DEPTH / DYNAMIC_BLOCK];
    uint8_t brought[4][2][AVX2_BYTES];
    float edge[4 * DYNAMIC_GROUP];
    int64_t depth = job->inputs - k < DEPTH ? job->inputs - k : DEPTH, left = depth % DYNAMIC_GROUP / DYNAMIC_BLOCK;
    Avx2Piece pieces[4];
    const uint8_t *at[4][2];
    if (depth % DYNAMIC_BLOCK != 0)
        return 0;
    int count = avx2_pieces(job, k, depth, pieces);
    for (int i = 0; i < 2; i++) {
        int64_t own = n + (i < wide ? i : 0);
        if (!avx2_ready(job, own, k, depth / DYNAMIC_BLOCK, room[i], room[2 + i]))
            return 0;
        int copied = left != 2 || own + 1 == job->outputs; /* else the next row's bytes are read, not used */
        for (int p = 0; p < count; p++)
            at[p][i] = avx2_brought(job, pieces + p, own, copied, brought[p][i]);
    }
    for (int64_t end = row + rows, step; row < end; row += step) {
        int power = end - row >= 4 ? 2 : end - row >= 2 ? 1 : 0;
        __m256 kept[8] = {{0}};
        step = 1 << power;
        for (int p = 0; p < count; p++) {
            const Avx2Numbers *way = avx2_numbers_way(pieces + p);
            int64_t first = pieces[p].first - k / DYNAMIC_GROUP, x_row = job->x_row, half = pieces[p].left && left == 2;
            const float *x = (const float *)job->x + row * x_row + k + first * DYNAMIC_GROUP, *scales[4];
            for (int i = 0; i < 4; i++)
                scales[i] = room[i] + 4 * first;
            if (pieces[p].left && !half) {
                memset(edge, 0, sizeof edge);
                for (int64_t r = 0; r < step; r++)
                    memcpy(edge + r * DYNAMIC_GROUP, x + r * x_row, (size_t)left * 128);
                x = edge, x_row = DYNAMIC_GROUP;
            }
            way->dots[power](x, x_row, at[p], half ? 0 : pieces[p].count, (int)half, scales, kept);
        }
        for (int64_t i = 0; i < 2 * step; i++) {
            float *to = (float *)job->y + (row + i / 2) * job->outputs + n + i % 2, sum = avx2_total(kept[i]);
            if (i % 2 < wide)
                *to = k == 0 ? sum : *to + sum;
        }
    }
    return 1;
}
